"""Several tokens a step where they can be guessed: tokens a second of weft's engine with guesses and without.

    python -m benchmarks.guessing FOLDER        # of a model that has learnt something, with its tokenizer.json
    python -m benchmarks.guessing FOLDER --kind fp32 --draft FOLDER       # and a draft model, in this machine's numbers

`code` reads functions of Python's library and writes them again, as a person's editor asks; `prose` tells a story at
temperature 0.8, where hardly anything can be looked up. Engines with guesses and without take turns on the same
requests, and are timed until the first text ends; all must write the same texts where the likeliest token is taken in
fp32.
"""

import argparse
import asyncio
import inspect
import statistics
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer

from benchmarks import report
from weft.engine.draw import Drawing
from weft.engine.engine import Engine
from weft.engine.load import DraftModel, engine_of, kind_alone, plan
from weft.engine.numbers import Kind
from weft.engine.text import Wanted
from weft.model.config import num_parameters
from weft.model.weights import read_folder

CPU = torch.device("cpu")
CONTEXT, NUM_TOKENS = 2048, 160
FUNCTIONS = (textwrap.wrap, textwrap.dedent, textwrap.indent, inspect.cleandoc, statistics.mean, inspect.getmodulename)
STORIES = ("Once upon a time", "The train was late, and", "In the garden of my aunt", "Nobody had seen the sea")
WORKS = ("code", "prose")
NONE = "nobody"


@dataclass(frozen=True)
class Turn:
    """What one round of requests came to.

    Args:
        tokens_per_s: of all texts, until the first of them ends: then fewer share a step, and a server has others.
    """

    tokens_per_s: float
    tokens_per_step: float  # of a text
    texts: list[list[int]]


def requests(work: str, num: int, tokenizer: Tokenizer, number: int) -> list[Wanted]:
    found = []
    for at in range(num):
        if work == "code":
            function = FUNCTIONS[(at + number) % len(FUNCTIONS)]
            code = inspect.getsource(function)
            text = f"# The function:\n{code}\n\n# The same function, with comments:\ndef {function.__name__}("
            drawing = Drawing(temperature=0.0)
        else:
            text = STORIES[(at + number) % len(STORIES)]
            drawing = Drawing(temperature=0.8, seed=bytes([at, number] * 16))
        found.append(Wanted("bench", tuple(tokenizer.encode(text).ids), NUM_TOKENS, drawing))
    return found


def turn(engine: Engine, wanted: Sequence[Wanted]) -> Turn:
    async def one(each: Wanted) -> list[tuple[int, float]]:
        return [(drawn.token, time.perf_counter()) async for drawn in engine.begin(each)]

    async def together() -> list[list[tuple[int, float]]]:
        return list(await asyncio.gather(*map(one, wanted)))

    before, began = engine.totals.num_steps, time.perf_counter()
    found = asyncio.run(together())
    until = min(text[-1][1] for text in found)
    num = sum(at <= until for text in found for _, at in text)
    num_steps = engine.totals.num_steps - before
    return Turn(num / (until - began), NUM_TOKENS / num_steps, [[token for token, _ in text] for text in found])


def compare(
    engines: dict[str, Engine], work: str, num: int, tokenizer: Tokenizer, turns: int
) -> Iterator[list[object]]:
    """Yield a row of each way to guess."""
    found: dict[str, list[Turn]] = {name: [] for name in engines}
    for number in range(turns + 1):  # the first warms up
        for name in engines if number % 2 else reversed(engines):
            found[name].append(turn(engines[name], requests(work, num, tokenizer, number)))
    without = found[NONE][1:]
    for name in engines.keys() - {NONE}:
        with_them = found[name][1:]
        pairs = list(zip(with_them, without, strict=True))
        alike = sum(a == b for x, y in pairs for a, b in zip(x.texts, y.texts, strict=True))
        yield [
            f"{work}, {num} text{'s' if num > 1 else ''}",
            name,
            statistics.median(each.tokens_per_s for each in without),
            statistics.median(each.tokens_per_s for each in with_them),
            statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs),
            statistics.median(each.tokens_per_step for each in with_them),
            f"{alike} of {num * turns}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=get_args(Kind), help="left out: as `weft serve` chooses")
    parser.add_argument("--draft", type=Path, help="folder of a draft model")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--batches", default="1,8")
    options, before = parser.parse_args(), report.load()
    torch.set_num_threads(1)
    kind: Kind = options.kind or kind_alone(CPU)
    config, vector = read_folder(options.folder)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    held = plan(config, CPU, kind, CONTEXT, None, 1 << 33)
    engines = {
        NONE: engine_of(config, vector, CPU, held, CONTEXT, has_guesses=False),
        "look-up": engine_of(config, vector, CPU, held, CONTEXT),
    }
    title, sizes = "guessing", ""
    if options.draft is not None:
        draft = DraftModel(*read_folder(options.draft), kind_alone(CPU))
        engines["look-up and a draft model"] = engine_of(config, vector, CPU, held, CONTEXT, draft=draft)
        title = "guessing_draft"
        sizes = f", the draft model {num_parameters(draft.config):,} in {draft.kind}"
    try:
        rows = [
            row
            for work in WORKS
            for num in map(int, options.batches.split(","))
            for row in compare(engines, work, num, tokenizer, options.turns)
        ]
    finally:
        for engine in engines.values():
            engine.close()
    header = [
        "",
        "guessed by",
        "tokens/s without",
        "with guesses",
        "times as fast",
        "tokens a step of a text",
        "texts alike",
    ]
    sections = [
        f"{options.folder.name}, {num_parameters(config):,} parameters in {kind}{sizes}; one thread, {NUM_TOKENS} "
        f"tokens a text. {report.load_line(before)}",
        report.table(header, rows),
    ]
    report.write(title, "Several tokens a step", "python -m benchmarks.guessing FOLDER", sections, [])


if __name__ == "__main__":
    main()
