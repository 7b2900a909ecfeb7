"""Which blob is fetched from which of its holders: one queue, from which whoever is free takes the next.

    blobs     waiting ──take──► under way at one holder ──arrived──► done
                 ▲                      │
                 └────── failed ────────┘      the holder is gone, or far slower than the others at the end

So each holder delivers as much as it can, and no blob is asked of two holders at a time. Towards the end, a slow
holder takes nothing that the others would have fetched before it, and what it still holds then goes back to them: the
last blobs take about as long as any, however slow one holder is.

Pure: it is told the time. It does not know how blobs are fetched.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.ids import Digest, PeerId

MAX_UNDER_WAY = 4  # in all, or some of each holder: what is on its way as a round begins to exchange is in its way
LEAST_OF_ONE = 2  # so that a holder has the next one asked of it while one comes
MAX_OF_ONE = 4  # several get past lost packets and the time an answer takes
MAX_LACKING = 3  # a holder that lacks so many has lost them all: a pin that was dropped
LATE = 4.0  # times what others need: who takes longer for the last blobs is not waited for
LATE_S = 2.0  # and so much more


@dataclass(frozen=True, kw_only=True)
class Blob:
    digest: Digest
    nbytes: int


@dataclass
class _Holder:
    began: float
    under_way: dict[int, float] = field(default_factory=dict)  # since when
    lacking: set[int] = field(default_factory=set)
    nbytes: int = 0  # delivered
    last: float = 0.0  # when

    @property
    def speed(self) -> float:
        """Return bytes per second up to its last blob; 0 before the first."""
        return self.nbytes / max(self.last - self.began, 1e-9) if self.nbytes else 0.0


class Shares:
    """The blobs that are wanted, and who fetches which."""

    def __init__(self, blobs: Sequence[Blob], holders: Sequence[PeerId], now: float) -> None:
        self.blobs = tuple(blobs)
        self._waiting = deque(range(len(blobs)))
        self._left_nbytes = sum(blob.nbytes for blob in blobs)
        self._holders = {holder: _Holder(began=now) for holder in holders}
        self.delivered: dict[PeerId, int] = {}  # bytes of each, also of those that failed later

    @property
    def holders(self) -> tuple[PeerId, ...]:
        """Return those that have not failed."""
        return tuple(self._holders)

    @property
    def is_done(self) -> bool:
        return not self._waiting and not any(each.under_way for each in self._holders.values())

    def add(self, peer: PeerId, now: float) -> None:
        """Note that `peer` delivers, too."""
        self._holders.setdefault(peer, _Holder(began=now))

    def take(self, peer: PeerId, now: float) -> int | None:
        """Return the number of the blob that `peer` is to deliver next, or None where it has enough to do."""
        holder = self._holders.get(peer)
        most = min(MAX_OF_ONE, max(LEAST_OF_ONE, MAX_UNDER_WAY // max(len(self._holders), 1)))
        if holder is None or len(holder.under_way) >= most:
            return None
        number = next((each for each in self._waiting if each not in holder.lacking), None)
        if number is None or self._is_too_slow(peer, holder, number, now):
            return None
        self._waiting.remove(number)
        holder.under_way[number] = now
        return number

    def arrived(self, peer: PeerId, number: int, now: float) -> None:
        """Note that `peer` has delivered a blob."""
        nbytes = self.blobs[number].nbytes
        self._left_nbytes -= nbytes
        self.delivered[peer] = self.delivered.get(peer, 0) + nbytes
        if (holder := self._holders.get(peer)) is not None:
            holder.under_way.pop(number)
            holder.nbytes += nbytes
            holder.last = now

    def lacks(self, peer: PeerId, number: int) -> None:
        """Note that `peer` does not have a blob; who lacks several is asked no more."""
        if (holder := self._holders.get(peer)) is not None:
            holder.under_way.pop(number)
            holder.lacking.add(number)
            self._waiting.appendleft(number)
            if len(holder.lacking) >= MAX_LACKING:
                self.failed(peer)

    def failed(self, peer: PeerId) -> tuple[int, ...]:
        """Ask `peer` no more; return what it had under way, which goes to others."""
        holder = self._holders.pop(peer, None)
        back = () if holder is None else tuple(holder.under_way)
        self._waiting.extendleft(reversed(back))
        return back

    def unobtainable(self) -> int | None:
        """Return a blob that nobody who is left can deliver, if there is one."""
        lost = (each for each in self._waiting if all(each in other.lacking for other in self._holders.values()))
        return next(lost, None)

    def late(self, now: float) -> tuple[PeerId, ...]:
        """Return whose last blobs are not worth waiting for: others are idle, and would have had them long ago."""
        if self._waiting:
            return ()
        late = []
        for peer, holder in self._holders.items():
            others = [other for name, other in self._holders.items() if name != peer and other.nbytes]
            if not holder.under_way or not others or any(other.under_way for other in others):
                continue
            fastest = max(other.speed for other in others)
            oldest = min(holder.under_way, key=lambda number: holder.under_way[number])
            takes_s = MAX_OF_ONE * self.blobs[oldest].nbytes / fastest
            if now - holder.under_way[oldest] > LATE * takes_s + LATE_S:
                late.append(peer)
        return tuple(late)

    def _is_too_slow(self, peer: PeerId, holder: _Holder, number: int, now: float) -> bool:
        """Return whether all others together are done with everything before `peer` would be with one more blob."""
        speeds = [other.speed for name, other in self._holders.items() if name != peer and other.nbytes]
        can_others = any(number not in other.lacking for name, other in self._holders.items() if name != peer)
        if not speeds or not can_others or not holder.under_way:
            return False
        mine = sum(self.blobs[each].nbytes for each in (*holder.under_way, number))
        mine_s = mine / holder.speed if holder.nbytes else now - min(holder.under_way.values())
        others_left = self._left_nbytes - mine + self.blobs[number].nbytes
        return mine_s > others_left / sum(speeds)
