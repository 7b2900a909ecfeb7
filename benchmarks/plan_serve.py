"""What `weft plan --serve` says of a model against the engine that serves it: writes benchmarks/reports/plan_serve.md.

    python -m benchmarks.plan_serve FOLDER       # of a Hugging Face model

One text and eight, after prompts of 128 and 1,024 tokens: tokens a second while all of them draw; and of one the
seconds to its first token. The plan knows the model's shape alone and times a machine, as the command does; the engine
holds the model itself. Both take turns. Tokens are random, drawn at temperature 1, and none is guessed.

Other programs make both slower, and not alike, so CPU time is measured beside: of what the plan times, and of the whole
process that draws. On an idle machine with one thread the two agree.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks import report
from weft import rng
from weft.cli.plan.serve_here import measure, usual
from weft.engine.engine import Engine
from weft.engine.load import engine_of, free_nbytes, kind_for, plan
from weft.engine.numbers import Kind
from weft.engine.text import Wanted
from weft.model.config import ModelConfig
from weft.model.weights import read_folder
from weft.plan.serve import Timed, first_token_s, speed, stages_of
from weft.run.machine import PeerConfig
from weft.training.device import choose

SETTINGS = ((1, 128), (1, 1024), (8, 128), (8, 1024))  # texts, tokens of each prompt
CONTEXT = 2048
NUM_DRAWN = 24  # tokens of each text
AROUND = 5  # more of each for every text that begins beside it: a step in four reads a page
AIM = 0.2
ABOUT = f"""
Planned and measured in turns, medians; the ratio is that of measured to planned, turn by turn. Aim: within {AIM:.0%}.
By the wall, and in brackets by CPU time, which other programs disturb less.
""".strip()


@dataclass
class Figures:
    """By the wall and by CPU time: tokens a second, and seconds to the first token; of each turn."""

    speeds: list[tuple[float, float]] = field(default_factory=list)
    first_s: list[tuple[float, float]] = field(default_factory=list)


def by_cpu(step: Callable[[], None]) -> float:
    """Return the CPU-seconds of a usual step."""
    took_s = list[float]()
    while len(took_s) < 4 or sum(took_s) < 0.2:
        began = time.process_time()
        step()
        took_s.append(time.process_time() - began)
    return median(took_s[1:])


def planned(config: ModelConfig, clocks: Sequence[Timed], num: int, prompt: int) -> Figures:
    (whole,) = stages_of(config, clocks[0].kind)
    wall, cpu = clocks
    found = Figures()
    context = prompt + NUM_DRAWN // 2
    found.speeds.append((speed(wall, whole, num, context).tokens_per_s, speed(cpu, whole, num, context).tokens_per_s))
    found.first_s.append((first_token_s(wall, whole, prompt), first_token_s(cpu, whole, prompt)))
    return found


class Served:
    """The engine, and prompts that none of its pages know."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._luck = rng.stream(0, "prompts")

    def measured(self, num: int, prompt: int) -> Figures:
        return asyncio.run(self._measured(num, prompt))

    async def _measured(self, num: int, prompt: int) -> Figures:
        texts = [tuple(self._luck.integers(0, self._vocab_size, prompt).tolist()) for _ in range(num)]
        for text in texts if num > 1 else ():  # so that all draw at once, but for the prompts' last pages
            await self._times(text, 1)
        began = _now()
        most = NUM_DRAWN + (AROUND * num if num > 1 else 0)
        all_times = await asyncio.gather(*(self._times(each, most) for each in texts))
        start, stop = max(times[0] for times in all_times), min(times[-1] for times in all_times)
        drawn = sum(start[0] < at[0] <= stop[0] for times in all_times for at in times)
        found = Figures()
        found.speeds.append((drawn / (stop[0] - start[0]), drawn / (stop[1] - start[1])))
        found.first_s.append((start[0] - began[0], start[1] - began[1]))
        return found

    async def _times(self, prompt: tuple[int, ...], most: int) -> list[tuple[float, float]]:
        return [_now() async for _ in self._engine.begin(Wanted("bench", prompt, most))]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    options, before = parser.parse_args(), report.load()
    torch.set_num_threads(options.threads)
    config, vector = read_folder(options.folder)
    device = choose(PeerConfig()).torch
    kind: Kind = kind_for(device)
    held = plan(config, device, kind, min(CONTEXT, config.max_seq_len), None, free_nbytes(device))
    engine = engine_of(config, vector, device, held, min(CONTEXT, config.max_seq_len), has_guesses=False)
    rows = dict[tuple[int, int], tuple[Figures, Figures]]()
    try:
        served = Served(engine, config.vocab_size)
        served.measured(1, 128)  # what is made once
        for _ in range(options.turns):
            clocks = [measure(config, kind, device, clocked).timed for clocked in (usual, by_cpu)]
            for setting in SETTINGS:
                said, found = rows.setdefault(setting, (Figures(), Figures()))
                for into, more in ((said, planned(config, clocks, *setting)), (found, served.measured(*setting))):
                    into.speeds += more.speeds
                    into.first_s += more.first_s
    finally:
        engine.close()
    told = f"{options.folder.name} in {kind}, threads: {options.threads}. {report.load_line(before)}"
    header = ("", "planned", "measured", "measured / planned", "by CPU time")
    report.write(
        "plan_serve",
        "What a plan says of answers against the engine",
        "python -m benchmarks.plan_serve FOLDER",
        [ABOUT, told, report.table(header, list(_rows(rows)))],
    )


def _rows(rows: dict[tuple[int, int], tuple[Figures, Figures]]) -> list[list[object]]:
    found = list[list[object]]()
    for (num, prompt), (said, seen) in rows.items():
        texts = f"{num} text{'s' if num > 1 else ''} after {prompt:,} tokens"
        found.append([f"{texts}, tokens/s", *_cells(said.speeds, seen.speeds)])
        if num == 1:
            found.append([f"{texts}, first token, s", *_cells(said.first_s, seen.first_s)])
    return found


def _cells(said: Sequence[tuple[float, float]], seen: Sequence[tuple[float, float]]) -> list[object]:
    """Return what was planned, what was measured, and their ratio, by the wall and by CPU time."""

    def of(pairs: Sequence[tuple[float, float]]) -> str:
        wall, cpu = (median(pair[at] for pair in pairs) for at in (0, 1))
        return f"{wall:.4g} ({cpu:.4g})"

    wall, cpu = (median(b[at] / a[at] for a, b in zip(said, seen, strict=True)) for at in (0, 1))
    return [of(said), of(seen), wall, cpu]


if __name__ == "__main__":
    main()
