"""Real processes on this machine, befallen by the faults of a scenario: `weft train` and `weft join`, a home each.

    stage = RealStage(scenario, run_file, folder)
    await stage.play(watch)               # until the scenario's limit; then all are told to stop
    await stage.play_to_end(watch)        # until all have ended by themselves, as a run that is complete does
    stage.befall(Kill(peer="lab-1", at_s=0.0, returns_after_s=2.0))      # by `watch`: what no script foresees

The script is the simulator's. Its time, that of `at_s`, `joins_at_s` and `limit_s`, begins once all that are there from
the start have made an outer step together: what Python takes to start is no matter of the script. Who comes later joins
with the newest ticket of anybody who lives. Where each machine is a network namespace (`lines`), they can also be
parted, and have lines of their own rates. What cannot be done to a real process is refused before one is started.

Failure:
- a process ends that nobody ended: it is noted in `broken`, with what it said last.
- a process that is told to stop does not: it is killed, and noted.
- this process ends, however: the others stop by themselves (`--parent`).
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig.namespaces import Lines
from weft.clock import Clock, SystemClock
from weft.errors import ConfigError, DeadlineExceeded
from weft.events import Entry, RoundCommitted
from weft.log import LogTail
from weft.sim.scenario import (
    Corrupt,
    Drop,
    Fault,
    Freeze,
    Kill,
    Kind,
    Lie,
    Line,
    Partition,
    Scenario,
    Skew,
    Slow,
    Stop,
    at_present,
    parted,
)

LOOK_S = 0.5
START_S = 900.0  # for the first machines to make an outer step together, on however busy a machine
STOP_S = 30.0  # to say goodbye, save and end
SLICE_S = 0.1  # of a slowed process: it runs for a share of each
LAST_WORDS = 1500
LOOPBACK = "127.0.0.1"
COMMON = ("--transports", "tls", "--device", "cpu", "--threads", "1")

# Why a fault is for the simulator alone.
_NO_LINES = "between processes on one machine there is no line that could be cut or slowed, unless each has a namespace"
_RATES = "a real line has a rate each way; delay, jitter and loss are simulated"
_HONEST = "a real process does what its program does"
_IMPOSSIBLE: dict[type[Fault], str] = {
    Skew: "all processes of a machine share its clock",
    Drop: _HONEST,
    Corrupt: _HONEST,
    Lie: _HONEST,
}
_RATED = ("up_mbit", "down_mbit")
_MODELLED = ("tokens_per_s", "delay_ms", "jitter_ms", "loss", "clock_skew_s")


def require_playable(scenario: Scenario, *, has_lines: bool = False) -> None:
    """Refuse what cannot be done with real processes.

    Args:
        has_lines: each machine is a network namespace.

    Raises:
        ConfigError: names the fault or field, and says why not.
    """
    for fault in scenario.fault:
        if (why := _why_not(fault, has_lines)) is not None:
            what = f"fault {type(fault).__name__.lower()} of {', '.join(fault.named())}"
            raise ConfigError(f"{what}: {why}. Play it with weft simulate, or leave it out.")
    for kind in scenario.kind:
        usual = Kind(name=kind.name)
        for field in _MODELLED if has_lines else (*_MODELLED, *_RATED):
            if getattr(kind, field) != getattr(usual, field):
                raise ConfigError(
                    f"kind {kind.name}: {field} describes machines that are simulated; real processes are as fast as "
                    "this one. Leave it out, or play it with weft simulate."
                )


def _why_not(fault: Fault, has_lines: bool) -> str | None:
    match fault:
        case Partition():
            return None if has_lines else _NO_LINES
        case Line():
            if not has_lines:
                return _NO_LINES
            return None if fault.delay_ms is fault.jitter_ms is fault.loss is None else _RATES
        case Slow():
            return "a real process cannot be made faster: factor is at most 1" if fault.factor > 1 else None
        case _:
            return _IMPOSSIBLE.get(type(fault))


@dataclass
class RealLife:
    """One process of a machine.

    Args:
        began_at: wall seconds, as logs have them.
        is_ended: killed or told to stop by the script.
    """

    process: "subprocess.Popen[bytes]"
    began_at: float
    ended_at: float | None = None
    is_ended: bool = False

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


class RealMachine:
    """A home on this machine, and the processes that it had."""

    def __init__(self, name: str, folder: Path, number: int) -> None:
        self.name = name
        self.home = folder / name
        self.number = number  # 0: the maker
        self.said = folder / f"{name}.said"  # all that its processes say to a person
        self.lives: list[RealLife] = []
        self.in_force: tuple[Fault, ...] = ()
        self._num_holds = 0
        self._tails: dict[Path, LogTail] = {}
        self.entries: list[Entry] = []  # of all its logs, as far as they were read

    @property
    def is_running(self) -> bool:
        return bool(self.lives) and self.lives[-1].is_running

    def read(self) -> list[Entry]:
        """Return what its processes have logged since the last call."""
        for path in sorted(self.home.glob("runs/*/*/log.jsonl")):
            self._tails.setdefault(path, LogTail(path))
        new = [entry for tail in self._tails.values() for entry in tail.read()]
        self.entries += new
        return new

    def tickets(self) -> list[Path]:
        return list(self.home.glob("runs/*/*/ticket"))

    def signal(self, number: signal.Signals) -> None:
        if self.is_running:
            self.lives[-1].process.send_signal(number)

    def hold(self) -> None:
        """Let its process stand still until as many `release` as `hold`."""
        self._num_holds += 1
        if self._num_holds == 1:
            self.signal(signal.SIGSTOP)

    def release(self) -> None:
        self._num_holds -= 1
        if not self._num_holds:
            self.signal(signal.SIGCONT)

    def kill(self, clock: Clock) -> None:
        if self.is_running:
            life = self.lives[-1]
            life.is_ended = True
            life.process.kill()
            life.process.wait()
            life.ended_at = clock.wall()


class RealStage:
    """Plays one scenario.

    Args:
        run_file: for the maker's `weft train`.
        folder: where homes come to lie, and what the processes say.
        options: of the machines named: words for its `weft train` or `weft join`, beside those that all have.
        lines: where machines are network namespaces, as many as there are machines.
    """

    def __init__(
        self,
        scenario: Scenario,
        run_file: Path,
        folder: Path,
        options: Mapping[str, Sequence[str]] | None = None,
        lines: Lines | None = None,
    ) -> None:
        require_playable(scenario, has_lines=lines is not None)
        self._scenario = scenario
        self._run_file = run_file.absolute()
        self._folder = folder
        self._options = options or {}
        self._lines = lines
        self._partitions: list[Partition] = []  # in force
        self._clock = SystemClock()
        self._kinds: dict[str, Kind] = dict(scenario.machines())
        self.machines = {name: RealMachine(name, folder, number) for number, name in enumerate(self._kinds)}
        self.began_at = 0.0  # wall seconds of the script's beginning
        self._began = 0.0
        self.broken: list[str] = []
        self._ticket = b""  # that was sent last
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def living(self) -> list[RealMachine]:
        return [machine for machine in self.machines.values() if machine.is_running]

    async def play(self, watch: Callable[[], object] = lambda: None) -> None:
        """Play until the scenario's limit, and end every process.

        Args:
            watch: called every half second while the script is played.

        Raises:
            DeadlineExceeded: the first machines do not come together; says what they said last.
        """
        async with self._ending():
            await self._begin()
            while self._clock.now() - self._began < self._scenario.limit_s:
                self._look()
                watch()
                await asyncio.sleep(LOOK_S)

    async def play_to_end(self, watch: Callable[[], object] = lambda: None) -> None:
        """Play until every process has ended by itself, and nothing befalls anybody any more.

        Args:
            watch: called every half second meanwhile.

        Raises:
            DeadlineExceeded: as `play`, or there is no end within the scenario's limit.
        """
        async with self._ending():
            await self._begin()
            while self.living or not all(task.done() for task in self._tasks):
                self._look(is_end_due=True)
                watch()
                await asyncio.sleep(LOOK_S)
                if self._clock.now() - self._began > self._scenario.limit_s:
                    raise DeadlineExceeded(f"no end within {self._scenario.limit_s:.0f} s. {self._all_words()}")
            self._look(is_end_due=True)

    def befall(self, fault: Fault, *, stop_by: signal.Signals = signal.SIGTERM) -> "asyncio.Task[None]":
        """Let something befall a machine, besides what is in the script.

        Args:
            stop_by: the signal by which a Stop is asked for.

        Returns:
            What is done once the machine is as before: it runs again, or goes on.
        """
        (name,) = self._scenario.called(fault.named()[0])
        self._tasks.append(asyncio.ensure_future(self._befall(fault, self.machines[name], stop_by)))
        return self._tasks[-1]

    async def _begin(self) -> None:
        for machine in self.machines.values():
            self._arrange(machine)
        present = [each for each in self.machines.values() if not self._kinds[each.name].joins_at_s]
        for machine in present:
            await self._start(machine, len(present))
        await self._until(lambda: all(map(_has_committed, present)), "the first outer step of all")
        self.began_at, self._began = self._clock.wall(), self._clock.now()
        for coming in self._script(present):
            self._tasks.append(asyncio.ensure_future(coming))

    @asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            failed = await asyncio.gather(*self._tasks, return_exceptions=True)
            self.broken += [repr(each) for each in failed if isinstance(each, Exception)]
            await asyncio.gather(*(self._stop(machine) for machine in self.living))
            for machine in self.machines.values():
                machine.kill(self._clock)
                machine.read()

    def _script(self, present: Iterable[RealMachine]) -> Iterator[Coroutine[Any, Any, None]]:
        for machine in self.machines.values():
            if machine not in present:
                yield self._join(machine)
        for fault in self._scenario.fault:
            if isinstance(fault, Partition):
                yield self._part(fault)
                continue
            for name in self._scenario.called(fault.peer):
                yield self._befall(fault, self.machines[name])

    # --- processes ---

    async def _join(self, machine: RealMachine) -> None:
        await asyncio.sleep(self._kinds[machine.name].joins_at_s)
        await self._start(machine)

    async def _start(self, machine: RealMachine, wait_for: int = 1) -> None:
        if not machine.number:
            self._spawn(machine, ["train", str(self._run_file), "--wait-for", str(wait_for)])
            return
        if not machine.lives:
            await self._until(lambda: any(each.tickets() for each in self.living), "anybody's ticket")
        others = [each for each in self.living if each.tickets()] or [machine]  # alone, it has its own of before
        tickets = [path for each in others for path in each.tickets()]
        if tickets:  # who has ended has none; then that which was sent last is what people have
            self._ticket = max(tickets, key=lambda path: path.stat().st_mtime).read_bytes()
        self._spawn(machine, ["join", "-", "--yes"], self._ticket)

    def _spawn(self, machine: RealMachine, words: Sequence[str], given: bytes = b"") -> None:
        lines, number = self._lines, machine.number
        weft = [sys.executable, "-P", "-m", "weft", "--home", str(machine.home)]
        host = LOOPBACK if lines is None else lines.address(number)
        own = ["--name", machine.name, "--host", host, "--quiet", "--parent", str(os.getpid())]
        what = [*weft, *words, *own, *COMMON, *self._options.get(machine.name, ())]
        with machine.said.open("ab") as said:
            process = subprocess.Popen(
                what if lines is None else lines.command(number, what),
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # of the maker: its ticket
                stderr=said,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(given)
        machine.lives.append(RealLife(process, self._clock.wall()))

    async def _stop(self, machine: RealMachine, by: signal.Signals = signal.SIGTERM) -> None:
        """Tell a machine's process to leave, and wait until it has."""
        life = machine.lives[-1]
        machine.signal(signal.SIGCONT)  # one that stands still hears nothing
        if not life.is_ended:  # the same signal again would end it at once
            life.is_ended = True
            machine.signal(by)
        with suppress(DeadlineExceeded):
            await self._until(lambda: not life.is_running, "its end", STOP_S)
        if life.is_running:
            self.broken.append(f"{machine.name} did not end within {STOP_S:.0f} s of {by.name}; {_words(machine)}")
            machine.kill(self._clock)
        elif life.process.returncode not in (0, -signal.SIGTERM):  # the latter while Python itself still starts
            self.broken.append(f"{machine.name} ended with code {life.process.returncode}; {_words(machine)}")
        life.ended_at = self._clock.wall()

    def _look(self, *, is_end_due: bool = False) -> None:
        for machine in self.machines.values():
            machine.read()
            life = machine.lives[-1] if machine.lives else None
            if life is not None and not life.is_running and life.ended_at is None and not life.is_ended:
                life.ended_at = self._clock.wall()
                if life.process.returncode or not is_end_due:
                    self.broken.append(
                        f"{machine.name} ended by itself with code {life.process.returncode}; {_words(machine)}"
                    )

    # --- faults ---

    async def _befall(self, fault: Fault, machine: RealMachine, stop_by: signal.Signals = signal.SIGTERM) -> None:
        await self._moment(fault, machine)
        match fault:
            case Kill():
                machine.kill(self._clock)
                await self._return(machine, fault.returns_after_s)
            case Stop():
                if machine.is_running:
                    await self._stop(machine, stop_by)
                await self._return(machine, fault.returns_after_s)
            case Freeze():
                machine.hold()
                await asyncio.sleep(fault.lasts_s)
                machine.release()
            case Slow() | Line():
                machine.in_force = (*machine.in_force, fault)
                self._arrange(machine)
                with suppress(TimeoutError):
                    async with asyncio.timeout(fault.lasts_s):
                        await (_slow_down(machine, fault) if isinstance(fault, Slow) else asyncio.Event().wait())
                machine.in_force = tuple(each for each in machine.in_force if each is not fault)
                self._arrange(machine)
            case _:
                raise AssertionError(f"{type(fault).__name__} was refused before")

    def _arrange(self, machine: RealMachine) -> None:
        """Give a machine's line the rates that it has at the moment."""
        if (lines := self._lines) is not None:
            now = at_present(self._kinds[machine.name], machine.in_force)
            lines.set(machine.number, mbit=now.up_mbit or lines.mbit, down_mbit=now.down_mbit or lines.mbit)

    async def _part(self, fault: Partition) -> None:
        await self._moment(fault, self.machines[self._scenario.called(fault.sides[0][0])[0]])
        self._partitions.append(fault)
        self._cut()
        await asyncio.sleep(fault.lasts_s)
        self._partitions.remove(fault)
        self._cut()

    def _cut(self) -> None:
        assert self._lines is not None
        pairs: set[tuple[int, int]] = set()
        for fault in self._partitions:
            sides = [[name for each in side for name in self._scenario.called(each)] for side in fault.sides]
            apart = parted(sides, self.machines)
            pairs |= {(self.machines[one].number, self.machines[other].number) for one, other in apart}
        self._lines.cut(pairs)

    async def _moment(self, fault: Fault, machine: RealMachine) -> None:
        if fault.at_s is not None:
            await asyncio.sleep(fault.at_s)
        else:
            await self._until(lambda: _last_round(machine) >= (fault.at_round or 0), "a round", within_s=None)

    async def _return(self, machine: RealMachine, after_s: float | None) -> None:
        if after_s is not None:
            await asyncio.sleep(after_s)
            if not machine.is_running:
                await self._start(machine)

    def _all_words(self) -> str:
        return "; ".join(f"{machine.name}: {_words(machine)}" for machine in self.machines.values())

    async def _until(self, is_so: Callable[[], bool], what: str, within_s: float | None = START_S) -> None:
        began = self._clock.now()
        while not is_so():
            if within_s is not None and self._clock.now() - began > within_s:
                raise DeadlineExceeded(f"waited {within_s:.0f} s for {what}. {self._all_words()}")
            await asyncio.sleep(LOOK_S / 5)
            for machine in self.machines.values():
                machine.read()


async def _slow_down(machine: RealMachine, fault: Slow) -> None:
    """Let a process run for a share of each slice; of faults that overlap, the first does it for all."""
    while True:
        if next(each for each in machine.in_force if isinstance(each, Slow)) is not fault:
            await asyncio.sleep(SLICE_S)
            continue
        factor = at_present(Kind(name=machine.name, tokens_per_s=1.0), machine.in_force).tokens_per_s
        machine.hold()
        try:
            await asyncio.sleep((1 - factor) * SLICE_S)
        finally:
            machine.release()
        await asyncio.sleep(factor * SLICE_S)


def _has_committed(machine: RealMachine) -> bool:
    return _last_round(machine) > 0


def _last_round(machine: RealMachine) -> int:
    rounds = (entry.event.round for entry in reversed(machine.entries) if isinstance(entry.event, RoundCommitted))
    return next(rounds, 0)


def _words(machine: RealMachine) -> str:
    if not machine.said.exists():
        return "it was not started"
    words = machine.said.read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:].strip()
    return f"it said: {words}" if words else "it said nothing"
