"""The state on its way to newcomers and stragglers: `StateServer` at who has it, `StateFetch` at who lacks it.

A pin is a copy of the replicated vectors at one head, kept for a while so that a newcomer can fetch it chunk by chunk
whatever is committed meanwhile, and go on with it when it was interrupted. Who asks for a head by name gets that one
where it is pinned or still the present one, so that several members pin the same; else the present one. Few pins exist
at a time, and none is dropped that somebody is fetching: askers share the newest, as long as what was committed since
can be replayed. Chunks give way to rounds (`weft.net.blobs.bulk`).

A fork, the outer parameters of the last manifest before a branch, is a pin that is read from disk: who went on in the
branch that was left has not kept them, and needs them once its side is the one that is given up.

A newcomer fetches it from several members at once:

    ask       some of those that hold one, the furthest first, to pin one and the same head
    choose    the state that most of them offer
    pull      the chunks that are missing, from everybody who offers that state

What has come stays, also over a restart of this process: the same head is asked for again as long as that is less to
fetch than a newer one.

Failure:
- some donors vanish, lie or forget their pin: the others deliver the rest. All do: the caller asks again, and what has
  come stays.
- members disagree what the state at one head is: what most of those asked offer is believed, and an event says so.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod

from torch import Tensor

from weft.errors import CheckpointError, PeerError, WireError
from weft.events import Notice
from weft.ids import Digest, PeerId, short
from weft.net.messages import Heartbeat
from weft.net.multi_source import Blob, pull
from weft.peer import messages
from weft.peer.chain import NEAR, Heads, as_many_as_fit
from weft.peer.context import Context
from weft.peer.round.driver import Participation
from weft.peer.state.legacies import FORK, Legacies
from weft.peer.state.naming import hashed_in_turns
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import MAX_DONORS, Offered, StateClient, joined, most_offered
from weft.progress import Meter
from weft.store.chunks import Partial, chunks, drop, index_of, state_index
from weft.sync.merge.sharded import gathered
from weft.sync.records import rewinds
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, digest, digest_of, encode

PIN_S = 600.0  # after the last request for it: a newcomer on a slow link comes back for more
DROP_AGAIN_S = 1.0  # at least between two looks for pins that are due
FRESH_S = 30.0  # askers within this share a pin
MAX_PINS = 2  # of states, and as many of forks: so many are kept on disk
RESTING_S = 15.0  # a pin of which nothing was asked for so long may give way to another

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
        self._node = node = context.node
        self._memory = context.memory
        self._replica = replica
        self._legacies = legacies
        self._compute = context.compute
        self._clock = context.clock
        self._pins: list[_State] = []
        self._forks: list[_Pin] = []
        self._making: dict[str, asyncio.Future[Any]] = {}  # goes on when who asked has stopped waiting
        self._has_timer = False
        self._serves_blobs = False
        self._participation = participation
        node.serve(messages.StateRequest, self._offer)
        node.serve(messages.ChainRequest, self._continue)
        node.serve(messages.ForkRequest, self._offer_fork)

    async def _offer(self, _peer: PeerId, request: messages.StateRequest) -> messages.StateOffer:
        head = self._replica.head
        # What a restart has read may be long outdated, unless there is nothing after it.
        if head is None or (self._participation.chain is None and not self._replica.is_complete):
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
            if not self._serves_blobs:
                self._serves_blobs = True
                self._node.serve_blobs(self._lookup, is_patient=True)
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
        if any(rewinds.decided(certificate.manifest) is not None for certificate in since or ()):
            return False  # that takes more than results
        parts = [part for certificate in since or () for part in certificate.manifest.parts]
        return since is not None and all(chain.result(part.result) is not None for part in parts)

    async def _pin(self) -> _State:
        """Copy the state where outer steps are made, so never in the middle of one, and name its chunks afterwards."""
        head, charter, vectors = await self._compute.serve(self._copy)
        blobs: dict[Digest, Buffer] = {}
        digests = dict[str, list[Digest]]()
        for name, vector in sorted(vectors.items()):
            pieces = chunks(vector)
            digests[name] = await hashed_in_turns(self._compute, pieces)
            blobs.update(zip(digests[name], pieces, strict=True))
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


Beats = Callable[[], Mapping[PeerId, Heartbeat]]


class StateFetch:
    """Fetches states for one peer, of the shape that `replica` has.

    Args:
        beats: returns what linked members told last: who stands at a head can still pin it.
    """

    def __init__(self, context: Context, replica: Replica, beats: Beats) -> None:
        self._context = context
        self._client = StateClient(context.node, context.compute, context.clock)
        self._replica = replica
        self._beats = beats
        self._folder = context.folder.arriving
        self._partial: Partial | None = None
        self._is_opened = False
        self._began_at: float | None = None
        self._asked: set[PeerId] = set()  # for the state that is being fetched
        self._votes: Counter[tuple[Digest, Digest]] = Counter()  # what those asked offer: head and index
        self._last = 0  # the furthest round that is believed in
        self.failed: set[PeerId] = set()  # who delivered nothing when `fetch` last failed
        self.donors: tuple[PeerId, ...] = ()  # who offered the last one, or gave some of it
        self.under_way: Partial | None = None  # what is coming just now

    async def fetch(self, heads: Heads) -> tuple[Manifest, Charter, dict[str, Tensor]]:
        """Return the manifest that a state belongs to, what holds after it, and the state.

        Args:
            heads: who holds which state, in the order in which they are asked; the first is the one that is wanted.

        Raises:
            PeerError, NetError, Refused: nobody delivered one; what has come is kept for the next time.
        """
        if self._began_at is None:
            self._began_at = self._context.clock.now()
        if not self._is_opened:
            self._partial = await self._context.compute.serve(
                lambda: Partial.open(self._folder, self._context.memory.empty)
            )
            self._is_opened = True
        counts = Counter(digest_of(head) for _, head in heads)
        best = max(heads, key=lambda each: counts[digest_of(each[1])])[1]  # of the first, where all differ
        self._last = max(head.round for _, head in heads if head.branch == best.branch) + NEAR
        self.failed, self._asked, self._votes = set(), set(), Counter()
        offered = await self._ask([peer for peer, head in heads if head.branch == best.branch], self._wanted(best))
        self.failed |= set(offered.donors)
        partial = await self._begin(offered)
        delivered = await self._pull(partial, offered)
        await self._context.compute.serve(partial.drop)
        self._partial = None
        self._tell(partial, delivered)
        self.donors = tuple(sorted({*offered.donors, *delivered}))
        return partial.head, partial.charter, partial.vectors

    async def forget(self) -> None:
        """Drop what has come of a state: this peer needs none."""
        self._partial = None
        await self._context.compute.serve(lambda: drop(self._folder))

    def _wanted(self, best: Manifest) -> Digest:
        """Return the head to ask for: that of what has come, where the rest and what was committed since is less."""
        partial = self._partial
        if partial is None or partial.head.branch != best.branch:
            return digest_of(best)
        num_rounds = max(best.round - partial.head.round, 0)
        is_less = partial.missing_nbytes + num_rounds * self._replica.result_nbytes < partial.index.nbytes
        return partial.name if is_less else digest_of(best)

    async def _ask(self, peers: Sequence[PeerId], wanted: Digest) -> Offered:
        """Ask members to pin the state of a head, as many at once as may give it; return what most of them offer."""
        offers: list[Offered] = []
        failures: list[str] = []
        rest = list(peers)
        while rest and len(offers) < MAX_DONORS:
            now, rest = rest[: MAX_DONORS - len(offers)], rest[MAX_DONORS - len(offers) :]
            for peer, offer in (await self._offers(now, wanted)).items():
                if isinstance(offer, str):
                    self.failed.add(peer)
                    failures.append(offer)
                else:
                    offers.append(offer)
        if not offers:
            raise PeerError(f"nobody offers a state: {'; '.join(failures)}")
        chosen = most_offered(offers)
        self._tell_disagreement(chosen.head, chosen.index)
        return chosen

    async def _offers(self, peers: Sequence[PeerId], wanted: Digest) -> dict[PeerId, Offered | str]:
        """Return what these offer, counted among the votes, or why it is not believed."""
        self._asked |= set(peers)
        offers = await self._client.offers(peers, wanted)
        for peer, offer in offers.items():
            if isinstance(offer, str):
                continue
            if offer.head.round > self._last:
                offers[peer] = f"{short(peer)} offers round {offer.head.round}, far ahead of everybody else"
            else:
                self._votes[digest_of(offer.head), offer.index] += 1
        return offers

    def _tell_disagreement(self, head: Manifest, index: Digest) -> None:
        name = digest_of(head)
        num_asked = sum(votes for (each, _), votes in self._votes.items() if each == name)
        if self._votes[name, index] < num_asked:
            text = f"members disagree about the state after round {head.round}: this peer believes "
            text += (
                f"{self._votes[name, index]} of {num_asked} that it asked; the others lie, or their machines are broken"
            )
            self._context.emit(Notice(text=text))

    async def _begin(self, offered: Offered) -> Partial:
        """Return what is to be completed: what has come, if it is of the offered state, else a new one."""
        before = self._partial
        if before is not None and (before.name, digest_of(before.index)) == (digest_of(offered.head), offered.index):
            return before
        index = await self._client.index(offered.index, offered.donors)
        if index.shape != {name: vector.numel() for name, vector in self._replica.vectors().items()}:
            raise WireError("the offered state has other vectors than this run's model")
        partial = Partial(self._folder, offered.head, offered.charter, index, self._context.memory.empty)
        await self._context.compute.serve(lambda: partial.begin(before))
        self._partial = partial
        return partial

    async def _more(self, offered: Offered, known: Sequence[PeerId]) -> Sequence[PeerId]:
        """Ask those that stand at the head and were not asked to pin it, too: a link may have come up since."""
        beats, wanted = self._beats(), digest_of(offered.head)
        found = [peer for peer, beat in beats.items() if beat.manifest == wanted and peer not in self._asked]
        answers = await self._offers(found[: max(MAX_DONORS - len(known), 0)], wanted)
        if (
            max(votes for (each, _), votes in self._votes.items() if each == wanted)
            > self._votes[wanted, offered.index]
        ):
            raise PeerError(f"most members offer another state after round {offered.head.round} than those asked first")
        offers = [each for each in answers.values() if isinstance(each, Offered) and each.head == offered.head]
        if any(offer.index != offered.index for offer in offers):
            self._tell_disagreement(offered.head, offered.index)
        return [peer for offer in offers if offer.index == offered.index for peer in offer.donors]

    async def _pull(self, partial: Partial, offered: Offered) -> dict[PeerId, int]:
        async def keep(blob: Blob, data: Buffer) -> None:
            was_kept = partial.why_not_kept is None
            await self._context.compute.serve(lambda: partial.put(blob.digest, data))
            meter.add(len(data))
            if was_kept and partial.why_not_kept is not None:
                text = f"what this peer has fetched of the state cannot be saved ({partial.why_not_kept}): if it "
                self._context.emit(Notice(text=text + "ends before it has all, it must fetch all again"))

        async def more(known: Sequence[PeerId]) -> Sequence[PeerId]:
            return await self._more(offered, known)

        missing, total = partial.missing(), partial.index.nbytes
        there = total - sum(blob.nbytes for blob in missing)
        self.under_way = partial
        try:
            with Meter("fetching the state", "B", self._context.emit, self._context.clock, total, done=there) as meter:
                return await pull(self._context.node, missing, offered.donors, keep, self._context.clock, more)
        finally:
            self.under_way = None

    def _tell(self, partial: Partial, delivered: dict[PeerId, int]) -> None:
        assert self._began_at is not None
        took_s = self._context.clock.now() - self._began_at
        self._context.emit(joined(partial.head, partial.index, delivered, took_s))
        self._began_at = None
