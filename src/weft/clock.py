"""Time, in one place: the clock of this machine, and a virtual one for simulation and tests.

The virtual clock is an asyncio event loop whose selector never waits: when no callback is ready it jumps to
the next timer. `asyncio.sleep`, `asyncio.timeout` and every deadline in production code then run on virtual
time unchanged, and two runs schedule the same callbacks in the same order.

Several processes can be played on one loop. What runs in the context of one (`VirtualClock.context_of`), with all tasks
and timers that come of it, can be frozen and thawed as by SIGSTOP and SIGCONT.
"""

import asyncio
import heapq
import os
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_process: ContextVar[object] = ContextVar("process", default=None)  # to which what runs just now belongs


class Clock(Protocol):
    def now(self) -> float:
        """Return monotonic seconds, equal to the running event loop's time."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970: for people, and for what they set by day and hour. Nothing that others see may
        depend on it."""
        ...


def cpu_s() -> float:
    """Return the seconds that this process has computed so far, on all its threads: for reports."""
    return time.process_time()


def computing(clock: "Clock") -> Callable[[], float]:
    """Return what tells the seconds that the calling thread has computed; where time is virtual, nothing takes any."""
    return time.thread_time if isinstance(clock, SystemClock) else lambda: 0.0


def kept_waiting(clock: "Clock") -> Callable[[], float]:
    """Return what tells the seconds that the calling thread could have computed while others did; none where the system
    does not say it, or time is virtual."""
    thread = str(threading.get_native_id())

    def waited_s() -> float:
        found = _scheduled(thread)
        return 0.0 if found is None else found[1] * 1e-9

    return waited_s if isinstance(clock, SystemClock) else lambda: 0.0


def part_given(clock: "Clock") -> Callable[[], float]:
    """Return what tells what part of the time in which threads of this process wanted to compute they got to, since it
    was asked last: 1 where nobody else does, where the system does not say it, and where time is virtual."""
    before = dict[str, tuple[int, int]]()

    def part() -> float:
        nonlocal before
        now = {thread: found for thread in _threads() if (found := _scheduled(thread)) is not None}
        gone = (0, 0)
        ran = sum(each - before.get(thread, gone)[0] for thread, (each, _) in now.items())
        waited = sum(each - before.get(thread, gone)[1] for thread, (_, each) in now.items())
        before = now
        return ran / (ran + waited) if ran + waited >= _LEAST_WANTED_NS else 1.0

    return part if isinstance(clock, SystemClock) else lambda: 1.0


_LEAST_WANTED_NS = 10_000_000  # less says nothing


_TASKS = "/proc/self/task"


def _threads() -> list[str]:
    with suppress(OSError):
        return os.listdir(_TASKS)
    return []


def _scheduled(thread: str) -> tuple[int, int] | None:
    """Return the nanoseconds that a thread computed, and that it could have while others did; None: nobody says it."""
    with suppress(OSError, ValueError), open(f"{_TASKS}/{thread}/schedstat") as file:
        ran, waited, _ = map(int, file.read().split())
        return ran, waited
    return None


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Wish:
    """That a process should end, as signals tell it. `timeout` and terminals send one twice within a moment."""

    ONE_S = 2.0  # what comes so soon after the first is the first

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_at: float | None = None

    def is_again(self) -> bool:
        """Take a signal; return whether it is a second wish."""
        if self._told_at is None:
            self._told_at = self._clock.now()
        return self._clock.now() - self._told_at >= self.ONE_S

    @property
    def is_told(self) -> bool:
        return self._told_at is not None


class SkewedClock:
    """Another clock whose wall shows another time, as on a machine that is set wrongly.

    Args:
        ahead_s: by how much; it may be set anew at any time.
    """

    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock = clock
        self.ahead_s = ahead_s

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall() + self.ahead_s


class VirtualClock:
    """A clock that moves only when everybody waits. Run a program on it with `run`."""

    EPOCH = 1_700_000_000.0  # any fixed wall time, so that logs of equal runs are equal

    def __init__(self) -> None:
        self._now = 0.0
        self._frozen: dict[object, _Held] = {}

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self.EPOCH + self._now

    def advance(self, delay_s: float) -> None:
        """Move on by `delay_s` (seconds, >= 0): the only way virtual time passes.

        Raises:
            ValueError: `delay_s` is negative or not a number.
        """
        if not delay_s >= 0.0:
            raise ValueError(f"virtual clock: cannot advance by {delay_s} s; time goes forward only")
        self._now += delay_s

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end on a new event loop driven by this clock.

        Raises:
            RuntimeError: every task waits and no timer is set, so nothing could ever happen.
        """
        with asyncio.Runner(loop_factory=lambda: _VirtualLoop(self, self._frozen)) as runner:
            return runner.run(main)

    # --- processes ---

    @staticmethod
    def context_of(process: object) -> Context:
        """Return a context in which code, and what it schedules, belongs to `process`: for `create_task`."""
        context = copy_context()
        context.run(_process.set, process)
        return context

    def freeze(self, process: object) -> None:
        """Run nothing of `process` until `thaw`. What becomes due meanwhile waits."""
        self._frozen.setdefault(process, _Held())

    def thaw(self, process: object) -> None:
        """Let `process` go on: first what others gave it meanwhile, then its timers that are over, in their order."""
        held = self._frozen.pop(process, None)
        if held is not None:
            loop: Any = asyncio.get_running_loop()
            loop.take_back(held)


class _Held:
    """What a frozen process would do."""

    def __init__(self) -> None:
        self.ready: list[asyncio.Handle] = []
        self.timers: list[asyncio.TimerHandle] = []


class _VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop with the clock's time. What belongs to a frozen process is taken out of its queues.

    `_run_once`, `_ready`, `_scheduled` and `_context` are asyncio's, private and the same in Python 3.11 to 3.13. No
    public call tells to whom a callback belongs, and wrapping each would cost all plays what few need.
    """

    _ready: Any
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, clock: VirtualClock, frozen: dict[object, _Held]) -> None:
        self._virtual_clock = clock
        self._frozen = frozen
        super().__init__(_JumpingSelector(clock))
        # asyncio runs timers due before now + resolution. With the machine's 1 ns that sum is `now` itself once
        # virtual time has passed 2**24 s, where floats are coarser, and a timer that is due would never run.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual_clock.now()

    def _run_once(self) -> None:
        if self._frozen:
            self._hold()
        self._reach()
        super()._run_once()  # type: ignore[misc]

    def _reach(self) -> None:
        """Let the time come of a timer that runs now because it is due within the resolution. Else two that wait for
        what is left until a moment, and look again, wake each other for ever: that moment never comes."""
        if self._scheduled:
            ahead = self._scheduled[0].when() - self.time()
            if 0.0 < ahead <= self._clock_resolution:
                self._virtual_clock.advance(ahead)

    def _hold(self) -> None:
        for handle in [handle for handle in self._ready if self._held_of(handle) is not None]:
            self._ready.remove(handle)
            self._held_of(handle).ready.append(handle)  # type: ignore[union-attr]
        timers = [timer for timer in self._scheduled if self._held_of(timer) is not None]
        if timers:
            self._scheduled[:] = [timer for timer in self._scheduled if self._held_of(timer) is None]
            heapq.heapify(self._scheduled)
        for timer in timers:
            timer._scheduled = False  # type: ignore[attr-defined]  # the loop does not count it when it is cancelled
            self._held_of(timer).timers.append(timer)  # type: ignore[union-attr]

    def _held_of(self, handle: asyncio.Handle) -> _Held | None:
        return self._frozen.get(handle._context.get(_process))  # type: ignore[attr-defined]

    def take_back(self, held: _Held) -> None:
        self._ready.extend(held.ready)
        for timer in held.timers:
            if not timer.cancelled():
                timer._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._scheduled, timer)


class _JumpingSelector(selectors.DefaultSelector):  # chosen per platform
    """Polls real sockets without waiting; where the loop would sleep, the clock jumps instead."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("virtual clock: all tasks wait and no timer is set, so nothing can happen any more")
        self._clock.advance(max(timeout, 0.0))
        return ready
