"""How busy a pipeline keeps its peers: weft's stages against torch's 1F1B over gloo, with devices that only wait.

    python -m benchmarks.scheduling        # twenty-five minutes

Each process is a peer whose device waits as long as its script says instead of computing; activations and their
gradients are real bytes on real sockets, weft's encrypted. 1F1B fixes who does what: a pipeline is as fast as its
slowest peer, and its replicas wait for each other at the end of a step. weft's peers choose whom they send to.

The sum of capacities is what peers could do that never wait: of each stage the sum of its members' rates, of these the
least. One run computes: two sections of a real model, each on a core, where what is sent takes processor time as well;
its capacity is what a process makes of the slower section alone.

Where it can (root on Linux), the benchmark moves itself to a network namespace that has loopback only.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks._crew import Crew
from benchmarks._isolated import isolate
from benchmarks.report import load, load_line, table, write

PART_S = 0.05  # a forward pass; a backward pass takes two
NBYTES = 1 << 20  # activations of 8 samples of 256 tokens, width 128, fp32
NUM_MICRO = (8, 32)  # of 1F1B, in a step
FOR_S, WARM_S = 40.0, 10.0
STEPS_S = 30.0  # of 1F1B


MODEL: dict[str, object] = {
    "vocab_size": 4096,
    "max_seq_len": 128,
    "width": 256,
    "ffn_width": 768,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 4,
    "is_tied": False,
}


class Setting(NamedTuple):
    name: str
    slow: tuple[tuple[float, ...], ...]  # of each stage, times PART_S that each member takes

    @property
    def capacity(self) -> float:
        """Micro-batches a second."""
        return min(sum(1 / (3 * PART_S * each) for each in stage) for stage in self.slow)


SETTINGS = (
    Setting("3 stages of 2", ((1.0, 1.0),) * 3),
    Setting("8 stages of 1", ((1.0,),) * 8),
    Setting("3 stages of 2, one of each 4 times slower", ((1.0, 4.0),) * 3),
    Setting("3 stages of 2, 4 times slower ones in two replicas", ((1.0, 4.0), (4.0, 1.0), (1.0, 4.0))),
)
COMPUTED = Setting("2 sections that are computed", ((1.0,), (1.0,)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options, before = parser.parse_args(), load()
    if not options.isolated:
        isolate("benchmarks.scheduling")
    rows: list[tuple[object, ...]] = []
    for setting in SETTINGS:
        found: dict[str, list[float]] = {}
        for _ in range(options.times):  # in turn: all see the same machine
            found.setdefault("weft", []).append(_weft(setting))
            for num_micro in NUM_MICRO:
                found.setdefault(f"1F1B, {num_micro}", []).append(_one_f_one_b(setting, num_micro))
            print(setting.name, {name: f"{each[-1]:.2f}" for name, each in found.items()}, file=sys.stderr, flush=True)
        rows += _rows(setting.name, found, setting.capacity)
    found = {}
    for _ in range(options.times):
        found.setdefault("weft", []).append(_weft(COMPUTED, MODEL))
        for num_micro in NUM_MICRO:
            found.setdefault(f"1F1B, {num_micro}", []).append(_one_f_one_b(COMPUTED, num_micro, MODEL))
        found.setdefault("", []).append(_alone(MODEL))
        print(COMPUTED.name, {name: f"{each[-1]:.2f}" for name, each in found.items()}, file=sys.stderr, flush=True)
    capacity = median(found.pop(""))
    rows += _rows(COMPUTED.name, found, capacity)
    head = ("peers", "schedule", "micro-batches a second", "least to most", "of capacity", "weft is so many times")
    write(
        "scheduling",
        "How busy a pipeline keeps its peers",
        "python -m benchmarks.scheduling",
        [
            f"A forward pass waits {1000 * PART_S:.0f} ms, a backward pass twice as long; {NBYTES >> 20} MiB between "
            f"two sections each way; median of {options.times}. weft goes on without steps; 1F1B makes steps of so "
            f"many micro-batches as stand behind it, and averages nothing at their end. {load_line(before)}",
            f"The sections that are computed are of a model of {MODEL['num_layers']} layers of width {MODEL['width']}, "
            f"4 samples of 128 tokens at a time, fp32 between them; each alone makes {capacity:.2f} micro-batches a "
            "second at least, while the other one computes beside it.",
            table(head, rows),
        ],
    )


def _rows(name: str, found: Mapping[str, Sequence[float]], capacity: float) -> Iterator[tuple[str, ...]]:
    ours = median(found["weft"])
    for schedule, each in found.items():
        spread = f"{min(each):.2f} to {max(each):.2f}"
        of_capacity, of_ours = f"{median(each) / capacity:.3f}", f"{ours / median(each):.2f}"
        yield (name, schedule, f"{median(each):.2f}", spread, of_capacity, of_ours)


def _alone(model: Mapping[str, object]) -> float:
    """Return the micro-batches a second of the slower section, with nobody to wait for."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, crew_of("alone", 2, folder) as crew:
        crew.ask([{"do": "start"}] * 2)
        crew.ask([{"do": "meet", "model": model, "stage": stage, "num_stages": 2} for stage in range(2)])
        told = crew.ask([{"do": "go", "for_s": FOR_S - WARM_S}] * 2)
        rates: list[float] = [each["rate"] for each in told]
        return min(rates)


def _weft(setting: Setting, model: Mapping[str, object] | None = None) -> float:
    members = [(stage, slow) for stage, all_slow in enumerate(setting.slow) for slow in all_slow]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, crew_of("weft", len(members), folder) as crew:
        started = crew.ask([{"do": "start"}] * len(members))
        addresses = {each["peer"]: each["addresses"] for each in started}
        stages: list[list[str]] = [[] for _ in setting.slow]
        for (stage, _), each in zip(members, started, strict=True):
            stages[stage].append(each["peer"])
        meeting = [
            {
                "do": "meet",
                "addresses": addresses,
                "stages": stages,
                "stage": stage,
                "part_s": PART_S * slow,
                "nbytes": NBYTES,
                "model": model,
            }
            for stage, slow in members
        ]
        crew.ask(meeting)
        told = crew.ask([{"do": "go", "for_s": FOR_S, "warm_s": WARM_S}] * len(members))
        finished = [0] * len(setting.slow)
        for (stage, _), each in zip(members, told, strict=True):
            finished[stage] += each["counted"]
        return min(finished) / (FOR_S - WARM_S)


def _one_f_one_b(setting: Setting, num_micro: int, model: Mapping[str, object] | None = None) -> float:
    """Return the micro-batches a second of all replicas, each made of the members in one place of all stages."""
    num_stages, num_replicas = len(setting.slow), len(setting.slow[0])
    slowest = max(max(stage) for stage in setting.slow)
    steps = max(2, round(STEPS_S / (3 * PART_S * slowest * (num_micro + num_stages - 1))))
    with (
        tempfile.TemporaryDirectory(prefix="weft-bench-") as folder,
        crew_of("1f1b", num_stages * num_replicas, folder) as crew,
    ):
        crew.ask([{"do": "start"}] * num_stages * num_replicas)
        meeting = [
            {
                "do": "meet",
                "num_stages": num_stages,
                "stage": stage,
                "num_micro": num_micro,
                "file": f"{folder}/gloo-{replica}",
                "part_s": PART_S * setting.slow[stage][replica],
                "nbytes": NBYTES,
                "model": model,
            }
            for replica in range(num_replicas)
            for stage in range(num_stages)
        ]
        crew.ask(meeting)
        told = crew.ask([{"do": "go", "steps": steps}] * len(meeting))
        # Replicas average at the end of a step: the fastest waits for the slowest.
        took_s: list[float] = [each["took_s"] for each in told]
        return num_replicas * steps * num_micro / max(took_s)


def crew_of(kind: str, num: int, folder: str) -> Crew:
    members = str(Path(__file__).parent / "_stage_members.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return Crew([[sys.executable, members, kind]] * num, env, (Path(folder) / "log").open("w"))


if __name__ == "__main__":
    main()
