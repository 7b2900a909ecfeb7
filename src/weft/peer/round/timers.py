"""The timers of a round, as long as the last rounds say.

    grace      from when a quorum is ready to the last announcement of a round
    progress   a grace, and from when a quorum is ready to the commit; doubled with each attempt that this peer was in

Attempts that others skip make nobody wait longer.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.clock import Clock
from weft.errors import DataError, DiskFull
from weft.ids import Attempt, PeerId
from weft.store.home import RecordFile
from weft.sync.records.tuning import NUM_SEEN, Seen
from weft.sync.round.machine import NUM_REMEMBERED, Timer, deadline_s

EVERY_S = 5.0
MAX_NBYTES = 64 << 10  # of what is kept of them

_Times = Annotated[tuple[Annotated[float, Meta(ge=0, le=1e6)], ...], Meta(max_length=NUM_REMEMBERED)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, oldest first: from a quorum's announcement to the last, and to the commit."""

    graces_s: _Times = ()
    latencies_s: _Times = ()


class RoundTimes:
    """How long rounds took, kept for the next process of this peer: it need not wait as if nothing were known.

    The file is replaced now and then, and not synced: what is lost or damaged is measured again.
    """

    def __init__(self, path: Path, now: Callable[[], float], *, is_on: bool) -> None:
        self._file = RecordFile(path, Measured, MAX_NBYTES, Measured(), is_synced=False)
        self._now = now
        self._is_on = is_on
        self._written_at = float("-inf")

    def read(self) -> Measured:
        return self._file.read()

    def keep(self, measured: Measured) -> None:
        """Write it down, unless that was done a moment ago."""
        if self._is_on and self._now() - self._written_at >= EVERY_S:
            self._written_at = self._now()
            with suppress(DiskFull, DataError):
                self._file.keep(measured)


# Times the median of an exchange. A newcomer makes one a third longer (net.turns.SHARE), and whoever uses the same line
# for something else, too; to begin it anew costs all that has been sent.
SLACK = 1.5
MAX_DOUBLINGS = 5  # of the progress timer: half an hour at most, where rounds take a minute


class Timers:
    """Measures rounds, and calls `expire(timer, attempt)` when one takes too long."""

    def __init__(self, clock: Clock, expire: Callable[[Timer, Attempt], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._watched: set[Attempt] = set()  # attempts of the present round whose progress was waited for
        self._running: dict[tuple[Timer, Attempt], asyncio.TimerHandle] = {}
        self._ready_at: float | None = None  # the last announcement of the present round
        self._all_ready_at: dict[PeerId, float] = {}
        self._announced_at: float | None = None  # by this peer
        self._quorum_at: float | None = None  # since when the leader could go on
        self._gathering_s = 0.0  # leader: how long a quorum's payloads took to arrive
        self._gathered_at: float | None = None  # leader: the last payload that it counts
        self._idle_s: float | None = None  # leader: from then to its plan, in which it waited for who was late
        self._began_at = clock.now()  # the present round
        self._worked_s: float | None = None  # in inner steps of it
        self._apart_s = 0.0  # with what is no part of it
        self._seen: list[tuple[float, float]] = []  # of the last rounds: waited, worked
        self._graces_s: list[float] = []
        self._latencies_s: list[float] = []

    @property
    def measured(self) -> Measured:
        return Measured(graces_s=tuple(self._graces_s), latencies_s=tuple(self._latencies_s))

    def recall(self, measured: Measured) -> None:
        """Go on from what a process before this one measured."""
        self._graces_s, self._latencies_s = list(measured.graces_s), list(measured.latencies_s)

    def begin(self) -> None:
        self.stop()
        self._began_at = self._clock.now()
        self._all_ready_at = {}
        self._announced_at, self._ready_at, self._quorum_at, self._gathering_s = None, None, None, 0.0
        self._gathered_at, self._idle_s = None, None
        self._worked_s, self._apart_s = None, 0.0
        self._watched.clear()

    def note_ready(self, peer: PeerId) -> None:
        self._ready_at = self._all_ready_at[peer] = self._clock.now()

    def note_quorum(self) -> None:
        self._quorum_at = self._clock.now()

    def note_gathering(self, took_s: float) -> None:
        """A quorum's payloads have taken so long to arrive: the others' may take half as long more."""
        self._gathering_s = took_s
        self._gathered_at = self._clock.now()

    def note_planned(self, *, leads: bool) -> None:
        """There is a plan of the round.

        Args:
            leads: it is this peer's.
        """
        if leads and self._idle_s is None:
            self._idle_s = 0.0 if self._gathered_at is None else self._clock.now() - self._gathered_at

    def note_worked(self, took_s: float) -> None:
        """This peer's inner steps of the present round took so long."""
        self._worked_s = took_s

    def note_apart(self, took_s: float) -> None:
        """So long it did what is no part of a round: it evaluated."""
        self._apart_s += took_s

    def note_announced(self) -> None:
        self._announced_at = self._clock.now()

    @property
    def was_in_time(self) -> bool:
        """Whether this peer announced before half of the grace was over."""
        if self._announced_at is None:
            return False
        return self._quorum_at is None or self._announced_at - self._quorum_at < deadline_s(self._graces_s) / 2

    @property
    def is_grace_half_over(self) -> bool:
        """Whether half of a grace has passed since a quorum was ready: what remains is for encoding and links."""
        return self._quorum_at is not None and self._clock.now() - self._quorum_at >= deadline_s(self._graces_s) / 2

    def note_decided(self, counted: Iterable[PeerId], *, is_whole: bool) -> None:
        """The round is decided.

        Args:
            counted: who; of others nobody has waited for the announcement.
            is_whole: nobody who was leased something is missing. Else only the leader knows how long it waited.
        """
        is_known = is_whole or self._idle_s is not None
        if is_known and self._announced_at is not None and self._worked_s is not None:
            ready_at = max((self._all_ready_at.get(peer, 0.0) for peer in counted), default=0.0)
            before_s = self._announced_at - self._began_at - self._apart_s - self._worked_s
            after_s = self._clock.now() - max(self._announced_at, ready_at) - (self._idle_s or 0.0)
            waited_s = max(before_s, 0.0) + max(after_s, 0.0)
            self._seen = [*self._seen, (waited_s, self._worked_s)][-NUM_REMEMBERED:]
        if self._quorum_at is None or self._ready_at is None:
            return
        self._latencies_s = [*self._latencies_s, self._clock.now() - self._quorum_at][-NUM_REMEMBERED:]
        self._graces_s = [*self._graces_s, max(0.0, self._ready_at - self._quorum_at)][-NUM_REMEMBERED:]

    @property
    def seen(self) -> Seen | None:
        """Return what the last rounds took, in the median; None: too few were measured since `forget`."""
        if len(self._seen) < NUM_SEEN:
            return None
        waited, worked = zip(*self._seen, strict=True)
        return Seen(median(waited), median(worked))

    def forget(self) -> None:
        """Rounds are of another kind from now on."""
        self._seen = []

    def set(self, timer: Timer, attempt: Attempt) -> None:
        """Start a timer, unless it runs."""
        if (timer, attempt) in self._running:
            return
        if timer == "progress" and self._quorum_at is None:
            self._quorum_at = self._clock.now()
        delay_s = self._grace_s()
        if timer == "progress":
            self._watched.add(attempt)
            delay_s = self.progress_s()
        self._running[timer, attempt] = asyncio.get_running_loop().call_later(delay_s, self._end, timer, attempt)

    def _grace_s(self) -> float:
        return max(deadline_s(self._graces_s), self._gathering_s / 2)

    def progress_s(self) -> float:
        """Return how long this peer follows its present attempt."""
        num_before = min(max(0, len(self._watched) - 1), MAX_DOUBLINGS)
        return (self._grace_s() + deadline_s(self._latencies_s, SLACK)) * (1 << num_before)

    def stop(self) -> None:
        for handle in self._running.values():
            handle.cancel()
        self._running.clear()

    def _end(self, timer: Timer, attempt: Attempt) -> None:
        self._running.pop((timer, attempt), None)
        self._expire(timer, attempt)
