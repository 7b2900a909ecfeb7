"""Fetches many blobs from several holders at once.

    delivered = await pull(node, blobs, holders, keep, clock)

Each blob comes into memory of its own and is given to `keep` once it has its digest, so what was kept stays, whatever
happens to the rest.

Failure:
- a holder that cannot be reached, is gone, or falls silent: the others deliver what it had under way.
- a holder that lies: it is asked no more.
- a holder that lacks a blob: another is asked for that one.
- no holder is left for a blob: PeerError; what arrived has been kept.

`BlobQueue` decides who delivers what, and is told the time: one queue, from which whoever is free takes the next.

    blobs     waiting ──take──► under way at one holder ──arrived──► done
                 ▲                      │
                 └────── failed ────────┘      the holder is gone, or far slower than the others at the end

So each holder delivers as much as it can, and no blob is asked of two holders at a time. Towards the end, a slow
holder takes nothing that the others would have fetched before it, and what it still holds then goes back to them: the
last blobs take about as long as any, however slow one holder is.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.clock import Clock
from weft.errors import CallFailed, DeadlineExceeded, NetError, PeerError, Refused
from weft.ids import Digest, PeerId, short
from weft.net.blobs.blobs import first_of
from weft.net.node import Node
from weft.tasks import within
from weft.wire import Buffer

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


class BlobQueue:
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


LOOK_S = 1.0  # between two looks at who is silent or late
SILENT_S = 10.0  # a peer that lives is heard every 2 s, whatever else it sends
# For 1 MiB beside seven more: who gets less than 300 kbit/s never catches up, and a byte now and then is no transfer.
LIMIT_S_PER_MIB = 240.0

Keep = Callable[[Blob, Buffer], Awaitable[None]]
More = Callable[[Sequence[PeerId]], Awaitable[Sequence[PeerId]]]


async def nobody(_known: Sequence[PeerId]) -> Sequence[PeerId]:
    """Find no more holders."""
    return ()


async def pull(
    node: Node, blobs: Sequence[Blob], holders: Sequence[PeerId], keep: Keep, clock: Clock, more: More = nobody
) -> dict[PeerId, int]:
    """Give each of `blobs` to `keep`, in any order; return how many bytes each holder delivered.

    Args:
        more: asked now and then who else has them, beside those that have not failed.

    Raises:
        PeerError: nobody is left who delivers; the message says why each was given up.
        WeftError: what `keep` raises.
    """
    return await _Pull(node, BlobQueue(blobs, holders, clock.now()), keep, clock, more).run()


class _Pull:
    def __init__(self, node: Node, queue: BlobQueue, keep: Keep, clock: Clock, more: More) -> None:
        self._node = node
        self._queue = queue
        self._keep = keep
        self._clock = clock
        self._more = more
        self._seeking: asyncio.Future[Sequence[PeerId]] | None = None
        self._seek_at = 0.0
        self._under_way: dict[asyncio.Task[Buffer], tuple[PeerId, int]] = {}
        self._given_up: dict[PeerId, str] = {}

    async def run(self) -> dict[PeerId, int]:
        try:
            while not self._queue.is_done:
                self._begin_more()
                self._check_obtainable()
                await asyncio.wait(self._under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                done = [task for task in self._under_way if task.done()]  # in the order in which they were begun
                for task in sorted(done, key=lambda each: each.exception() is not None):  # what came is kept first
                    if task in self._under_way:
                        await self._take_up(task)
                await self._look()
        finally:
            if self._seeking is not None:
                self._seeking.cancel()
                await asyncio.gather(self._seeking, return_exceptions=True)
            await self._end(list(self._under_way))
        return self._queue.delivered

    def _begin_more(self) -> None:
        is_any = True
        while is_any:  # a blob each in turn, so that the first holder does not take all there is
            is_any = False
            for holder in self._queue.holders:
                number = self._queue.take(holder, self._clock.now())
                if number is not None:
                    self._under_way[asyncio.ensure_future(self._fetch(holder, number))] = holder, number
                    is_any = True

    def _check_obtainable(self) -> None:
        if self._under_way:  # what can be had is kept first
            return
        number = self._queue.unobtainable()
        if number is not None:
            blob = self._queue.blobs[number]
            reasons = "; ".join(self._given_up.values()) or "nobody is connected"
            raise PeerError(f"nobody is left to deliver blob {short(blob.digest)}: {reasons}")

    async def _fetch(self, holder: PeerId, number: int) -> Buffer:
        blob = self._queue.blobs[number]
        data = bytearray(blob.nbytes)
        limit_s = LIMIT_S_PER_MIB * max(1.0, blob.nbytes / (1 << 20))
        overdue = f"{short(holder)} did not deliver {blob.nbytes} bytes within {limit_s:.0f} s"
        async with within(limit_s, lambda: DeadlineExceeded(overdue)):
            # Where rounds go first a stream may rest for long; `_look` sees whether its holder lives.
            await self._node.fetch(holder, blob.digest, data, stall_s=limit_s)
        return data

    async def _take_up(self, task: "asyncio.Task[Buffer]") -> None:
        holder, number = self._under_way.pop(task)
        try:
            data = task.result()
        except CallFailed as error:
            self._given_up[holder] = str(error)
            self._queue.lacks(holder, number)
        except (PeerError, NetError, Refused) as error:
            await self._give_up(holder, str(error))
        else:
            await self._keep(self._queue.blobs[number], data)
            self._queue.arrived(holder, number, self._clock.now())

    async def _look(self) -> None:
        now = self._clock.now()
        for holder in self._queue.holders:
            heard_at = self._node.last_heard(holder)
            if heard_at is not None and now - heard_at > SILENT_S:
                await self._give_up(holder, f"{short(holder)} has been silent for {SILENT_S:g} s")
        for holder in self._queue.late(now):
            await self._give_up(holder, f"{short(holder)} is far slower than the others")
        self._seek(now)

    def _seek(self, now: float) -> None:
        if self._seeking is not None and self._seeking.done():
            for holder in self._seeking.result():
                if holder not in self._given_up:
                    self._queue.add(holder, now)
            self._seeking = None
        if self._seeking is None and now >= self._seek_at:
            self._seek_at = now + LOOK_S
            self._seeking = asyncio.ensure_future(self._more(self._queue.holders))

    async def _give_up(self, holder: PeerId, reason: str) -> None:
        self._given_up[holder] = reason
        self._queue.failed(holder)
        await self._end([task for task, (whose, _) in self._under_way.items() if whose == holder])

    async def _end(self, tasks: "Sequence[asyncio.Task[Buffer]]") -> None:
        for task in tasks:
            self._under_way.pop(task, None)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def everybody(node: Node, first: Iterable[PeerId]) -> list[PeerId]:
    """Return whom to ask for what any member has: `first`, who is linked by now, and whose addresses are known by now.

    Who let a newcomer in may be gone a moment later, and the others are the ones it named.
    """
    known = dict.fromkeys([*first, *node.peers, *node.known_addresses()])
    return [peer for peer in known if peer != node.peer]


async def small_from(node: Node, peers: Sequence[PeerId], digest: Digest, max_nbytes: int) -> bytes:
    """Return a blob of unknown length, at most `max_nbytes`, from the first of `peers` that delivers it.

    Raises:
        PeerError: none did; says what each answered.
    """
    return await first_of(
        peers, lambda peer: node.fetch_small(peer, digest, max_nbytes), lambda: f"blob {short(digest)}"
    )
