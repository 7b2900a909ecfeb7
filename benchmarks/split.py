"""One layer split over two peers, by heads and by segments, against the same layer undivided; beside what is reckoned.

    python -m benchmarks.split        # five minutes

Two processes with one thread each, over TLS on loopback. How fast a processor is, is reckoned from the CPU-seconds of
the undivided layer, which other programs on it change least; how fast the link, from handing over 4 MiB both ways at
once, as a team does. What is reckoned of splits are the closed forms of `weft.plan.split`. Where it can (root on
Linux), the benchmark moves itself to a network namespace that has loopback only.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks._crew import Crew
from benchmarks._isolated import isolate
from benchmarks.report import load, load_line, table, write
from weft.model.config import named
from weft.plan.split import Layer, Link, heads_s, segments_s

WAYS = ("undivided", "by heads", "by segments")
TRIPS = 1.5  # of which a handing over is made


class Setting(NamedTuple):
    size: str
    batch: int
    seq_len: int

    @property
    def name(self) -> str:
        return f"width {self.layer.config.width}, {self.batch} x {self.seq_len} tokens"

    @property
    def layer(self) -> Layer:
        return Layer(named(self.size, 32_000, self.seq_len), self.batch, self.seq_len)


SETTINGS = (Setting("35m", 1, 1024), Setting("35m", 1, 4096), Setting("1b", 1, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options, before = parser.parse_args(), load()
    if not options.isolated:
        isolate("benchmarks.split")
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, _crew(folder) as crew:
        started = crew.ask([{"do": "start"}] * 2)
        peers = [each["peer"] for each in started]
        crew.ask([{"do": "meet", "peers": peers, "addresses": {e["peer"]: e["addresses"] for e in started}}] * 2)
        probe = crew.ask([{"do": "probe"}] * 2)[0]
        link = Link(8 * probe["nbytes"] / (probe["large_s"] - probe["small_s"]), probe["small_s"] / TRIPS)
        rows = [row for setting in SETTINGS for row in _measured(crew, setting, options.times, link)]
    timed = ("layer", "way", "seconds", "least to most", "undivided / it", "CPU-seconds", "undivided / it")
    head = (*timed, "reckoned seconds", "reckoned undivided / it")
    write(
        "split",
        "One layer split over two peers",
        "python -m benchmarks.split",
        [
            "Forward and back, gradients of all weights included, fp32, one thread in each of two processes, over TLS "
            f"on loopback; median of {options.times}. {load_line(before)} The link as a team has it: "
            f"{link.bps / 1e9:.2f} Gbit/s both ways at once, {1e3 * link.rtt_s:.1f} ms a round trip, digests and "
            "encryption included.",
            table(head, rows),
            "CPU-seconds are those of the process that used most, digests, encryption and the event loop included. "
            "Where other programs want the same cores, two processes get no more of them than one: what a split saves "
            "shows in CPU-seconds then, and not in seconds. The closed forms count operations alone. They know nothing "
            "of what is not halved: by segments each process writes the gradients of all weights.",
        ],
    )


def _measured(crew: Crew, setting: Setting, times: int, link: Link) -> list[tuple[Any, ...]]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    used: dict[str, list[float]] = {way: [] for way in WAYS}  # by who used most
    for turn in range(times + 1):  # in turn: all see the same machine
        for way in WAYS:
            question = {"do": way, "team": f"{setting.name} {way} {turn}", **setting._asdict()}
            told = crew.ask([question], only=[0]) if way == "undivided" else crew.ask([question] * 2)
            if turn:  # the first is for caches and streams
                found[way].append(max(each["took_s"] for each in told))
                used[way].append(max(each["cpu_s"] for each in told))
        print(
            setting.name, {way: f"{each[-1]:.2f}" for way, each in found.items() if each}, file=sys.stderr, flush=True
        )
    alone, alone_cpu = median(found["undivided"]), median(used["undivided"])
    speeds = [setting.layer.flops / alone_cpu] * 2
    reckoned = {
        "undivided": alone_cpu,
        "by heads": heads_s(setting.layer, speeds, link),
        "by segments": segments_s(setting.layer, speeds, link),
    }
    return [
        (
            setting.name,
            way,
            f"{median(each):.3f}",
            f"{min(each):.3f} to {max(each):.3f}",
            f"{alone / median(each):.2f}",
            f"{median(used[way]):.3f}",
            f"{alone_cpu / median(used[way]):.2f}",
            f"{reckoned[way]:.3f}",
            f"{alone_cpu / reckoned[way]:.2f}",
        )
        for way, each in found.items()
    ]


def _crew(folder: str) -> Crew:
    members = str(Path(__file__).parent / "_split_members.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return Crew([[sys.executable, members]] * 2, env, (Path(folder) / "log").open("w"))


if __name__ == "__main__":
    main()
