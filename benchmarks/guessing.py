"""Several tokens a step where they can be guessed: tokens a second of weft's engine with guesses and without.

    python -m benchmarks.guessing FOLDER        # of a model that has learnt something, with its tokenizer.json

`code` reads functions of Python's library and writes them again, as a person's editor asks; `prose` tells a story at
temperature 0.8, where hardly anything can be guessed. Engines with guesses and without take turns on the same requests;
both must write the same texts where the likeliest token is taken in fp32.
"""

import argparse
import asyncio
import inspect
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer

from benchmarks import report
from weft.engine.draw import Drawing
from weft.engine.engine import Engine, Wanted
from weft.engine.load import engine_of, kind_alone, plan
from weft.engine.numbers import Kind
from weft.model.weights import read_folder

CPU = torch.device("cpu")
CONTEXT, NUM_TOKENS = 2048, 160
FUNCTIONS = (textwrap.wrap, textwrap.dedent, textwrap.indent, inspect.cleandoc, statistics.mean, inspect.getmodulename)
STORIES = ("Once upon a time", "The train was late, and", "In the garden of my aunt", "Nobody had seen the sea")
WORKS = ("code", "prose")


@dataclass(frozen=True)
class Turn:
    """What one round of requests came to."""

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
    async def one(each: Wanted) -> list[int]:
        return [drawn.token async for drawn in engine.begin(each)]

    async def together() -> list[list[int]]:
        return list(await asyncio.gather(*map(one, wanted)))

    before, began = engine.totals.num_steps, time.perf_counter()
    texts = asyncio.run(together())
    took_s = time.perf_counter() - began
    return Turn(sum(map(len, texts)) / took_s, NUM_TOKENS / (engine.totals.num_steps - before), texts)


def compare(engines: dict[bool, Engine], work: str, num: int, tokenizer: Tokenizer, turns: int) -> list[object]:
    found: dict[bool, list[Turn]] = {True: [], False: []}
    for number in range(turns + 1):  # the first warms up
        for has_guesses in (True, False) if number % 2 else (False, True):
            asked = requests(work, num, tokenizer, number)
            found[has_guesses].append(turn(engines[has_guesses], asked))
    with_them, without = found[True][1:], found[False][1:]
    ratio = statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(with_them, without, strict=True))
    alike = sum(a == b for x, y in zip(with_them, without, strict=True) for a, b in zip(x.texts, y.texts, strict=True))
    return [
        f"{work}, {num} text{'s' if num > 1 else ''}",
        statistics.median(each.tokens_per_s for each in without),
        statistics.median(each.tokens_per_s for each in with_them),
        ratio,
        statistics.median(each.tokens_per_step for each in with_them),
        f"{alike} of {num * turns}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=get_args(Kind), help="left out: as `weft serve` chooses")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--batches", default="1,8")
    options, before = parser.parse_args(), report.load()
    torch.set_num_threads(1)
    kind: Kind = options.kind or kind_alone(CPU)
    config, vector = read_folder(options.folder)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    held = plan(config, CPU, kind, CONTEXT, None, 1 << 33)
    engines = {each: engine_of(config, vector, CPU, held, CONTEXT, has_guesses=each) for each in (True, False)}
    try:
        rows = [
            compare(engines, work, num, tokenizer, options.turns)
            for work in WORKS
            for num in map(int, options.batches.split(","))
        ]
    finally:
        for engine in engines.values():
            engine.close()
    header = ["", "tokens/s without", "with guesses", "times as fast", "tokens a step of a text", "texts alike"]
    sections = [
        f"{options.folder.name}, {kind}, one thread; {NUM_TOKENS} tokens a text. {report.load_line(before)}",
        report.table(header, rows),
    ]
    report.write("guessing", "Several tokens a step", "python -m benchmarks.guessing FOLDER", sections, [])


if __name__ == "__main__":
    main()
