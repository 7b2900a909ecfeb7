"""Gives and fetches the outer parameters of a last common manifest: who opened a branch there has kept them.

Who went on in the branch that was left has not, and needs them once its side is the one that is given up.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.errors import CheckpointError, NetError, PeerError, Refused, WireError
from weft.ids import Digest, PeerId
from weft.net.multi_source import Blob, pull
from weft.net.node import Node
from weft.peer.context import Context
from weft.peer.messages import ForkOffer, ForkRequest
from weft.store.chunks import chunks, state_index
from weft.store.index import StateIndex
from weft.wire import Buffer, decode, digest, encode

CALL_S = 60.0  # reading and hashing a large vector takes a while
SERVED_S = 600.0  # since somebody asked for it
MAX_HELD = 2  # in memory, each as large as the model: as many as are kept on disk
MAX_INDEX_NBYTES = 16 << 20

Find = Callable[[Digest], Tensor | None]


@dataclass
class _Held:
    """A fork in memory. One that cannot be read is not read again for as long."""

    index: Digest | None
    blobs: dict[Digest, Buffer]
    asked_at: float


class ForkDonor:
    """Serves what `find` returns for the digest of a manifest: read and hashed once, however often it is asked for."""

    def __init__(self, place: Context, find: Find) -> None:
        self._place = place
        self._find = find
        self._held: dict[Digest, _Held] = {}  # by manifest
        self._reading: dict[Digest, asyncio.Future[_Held | None]] = {}  # goes on when who asked has stopped waiting
        place.node.serve(ForkRequest, self._offer)
        place.node.serve_blobs(self._lookup, is_patient=True)

    async def _offer(self, _peer: PeerId, request: ForkRequest) -> ForkOffer:
        held = self._held.get(request.manifest)
        if held is None:
            if request.manifest not in self._reading:
                self._reading[request.manifest] = asyncio.ensure_future(self._read(request.manifest))
            held = await asyncio.shield(self._reading[request.manifest])
        if held is None:
            return ForkOffer(index=None)
        held.asked_at = self._place.clock.now()
        return ForkOffer(index=held.index)

    async def _read(self, manifest: Digest) -> _Held | None:
        try:
            index, blobs = await self._place.compute.serve(lambda: self._open(manifest))
            if index is None:
                return None
        except CheckpointError:
            index, blobs = None, {}
        finally:
            del self._reading[manifest]
        if len(self._held) >= MAX_HELD:
            del self._held[min(self._held, key=lambda each: self._held[each].asked_at)]
        self._held[manifest] = held = _Held(index, blobs, self._place.clock.now())
        self._drop_when_due(manifest, held)
        return held

    def _open(self, manifest: Digest) -> tuple[Digest | None, dict[Digest, Buffer]]:
        vector = self._find(manifest)
        if vector is None:
            return None, {}
        index = state_index({"fork": vector})
        listing = encode(index)
        blobs: dict[Digest, Buffer] = dict(zip(index.vectors[0].chunks, chunks(vector), strict=True))
        return digest(listing), {**blobs, digest(listing): listing}

    def _drop_when_due(self, manifest: Digest, held: _Held) -> None:
        left_s = held.asked_at + SERVED_S - self._place.clock.now()
        if self._held.get(manifest) is not held:
            return
        if left_s <= 0:
            del self._held[manifest]
        else:
            asyncio.get_running_loop().call_later(left_s, self._drop_when_due, manifest, held)

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        return next((held.blobs[wanted] for held in self._held.values() if wanted in held.blobs), None)


async def fetch_fork(place: Context, manifest: Digest, num: int) -> Float32[Tensor, " num"]:
    """Return the outer parameters after `manifest`, of `num` numbers, from whoever linked has kept them.

    Raises:
        PeerError: nobody has, or delivers them.
    """
    for peer in sorted(place.node.peers):
        try:
            offer = await place.node.call(peer, ForkRequest(manifest=manifest), ForkOffer, deadline_s=CALL_S)
            if offer.index is not None:
                return await _fetch(place, peer, offer.index, num)
        except (PeerError, NetError, Refused):
            continue
    raise PeerError("nobody that is linked has kept the parameters of the last common round")


async def _fetch(place: Context, peer: PeerId, wanted: Digest, num: int) -> Tensor:
    node: Node = place.node
    data = await node.fetch_small(peer, wanted, MAX_INDEX_NBYTES)
    index: StateIndex = decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)
    if [(each.name, each.num) for each in index.vectors] != [("fork", num)]:
        raise WireError("what is offered is no vector of this run's model")
    vector = torch.empty(num)
    places: dict[Digest, list[memoryview]] = {}
    for name, room in zip(index.vectors[0].chunks, chunks(vector), strict=True):
        places.setdefault(name, []).append(room)

    async def keep(blob: Blob, data: Buffer) -> None:
        for room in places[blob.digest]:
            room[:] = memoryview(data).cast("B")

    blobs = [Blob(digest=name, nbytes=len(rooms[0])) for name, rooms in places.items()]
    await pull(node, blobs, [peer], keep, place.clock)
    return vector
