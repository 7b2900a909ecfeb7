"""An anchor: keeps addresses and the newest state of a run for whoever comes, without torch and without a vote.

    another peer      what an anchor does
    trains            follows its chain: asks for the certificates of what was committed, fetches the results they name
    is far ahead      fetches its state, whole, from up to four that stand where it does, and drops the one before then
    joins             is told the state that is kept here, its chunks, and what was committed since
    comes back        the same; so those that were all killed meet at the newest round that any of them or this one has

It never asks to be counted in, so it is in no electorate and nobody waits for it. It sends heartbeats, so members see
it and know how far its state is; it takes one of the places among those who watch each other.

Of an audited run it may keep more: what it takes to do any counted training step again (`weft.anchor.archivist`).

Outer steps need arithmetic that it does not have, so it keeps a state and the results of the rounds since, and fetches
a new state when those weigh as much as the state does, or once the run has gone back to earlier parameters.

Failure:
- some donors vanish or lie: the others deliver the rest. All do: the chunks that came are kept, and others are asked.
- the disk is full: it says so, and goes on with what it has.
- nobody else is there: it serves what it has, and waits.
- something else breaks here: it says goodbye and raises, rather than follow nothing and look alive.

It believes what most donors offer, as a newcomer does (docs/threat_model.md).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET

from weft.anchor.archive import Archive
from weft.anchor.archivist import Archivist
from weft.anchor.disk import Anchored
from weft.clock import Clock
from weft.data.store import DataIndex
from weft.data.tokenizer import MAX_BLOB_NBYTES as MAX_TOKENIZER_NBYTES
from weft.errors import DataError, DiskFull, NetError, PayloadError, PeerError, Refused
from weft.events import DataReady, Emit, Notice, PeerStopped
from weft.ids import BranchId, Digest, PeerId, Round
from weft.model.came_with import MAX_BLOB_NBYTES
from weft.net.membership.membership import Membership
from weft.net.messages import Heartbeat
from weft.net.multi_source import Blob, pull, small_from
from weft.net.node import Node
from weft.peer import messages
from weft.peer.chain import NEAR, as_many_as_fit, believed, is_further
from weft.peer.state import state_client
from weft.run.outline import Outline, data_ready
from weft.store.home import Home
from weft.sync.records.charter import Charter
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex
from weft.sync.records.messages import Certificate, Manifest
from weft.tasks import Compute, Tasks
from weft.wire import Buffer, digest_of

LOOK_S = 1.0
LEAST_RENEWED_NBYTES = 16 << 20  # results, below which a state is not fetched anew: it may be tiny
MAX_SINCE = 64  # rounds since the state; a chain remembers four times as many
MAX_VECTORS = 4  # of a state: parameters, and what an outer optimizer holds


@dataclass(frozen=True, kw_only=True)
class AnchorContext:
    """What an anchor works with: everything with effects, made by `weft.launch.anchor` or by a scenario."""

    node: Node
    home: Home
    kept: Anchored  # loaded: what an earlier process kept
    compute: Compute
    clock: Clock
    emit: Emit
    max_parameters: int  # states of larger models are refused
    archive: Archive | None = None  # of an audited run, for ever; None: the newest state is all that is kept


class Anchor:
    pausing = None  # it trains nothing

    def __init__(self, outline: Outline, context: AnchorContext) -> None:
        self._outline = outline
        self._node = node = context.node
        self._home = context.home
        self._kept = kept = context.kept
        self._compute = context.compute
        self._clock = context.clock
        self._emit = context.emit
        self._max_parameters = context.max_parameters
        self._membership = Membership(node, context.clock, context.emit, self._heartbeat)
        self._stopping = asyncio.Event()
        self._stop_reason = ""
        self.has_left = False  # it has said goodbye
        self._failure: Exception | None = None
        self._client = state_client.StateClient(node, context.compute, context.clock)
        self._ranking = state_client.Ranking(node, self._membership, context.clock)
        self._has_files = False
        self.archivist = None if context.archive is None else self._made(context, context.archive)
        self._told = ""  # the last failure that was said: once, not every second
        node.serve(messages.StateRequest, self._offer)
        node.serve(messages.ChainRequest, self._continue)
        node.serve(messages.CharterRequest, self._tell_charter)
        node.serve_blobs(lambda _peer, digest: kept.lookup(digest), is_patient=True)

    def _made(self, context: AnchorContext, archive: Archive) -> Archivist:
        has_ends = self._outline.trust is UNSET or self._outline.trust.numerics != "exact"
        return Archivist(
            context.node, archive, context.kept, self._ranking, context.compute, context.clock, context.emit,
            has_ends=has_ends,
        )  # fmt: skip

    @property
    def head(self) -> Manifest | None:
        """Return the newest manifest whose state can be had from here."""
        return None if self._kept.chain is None else self._kept.chain.head

    @property
    def charter(self) -> Charter | None:
        """Return what holds of the run by what is kept here; None: nothing is yet."""
        return None if self._kept.chain is None else self._kept.chain.charter

    def standing(self, peer: PeerId) -> int | None:
        """Return what another is to whoever looks for the run; see `Membership.standing`."""
        return self._membership.standing(peer)

    def stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._stopping.set()

    def fail(self, error: Exception) -> None:
        """End soon, for what this anchor cannot go on with: `keep` raises it."""
        self._failure = self._failure or error
        self.stop(type(error).__name__)

    async def keep(self) -> str:
        """Follow and serve the run until `stop`; return why it ended.

        Raises:
            Exception: what `fail` was told.
        """
        self._follow_bans()
        await self._membership.start()
        following = Tasks(self.fail)
        following.spawn(self._follow())
        if self.archivist is not None:
            following.spawn(self.archivist.follow())
            following.spawn(self.archivist.gather())
        try:
            await self._stopping.wait()
        finally:
            await following.aclose()
        await self._membership.say_goodbye(self._stop_reason)
        self.has_left = True
        await self._membership.aclose()
        self._emit(PeerStopped(reason=self._stop_reason))
        if self._failure is not None:
            raise self._failure
        return self._stop_reason

    # --- following ---

    async def _follow(self) -> None:
        while True:
            if self._node.peers:
                await self._try(self._look_on)
                if not self._has_files:
                    await self._try(self._fetch_files)
            await asyncio.sleep(LOOK_S)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (PeerError, NetError, Refused) as error:
            self._tell(f"not all of it could be fetched yet: {error}")
        except (DiskFull, DataError) as error:
            self._tell(f"what is new cannot be kept; what is here stays: {error}")

    async def _look_on(self) -> None:
        while await self._look():
            self._follow_bans()

    def _follow_bans(self) -> None:
        """Refuse whom acts of the run's stewards have banned."""
        banned = () if self._kept.chain is None else self._kept.chain.charter.banned
        if set(banned) != self._node.passport.banned:
            self._node.ban(banned)

    async def _look(self) -> bool:
        """Take up what one peer has that is not here; return whether there was something."""
        beats = {peer: self._membership.heartbeat_of(peer) for peer in self._node.peers}
        head = self.head
        told = {peer: beat for peer, beat in beats.items() if beat is not None and beat.manifest is not None}
        told = {peer: beat for peer, beat in told.items() if not beat.is_anchor} or told
        if not told:
            return False
        best, last = believed(list(told.values()))
        for peer in self._ranking.furthest_first():
            beat = told.get(peer)
            if beat is None or beat.branch != best or beat.round > last:
                continue
            if head is not None and not is_further(beat, head):
                continue
            try:
                if head is not None and head.branch == best:
                    if self._is_heavy() and await self._fetch_state(peer, best, last):
                        return True  # else the donor's pin is older than what is here, for half a minute
                    if number := await self._continue_from(peer, head):
                        return True
                    if number is not None:
                        continue
                if await self._fetch_state(peer, best, last):
                    return True
            except (PeerError, NetError, Refused):
                self._ranking.note_failure(peer)
                raise
        return False

    def _is_heavy(self) -> bool:
        """Return whether what was committed since the state weighs as much as a new state, or goes back."""
        most = max(self._kept.state_nbytes, LEAST_RENEWED_NBYTES)
        return self._kept.has_gone_back or self._kept.results_nbytes >= most or self._kept.num_since >= MAX_SINCE

    async def _continue_from(self, peer: PeerId, head: Manifest) -> int | None:
        """Follow what was committed after `head`; return how many rounds, None: the peer no longer knows."""
        request = messages.ChainRequest(branch=head.branch, after=head.round)
        answer = await self._node.call(peer, request, messages.ChainAnswer, deadline_s=state_client.CALL_S)
        if answer.certificates is None:
            return None
        taken = 0
        for certificate in answer.certificates:
            chain = self._kept.chain
            if chain is None or not chain.proven(certificate):
                break
            await self._fetch_results(peer, certificate)
            if not await self._compute.serve(partial(self._kept.write, certificate)):
                break
            self._kept.follow(certificate)
            taken += 1
        return taken

    async def _fetch_results(self, peer: PeerId, certificate: Certificate) -> None:
        manifest, most = certificate.manifest, max(self._kept.state_nbytes, 1)
        for part in manifest.parts:
            holders = dict.fromkeys([part.owner, peer, *manifest.members])
            others = [each for each in holders if self._node.is_linked(each)]
            if not self._kept.has(part.result):
                await self._put(await small_from(self._node, others, part.result, most))

    async def _fetch_state(self, peer: PeerId, branch: BranchId, last: int) -> bool:
        """Fetch the state that a peer and others beside it offer; return whether it is further than what is here.

        Args:
            branch: that is believed in, up to the round `last`; others' states are not taken.
        """
        began = self._clock.now()
        offered = await self._ask(peer)
        base = None if self._kept.kept is None else self._kept.kept.head
        if offered is None or offered.head.branch != branch or offered.head.round > last + NEAR:
            return False
        if base is not None and not is_further(offered.head, base):
            return False
        index = await self._index(offered)
        missing = await self._compute.serve(lambda: self._make_room(offered.index, index))

        async def keep(_blob: Blob, data: Buffer) -> None:
            await self._put(data)

        delivered = await pull(self._node, missing, offered.donors, keep, self._clock)
        await self._compute.serve(lambda: self._kept.replace(offered.head, offered.charter, offered.index))
        self._emit(state_client.joined(offered.head, index, delivered, self._clock.now() - began))
        return True

    def _make_room(self, name: Digest, index: StateIndex) -> list[Blob]:
        """Remove what neither the kept state nor the coming one names; return what the latter lacks."""
        self._kept.make_room({name, *index.places()})
        return self._kept.missing(index)

    async def _ask(self, peer: PeerId) -> state_client.Offered | None:
        """Ask a peer, and others that stand where it does, for their states; return what most of them offer."""
        beat = self._membership.heartbeat_of(peer)
        wanted = None if beat is None else beat.manifest
        beside = [each for each in self._ranking.furthest_first() if each != peer and self._stands_at(each, wanted)]
        answers = await self._client.ask([peer, *beside][: state_client.MAX_DONORS], wanted)
        offers: list[state_client.Offered] = []
        for each, answer in answers.items():
            offer = answer if isinstance(answer, str) else state_client.opened(each, answer, self._node.run)
            if isinstance(offer, state_client.Offered):
                offers.append(offer)
            elif each == peer and (isinstance(answer, str) or answer.index is not None):
                raise PeerError(offer)
        return state_client.most_offered(offers) if offers else None

    def _stands_at(self, peer: PeerId, manifest: Digest | None) -> bool:
        beat = self._membership.heartbeat_of(peer)
        return manifest is not None and beat is not None and beat.manifest == manifest

    async def _index(self, offered: state_client.Offered) -> StateIndex:
        if not self._kept.has(offered.index):
            await self._put(await small_from(self._node, offered.donors, offered.index, MAX_INDEX_NBYTES))
        index = await self._compute.serve(lambda: self._kept.index(offered.index))
        if index is None or index.nbytes > 4 * MAX_VECTORS * self._max_parameters:
            raise PayloadError("the state that is offered is larger than this machine takes")
        return index

    async def _put(self, data: Buffer) -> None:
        await self._compute.serve(lambda: self._kept.put(data))

    async def _fetch_files(self) -> None:
        """Fetch what is missing of the run's shards, tokenizer, what came with its model, and first weights."""
        index, home, peers = self._outline.data, self._home, self._ranking.furthest_first()
        ready = None if index is None else await self._fetch_data(index, home, peers)
        if not self._outline.is_seeded and home.blobs.open(self._outline.initial) is None:
            if not self._kept.state_nbytes:
                return  # how large they may be is not known before there is a state
            first = await small_from(self._node, peers, self._outline.initial, self._kept.state_nbytes)
            await self._compute.serve(lambda: home.blobs.put(first))
        base, nbytes = self._outline.base, self._outline.base_nbytes
        if base and nbytes and home.blobs.open(base) is None:
            if nbytes > 4 * self._max_parameters:
                raise PayloadError("the model that the run's adapter goes beside is larger than this machine takes")
            whole = await self._node.fetch_any(peers, base, nbytes)
            await self._compute.serve(lambda: home.blobs.put(whole))
        self._has_files = True
        if ready is not None:
            self._emit(ready)

    async def _fetch_data(self, index: DataIndex, home: Home, peers: list[PeerId]) -> DataReady:
        if home.blobs.open(index.tokenizer) is None:
            tokenizer = await small_from(self._node, peers, index.tokenizer, MAX_TOKENIZER_NBYTES)
            await self._compute.serve(lambda: home.blobs.put(tokenizer))
        came_with = self._outline.came_with
        if came_with is not UNSET and home.blobs.open(came_with) is None:
            files = await small_from(self._node, peers, came_with, MAX_BLOB_NBYTES)
            await self._compute.serve(lambda: home.blobs.put(files))
        missing = await self._compute.serve(lambda: home.shards.missing(index))

        async def keep(shard: Blob, data: Buffer) -> None:
            await self._compute.serve(lambda: home.shards.add(index, shard.digest, data))

        shards = [Blob(digest=info.digest, nbytes=info.nbytes) for info in missing]
        await pull(self._node, shards, peers, keep, self._clock)
        return data_ready(index, fetched_nbytes=sum(info.nbytes for info in missing))

    # --- serving ---

    async def _offer(self, _peer: PeerId, request: messages.StateRequest) -> messages.StateOffer:
        kept = self._kept.kept
        if kept is None:
            return messages.StateOffer(head=None, index=None, charter=None)
        if request.wanted is None:
            return messages.StateOffer(head=kept.head, index=None, charter=None)
        return messages.StateOffer(head=kept.head, index=kept.index, charter=kept.charter)

    async def _tell_charter(self, _peer: PeerId, _request: messages.CharterRequest) -> messages.CharterAnswer:
        chain = self._kept.chain
        if chain is None:
            raise PeerError("this anchor has no state yet")
        return messages.CharterAnswer(charter=chain.charter, round=chain.head.round, members=chain.head.members)

    async def _continue(self, _peer: PeerId, request: messages.ChainRequest) -> messages.ChainAnswer:
        chain = self._kept.chain
        if chain is None or chain.head.branch != request.branch:
            return messages.ChainAnswer(certificates=None)
        found = chain.after(request.after, messages.MAX_CERTIFICATES)
        return messages.ChainAnswer(certificates=None if found is None else as_many_as_fit(found))

    def _heartbeat(self) -> Heartbeat:
        head = self.head
        return Heartbeat(
            name=self._node.passport.name,
            branch=BranchId(self._node.run) if head is None else head.branch,
            round=Round(0) if head is None else head.round,
            manifest=None if head is None else digest_of(head),
            committed_tokens=0 if head is None else head.committed_tokens,
            state="anchor",
            loss=None,
            tokens_per_s=0.0,
            is_anchor=True,
        )

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._emit(Notice(text=text))
