"""Machines that take part in one run, each a process in a network namespace on a line of its own (`rig.namespaces`).

company = Company(lines, folder, text_of_a_run_file)
company.found(4)                  # the maker, and three that join it
newcomer = company.join(4)
newcomer.said(StateJoined)
company.end()

As a context it ends all of them, and prints what they complained of where that is because of an error.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.rig.namespaces import Lines
from weft.events import Entry, Event, StepDone
from weft.log import read_jsonl

SOURCE = Path(__file__).parents[1] / "src"
DEADLINE_S = 900.0


@dataclass
class Machine:
    """One process on one machine, and what it says."""

    number: int
    home: Path
    process: "subprocess.Popen[bytes]"

    def entries(self) -> list[Entry]:
        return [entry for path in self.home.glob("runs/*/*/log.jsonl") for entry in read_jsonl(path)]

    def said(self, kind: type[Event]) -> list[Entry]:
        return [entry for entry in self.entries() if isinstance(entry.event, kind)]

    def threads(self) -> dict[int, float]:
        """Return the CPU-seconds of each thread; the first has the event loop."""
        return {each.id: each.user_time + each.system_time for each in psutil.Process(self.process.pid).threads()}

    def tokens(self) -> int:
        return sum(entry.event.num_tokens for entry in self.said(StepDone) if isinstance(entry.event, StepDone))


class Company:
    """Machines that take part in one run.

    Args:
        folder: where the run file, the homes and what processes print come to lie.
        run: the run file's text.
        program: what Python is started with.
    """

    def __init__(self, lines: Lines, folder: Path, run: str, program: Sequence[str] = ("-P", "-m", "weft")) -> None:
        self._lines = lines
        self._program = program
        self._folder = folder
        self.ticket = ""  # in the environment: others see a command line
        self.machines: list[Machine] = []
        (folder / "run.toml").write_text(run)

    def __enter__(self) -> "Company":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for path in sorted(self._folder.glob("*.err")):
                print(path.name, path.read_text()[-2000:], file=sys.stderr)
        self.end()

    def found(self, num: int, *joining: str) -> None:
        """
        Args:
            joining: more words of those that join.
        """
        first = self._start(0, ["train", "run.toml", "--wait-for", str(num)])
        ticket = until(lambda: (first.home.with_suffix(".out").read_text() or "").partition("\n")[0], "a ticket")
        self.ticket = str(ticket)
        for number in range(1, num):
            self.join(number, *joining)

    def join(self, number: int, *joining: str) -> Machine:
        return self._start(number, ["join", "--yes", *joining])

    def _start(self, number: int, words: Sequence[str]) -> Machine:
        home = self._folder / f"home{number}"
        where = ["--transports", "tls", "--host", self._lines.address(number), "--device", "cpu", "--threads", "1"]
        command = [sys.executable, *self._program, "--home", str(home), *words, *where, "--quiet"]
        with home.with_suffix(".out").open("wb") as out, home.with_suffix(".err").open("wb") as err:
            path = os.pathsep.join([str(SOURCE), str(SOURCE.parent)])
            env = os.environ | {"PYTHONPATH": path, "WEFT_TICKET": self.ticket}
            process = self._lines.start(number, command, self._folder, stdout=out, stderr=err, env=env)
        machine = Machine(number, home, process)
        self.machines.append(machine)
        return machine

    def end(self, *machines: Machine, how: int = signal.SIGKILL) -> None:
        for machine in machines or self.machines:
            if machine.process.poll() is None:
                machine.process.send_signal(how)
                machine.process.wait()


def until(found: "object", what: str) -> object:
    """Wait until a function returns something."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := found()):  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(0.5)
    return answer
