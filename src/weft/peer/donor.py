"""Gives newcomers and stragglers what they ask for: a pinned state, and what was committed since.

A pin is a copy of the replicated vectors at one head, kept for a while so that a newcomer can fetch it chunk by chunk
whatever is committed meanwhile. Few pins exist at a time; askers share the newest, as long as what was committed since
can be replayed.
It does not know who joins when.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

from torch import Tensor

from weft.clock import Clock
from weft.ids import Digest, PeerId
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.compute import Compute
from weft.peer.messages import MAX_CERTIFICATES, ChainRequest, StateOffer, StateRequest
from weft.peer.messages import Chain as ChainAnswer
from weft.peer.replica import Replica
from weft.peer.state import chunks, state_index
from weft.sync.charter import Charter
from weft.sync.messages import Certificate, Manifest
from weft.wire import Buffer, digest, encode

PIN_S = 600.0  # after the last request for it: a newcomer on a slow link comes back for more
DROP_AGAIN_S = 1.0  # at least between two looks for pins that are due
FRESH_S = 30.0  # askers within this share a pin
MAX_PINS = 2
ANSWER_NBYTES = 900_000  # of certificates: below what a call's body may have


@dataclass
class _Pin:
    head: Manifest | None
    charter: Charter
    index: Digest
    vectors: dict[str, Tensor]
    blobs: dict[Digest, Buffer]
    made_at: float
    used_at: float


class Donor:
    """Answers for `replica`; `chain` returns the chain once this peer follows one."""

    def __init__(
        self, node: Node, replica: Replica, chain: Callable[[], Chain | None], compute: Compute, clock: Clock
    ) -> None:
        self._replica = replica
        self._compute = compute
        self._clock = clock
        self._pins: list[_Pin] = []
        self._pinning: asyncio.Future[_Pin] | None = None  # goes on when who asked has stopped waiting
        self._has_timer = False
        self._chain = chain
        node.serve(StateRequest, self._offer)
        node.serve(ChainRequest, self._continue)
        node.serve_blobs(self._lookup)

    async def _offer(self, _peer: PeerId, _request: StateRequest) -> StateOffer:
        if self._replica.head is None or self._chain() is None:  # what a restart has read may be long outdated
            return StateOffer(head=None, index=None, charter=None)
        newest = self._pins[-1] if self._pins else None
        if newest is None or self._clock.now() - newest.made_at > FRESH_S or not self._is_replayable(newest):
            if self._pinning is None:
                self._pinning = asyncio.ensure_future(self._compute.serve(self._pin))
                self._pinning.add_done_callback(self._pinned)
            newest = await asyncio.shield(self._pinning)
        newest.used_at = self._clock.now()
        return StateOffer(head=newest.head, index=newest.index, charter=newest.charter)

    def _pinned(self, pinning: "asyncio.Future[_Pin]") -> None:
        self._pinning = None
        if not pinning.cancelled() and pinning.exception() is None:
            self._pins = [*self._pins, pinning.result()][-MAX_PINS:]
            self._drop_when_due()

    def _drop_when_due(self) -> None:
        """Look for pins that nobody wants any more when the first may be due. The timer keeps no donor alive."""
        if self._pins and not self._has_timer:
            wait_s = min(pin.used_at for pin in self._pins) + PIN_S - self._clock.now()
            asyncio.get_running_loop().call_later(max(wait_s, DROP_AGAIN_S), _call_if_alive, WeakMethod(self._drop_due))
            self._has_timer = True

    def _drop_due(self) -> None:
        self._has_timer = False
        now = self._clock.now()
        self._pins = [pin for pin in self._pins if now - pin.used_at < PIN_S]
        self._drop_when_due()

    def _is_replayable(self, pin: _Pin) -> bool:
        """Return whether this peer holds every result that leads from the pin to its own state."""
        chain, head = self._chain(), self._replica.head
        if chain is None or head is None or pin.head is None:
            return True
        if head.branch != pin.head.branch:
            return False
        since = chain.after(pin.head.round, head.round - pin.head.round)
        parts = [part for certificate in since or () for part in certificate.manifest.parts]
        return since is not None and all(chain.result(part.result) is not None for part in parts)

    def _pin(self) -> _Pin:
        """Copy the state. Runs where outer steps run, so never in the middle of one."""
        vectors = {name: vector.clone() for name, vector in self._replica.vectors().items()}
        index = state_index(vectors)
        blobs: dict[Digest, Buffer] = {}
        for each in index.vectors:
            blobs.update(zip(each.chunks, chunks(vectors[each.name]), strict=True))
        listing = encode(index)
        blobs[digest(listing)] = listing
        now = self._clock.now()
        return _Pin(self._replica.head, self._replica.charter, digest(listing), vectors, blobs, now, now)

    async def _continue(self, _peer: PeerId, request: ChainRequest) -> ChainAnswer:
        chain = self._chain()
        if chain is None or chain.head.branch != request.branch:
            return ChainAnswer(certificates=None)
        found = chain.after(request.after, MAX_CERTIFICATES)
        return ChainAnswer(certificates=None if found is None else _as_many_as_fit(found))

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        for pin in self._pins:
            if (found := pin.blobs.get(wanted)) is not None:
                pin.used_at = self._clock.now()
                return found
        return None


def _call_if_alive(method: WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()


def _as_many_as_fit(certificates: tuple[Certificate, ...]) -> tuple[Certificate, ...]:
    """Return the first certificates that an answer holds, one at least: those of many members are large."""
    taken, nbytes = 0, 0
    while taken < len(certificates) and (nbytes := nbytes + len(encode(certificates[taken]))) < ANSWER_NBYTES:
        taken += 1
    return certificates[: max(taken, 1)]
