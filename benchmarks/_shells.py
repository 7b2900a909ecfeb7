"""A run as people make it: `weft train` and `weft join`, a process and a home each, over TLS on loopback.

    ended = run("recipe.toml", 4, folder)

It reads what the processes report at their end and what their logs tell. None of them outlives its deadline.
"""

import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.cli.run.running import Report
from weft.events import Entry, Evaluated, RoundCommitted, StepDone
from weft.log import read_jsonl

MACHINE = ("--transports", "tls", "--host", "127.0.0.1", "--device", "cpu", "--threads", "1")
MEET_S, TRAIN_S, STOP_S = 120.0, 1800.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run of processes ended."""

    commands: tuple[str, ...]  # as typed
    reports: tuple[Report, ...]  # one per process
    num_rounds: int
    num_short_rounds: int  # that left somebody out
    num_steps: tuple[int, ...]  # inner steps of each process
    heldout_tokens: int  # that the loss is the mean over
    steps_s: tuple[float, ...]  # from the first inner step of each process to its last
    wall_s: float
    cpu_s: float  # of all processes, start and evaluation included


def run(recipe: str, num_peers: int, folder: Path, machine: Sequence[str] = MACHINE, num_ranks: int = 0) -> Ended:
    """Train the run of a run file with `num_peers` processes until it is complete.

    Args:
        recipe: a file in `folder`.
        folder: where the commands are typed, and where homes and what the processes say come to lie.
        machine: what each command says of its machine.
        num_ranks: that torchrun starts of each process; 0: it is started as it is.

    Raises:
        RuntimeError: a process failed or was late; tells what it said.
    """
    began, cpu_s = time.monotonic(), _cpu_s()
    shells = [_Shell(folder / f"home{number}", machine, num_ranks) for number in range(1, num_peers + 1)]
    train = ["train", recipe, *(["--wait-for", str(num_peers)] if num_peers > 1 else [])]
    join = ["join", "@ticket.txt", "--yes"]
    try:
        shells[0].type(train)
        (folder / "ticket.txt").write_text(shells[0].ticket() if num_peers > 1 else "")
        for shell in shells[1:]:
            shell.type(join)
        deadline = time.monotonic() + TRAIN_S
        for shell in shells:
            shell.wait(deadline)
    finally:
        for shell in shells:
            shell.end()
    logs = [shell.entries() for shell in shells]
    events = [[entry.event for entry in log] for log in logs]
    steps_at = [[entry.at for entry in log if isinstance(entry.event, StepDone)] for log in logs]
    told = [event for log in events for event in log]
    counted = {each.round: len(each.contributors) for each in told if isinstance(each, RoundCommitted)}
    typed = [train, *[join] * (num_peers - 1)]
    return Ended(
        commands=tuple(
            shlex.join(["weft", "--home", f"home{n}", *words, *machine]) for n, words in enumerate(typed, 1)
        ),
        reports=tuple(shell.report() for shell in shells),
        num_rounds=len(counted),
        num_short_rounds=sum(count < num_peers for count in counted.values()),
        num_steps=tuple(sum(isinstance(each, StepDone) for each in log) for log in events),
        heldout_tokens=next(each.num_tokens for each in reversed(told) if isinstance(each, Evaluated)),
        steps_s=tuple(at[-1] - at[0] if at else 0.0 for at in steps_at),
        wall_s=time.monotonic() - began,
        cpu_s=_cpu_s() - cpu_s,
    )


class _Shell:
    """One process, its home, and files for what it says."""

    def __init__(self, home: Path, machine: Sequence[str], num_ranks: int) -> None:
        self._home, self._machine = home, machine
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        self._python = [sys.executable, *(torchrun if num_ranks else ["-P"])]
        self._printed, self._said = home.with_suffix(".printed"), home.with_suffix(".said")
        self._report = home.with_suffix(".json")
        self._process: subprocess.Popen[bytes] | None = None

    def type(self, words: Sequence[str]) -> None:
        weft = [*self._python, "-m", "weft", "--home", str(self._home)]
        with self._printed.open("wb") as printed, self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*weft, *words, *self._machine, "--quiet", "--report", str(self._report)],
                cwd=self._home.parent,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=said,
            )

    def ticket(self) -> str:
        deadline = time.monotonic() + MEET_S
        while not (line := self._printed.read_text()).endswith("\n"):
            if time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                raise self._failure("printed no ticket")
            time.sleep(0.1)
        return line.strip()

    def wait(self, deadline: float) -> None:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            if self._process.wait(max(0.0, deadline - time.monotonic())) == 0:
                return
        raise self._failure("did not end well in time")

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()
            self._process.wait()

    def entries(self) -> list[Entry]:
        return [entry for path in self._home.glob("runs/*/*/log.jsonl") for entry in read_jsonl(path)]

    def report(self) -> Report:
        return msgspec.json.decode(self._report.read_bytes(), type=Report)

    def _failure(self, what: str) -> RuntimeError:
        return RuntimeError(f"{self._home.name} {what}; it said:\n{self._said.read_text()[-3000:]}")


def _cpu_s() -> float:
    """Return the CPU-seconds of all processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
