"""What passes between the peers of a pipeline: calls, notes, and bytes that one gives and the other fetches.

A peer may hold several stages, and begin micro-batches beside: what names a stage goes to who holds it here. Where
nobody does, a call is answered so that whoever asked goes elsewhere, and a note is dropped.

A peer is among those that it sends work to where it holds the next stage, too, or begins micro-batches as a member of
the first: what it says to itself takes the same way, less the network.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from weft.errors import CallFailed
from weft.ids import Digest, PeerId, short
from weft.net.node import Node
from weft.pipeline.messages import Backward, Computed, Forward, GivenUp, IsTaken, Verdict
from weft.wire import Buffer, Signer, digest

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


class Parcel(NamedTuple):
    """Bytes for another peer, and their digest."""

    digest: Digest
    data: Buffer


def parcel(data: Buffer) -> Parcel:
    return Parcel(digest(data), data)


class StageLink:
    """Of one peer, on its node."""

    def __init__(self, node: Node) -> None:
        self.me = node.peer
        self._node = node
        self._calls: dict[type, Callable[[PeerId, Any], Awaitable[msgspec.Struct]]] = {}
        self._notes: dict[type, list[Callable[[PeerId, Any], Awaitable[None]]]] = {}
        self._held: dict[tuple[type, int], Callable[[PeerId, Any], Awaitable[Any]]] = {}  # by the stage that is named
        self._given: dict[Digest, tuple[Buffer, int]] = {}  # and how often
        self._on_parted: list[Callable[[PeerId], object]] = []
        self._parting: dict[PeerId, set[asyncio.Future[None]]] = {}
        node.serve_blobs(self._lookup)
        node.on_link(self._on_link)
        self.serve_stages(Forward, IsTaken(is_taken=False))
        self.serve_stages(Backward, Verdict(word="unknown"))
        self.on_stage_note(Computed)
        self.on_stage_note(GivenUp)

    @property
    def signer(self) -> Signer:
        return self._node.passport.identity

    def serve(self, kind: type[Q], handler: Callable[[PeerId, Q], Awaitable[msgspec.Struct]]) -> None:
        """Answer calls of `kind`; see `Node.serve`."""
        self._calls[kind] = handler
        self._node.serve(kind, handler)

    def on_note(self, kind: type[Q], handler: Callable[[PeerId, Q], Awaitable[None]]) -> None:
        """Take notes of `kind`, beside whoever takes them already; see `Node.on_note`."""
        if kind not in self._notes:
            self._node.on_note(kind, partial(self._noted, kind))
        self._notes.setdefault(kind, []).append(handler)

    async def _noted(self, kind: type, peer: PeerId, note: Any) -> None:
        for handler in self._notes[kind]:
            await handler(peer, note)

    def serve_stages(self, kind: type[Q], absent: msgspec.Struct) -> None:
        """Have calls of `kind` answered by who holds the stage that they name; where nobody does, by `absent`."""

        async def answer(peer: PeerId, request: Any) -> msgspec.Struct:
            handler = self._held.get((kind, request.stage))
            return absent if handler is None else await handler(peer, request)

        self.serve(kind, answer)

    def on_stage_note(self, kind: type[Q]) -> None:
        """Have notes of `kind` heard by who holds the stage that they name."""

        async def hear(peer: PeerId, note: Any) -> None:
            if (handler := self._held.get((kind, note.stage))) is not None:
                await handler(peer, note)

        self.on_note(kind, hear)

    def hold(self, stage: int, kind: type[Q], handler: Callable[[PeerId, Q], Awaitable[Any]]) -> None:
        """Let what is said of a stage in messages of `kind` come here, from now on."""
        self._held[kind, stage] = handler

    def let_go(self, stage: int, kind: type[Q], handler: Callable[[PeerId, Q], Awaitable[Any]]) -> None:
        """Let it come here no longer, if it does."""
        if self._held.get((kind, stage)) == handler:
            del self._held[kind, stage]

    async def call(self, peer: PeerId, request: msgspec.Struct, response: type[R], *, deadline_s: float) -> R:
        """Return a peer's answer; fails as `Node.call` does."""
        if peer != self.me:
            return await self._node.call(peer, request, response, deadline_s=deadline_s)
        answer = await self._calls[type(request)](peer, request)
        assert isinstance(answer, response)
        return answer

    async def post(self, peer: PeerId, note: msgspec.Struct) -> None:
        """Send a note, if a link stands."""
        if peer == self.me:
            await self._noted(type(note), peer, note)
        else:
            self._node.post(peer, note)

    async def tell(self, note: msgspec.Struct) -> None:
        """Send a note to all that are linked; this peer hears it, too, where it takes such notes."""
        for peer in self._node.peers:
            self._node.post(peer, note)
        if type(note) in self._notes:
            await self._noted(type(note), self.me, note)

    def welcome(self, peer: PeerId) -> None:
        """Say that a note of `peer` was one that this peer had agreed to take; see `Node.welcome`."""
        self._node.welcome(peer)

    def on_parted(self, callback: Callable[[PeerId], object]) -> None:
        """Call `callback(peer)` whenever a link goes down."""
        self._on_parted.append(callback)

    def off_parted(self, callback: Callable[[PeerId], object]) -> None:
        """Call it no more, if it is called."""
        if callback in self._on_parted:
            self._on_parted.remove(callback)

    def is_linked(self, peer: PeerId) -> bool:
        return peer == self.me or self._node.is_linked(peer)

    async def until_parted(self, peer: PeerId) -> None:
        """Return once the link to `peer` goes down."""
        parted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._parting.setdefault(peer, set())
        waiting.add(parted)
        try:
            await parted
        finally:
            waiting.discard(parted)

    def give(self, parcel: Parcel) -> None:
        """Let others fetch these bytes, until `take_back` was called as often."""
        self._given[parcel.digest] = parcel.data, self._given.get(parcel.digest, (None, 0))[1] + 1

    def take_back(self, digest: Digest) -> None:
        data, num = self._given.pop(digest)
        if num > 1:
            self._given[digest] = data, num - 1

    async def fetch(self, peer: PeerId, digest: Digest, nbytes: int) -> Parcel:
        """Return the bytes that `peer` gives.

        Raises:
            PeerError: it does not give them, or others; see `Node.fetch`.
        """
        if peer == self.me:
            data = self._lookup(peer, digest)
            if data is None or memoryview(data).nbytes != nbytes:
                raise CallFailed(f"{short(peer)} itself holds no {nbytes} bytes of digest {short(digest)}")
            return Parcel(digest, data)
        held = np.empty(nbytes, np.uint8).data  # not zeros, which would take the event loop 0.6 ms a megabyte
        await self._node.fetch(peer, digest, held)
        return Parcel(digest, held)

    def _lookup(self, _peer: PeerId, digest: Digest) -> Buffer | None:
        given = self._given.get(digest)
        return None if given is None else given[0]

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:
            for callback in tuple(self._on_parted):
                callback(peer)
            for parted in self._parting.get(peer, ()):
                if not parted.done():
                    parted.set_result(None)
