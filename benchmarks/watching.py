"""What members of a run pay for being watched: CPU-seconds per token, in stretches with a watcher and without.

    python -m benchmarks.watching            # 24 stretches, twenty minutes

Real processes, `weft train`, `weft join` and `weft watch TICKET`, each in a network namespace on a line of its own;
needs root. Four members train; a watcher comes and goes, and stretches are compared with the ones beside them, so that
what changes slowly changes both.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import psutil

from benchmarks import report
from benchmarks._company import SOURCE, Company, Machine, until
from weft.events import RoundCommitted
from weft.sim.namespaces import Lines

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


def used(members: Sequence[Machine]) -> tuple[float, int]:
    """Return the CPU-seconds and the tokens of all members so far."""
    times = [psutil.Process(member.process.pid).cpu_times() for member in members]
    return sum(each.user + each.system for each in times), sum(member.tokens() for member in members)


class Watcher:
    """`weft watch TICKET` on a machine of its own."""

    def __init__(self, lines: Lines, folder: Path, ticket: str) -> None:
        command = [sys.executable, "-P", "-m", "weft", "--home", str(folder / "watcher"), "watch", ticket]
        command += ["--port", "0", "--transports", "tls"]
        with (folder / "watcher.err").open("ab") as said:
            self._process = lines.start(
                NUM,
                command,
                folder,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=os.environ | {"PYTHONPATH": str(SOURCE)},
            )
        until(lambda: (folder / "watcher.err").read_text().count("linked"), "a link to the members")

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def stretch(members: Sequence[Machine]) -> float:
    """Return the members' CPU-seconds per token in a while, from one commit to another."""

    def next_commit() -> None:
        before = len(members[0].said(RoundCommitted))
        until(lambda: len(members[0].said(RoundCommitted)) > before, "a commit")

    next_commit()
    cpu_s, tokens = used(members)
    time.sleep(STRETCH_S)
    next_commit()
    more_s, more = used(members)
    return (more_s - cpu_s) / (more - tokens)


def main() -> None:
    before = report.load()
    found: list[tuple[bool, float]] = []
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
                print(f"{number}: {how} {1e6 * found[-1][1]:.2f} us a token", flush=True)
                if watcher is not None:
                    watcher.end()
        finally:
            company.end()
    more = [
        (b if watched else a) / (a if watched else b) - 1
        for (_, a), (watched, b) in list(pairwise(found))[::2]  # pairs that share no stretch
    ]
    error = stdev(more) / sqrt(len(more))
    pairs = zip(found[::2], found[1::2], strict=True)
    rows = [(number, f"{1e6 * a[1]:.2f}", f"{1e6 * b[1]:.2f}") for number, (a, b) in enumerate(pairs)]
    verdict = "met" if mean(more) + 2 * error < MOST else "missed" if mean(more) - 2 * error > MOST else "not shown"
    report.write(
        "watching",
        "What being watched costs members",
        "python -m benchmarks.watching",
        [
            f"{NUM} members and a watcher, each a process in a namespace on a line of {MBIT:g} Mbit/s. "
            f"{report.load_line(before)}",
            f"CPU-seconds per token of the members together, by the kernel's count, are {100 * mean(more):+.2f} % "
            f"+- {100 * error:.2f} (standard error of {len(more)} pairs) where somebody watches; the aim is under "
            f"{100 * MOST:g} %, two standard errors away from it: {verdict}.",
            "Microseconds of CPU per token, in stretches of half a minute and a round: first and second of each pair. "
            "The second is watched in even pairs, the first in odd ones.",
            report.table(("pair", "first", "second"), rows),
        ],
    )


if __name__ == "__main__":
    main()
