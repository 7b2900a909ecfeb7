"""Holds a running peer to what its machine may give: looks every second, and tells the peer what to do.

    the day's bytes     nearly spent: said once; spent: the peer leaves, with a goodbye and a checkpoint
    memory              above the cap: the peer leaves
    hours               outside of them the peer is paused
    until               the time has come: the peer leaves

How much is moved per second, VRAM and cores need nobody who looks: `net.transport.rate_limit`, torch and the system
hold them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Protocol

from weft.clock import Clock
from weft.errors import ConfigError, DataError, DiskFull
from weft.events import Emit, Notice
from weft.net.transport.rate_limit import Ration, Valve
from weft.run.host import process_nbytes
from weft.run.machine import CapsConfig, Moved, clock_face, is_near, is_open, minute_of, moved_on, opens_at
from weft.store.home import RecordFile

LOOK_S = 1.0
KEEP_S = 5.0  # between two writes of what was moved: a crash forgets no more
MAX_NBYTES = 4 << 10  # of the count


class DayCount:
    """Bytes moved since midnight, over all starts of one peer, or of several processes that count in one file.

    Nothing is counted where there is no cap.

    Args:
        path: where it is kept.
        timezone: whose midnight; None: the machine's.
    """

    def __init__(self, path: Path, caps: CapsConfig, clock: Clock, timezone: tzinfo | None = None) -> None:
        self.cap_nbytes = caps.day_nbytes
        self._file: RecordFile[Moved | None] = RecordFile(path, Moved, MAX_NBYTES, None)
        self._clock = clock
        self._timezone = timezone
        self._counted = 0  # of the ration's
        self._kept_at = clock.now()
        self.moved = self._written = moved_on(self._day(), self._file.read())
        left = None if self.cap_nbytes is None else self.cap_nbytes - self.moved.nbytes
        self.ration = Ration(left, self.keep)

    def require(self, nbytes: int = 0) -> None:
        """Refuse to begin what moves `nbytes`, or anything at all, where no more is left of the day.

        Raises:
            ConfigError: says when a new day begins.
        """
        left = self.ration.left_nbytes
        if left is not None and left <= nbytes:
            moved = _gigabytes(self.moved.nbytes + self.ration.moved_nbytes)
            needed = f" and joining takes {_gigabytes(nbytes)}" if nbytes else ""
            raise ConfigError(
                f"caps.day_nbytes: {moved} were moved today{needed}; the cap is {_gigabytes(self.cap_nbytes or 0)}. "
                "Start again after midnight, or raise it (--per-day)."
            )

    def look(self) -> bool:
        """Count what was moved since the last look; return whether a new day has begun."""
        day, new = self._day(), self.ration.moved_nbytes - self._counted
        self._counted += new
        is_new_day = day != self.moved.day
        self.moved = moved_on(day, self.moved, 0 if is_new_day else new)
        if is_new_day and self.cap_nbytes is not None:
            self.ration.grant(self.cap_nbytes)
        if self._clock.now() - self._kept_at >= KEEP_S:
            self.keep()
        return is_new_day

    def keep(self) -> None:
        """Write the count down, with what others have counted there; where it cannot be, the one before stays."""
        if self.cap_nbytes is None:
            return
        self._kept_at = self._clock.now()
        found = moved_on(self.moved.day, self._file.read())
        if (others := found.nbytes - self._written.nbytes) > 0 and self._written.day == found.day:
            self.moved = moved_on(self.moved.day, self.moved, others)
            if self.ration.left_nbytes is not None:
                self.ration.left_nbytes -= others
        kept = moved_on(self.moved.day, self.moved, self.ration.moved_nbytes - self._counted)
        with suppress(DiskFull, DataError):
            self._file.keep(kept)
            self._written = kept

    def local(self, wall: float | None = None) -> datetime:
        """Return the time of the machine's calendar: now, or at `wall` seconds."""
        return datetime.fromtimestamp(self._clock.wall() if wall is None else wall, self._timezone)

    def _day(self) -> str:
        return self.local().date().isoformat()


def valve(caps: CapsConfig, clock: Clock, ration: Ration | None = None) -> Valve | None:
    """Return what a machine's bytes have to pass; None where nothing caps them."""
    if caps.upload_bps is None and caps.download_bps is None and caps.day_nbytes is None:
        return None
    return Valve(clock, upload_bps=caps.upload_bps, download_bps=caps.download_bps, ration=ration)


class Pausing(Protocol):
    def want(self, reason: str) -> None: ...

    def want_no_more(self, reason: str) -> None: ...

    async def settled(self) -> None: ...

    @property
    def is_away(self) -> bool: ...

    @property
    def reasons(self) -> tuple[str, ...]: ...


class Guarded(Protocol):
    """What a guard looks after: a peer, or an anchor, which trains nothing and has nothing to pause."""

    @property
    def pausing(self) -> Pausing | None: ...

    def stop(self, reason: str) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Guard:
    """Looks after one process.

    Args:
        until: wall seconds at which it should leave; None: never.
        memory: returns the bytes of main memory taken.
    """

    def __init__(
        self,
        caps: CapsConfig,
        day: DayCount,
        emit: Emit,
        guarded: Guarded,
        until: float | None = None,
        memory: Callable[[], int] = process_nbytes,
    ) -> None:
        self._caps = caps
        self._day = day
        self._emit = emit
        self._guarded = guarded
        self._until = until
        self._memory = memory
        self._is_near_told = False
        self._paused_for = ""  # these hours

    async def watch(self) -> None:
        """Look until cancelled; then write down what was moved."""
        if self._until is not None:
            at = self._day.local(self._until)
            self._emit(Notice(text=f"this peer leaves on {at:%Y-%m-%d} at {at:%H:%M}"))
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            self._day.look()
            self._day.keep()

    def look(self) -> None:
        if self._day.look():
            self._is_near_told = False
        self._look_at_bytes()
        self._look_at_memory()
        self._look_at_the_clock()

    def _look_at_bytes(self) -> None:
        cap, moved = self._day.cap_nbytes, self._day.moved
        if cap is None:
            return
        if self._day.ration.is_spent:
            self._guarded.stop(f"{_gigabytes(moved.nbytes)} moved today, and the cap is {_gigabytes(cap)}")
        elif is_near(moved, cap) and not self._is_near_told:
            self._is_near_told = True
            text = f"{_gigabytes(moved.nbytes)} of the day's {_gigabytes(cap)} are moved; at the cap this peer leaves"
            self._emit(Notice(text=text))

    def _look_at_memory(self) -> None:
        cap = self._caps.memory_nbytes
        if cap is not None and (taken := self._memory()) > cap:
            self._guarded.stop(f"it uses {_gigabytes(taken)} of memory, and the cap is {_gigabytes(cap)}")

    def _look_at_the_clock(self) -> None:
        now, hours, pausing = self._day.local(), self._caps.hours, self._guarded.pausing
        if self._until is not None and now >= self._day.local(self._until):
            self._guarded.stop(f"it is {clock_face(minute_of(now))}, the time at which it was to leave")
        if pausing is None or not hours:
            return
        if is_open(hours, minute_of(now)):
            pausing.want_no_more(self._paused_for)
            self._paused_for = ""
        elif not self._paused_for:
            self._paused_for = f"outside its hours, until {clock_face(opens_at(hours, minute_of(now)))}"
            pausing.want(self._paused_for)


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
