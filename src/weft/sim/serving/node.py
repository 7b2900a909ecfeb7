"""A node without streams: what it sends passes its line, the way, and the other's line, and is heard as it was said.

Lines, delays, jitter and loss are those of `net.transport.memory`. Handshakes, frames and heartbeats are left out: of a
play of hundreds of machines they would be three quarters of the work, and what is played is who sends what to whom.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

import msgspec

from weft.errors import CallFailed, DeadlineExceeded, PeerError, Unreachable
from weft.ids import Digest, PeerId, short
from weft.net.blobs.blobs import Lookup
from weft.net.link.links import OnLink
from weft.net.node import Node
from weft.net.transport.memory import Link, MemoryNetwork
from weft.tasks import Tasks, within
from weft.wire import Buffer, encode

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

ASKED_NBYTES = 64  # of who asks for a blob
STALL_S = 30.0


class _Way:
    """From one node to another, in order."""

    def __init__(self, link: Link, node: "PlayedNode") -> None:
        self.node = node
        self.is_cut = False
        self._link = link
        self._due_s = 0.0
        self._then: deque[Callable[[], object]] = deque()

    def send(self, data: bytes, then: Callable[[], object]) -> None:
        """Do `then` once all of `data` is there. Long ones give way to others on the same lines."""
        size = self._link.chunk_nbytes
        starts = range(0, len(data), size) or range(1)
        self._then.extend([_nothing] * (len(starts) - 1))
        self._then.append(then)
        for start in starts:
            self._link.up.carry(self, data[start : start + size], self._travel)

    @property
    def delay_s(self) -> float:
        return self._link.delay_s

    def _travel(self, chunk: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s, loop.time() + self._link.travel_s(chunk))
        loop.call_at(self._due_s, self._reach, chunk, context=Context())

    def _reach(self, chunk: bytes | None) -> None:
        self._link.down.carry(self, chunk, self._arrive)

    def _arrive(self, _chunk: bytes | None) -> None:
        then = self._then.popleft()  # timers of equal time may fire in any order
        if not self.is_cut:
            then()


def _nothing() -> None:
    pass


class PlayedNode(Node):
    """Of one process."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self._network, self._me = network, peer
        self._calls: dict[type, Callable[[PeerId, Any], Awaitable[msgspec.Struct]]] = {}
        self._notes: dict[type, Callable[[PeerId, Any], Awaitable[None]]] = {}
        self._lookups: list[Lookup] = []
        self._hear_links: list[OnLink] = []
        self._ways: dict[PeerId, _Way] = {}
        self._waiting: dict[asyncio.Future[Any], PeerId] = {}
        self._tasks = Tasks()
        self._last: tuple[msgspec.Struct, bytes] | None = None  # what goes to many is encoded once

    @property
    def peer(self) -> PeerId:
        return self._me

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._ways)

    def is_linked(self, peer: PeerId) -> bool:
        return peer in self._ways

    def welcome(self, peer: PeerId) -> None:
        """Time is virtual here: nobody is charged for anything."""

    def link_with(self, other: "PlayedNode") -> None:
        for one, two in ((self, other), (other, self)):
            one._ways[two.peer] = _Way(self._network.link(one.peer, two.peer), two)
        for one, two in ((self, other), (other, self)):
            for callback in one._hear_links:
                callback(two.peer, True, "")

    def kill(self) -> None:
        """End at once: what is under way is lost, and the others hear of it as of a reset."""
        for way in self._ways.values():
            way.is_cut = True
            asyncio.get_running_loop().call_later(way.delay_s, way.node._parted, self, context=Context())
        self._end()

    async def aclose(self) -> None:
        for way in self._ways.values():
            way.send(b"", partial(way.node._parted, self))
        self._end()
        await self._tasks.aclose()

    def _end(self) -> None:
        self._ways.clear()
        self._give_up(list(self._waiting))

    def _parted(self, other: "PlayedNode") -> None:
        way = self._ways.get(other.peer)
        if way is None or way.node is not other:
            return
        way.is_cut = True
        del self._ways[other.peer]
        self._give_up([answer for answer, peer in self._waiting.items() if peer == other.peer])
        for callback in self._hear_links:
            callback(other.peer, False, "it is gone")

    def _give_up(self, answers: list[asyncio.Future[Any]]) -> None:
        for answer in answers:
            if not answer.done():
                answer.set_exception(PeerError(f"the link to {short(self._waiting[answer])} went down"))

    # --- as of a node ---

    def serve(self, kind: type[Q], handler: Callable[[PeerId, Q], Awaitable[msgspec.Struct]]) -> None:
        self._calls[kind] = handler

    def on_note(self, kind: type[Q], handler: Callable[[PeerId, Q], Awaitable[None]]) -> None:
        self._notes[kind] = handler

    def serve_blobs(self, lookup: Lookup, *, is_patient: bool = False) -> None:  # noqa: ARG002
        self._lookups.append(lookup)

    def on_link(self, callback: OnLink) -> None:
        self._hear_links.append(callback)

    def post(self, peer: PeerId, record: msgspec.Struct) -> bool:
        way = self._ways.get(peer)
        if way is None:
            return False
        if self._last is None or self._last[0] is not record:
            self._last = record, encode(record)
        way.send(self._last[1], partial(way.node._hear, self, record))
        return True

    async def call(self, peer: PeerId, request: msgspec.Struct, response: type[R], *, deadline_s: float) -> R:
        found = await self._asked(peer, encode(request), deadline_s, lambda node: node._answer(self.peer, request))
        assert isinstance(found, response)
        return found

    async def fetch(self, peer: PeerId, digest: Digest, into: Buffer, *, stall_s: float = STALL_S) -> None:
        data = await self._asked(peer, bytes(ASKED_NBYTES), stall_s, lambda node: node._look_up(self.peer, digest))
        memoryview(into)[:] = data

    async def _asked(
        self, peer: PeerId, data: bytes, deadline_s: float, ask: Callable[["PlayedNode"], Awaitable[Any]]
    ) -> Any:
        way = self._ways.get(peer)
        if way is None:
            raise Unreachable(f"no link to {short(peer)}")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = peer
        way.send(data, lambda: way.node._begin(self, ask, answer))
        try:
            async with within(deadline_s, lambda: DeadlineExceeded(f"{short(peer)} did not answer in time")):
                return await answer
        finally:
            del self._waiting[answer]

    # --- what others say ---

    def _hear(self, sender: "PlayedNode", note: msgspec.Struct) -> None:
        handler = self._notes.get(type(note))
        if handler is not None and self._knows(sender):
            self._tasks.spawn(_to_the_end(handler(sender.peer, note)))

    def _begin(
        self, sender: "PlayedNode", ask: Callable[["PlayedNode"], Awaitable[Any]], answer: asyncio.Future[Any]
    ) -> None:
        if self._knows(sender):
            self._tasks.spawn(self._reply(sender, ask, answer))

    async def _reply(
        self, sender: "PlayedNode", ask: Callable[["PlayedNode"], Awaitable[Any]], answer: asyncio.Future[Any]
    ) -> None:
        found: Any = None
        try:
            found = await ask(self)
        except CallFailed as error:
            found = error
        way = self._ways.get(sender.peer)
        if way is not None and way.node is sender:
            way.send(_bytes_of(found), lambda: _settle(answer, found))

    async def _answer(self, sender: PeerId, request: msgspec.Struct) -> msgspec.Struct:
        handler = self._calls.get(type(request))
        if handler is None:
            raise CallFailed(f"nobody here serves {type(request).__name__}")
        return await handler(sender, request)

    async def _look_up(self, sender: PeerId, digest: Digest) -> Buffer:
        for lookup in self._lookups:
            if (data := lookup(sender, digest)) is not None:
                return data
        raise CallFailed(f"nobody here holds {short(digest)}")

    def _knows(self, sender: "PlayedNode") -> bool:
        way = self._ways.get(sender.peer)
        return way is not None and way.node is sender


async def _to_the_end(work: Awaitable[None]) -> None:
    await work


def _bytes_of(found: Any) -> bytes:
    if isinstance(found, CallFailed):
        return b""
    return encode(found) if isinstance(found, msgspec.Struct) else bytes(found)


def _settle(answer: asyncio.Future[Any], found: Any) -> None:
    if answer.done():
        return
    if isinstance(found, CallFailed):
        answer.set_exception(found)
    else:
        answer.set_result(found)
