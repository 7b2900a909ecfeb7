"""Fetches many blobs from several holders at once.

    delivered = await pull(node, blobs, holders, keep, clock)

`shares` decides who delivers what; this carries it out. Each blob comes into memory of its own and is given to `keep`
once it has its digest, so what was kept stays, whatever happens to the rest.

Failure:
- a holder that cannot be reached, is gone, or falls silent: the others deliver what it had under way.
- a holder that lies: it is asked no more.
- a holder that lacks a blob: another is asked for that one.
- no holder is left for a blob: PeerError; what arrived has been kept.

It does not know what a blob means, nor where it is kept.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from weft.clock import Clock
from weft.errors import CallFailed, DeadlineExceeded, NetError, PeerError, Refused
from weft.ids import PeerId, short
from weft.net.node import Node
from weft.net.shares import Blob, Shares
from weft.wire import Buffer

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
    node: Node,
    blobs: Sequence[Blob],
    holders: Sequence[PeerId],
    keep: Keep,
    clock: Clock,
    more: More = nobody,
) -> dict[PeerId, int]:
    """Give each of `blobs` to `keep`, in any order; return how many bytes each holder delivered.

    Args:
        more: asked now and then who else has them, beside those that have not failed.

    Raises:
        PeerError: nobody is left who delivers; the message says why each was given up.
        WeftError: what `keep` raises.
    """
    return await _Pull(node, Shares(blobs, holders, clock.now()), keep, clock, more).run()


class _Pull:
    def __init__(self, node: Node, shares: Shares, keep: Keep, clock: Clock, more: More) -> None:
        self._node = node
        self._shares = shares
        self._keep = keep
        self._clock = clock
        self._more = more
        self._seeking: asyncio.Future[Sequence[PeerId]] | None = None
        self._seek_at = 0.0
        self._under_way: dict[asyncio.Task[Buffer], tuple[PeerId, int]] = {}
        self._given_up: dict[PeerId, str] = {}

    async def run(self) -> dict[PeerId, int]:
        try:
            while not self._shares.is_done:
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
        return self._shares.delivered

    def _begin_more(self) -> None:
        is_any = True
        while is_any:  # a blob each in turn, so that the first holder does not take all there is
            is_any = False
            for holder in self._shares.holders:
                number = self._shares.take(holder, self._clock.now())
                if number is not None:
                    self._under_way[asyncio.ensure_future(self._fetch(holder, number))] = holder, number
                    is_any = True

    def _check_obtainable(self) -> None:
        if self._under_way:  # what can be had is kept first
            return
        number = self._shares.unobtainable()
        if number is not None:
            blob = self._shares.blobs[number]
            reasons = "; ".join(self._given_up.values()) or "nobody is connected"
            raise PeerError(f"nobody is left who delivers blob {short(blob.digest)}: {reasons}")

    async def _fetch(self, holder: PeerId, number: int) -> Buffer:
        blob = self._shares.blobs[number]
        data = bytearray(blob.nbytes)
        limit_s = LIMIT_S_PER_MIB * max(1.0, blob.nbytes / (1 << 20))
        try:
            async with asyncio.timeout(limit_s):
                # Where rounds go first a stream may rest for long; `_look` sees whether its holder lives.
                await self._node.fetch(holder, blob.digest, data, stall_s=limit_s)
        except TimeoutError as error:
            if isinstance(error, PeerError):
                raise
            raise DeadlineExceeded(
                f"{short(holder)} did not deliver {blob.nbytes} bytes within {limit_s:.0f} s"
            ) from None
        return data

    async def _take_up(self, task: "asyncio.Task[Buffer]") -> None:
        holder, number = self._under_way.pop(task)
        try:
            data = task.result()
        except CallFailed as error:
            self._given_up[holder] = str(error)
            self._shares.lacks(holder, number)
        except (PeerError, NetError, Refused) as error:
            await self._give_up(holder, str(error))
        else:
            await self._keep(self._shares.blobs[number], data)
            self._shares.arrived(holder, number, self._clock.now())

    async def _look(self) -> None:
        now = self._clock.now()
        for holder in self._shares.holders:
            heard_at = self._node.last_heard(holder)
            if heard_at is not None and now - heard_at > SILENT_S:
                await self._give_up(holder, f"{short(holder)} has been silent for {SILENT_S:g} s")
        for holder in self._shares.late(now):
            await self._give_up(holder, f"{short(holder)} is far slower than the others")
        self._seek(now)

    def _seek(self, now: float) -> None:
        if self._seeking is not None and self._seeking.done():
            for holder in self._seeking.result():
                if holder not in self._given_up:
                    self._shares.add(holder, now)
            self._seeking = None
        if self._seeking is None and now >= self._seek_at:
            self._seek_at = now + LOOK_S
            self._seeking = asyncio.ensure_future(self._more(self._shares.holders))

    async def _give_up(self, holder: PeerId, reason: str) -> None:
        self._given_up[holder] = reason
        self._shares.failed(holder)
        await self._end([task for task, (whose, _) in self._under_way.items() if whose == holder])

    async def _end(self, tasks: "Sequence[asyncio.Task[Buffer]]") -> None:
        for task in tasks:
            self._under_way.pop(task, None)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
