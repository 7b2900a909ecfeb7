"""Serving texts of unequal length together: how fast, who waits for whom, and what is not read twice.

    python -m benchmarks.engine_mixed

Four plays on one engine, 150M parameters with random weights, int8, one thread, each several times; without guesses,
for random weights repeat themselves, some texts far sooner than others:

    unequal   32 texts whose prompts have 16 to 1,500 tokens draw together, beside 32 prompts of their mean length
    waits     the same 32 begin over a minute, long and short by turns: how long each waits for its first token, by its
              fair time, which is what reading its prompt takes alone, times the texts under way; each of a key of its
              own, and all of one
    a prompt  of 1,500 tokens comes while 8 texts draw: the gaps between their tokens while it is read, beside the gaps
              before; read in pieces, as weft does, and whole
    prefix    of 1,024 tokens is asked for twice, then by somebody who shares no pages: seconds to the first token
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from benchmarks import report
from benchmarks.engine import CONTEXT, CPU, VOCAB
from weft import rng
from weft.engine.draw import Drawing
from weft.engine.engine import Engine
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import Text, Wanted
from weft.model.config import named, num_parameters

NUM_TEXTS, SHORTEST, LONGEST = 32, 16, 1500
NUM_DRAWING, PREFIX = 8, 1024
NUM_PAGES = 2400  # of all texts of a play, whatever they draw
OVER_S = 60.0
LIKELIEST = Drawing(temperature=0.0)
WHOLE = 1e6  # times as long a step may last: all of a prompt is read in one


class Bench:
    def __init__(self, size: str) -> None:
        config = named(size, VOCAB, CONTEXT)
        vector = torch.from_numpy(rng.stream(0, "weights").standard_normal(num_parameters(config), np.float32)) * 0.02
        self._config, self._weights = config, Weights(config, vector, "int8")
        self._luck = rng.stream(1, "prompts")

    def engine(self, max_slowdown: float = 2.0) -> Engine:
        kept = KeysAndValues(self._config, NUM_PAGES, CPU, "int8")
        stepper = Stepper(self._weights, kept)
        return Engine(
            stepper,
            vocab_size=VOCAB,
            context=CONTEXT,
            num_pages=NUM_PAGES,
            max_slowdown=max_slowdown,
            has_guesses=False,
        )

    def prompt(self, num: int) -> tuple[int, ...]:
        return tuple(self._luck.integers(0, VOCAB, num).tolist())


class Texts:
    """Texts under way, and when each token of each came."""

    def __init__(self, bench: Bench, engine: Engine, lengths: Sequence[int], key: str = "bench") -> None:
        self._texts = [engine.begin(Wanted(key, bench.prompt(each), CONTEXT - each, LIKELIEST)) for each in lengths]
        self.times: list[list[float]] = [[] for _ in lengths]
        self._came: asyncio.Queue[None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read(*each)) for each in zip(self._texts, self.times, strict=True)]

    async def _read(self, text: Text, times: list[float]) -> None:
        async for _ in text:
            times.append(time.perf_counter())
            self._came.put_nowait(None)

    async def until(self, nums: Sequence[int]) -> None:
        """Wait until each text has at least so many tokens."""
        while any(len(each) < num for each, num in zip(self.times, nums, strict=True)):
            await self._came.get()

    async def end(self) -> None:
        for text in self._texts:
            text.cancel()
        await asyncio.gather(*self._tasks)


async def together(bench: Bench, engine: Engine, lengths: Sequence[int], num: int) -> float:
    """Return the tokens a second of all texts, over `num` tokens each while all of them draw."""
    texts = Texts(bench, engine, lengths)
    await texts.until([1] * len(lengths))
    start, before = time.perf_counter(), [len(each) for each in texts.times]
    await texts.until([each + num for each in before])
    found = (sum(map(len, texts.times)) - sum(before)) / (time.perf_counter() - start)
    await texts.end()
    return found


async def one_by_one(bench: Bench, engine: Engine, lengths: Sequence[int], keys: Sequence[str]) -> float:
    """Return the longest wait of a text for its first token, by its fair time, where all begin one after another.

    Args:
        keys: of who asks for each.
    """
    alone_s = list[float]()
    for length in (SHORTEST, LONGEST):
        began = time.perf_counter()
        alone_s.append((await times_of(engine, bench.prompt(length), 1))[0] - began)
    all_texts, fair_s, began_s = list[Texts](), list[float](), list[float]()
    for number in range(len(lengths)):
        length = lengths[-1 - number // 2] if number % 2 else lengths[number // 2]
        fair_s.append(float(np.interp(length, (SHORTEST, LONGEST), alone_s)) * (number + 1))
        began_s.append(time.perf_counter())
        all_texts.append(Texts(bench, engine, [length], keys[number]))
        await asyncio.sleep(OVER_S / len(lengths))
    for texts in all_texts:
        await texts.until([1])
    waits_s = [texts.times[0][0] - began for texts, began in zip(all_texts, began_s, strict=True)]
    for texts in all_texts:
        await texts.end()
    return max(wait / fair for wait, fair in zip(waits_s, fair_s, strict=True))


async def beside(bench: Bench, engine: Engine, num: int) -> tuple[float, float]:
    """Return the 99th percentile of gaps of texts that draw, before a prompt comes and while it is read, in seconds."""
    await times_of(engine, bench.prompt(300), 8)  # from then on what reading takes is known
    texts = Texts(bench, engine, [PREFIX // NUM_DRAWING] * NUM_DRAWING)
    await texts.until([num // 2] * NUM_DRAWING)
    middle = time.perf_counter()
    await texts.until([num] * NUM_DRAWING)
    began = time.perf_counter()
    first = (await times_of(engine, bench.prompt(LONGEST), 1))[0]
    await texts.until([len(each) + 1 for each in texts.times])
    await texts.end()

    def gaps(start: float, stop: float) -> float:
        found = [b - a for each in texts.times for a, b in pairwise(each) if start < b and a < stop]
        return float(np.percentile(found, 99))

    return gaps(middle, began), gaps(began, first)


async def times_of(engine: Engine, prompt: tuple[int, ...], num: int, salt: bytes = b"") -> list[float]:
    """Return when each token of a text came."""
    text = engine.begin(Wanted("bench", prompt, num, LIKELIEST, salt=salt))
    return [time.perf_counter() async for _ in text]


async def prefix(bench: Bench, engine: Engine) -> tuple[float, float, float]:
    """Return the seconds to the first token of a prompt, of the same again, and of the same by somebody else."""
    prompt = bench.prompt(PREFIX)
    found = list[float]()
    for salt in (b"a", b"a", b"b"):
        began = time.perf_counter()
        found.append((await times_of(engine, prompt, 1, salt))[0] - began)
    return found[0], found[1], found[2]


async def play(options: argparse.Namespace) -> list[list[object]]:
    bench = Bench(options.size)
    lengths = np.exp(np.linspace(np.log(SHORTEST), np.log(LONGEST), NUM_TEXTS)).astype(int).tolist()
    equal = [round(sum(lengths) / NUM_TEXTS)] * NUM_TEXTS
    ratios: dict[str, list[float]] = {
        name: [] for name in ("unequal", "waits", "waits of one", "in pieces", "whole", "again", "others")
    }
    for _ in range(options.turns):
        engine = bench.engine()
        unequal = await together(bench, engine, lengths, options.tokens)
        ratios["unequal"].append(unequal / await together(bench, engine, equal, options.tokens))
        ratios["waits"].append(await one_by_one(bench, engine, lengths, [f"key {n}" for n in range(NUM_TEXTS)]))
        ratios["waits of one"].append(await one_by_one(bench, engine, lengths, ["bench"] * NUM_TEXTS))
        first, again, others = await prefix(bench, engine)
        ratios["again"].append(again / first)
        ratios["others"].append(others / first)
        engine.close()
        for name, slowdown in (("in pieces", 2.0), ("whole", WHOLE)):
            engine = bench.engine(slowdown)
            before, reading = await beside(bench, engine, options.tokens)
            ratios[name].append(reading / before)
            engine.close()
    said = {
        "unequal": ("tokens a second: prompts of 16 to 1,500 tokens / of their mean", ">= 0.85"),
        "waits": ("longest wait for a first token, of 32 texts that begin over a minute / its fair time", "<= 4"),
        "waits of one": ("the same, where one key asks for all", "<= 4"),
        "in pieces": ("99th percentile of gaps: while a prompt is read in pieces / before", "<= 2.2"),
        "whole": ("the same, while it is read whole", ">= 5: else the play shows nothing"),
        "again": ("seconds to the first token: a prompt again / the first time", "<= 0.15"),
        "others": ("the same, by somebody who shares no pages", ">= 0.9"),
    }
    return [
        [text, statistics.median(ratios[name]), f"{min(ratios[name]):.2f} to {max(ratios[name]):.2f}", aim]
        for name, (text, aim) in said.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="150m")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="that each text draws")
    options, before = parser.parse_args(), report.load()
    torch.set_num_threads(1)
    rows = asyncio.run(play(options))
    sections = [report.load_line(before), report.table(["ratio", "median", "all turns", "aim"], rows)]
    report.write("engine_mixed", "Serving texts of unequal length", "python -m benchmarks.engine_mixed", sections)


if __name__ == "__main__":
    main()
