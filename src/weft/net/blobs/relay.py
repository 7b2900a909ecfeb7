"""Passing bytes on between two members that cannot reach each other: the member in the middle.

A member that has a direct link to both opens a bulk stream to the target, says for whom, and copies bytes both ways
until either side ends. What it copies is TLS between the two ends (`via`): it learns who speaks to whom, when and how
much, and nothing else.

What it gives is bounded: streams in all and of one peer, bytes per second over all of them together, seconds of
silence. It passes on to peers to which a direct link stands and to nobody else, so that no chain of relays can form.

Failure:
- either link of the two goes down: what is passed on over it ends.
- a side does not read: nothing moves, and after `idle_s` the stream ends.
- a member asks to reach whom this one does not reach, or for more than it gives: it is told why.
"""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Annotated

import msgspec

from weft.config import Config
from weft.errors import NetError, PeerError, Refused, WireError
from weft.ids import PeerId, short
from weft.net.blobs.bulk import Bulk, BulkStreams
from weft.net.link.links import Links
from weft.net.link.rpc import Handlers
from weft.net.messages import MAX_ANSWER_CHARS, Reaches, RelayAnswer, Relayed, RelayPlease, WhoReaches
from weft.net.transport.frame import write_frame
from weft.net.transport.rate_limit import Bucket
from weft.tasks import Tasks
from weft.wire import encode

OPEN_S = 6.0  # for a stream to the target: below the time in which a dial is given up


class RelayConfig(Config, frozen=True, kw_only=True):
    """What this machine passes on between members that cannot reach each other."""

    is_on: Annotated[bool, msgspec.Meta(description="pass on at all; what passes is encrypted between the two")] = True
    max_streams: Annotated[int, msgspec.Meta(ge=1, le=4096, description="streams at a time, over all members")] = 64
    max_streams_per_peer: Annotated[int, msgspec.Meta(ge=1, le=4096, description="the same at one member's wish")] = 24
    max_bps: Annotated[
        float, msgspec.Meta(ge=1e4, description="bits per second of all of them together; each is received and sent")
    ] = 20e6
    idle_s: Annotated[float, msgspec.Meta(ge=5, le=3600, description="seconds of silence that end a stream")] = 60.0


NO_RELAY = RelayConfig(is_on=False)


class Relay:
    """What one peer passes on.

    Args:
        bucket: what all streams together take their bytes from.
    """

    def __init__(
        self, config: RelayConfig, links: Links, streams: BulkStreams, handlers: Handlers, bucket: Bucket
    ) -> None:
        self._config = config
        self._links = links
        self._streams = streams
        self._bucket = bucket
        self._num_asked: Counter[PeerId] = Counter()
        self._passing: dict[asyncio.Task[None], tuple[PeerId, PeerId]] = {}
        self._tasks = Tasks()
        handlers.serve(WhoReaches, self._who_reaches)
        links.on_link(self._on_link)

    async def pass_on(self, bulk: Bulk, request: RelayPlease) -> None:
        """Pass on what comes on `bulk` to the peer it asks for, and back, until either ends."""
        source, target = bulk.peer, request.peer
        reason = self._objection(source, target)
        if reason:
            await _answer(bulk, reason)
            await bulk.close()
            return
        self._num_asked[source] += 1
        task = self._tasks.spawn(self._pass(bulk, request))
        self._passing[task] = (source, target)
        task.add_done_callback(lambda task: self._ended(task, source))
        await asyncio.wait([task])

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _pass(self, bulk: Bulk, request: RelayPlease) -> None:
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    onward = await self._streams.open(request.peer)
            except (PeerError, NetError, Refused, TimeoutError) as error:
                why = f"no stream to {short(request.peer)} could be opened: {type(error).__name__}"
                await _answer(bulk, why)
                return
            try:
                await write_frame(onward, encode(Relayed(peer=bulk.peer, lane=request.lane)))
                await _answer(bulk, "")
                await self._copy_both(bulk, onward)
            finally:
                await onward.close()
        finally:
            await bulk.close()

    async def _copy_both(self, one: Bulk, other: Bulk) -> None:
        moved = asyncio.Event()
        ways = [self._copy(one, other, moved), self._copy(other, one, moved), self._until_idle(moved)]
        running = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in running:
                way.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _copy(self, source: Bulk, target: Bulk, moved: asyncio.Event) -> None:
        buffer = memoryview(bytearray(self._bucket.slice_nbytes))
        while num_bytes := await source.recv_into(buffer):
            moved.set()
            await self._bucket.take(num_bytes, "bulk")
            await target.send(buffer[:num_bytes])
            moved.set()

    async def _until_idle(self, moved: asyncio.Event) -> None:
        with suppress(TimeoutError):
            while True:
                moved.clear()
                async with asyncio.timeout(self._config.idle_s):
                    await moved.wait()

    def _objection(self, source: PeerId, target: PeerId) -> str:
        """Return why this peer does not pass on from `source` to `target`, or ''."""
        config = self._config
        if not config.is_on:
            return "it passes nothing on"
        if target == source or not self._is_direct(source):
            return "it passes on between two others only, each linked to it directly"
        if not self._is_direct(target):
            return f"it has no direct link to {short(target)}"
        if len(self._passing) >= config.max_streams:
            return f"it passes on {len(self._passing)} streams, as many as its owner allows"
        if self._num_asked[source] >= config.max_streams_per_peer:
            return f"it passes on {self._num_asked[source]} streams for you, as many as its owner allows for one peer"
        return ""

    def _is_direct(self, peer: PeerId) -> bool:
        link = self._links.get(peer)
        return link is not None and not link.is_relayed

    async def _who_reaches(self, peer: PeerId, question: WhoReaches) -> Reaches:
        return Reaches(is_reached=not self._objection(peer, question.peer))

    def _ended(self, task: "asyncio.Task[None]", source: PeerId) -> None:
        del self._passing[task]
        self._num_asked[source] -= 1
        if not self._num_asked[source]:
            del self._num_asked[source]

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:
            for task, ends in list(self._passing.items()):
                if peer in ends:
                    task.cancel()


async def _answer(bulk: Bulk, reason: str) -> None:
    with suppress(WireError, PeerError):
        await write_frame(bulk, encode(RelayAnswer(reason=reason[:MAX_ANSWER_CHARS])))
