"""The timers of a round, as long as the last rounds say.

    grace      from the first to the last announcement of a round
    progress   a grace, and from this peer's announcement to the commit; doubled with each attempt

It does not know what expires.
"""

import asyncio
from collections.abc import Callable

from weft.clock import Clock
from weft.ids import Attempt
from weft.sync.deadline import NUM_REMEMBERED, deadline_s
from weft.sync.machine import Timer

MAX_DOUBLINGS = 5  # of the progress timer: half an hour at most, where rounds take a minute


class Timers:
    """Measures rounds, and calls `expire(timer, attempt)` when one takes too long."""

    def __init__(self, clock: Clock, expire: Callable[[Timer, Attempt], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._running: dict[tuple[Timer, Attempt], asyncio.TimerHandle] = {}
        self._ready_at: list[float] = []  # of the present round's announcements
        self._announced_at: float | None = None
        self._graces_s: list[float] = []
        self._latencies_s: list[float] = []

    def begin(self) -> None:
        """A round begins."""
        self.stop()
        self._ready_at, self._announced_at = [], None

    def note_ready(self) -> None:
        """Another member has announced its payload."""
        self._ready_at.append(self._clock.now())

    def note_announced(self) -> None:
        """This peer has."""
        self._announced_at = self._clock.now()
        self._ready_at.append(self._announced_at)

    def note_decided(self) -> None:
        """The round is decided."""
        if self._announced_at is not None:
            self._latencies_s = [*self._latencies_s, self._clock.now() - self._announced_at][-NUM_REMEMBERED:]
        if len(self._ready_at) > 1:
            self._graces_s = [*self._graces_s, self._ready_at[-1] - self._ready_at[0]][-NUM_REMEMBERED:]

    def set(self, timer: Timer, attempt: Attempt) -> None:
        """Start a timer, unless it runs."""
        if (timer, attempt) in self._running:
            return
        delay_s = deadline_s(self._graces_s)
        if timer == "progress":
            delay_s = (delay_s + deadline_s(self._latencies_s)) * 2 ** min(attempt, MAX_DOUBLINGS)
        self._running[timer, attempt] = asyncio.get_running_loop().call_later(delay_s, self._end, timer, attempt)

    def stop(self) -> None:
        for handle in self._running.values():
            handle.cancel()
        self._running.clear()

    def _end(self, timer: Timer, attempt: Attempt) -> None:
        self._running.pop((timer, attempt), None)
        self._expire(timer, attempt)
