"""What members of a run pay for being watched: CPU-seconds per token, in stretches with a watcher and without.

    python -m benchmarks.watching            # 24 stretches, twenty minutes

Real processes, `weft train`, `weft join` and `weft watch -`, each in a network namespace on a line of its own;
needs root. Four members train; a watcher comes and goes, and stretches are compared with the ones beside them, so that
what changes slowly changes both.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import psutil

from benchmarks import report
from benchmarks._company import SOURCE, Company, Machine, until
from benchmarks.rig.namespaces import Lines
from weft.events import RoundCommitted

NUM, MBIT = 4, 100.0
STRETCH_S, SETTLE_S, WARM_S = 30.0, 4.0, 180.0
NUM_STRETCHES = 24
MOST = 0.01  # the aim
RUN = """
name = "watched"
model = {type = "shape", num_layers = 4, num_heads = 4, width = 128, ffn_width = 344}
data = {source = {type = "text", paths = ["text.txt"]}}
train = {seq_len = 64, batch_size = 8, tokens = 1000000000, schedule = {type = "constant"}, evaluate_every = 0, \
evaluate_windows = 1}
method = {type = "diloco", every = 20}
"""


@dataclass(frozen=True)
class Used:
    """By all members so far, or in one stretch: CPU-seconds, those beside inner steps, and tokens."""

    cpu_s: float
    beside_s: float
    tokens: int

    def since(self, before: "Used") -> "Used":
        return Used(self.cpu_s - before.cpu_s, self.beside_s - before.beside_s, self.tokens - before.tokens)


def used(members: Sequence[Machine]) -> Used:
    threads = [member.threads() for member in members]
    # Once a process has warmed up, the busiest of its threads makes inner steps.
    beside_s = sum(sum(each.values()) - max(each.values()) for each in threads)
    times = [psutil.Process(member.process.pid).cpu_times() for member in members]
    cpu_s = sum(each.user + each.system for each in times)
    return Used(cpu_s, beside_s, sum(member.tokens() for member in members))


class Watcher:
    """`weft watch -` on a machine of its own."""

    def __init__(self, lines: Lines, folder: Path, ticket: str) -> None:
        command = [sys.executable, "-P", "-m", "weft", "--home", str(folder / "watcher"), "watch"]
        command += ["--port", "0", "--transports", "tls"]
        with (folder / "watcher.err").open("ab") as said:
            self._process = lines.start(
                NUM,
                command,
                folder,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=os.environ | {"PYTHONPATH": str(SOURCE), "WEFT_TICKET": ticket},
            )
        until(lambda: (folder / "watcher.err").read_text().count("linked"), "a link to the members")

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def stretch(members: Sequence[Machine]) -> Used:
    """Return what the members use in a while, from one commit to another."""

    def next_commit() -> None:
        before = len(members[0].said(RoundCommitted))
        until(lambda: len(members[0].said(RoundCommitted)) > before, "a commit")

    next_commit()
    before = used(members)
    time.sleep(STRETCH_S)
    next_commit()
    return used(members).since(before)


def more_watched(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return by what share the watched ones of pairs (alone, watched) cost more, and the standard error of it."""
    more = [watched / alone - 1 for alone, watched in pairs]
    return mean(more), stdev(more) / sqrt(len(more))


def _us(used: Used) -> str:
    return f"{1e6 * used.cpu_s / used.tokens:.2f} ({1e6 * used.beside_s / used.tokens:.2f})"


def _percent(share: float, error: float) -> str:
    return f"{100 * share:+.2f} % +- {100 * error:.2f}"


def main() -> None:
    before = report.load()
    found: list[tuple[bool, Used]] = []
    with TemporaryDirectory() as root, Lines("weft-watch", NUM + 1, mbit=MBIT) as lines:
        folder = Path(root)
        (folder / "text.txt").write_text("the warp holds and the weft goes over and under\n" * 20_000)
        company = Company(lines, folder, RUN)
        try:
            company.found(NUM)
            members = company.machines
            until(lambda: len(members[0].said(RoundCommitted)) >= 3, "rounds")
            time.sleep(WARM_S)
            for number in range(NUM_STRETCHES):
                is_watched = number % 4 in (1, 2)  # none, one, one, none
                watcher = Watcher(lines, folder, company.ticket) if is_watched else None
                time.sleep(SETTLE_S)
                found.append((is_watched, stretch(members)))
                how = "watched" if is_watched else "alone"
                print(f"{number}: {how} {_us(found[-1][1])} us a token", flush=True)
                if watcher is not None:
                    watcher.end()
        finally:
            company.end()
    # Pairs that share no stretch; in odd ones the first is watched.
    pairs = [(b, a) if is_watched else (a, b) for (is_watched, a), (_, b) in list(pairwise(found))[::2]]
    whole, whole_error = more_watched([(a.cpu_s / a.tokens, b.cpu_s / b.tokens) for a, b in pairs])
    # What is no inner step scatters less. As a share of all that a token costs:
    steps = [(a.cpu_s - a.beside_s) / a.tokens for a, _ in pairs]
    beside, beside_error = more_watched(
        [
            (step + a.beside_s / a.tokens, step + b.beside_s / b.tokens)
            for step, (a, b) in zip(steps, pairs, strict=True)
        ]
    )
    verdict = (
        "met" if beside + 2 * beside_error < MOST else "missed" if beside - 2 * beside_error > MOST else "not shown"
    )
    rows = [(number, *map(_us, pair)) for number, pair in enumerate(pairs)]
    report.write(
        "watching",
        "What being watched costs members",
        "python -m benchmarks.watching",
        [
            f"{NUM} members and a watcher, each a process in a namespace on a line of {MBIT:g} Mbit/s. "
            f"{report.load_line(before)}",
            f"CPU-seconds per token of the members together, by the kernel's count, are {_percent(whole, whole_error)} "
            f"(standard error of {len(pairs)} pairs) where somebody watches. All threads but those that make inner "
            f"steps, which no watcher gives work to, use {_percent(beside, beside_error)} of that total more. The aim "
            f"is under {100 * MOST:g} %; by the second figure, two standard errors away from it: {verdict}.",
            "Microseconds of CPU per token, in stretches of half a minute and a round; in brackets those beside inner "
            "steps. The second of a pair is watched, and comes first in odd ones.",
            report.table(("pair", "alone", "watched"), rows),
        ],
    )


if __name__ == "__main__":
    main()
