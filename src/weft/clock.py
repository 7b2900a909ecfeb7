"""Time, in one place: the clock of this machine, and a virtual one for simulation and tests.

The virtual clock is an asyncio event loop whose selector never waits: when no callback is ready it jumps to
the next timer. `asyncio.sleep`, `asyncio.timeout` and every deadline in production code then run on virtual
time unchanged, and two runs schedule the same callbacks in the same order.

It does not know threads: code that runs on a virtual clock computes inline.
"""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> float:
        """Return monotonic seconds, equal to the running event loop's time."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, for people only: no decision may depend on it."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class SkewedClock:
    """Another clock whose wall shows another time, as on a machine that is set wrongly.

    Args:
        ahead_s: by how much.
    """

    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock = clock
        self._ahead_s = ahead_s

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall() + self._ahead_s


class VirtualClock:
    """A clock that moves only when everybody waits. Run a program on it with `run`."""

    EPOCH = 1_700_000_000.0  # any fixed wall time, so that logs of equal runs are equal

    def __init__(self) -> None:
        self._now = 0.0

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
        with asyncio.Runner(loop_factory=lambda: _VirtualLoop(self)) as runner:
            return runner.run(main)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        self._virtual_clock = clock
        super().__init__(_JumpingSelector(clock))
        # asyncio runs timers due before now + resolution. With the machine's 1 ns that sum is `now` itself once
        # virtual time has passed 2**24 s, where floats are coarser, and a timer that is due would never run.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual_clock.now()


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
