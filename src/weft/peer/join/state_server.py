"""Gives newcomers and stragglers what they ask for: a pinned state, and what was committed since.

A pin is a copy of the replicated vectors at one head, kept for a while so that a newcomer can fetch it chunk by chunk
whatever is committed meanwhile, and go on with it when it was interrupted. Who asks for a head by name gets that one
where it is pinned or still the present one, so that several members pin the same; else the present one. Few pins exist
at a time, and none is dropped that somebody is fetching: askers share the newest, as long as what was committed since
can be replayed. Chunks give way to rounds (`weft.net.blobs.bulk`).

A fork, the outer parameters of the last manifest before a branch, is a pin that is read from disk: who went on in the
branch that was left has not kept them, and needs them once its side is the one that is given up.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod

from torch import Tensor

from weft.errors import CheckpointError
from weft.ids import Digest, PeerId
from weft.peer import messages
from weft.peer.chain import as_many_as_fit
from weft.peer.context import Context
from weft.peer.round.driver import Participation
from weft.peer.state.legacies import FORK, Legacies
from weft.peer.state.replica import Replica
from weft.store.chunks import chunks, index_of, state_index
from weft.sync.merge.sharded import gathered
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, digest, digest_of, encode

PIN_S = 600.0  # after the last request for it: a newcomer on a slow link comes back for more
DROP_AGAIN_S = 1.0  # at least between two looks for pins that are due
FRESH_S = 30.0  # askers within this share a pin
MAX_PINS = 2  # of states, and as many of forks: so many are kept on disk
RESTING_S = 15.0  # a pin of which nothing was asked for so long may give way to another
HASHED_AT_ONCE = 16  # chunks: some ten milliseconds, after which what a round wants merged has its turn

P = TypeVar("P")


@dataclass
class _Pin:
    name: Digest  # of the manifest
    index: Digest | None  # None: a fork that cannot be read, and is not read again for as long
    blobs: dict[Digest, Buffer]
    made_at: float
    used_at: float

    def use(self, now: float) -> None:
        self.used_at = now


@dataclass
class _State(_Pin):
    head: Manifest
    charter: Charter


class StateServer:
    """Answers for a replica, and for the forks that are kept."""

    def __init__(self, context: Context, replica: Replica, legacies: Legacies, participation: Participation) -> None:
        node = context.node
        self._memory = context.memory
        self._replica = replica
        self._legacies = legacies
        self._compute = context.compute
        self._clock = context.clock
        self._pins: list[_State] = []
        self._forks: list[_Pin] = []
        self._making: dict[str, asyncio.Future[Any]] = {}  # goes on when who asked has stopped waiting
        self._has_timer = False
        self._participation = participation
        node.serve(messages.StateRequest, self._offer)
        node.serve(messages.ChainRequest, self._continue)
        node.serve(messages.ForkRequest, self._offer_fork)
        node.serve_blobs(self._lookup, is_patient=True)

    async def _offer(self, _peer: PeerId, request: messages.StateRequest) -> messages.StateOffer:
        head = self._replica.head
        if head is None or self._participation.chain is None:  # what a restart has read may be long outdated
            return messages.StateOffer(head=None, index=None, charter=None)
        if request.wanted is None:
            return messages.StateOffer(head=head, index=None, charter=None)
        pin = self._at_hand(request.wanted, digest_of(head)) or await self.pin()
        pin.use(self._clock.now())
        return messages.StateOffer(head=pin.head, index=pin.index, charter=pin.charter)

    async def pin(self) -> _State:
        """Keep the present state for whoever asks for it."""
        return await self._once("present", self._pin, self._pins)

    def _at_hand(self, wanted: Digest, present: Digest) -> _State | None:
        """Return the pin to offer; None where a new one is to be made."""
        now = self._clock.now()
        good = [pin for pin in self._pins if self._is_replayable(pin)]
        named = next((pin for pin in good if pin.name == wanted), None)
        if named is not None or not good:
            return named
        can_make = len(self._pins) < MAX_PINS or any(now - pin.used_at > RESTING_S for pin in self._pins)
        is_shared = now - good[-1].made_at <= FRESH_S and wanted != present
        return good[-1] if is_shared or not can_make else None

    async def _offer_fork(self, _peer: PeerId, request: messages.ForkRequest) -> messages.ForkOffer:
        name = request.manifest
        pin = next((pin for pin in self._forks if pin.name == name), None)
        pin = pin or await self._once(name, lambda: self._compute.serve(lambda: self._read(name)), self._forks)
        if pin is None:
            return messages.ForkOffer(index=None)
        pin.use(self._clock.now())
        return messages.ForkOffer(index=pin.index)

    async def _once(self, name: str, make: Callable[[], Coroutine[Any, Any, P]], kept: list[Any]) -> P:
        """Return what `make` makes, one for all who wait for it, and keep it."""
        if name not in self._making:
            self._making[name] = asyncio.ensure_future(make())
            self._making[name].add_done_callback(partial(self._made, name, kept))
        return await asyncio.shield(self._making[name])

    def _made(self, name: str, kept: list[Any], making: "asyncio.Future[_Pin | None]") -> None:
        del self._making[name]
        if not making.cancelled() and making.exception() is None and (pin := making.result()) is not None:
            if len(kept) >= MAX_PINS:
                kept.remove(min(kept, key=lambda each: each.used_at))
            kept.append(pin)
            self._drop_when_due()

    def _drop_when_due(self) -> None:
        """Look for pins that nobody wants any more when the first may be due. The timer keeps no donor alive."""
        used_at = [pin.used_at for pin in (*self._pins, *self._forks)]
        if used_at and not self._has_timer:
            wait_s = min(used_at) + PIN_S - self._clock.now()
            asyncio.get_running_loop().call_later(max(wait_s, DROP_AGAIN_S), _call_if_alive, WeakMethod(self._drop_due))
            self._has_timer = True

    def _drop_due(self) -> None:
        self._has_timer = False
        now = self._clock.now()
        self._pins[:] = [pin for pin in self._pins if now - pin.used_at < PIN_S]
        self._forks[:] = [pin for pin in self._forks if now - pin.used_at < PIN_S]
        self._drop_when_due()

    def _is_replayable(self, pin: _State) -> bool:
        """Return whether this peer holds every result that leads from the pin to its own state."""
        chain, head = self._participation.chain, self._replica.head
        if chain is None or head is None:
            return True
        if head.branch != pin.head.branch:
            return False
        since = chain.after(pin.head.round, head.round - pin.head.round)
        parts = [part for certificate in since or () for part in certificate.manifest.parts]
        return since is not None and all(chain.result(part.result) is not None for part in parts)

    async def _pin(self) -> _State:
        """Copy the state where outer steps are made, so never in the middle of one, and name its chunks afterwards."""
        head, charter, vectors = await self._compute.serve(self._copy)
        blobs: dict[Digest, Buffer] = {}
        digests: dict[str, list[Digest]] = {name: [] for name in vectors}
        for name, vector in sorted(vectors.items()):
            pieces = chunks(vector)
            for start in range(0, len(pieces), HASHED_AT_ONCE):
                some = pieces[start : start + HASHED_AT_ONCE]
                found = await self._compute.serve(lambda some=some: [digest(piece) for piece in some])  # type: ignore[misc]
                digests[name] += found
                blobs.update(zip(found, some, strict=True))
        listing = encode(index_of(vectors, digests))
        blobs[digest(listing)] = listing
        now = self._clock.now()
        return _State(digest_of(head), digest(listing), blobs, now, now, head, charter)

    def _copy(self) -> tuple[Manifest, Charter, dict[str, Tensor]]:
        head = self._replica.head
        assert head is not None  # a replica that has a state never loses it
        held = sorted(self._replica.vectors().items())
        vectors = {name: gathered(vector, self._memory.empty) for name, vector in held}
        return head, self._replica.charter, vectors

    def _read(self, manifest: Digest) -> _Pin | None:
        now = self._clock.now()
        try:
            vector = self._legacies.fork(manifest)
        except CheckpointError:
            return _Pin(manifest, None, {}, now, now)
        if vector is None:
            return None
        index = state_index({FORK: vector})
        listing = encode(index)
        blobs: dict[Digest, Buffer] = dict(zip(index.vectors[0].chunks, chunks(vector), strict=True))
        return _Pin(manifest, digest(listing), {**blobs, digest(listing): listing}, now, now)

    async def _continue(self, _peer: PeerId, request: messages.ChainRequest) -> messages.ChainAnswer:
        chain = self._participation.chain
        if chain is None:
            return messages.ChainAnswer(certificates=None)
        found = chain.after_in(request.branch, request.after, messages.MAX_CERTIFICATES)
        return messages.ChainAnswer(certificates=None if found is None else as_many_as_fit(found))

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        for pin in (*self._pins, *self._forks):
            if (found := pin.blobs.get(wanted)) is not None:
                pin.use(self._clock.now())
                return found
        return None


def _call_if_alive(method: WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
