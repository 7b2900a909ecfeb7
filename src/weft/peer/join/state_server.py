"""Gives newcomers and stragglers what they ask for: a pinned state, and what was committed since.

A pin is a copy of the replicated vectors at one head, kept for a while so that a newcomer can fetch it chunk by chunk
whatever is committed meanwhile, and go on with it when it was interrupted. Who asks for a head by name gets that one
where it is pinned or still the present one, so that several members pin the same; else the present one. Few pins exist
at a time, and none is dropped that somebody is fetching: askers share the newest, as long as what was committed since
can be replayed. Chunks give way to rounds (`weft.net.blobs.priority`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

from torch import Tensor

from weft.ids import Digest, PeerId
from weft.peer.chain import as_many_as_fit
from weft.peer.context import Context
from weft.peer.messages import MAX_CERTIFICATES, ChainAnswer, ChainRequest, StateOffer, StateRequest
from weft.peer.round.driver import Participation
from weft.peer.state.replica import Replica
from weft.store.chunks import chunks
from weft.store.index import StateIndex, VectorIndex
from weft.sync.merge.sharded import gathered
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, digest, digest_of, encode

PIN_S = 600.0  # after the last request for it: a newcomer on a slow link comes back for more
DROP_AGAIN_S = 1.0  # at least between two looks for pins that are due
FRESH_S = 30.0  # askers within this share a pin
MAX_PINS = 2
RESTING_S = 15.0  # a pin of which nothing was asked for so long may give way to another
HASHED_AT_ONCE = 16  # chunks: some ten milliseconds, after which what a round wants merged has its turn


@dataclass
class _Pin:
    head: Manifest
    charter: Charter
    name: Digest  # of the head
    index: Digest
    vectors: dict[str, Tensor]
    blobs: dict[Digest, Buffer]
    made_at: float
    used_at: float


class StateServer:
    """Answers for a replica."""

    def __init__(self, place: Context, replica: Replica, participation: Participation) -> None:
        node = place.node
        self._memory = place.memory
        self._replica = replica
        self._compute = place.compute
        self._clock = place.clock
        self._pins: list[_Pin] = []
        self._pinning: asyncio.Future[_Pin] | None = None  # goes on when who asked has stopped waiting
        self._has_timer = False
        self._participation = participation
        node.serve(StateRequest, self._offer)
        node.serve(ChainRequest, self._continue)
        node.serve_blobs(self._lookup, is_patient=True)

    async def _offer(self, _peer: PeerId, request: StateRequest) -> StateOffer:
        head = self._replica.head
        if head is None or self._participation.chain is None:  # what a restart has read may be long outdated
            return StateOffer(head=None, index=None, charter=None)
        if request.wanted is None:
            return StateOffer(head=head, index=None, charter=None)
        pin = self._at_hand(request.wanted, digest_of(head)) or await self.pin()
        pin.used_at = self._clock.now()
        return StateOffer(head=pin.head, index=pin.index, charter=pin.charter)

    async def pin(self) -> "_Pin":
        """Keep the present state for whoever asks for it."""
        if self._pinning is None:
            self._pinning = asyncio.ensure_future(self._pin())
            self._pinning.add_done_callback(self._pinned)
        return await asyncio.shield(self._pinning)

    def _at_hand(self, wanted: Digest, present: Digest) -> _Pin | None:
        """Return the pin to offer; None where a new one is to be made."""
        now = self._clock.now()
        good = [pin for pin in self._pins if self._is_replayable(pin)]
        named = next((pin for pin in good if pin.name == wanted), None)
        if named is not None or not good:
            return named
        can_make = len(self._pins) < MAX_PINS or any(now - pin.used_at > RESTING_S for pin in self._pins)
        is_shared = now - good[-1].made_at <= FRESH_S and wanted != present
        return good[-1] if is_shared or not can_make else None

    def _pinned(self, pinning: "asyncio.Future[_Pin]") -> None:
        self._pinning = None
        if not pinning.cancelled() and pinning.exception() is None:
            if len(self._pins) >= MAX_PINS:
                self._pins.remove(min(self._pins, key=lambda pin: pin.used_at))
            self._pins.append(pinning.result())
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
        chain, head = self._participation.chain, self._replica.head
        if chain is None or head is None:
            return True
        if head.branch != pin.head.branch:
            return False
        since = chain.after(pin.head.round, head.round - pin.head.round)
        parts = [part for certificate in since or () for part in certificate.manifest.parts]
        return since is not None and all(chain.result(part.result) is not None for part in parts)

    async def _pin(self) -> _Pin:
        """Copy the state where outer steps are made, so never in the middle of one, and name its chunks afterwards."""
        head, charter, vectors = await self._compute.serve(self._copy)
        blobs: dict[Digest, Buffer] = {}
        names: dict[str, list[Digest]] = {name: [] for name in vectors}
        for name, vector in sorted(vectors.items()):
            pieces = chunks(vector)
            for start in range(0, len(pieces), HASHED_AT_ONCE):
                some = pieces[start : start + HASHED_AT_ONCE]
                found = await self._compute.serve(lambda some=some: [digest(piece) for piece in some])  # type: ignore[misc]
                names[name] += found
                blobs.update(zip(found, some, strict=True))
        listing = encode(
            StateIndex(
                vectors=tuple(
                    VectorIndex(name=name, num=vectors[name].numel(), chunks=tuple(found))
                    for name, found in names.items()
                )
            )
        )
        blobs[digest(listing)] = listing
        now = self._clock.now()
        return _Pin(head, charter, digest_of(head), digest(listing), vectors, blobs, now, now)

    def _copy(self) -> tuple[Manifest, Charter, dict[str, Tensor]]:
        head = self._replica.head
        assert head is not None  # a replica that has a state never loses it
        held = sorted(self._replica.vectors().items())
        vectors = {name: gathered(vector, self._memory.empty) for name, vector in held}
        return head, self._replica.charter, vectors

    async def _continue(self, _peer: PeerId, request: ChainRequest) -> ChainAnswer:
        chain = self._participation.chain
        if chain is None:
            return ChainAnswer(certificates=None)
        found = chain.after_in(request.branch, request.after, MAX_CERTIFICATES)
        return ChainAnswer(certificates=None if found is None else as_many_as_fit(found))

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        for pin in self._pins:
            if (found := pin.blobs.get(wanted)) is not None:
                pin.used_at = self._clock.now()
                return found
        return None


def _call_if_alive(method: WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
