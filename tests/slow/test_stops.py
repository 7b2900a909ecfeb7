"""A signal at any moment of a process's life: it ends soon, with 0, says no traceback, and its home goes on from there.

    train    alone, to the end of a short run: imports, packing, warm-up, rounds, evaluation, checkpoints, the report
    join     beside a member that stays: imports, terms, fetching, warm-up, joining, rounds, leaving

Moments are spread evenly over the life of an undisturbed process, whose length is measured first. Before Python has
come to weft's first line there is nobody to say anything: what is sent then ends the process as any other program.
"""

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slow.shell import COMMIT_S, LOCAL, Shell, run_of
from weft.events import Entry, RoundCommitted

pytestmark = pytest.mark.slow

SHORT = run_of('name = "short"\npeers = 1', "tokens = 60_000\nevaluate_every = 2\nevaluate_windows = 64")
MACHINE = "checkpoint_every_s = 0.2\n"
ALONE = (*LOCAL, "--port", "0", "--machine", "machine.toml")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
NUM_MOMENTS = 30
SOON_S = 5.0
WHOLE_S = 240.0


@dataclass(frozen=True)
class Stopped:
    """How a process ended that was sent a signal."""

    at_s: float
    sent: signal.Signals
    code: int
    took_s: float
    last: str  # the last event in its log when it was sent
    said: str

    def is_as_promised(self, start_s: float) -> bool:
        is_python = self.at_s < start_s and self.code in (-self.sent, 1)
        return self.took_s < SOON_S and (is_python or (self.code == 0 and "Traceback" not in self.said))


def stopped(shell: Shell, at_s: float, sent: signal.Signals, *command: str) -> Stopped:
    shell.said.write_text("")
    before = len(shell.entries())
    shell.run(*command)
    process = shell.process
    assert process is not None
    try:
        process.wait(at_s)
    except subprocess.TimeoutExpired:
        process.send_signal(sent)
    began = time.monotonic()
    entries = shell.entries()[before:]
    code = process.wait(60.0)
    last = type(entries[-1].event).__name__ if entries else "none"
    return Stopped(at_s, sent, code, time.monotonic() - began, last, shell.said.read_text())


def swept(stop: Callable[[float, signal.Signals], Stopped], whole_s: float) -> list[Stopped]:
    """Return how a process ends that is stopped at one moment after the other."""
    found = []
    for number in range(NUM_MOMENTS):
        each = stop(whole_s * number / (NUM_MOMENTS - 1), SIGNALS[number % 2])
        print(f"{each.at_s:6.2f} s {each.sent.name} -> {each.code} after {each.took_s:.2f} s, {each.last}")  # noqa: T201
        found.append(each)
    return found


def opened(shell: Shell) -> Shell:
    (shell.folder / "machine.toml").write_text(MACHINE)
    return shell


def undisturbed_s(shell: Shell, *command: str) -> float:
    began = time.monotonic()
    shell.run(*command)
    assert shell.process is not None
    assert shell.process.wait(WHOLE_S) == 0, shell.said.read_text()
    return time.monotonic() - began


def python_s() -> float:
    """Return how long Python takes to weft's first line, and as long again: it has other work, too."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-P", "-c", "import weft.cli.signals"], check=True, timeout=60.0)
    return 2 * (time.monotonic() - began)


def check(found: list[Stopped]) -> None:
    start_s = python_s()
    assert not [each for each in found if not each.is_as_promised(start_s)]
    assert len(Counter(each.last for each in found)) > 3, "it was stopped in few places only"


def test_train_stopped_at_any_moment_ends_well_and_goes_on(shells: Callable[..., Shell], run_file: Path) -> None:
    run_file.write_text(SHORT)
    command = ("train", str(run_file), *ALONE, "--report", "report.json")
    whole_s = undisturbed_s(opened(shells("undisturbed")), *command)

    def stop(at_s: float, sent: signal.Signals) -> Stopped:
        shell = opened(shells(f"at-{at_s:.2f}"))
        found = stopped(shell, at_s, sent, *command)
        undisturbed_s(shell, *command)
        assert (shell.folder / "report.json").exists(), found
        return found

    check(swept(stop, 1.1 * whole_s))


def test_join_stopped_at_any_moment_ends_well_and_the_other_goes_on(
    shells: Callable[..., Shell], run_file: Path
) -> None:
    anna, bert = shells("anna"), opened(shells("bert"))
    anna.run("train", str(run_file), *LOCAL, "--port", "0")
    ticket = anna.ticket()
    command = ("join", ticket, "--yes", *ALONE)
    began = time.monotonic()
    bert.run(*command)
    bert.wait(is_counted(bert))
    whole_s = time.monotonic() - began + 5.0
    assert bert.send(signal.SIGTERM) == 0
    check(swept(lambda at_s, sent: stopped(bert, at_s, sent, *command), whole_s))
    since = time.time()
    bert.run(*command)
    bert.wait(is_counted(bert), after=since, within_s=COMMIT_S)
    assert bert.send(signal.SIGTERM) == 0
    assert anna.send(signal.SIGTERM) == 0


def is_counted(shell: Shell) -> Callable[[Entry], bool]:
    def found(entry: Entry) -> bool:
        return isinstance(entry.event, RoundCommitted) and entry.peer in entry.event.contributors

    return found
