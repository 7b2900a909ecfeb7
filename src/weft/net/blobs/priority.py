"""Who may send next: what a round waits for goes first, what a newcomer fetches goes in between.

    urgent     payloads and results of the present round: sent at once
    patient    states, data, results of rounds long decided: a few at a time; and while something urgent is under way,
               and a moment longer, or an exchange has just begun or ended, one byte for every `SHARE - 1` urgent ones

Not none: a swarm whose rounds exchange all the time would otherwise never let anybody in. Shares are of bytes, because
what a line can carry is not known: what urgent blobs get through is what it carries. And not too few: a slice leaves at
the latest after `STARVED_S`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from weft.ids import PeerId

SHARE = 4  # of what is sent while rounds want the line, patient blobs are one part: four donors fill a line like theirs
MAX_PATIENT = 2  # blobs at a time to one peer: what a socket has taken before a round began cannot be taken back
SLICE_NBYTES = 128 << 10  # of a patient blob: 50 ms of 20 Mbit/s
QUIET_S = 1.0  # from one urgent blob to the next of the same exchange: an answer, a merge, a request over an ocean
# A slice waits no longer, however little rounds send: where models are small and rounds follow at once, a quarter of
# that is next to nothing, though the line is free. It makes 0.35 Mbit/s, so that two newcomers do not take it for dead.
STARVED_S = 3.0
STUCK_S = 5.0  # where no urgent byte has left for so long, nobody is held back


class Priority:
    """Of one peer's line, as far as it sends blobs."""

    def __init__(self) -> None:
        self._num_urgent = 0
        self._is_exchanging = False
        self._moved_at = -STUCK_S  # when an urgent byte last left
        self._credit = 0.0  # patient bytes that may leave though a round wants the line
        self._slots: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()
        self._in_order = asyncio.Lock()
        self._news = asyncio.Event()

    def exchange(self, is_going_on: bool) -> None:
        """Note that a round's exchange begins or has ended."""
        if is_going_on and not self._is_exchanging:
            self._begin()
        elif self._is_exchanging and not is_going_on:
            self._moved_at = _now()
        self._is_exchanging = is_going_on
        self._news.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Send a blob that others wait for, and tell of each slice with `moved`."""
        self._begin()
        self._num_urgent += 1
        try:
            yield
        finally:
            self._num_urgent -= 1
            self._moved_at = _now()
            self._news.set()

    def moved(self, nbytes: int) -> None:
        """Note that so much of an urgent blob has left."""
        self._moved_at = _now()
        self._credit = min(self._credit + nbytes / (SHARE - 1), 2.0 * SLICE_NBYTES)
        self._news.set()

    @asynccontextmanager
    async def patient(self, peer: PeerId) -> AsyncIterator[None]:
        """Send a blob to `peer` that can wait, once it is its turn; before each slice wait for `may_send`."""
        async with self._slots.setdefault(peer, asyncio.Semaphore(MAX_PATIENT)):
            yield

    async def may_send(self, nbytes: int) -> None:
        """Return when so much of a patient blob may leave."""
        async with self._in_order:
            until = _now() + STARVED_S
            while (busy_s := min(self._busy_s(), until - _now())) > 0 and self._credit < nbytes:
                self._news.clear()
                try:
                    async with asyncio.timeout(busy_s):
                        await self._news.wait()
                except TimeoutError:
                    continue
            self._credit = max(self._credit - nbytes, 0.0)

    def _begin(self) -> None:
        if self._busy_s() <= 0:
            self._credit = 0.0  # what was left over of the last exchange
            self._moved_at = _now()

    def _busy_s(self) -> float:
        """Return for how long patient blobs hold back if nothing urgent moves."""
        return self._moved_at + (STUCK_S if self._num_urgent else QUIET_S) - _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
