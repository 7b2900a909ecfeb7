"""What a round takes of a processor beside its inner steps: the terms of `weft.plan.processor`.

    python -m benchmarks.processor

Each is measured where the others hardly count. Four processes (`benchmarks._shells`) train a small model: with a round
after every step, and with rounds that take seconds. What all threads use but the one that makes inner steps is
c = each round + each second x its length, which two lengths tell apart. What each value takes is timed in one thread,
function by function, with cold caches.

The least that blocks of rounds used is what a machine does while nothing disturbs it.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks._shells import run as run_shells
from benchmarks._threads import Threads
from benchmarks.plan import DEMO, HOUSE, RUN
from benchmarks.report import load, load_line, table, write
from weft import ids
from weft.codec.build import build
from weft.codec.config import (
    Bf16Config,
    CodecConfig,
    E3m0Config,
    Fp8Config,
    Fp32Config,
    Int2Config,
    Int4Config,
    Int8Config,
    RandomKConfig,
    SignConfig,
    TopKConfig,
)
from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.store.journal import Journal
from weft.sync.merge.outer import AdamW, Nesterov, Outer, Sgd, StepContext
from weft.sync.merge.reduce import Coding, Merger, decode_parts, encode_parts, named
from weft.sync.method.choices import AdamWConfig, NesterovConfig, SgdConfig
from weft.sync.records.parts import cut

PEERS, SKIPPED = 4, 4
NUM = 1 << 23  # values: more than caches hold
REPEATS = 7
MESSAGES_S = 3.5e-3  # per other member, of rounds.md
TINY = 'type = "shape"\nnum_layers = 1\nnum_heads = 2\nwidth = 32\nffn_width = 48'
CODECS: dict[str, CodecConfig] = {
    "fp32": Fp32Config(),
    "bf16": Bf16Config(),
    "fp8": Fp8Config(),
    "int8": Int8Config(),
    "int4": Int4Config(),
    "e3m0": E3m0Config(),
    "int2": Int2Config(),
    "sign": SignConfig(),
    "top_k 64": TopKConfig(),
    "random_k 64": RandomKConfig(),
}
TITLE = "What a round takes of a processor beside its inner steps"


@dataclass(frozen=True)
class Length:
    """A run whose rounds are so long, and how many of them are looked at together."""

    name: str
    model: str
    batch: int
    every: int
    num_rounds: int
    block: int

    def text(self) -> str:
        tokens = self.num_rounds * PEERS * self.every * self.batch * 128
        method = f'type = "diloco"\nevery = {self.every}' if self.every > 1 else 'type = "ddp"'
        return RUN.format(model=self.model, batch=self.batch, tokens=tokens, method=method)


LENGTHS = (
    Length("17,000 parameters, a round after every step", TINY, 2, 1, 100, 12),
    Length("the demo's model, a round after 40 steps", DEMO, 4, 40, 8, 1),
)


@dataclass(frozen=True)
class Round:
    """Seconds and CPU-seconds of one process in a round, without inner steps; by block of rounds."""

    wall_s: list[float]
    beside_s: list[float]
    loop_s: list[float]

    @property
    def least(self) -> int:
        return int(np.argmin(self.beside_s))


def trained(length: Length, text: str) -> Round:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(text, encoding="utf-8")
        (folder / "run.toml").write_text(length.text(), encoding="utf-8")
        with Threads() as threads:
            run_shells("run.toml", PEERS, folder)
        first: dict[int, float] = {}
        for log in folder.glob("home*/runs/*/*/log.jsonl"):
            for entry in read_jsonl(log):
                if isinstance(entry.event, RoundCommitted):
                    first[entry.event.round] = min(entry.at, first.get(entry.event.round, entry.at))
    at = [first[number] for number in sorted(first) if number >= SKIPPED]
    marks, num = at[:: length.block], length.block
    used = threads.used(marks)
    return Round(
        wall_s=[(after - before) / num for before, after in pairwise(marks)],
        beside_s=[float(each) / num for each in used.beside_s],
        loop_s=[float(each) / num for each in used.loop_s],
    )


# --- values ---


def least_ns(function: Callable[[], object]) -> float:
    """Return the CPU-nanoseconds per value of `function`, in this thread, with cold caches: the least of several."""
    cold, took_s = torch.empty(1 << 24), []
    for _ in range(REPEATS):
        cold.fill_(1.0)
        began = time.thread_time()
        function()
        took_s.append(time.thread_time() - began)
    return 1e9 * min(took_s) / NUM


def codec_row(name: str, config: CodecConfig, folder: Path) -> Sequence[object]:
    codec, vector, out = build(config), torch.randn(NUM), torch.empty(NUM)
    parts = cut(NUM, (1,) * PEERS)
    encoded = encode_parts(codec, vector, parts)
    nbytes = sum(memoryview(each).nbytes for each in encoded)
    result, journal = named(encoded[0]), Journal(folder)

    def merge() -> None:
        merger = Merger(len(parts[0]), Coding(codec, codec))
        for _ in range(PEERS):
            merger.add(1000, encoded[0])
        merger.result()

    kept = least_ns(lambda: journal.keep(ids.Round(1), result.digest, encoded[0]))
    return (
        name,
        round(least_ns(lambda: encode_parts(codec, vector, parts)), 2),
        round(least_ns(merge), 2),
        round(least_ns(lambda: decode_parts(codec, encoded, parts, out)), 2),
        round(kept * NUM / (nbytes / PEERS), 2),
    )


def step_row(name: str, outer: Outer, max_norm: float | None) -> Sequence[object]:
    parameters, merged, state = torch.randn(NUM), torch.randn(NUM), outer.init(NUM)
    context = StepContext(number=10, lr=1e-4, num_decayed=NUM, max_norm=max_norm)
    return name, round(least_ns(lambda: outer.apply(parameters, state, merged, context)), 2)


def steps() -> list[Sequence[object]]:
    local, outer = torch.randn(NUM), torch.randn(NUM)
    delta = torch.empty(NUM)
    return [
        step_row("AdamW, clipped (ddp)", AdamW(AdamWConfig()), 1.0),
        step_row("Nesterov (diloco)", Nesterov(NesterovConfig()), None),
        step_row("SGD (fedavg)", Sgd(SgdConfig(lr=1.0)), None),
        ("the delta", round(least_ns(lambda: torch.sub(outer, local, out=delta)), 2)),
        ("the local parameters are set", round(least_ns(lambda: local.copy_(outer)), 2)),
        ("a gradient is copied", round(least_ns(lambda: delta.copy_(local)), 2)),
    ]


# --- the report ---


def apart(short: Round, long: Round, pick: Callable[[Round], tuple[float, float]]) -> tuple[float, float]:
    """Return CPU-milliseconds of each round and of each second."""
    (short_s, short_cpu_s), (long_s, long_cpu_s) = pick(short), pick(long)
    second = (long_cpu_s - short_cpu_s) / (long_s - short_s)
    return 1e3 * (short_cpu_s - second * short_s), 1e3 * second


def main() -> None:
    torch.set_num_threads(1)
    before = load()
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((HOUSE / "src").rglob("*.py")))
    short, long = used = [trained(length, text) for length in LENGTHS]
    solved = []
    for name, pick in (
        ("least", lambda found: (found.wall_s[found.least], found.beside_s[found.least])),
        ("median", lambda found: (median(found.wall_s), median(found.beside_s))),
    ):
        round_ms, second_ms = apart(short, long, pick)
        solved.append(
            (name, round(round_ms, 1), round(round_ms - 1e3 * MESSAGES_S * (PEERS - 1), 1), round(second_ms, 1))
        )
    with tempfile.TemporaryDirectory() as name:
        codecs = [codec_row(each, config, Path(name)) for each, config in CODECS.items()]
    lengths = [
        (
            length.name,
            round(median(found.wall_s), 3),
            round(1e3 * min(found.beside_s), 1),
            round(1e3 * median(found.beside_s), 1),
            round(1e3 * found.loop_s[found.least], 1),
        )
        for length, found in zip(LENGTHS, used, strict=True)
    ]
    sections = [
        load_line(before),
        "Four processes, a thread each, over TLS on loopback. CPU-milliseconds of one process in one round, without "
        "the thread that makes inner steps, by blocks of rounds:",
        table(("run", "s a round, median", "CPU ms, least", "median", "of the least: event loop"), lengths),
        f"So it takes each process, in CPU-milliseconds; messages of {PEERS - 1} others at {1e3 * MESSAGES_S:g} each "
        "are those of rounds.md:",
        table(("by blocks'", "each round", "without messages", "each second"), solved),
        f"CPU-nanoseconds per value in one thread, {NUM:,} values, cold caches, least of {REPEATS}. Merging is that of "
        f"{PEERS} contributions to one part of {PEERS}.",
        table(("codec", "encode", "merge", "decode results", "journal, per byte"), codecs),
        table(("what", "CPU ns per value"), steps()),
    ]
    write("processor", TITLE, "python -m benchmarks.processor", sections)


if __name__ == "__main__":
    main()
