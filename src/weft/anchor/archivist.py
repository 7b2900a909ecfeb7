"""Keeps an audited run in an archive, beside what an anchor keeps for those who join.

    begin     with the run's first manifest, where members still remember what came after it; else with the state that
              the anchor has
    follow    certificates and results, of the anchor or of members
    gather    of each work that a round counts: what was signed, of any member; what its leases began with, of its peer

A peer shows what its leases began with for some rounds and minutes. So works are asked for as they are counted, several
peers' at a time and one of each, and who is slow holds up no other. In exact numbers what is not shown follows from the
work before it.

Failure:
- a peer is gone before it has shown its work: it is asked again when it is back, and given up after `GIVE_UP_ROUNDS`
  and `GIVE_UP_S`. An event says so.
- nobody knows the rounds in between any more, or the run goes on on another branch: the archive begins anew from the
  state that the anchor has, beside what it holds.
- the disk is full: an event says so, and it is tried again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from weft.anchor.archive import Archive, Begin, KeptWork, Stretch, Wanted, counted_works, opened_work
from weft.anchor.disk import Anchored
from weft.clock import Clock
from weft.errors import DataError, DiskFull, NetError, PayloadError, PeerError, Refused, WireError
from weft.events import Emit, Notice
from weft.ids import Digest, PeerId, Round, short
from weft.net.multi_source import Blob, pull, small_from
from weft.net.node import Node
from weft.peer import messages
from weft.peer.state.state_client import Ranking
from weft.sync.proof import opened
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex
from weft.sync.records.messages import Certificate
from weft.sync.records.work import Work, is_state, state_after, state_before
from weft.tasks import Compute, Tasks
from weft.wire import Buffer, Signed, decode, digest_of

LOOK_S, CALL_S = 1.0, 20.0
GIVE_UP_ROUNDS, GIVE_UP_S = 64, 300.0  # both over: longer than any peer keeps what its works began with
MAX_WORK_NBYTES = 16 << 10  # of one that is signed
MAX_VECTORS = 4  # of a state: parameters, and what an optimizer holds
MAX_AT_ONCE = 8  # works that are asked for
PATIENCE = 5  # looks that bring nothing, until the rounds in between are given up
LOCAL, OUTER = "local", "outer"  # as states name parameters


@dataclass
class _Pending:
    """A work of which something is not here."""

    wanted: Wanted
    stretch: Stretch  # that has its round
    since: float
    kept: KeptWork | None = None


class Archivist:
    """
    Args:
        has_ends: where machines round differently, also the parameters that works ended with are kept: whoever makes
            the steps again may come to others, and compares them.
    """

    def __init__(
        self,
        node: Node,
        archive: Archive,
        kept: Anchored,
        ranking: Ranking,
        compute: Compute,
        clock: Clock,
        emit: Emit,
        *,
        has_ends: bool,
    ) -> None:
        self._node = node
        self._archive = archive
        self._kept = kept
        self._ranking = ranking
        self._compute = compute
        self._clock = clock
        self._emit = emit
        self._has_ends = has_ends
        self._pending: dict[Digest, _Pending] = {}
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks = Tasks()
        self._taking: dict[PeerId, asyncio.Task[None]] = {}  # of whom something is being fetched
        self._greeted: set[PeerId] = set()  # members that know that all is kept
        self._num_idle = 0  # looks in a row that brought nothing, though the run goes on
        self._known_num = 0  # of the run's parameters
        self._told = ""

    async def follow(self) -> None:
        """Keep the rounds that there are, again and again."""
        while True:
            await self._try(self._follow_all)
            await asyncio.sleep(LOOK_S)

    async def gather(self) -> None:
        """Keep what the works that they count began with."""
        await self._try(self._recall)
        try:
            while True:
                await self._greet()
                await self._gather()
                await asyncio.sleep(LOOK_S)
        finally:
            await self._tasks.aclose()

    async def _recall(self) -> None:
        stretch, now = self._archive.stretch, self._clock.now()
        if stretch is None:
            return
        for wanted, kept in await self._compute.serve(lambda: stretch.lacking(GIVE_UP_ROUNDS)):
            self._pending[wanted.name] = _Pending(wanted, stretch, now, kept)

    @property
    def num_pending(self) -> int:
        """Return how many works it still asks for."""
        return len(self._pending)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (PeerError, NetError, Refused):
            pass  # others are asked, or the same later
        except (DiskFull, DataError) as error:
            self._tell(f"the archive cannot be written: {error}")

    # --- rounds ---

    async def _follow_all(self) -> None:
        if self._kept.chain is None:
            return
        if self._archive.head is None:
            begin = await self._opening()
            self._num_idle += 1
            if begin is None and self._num_idle < PATIENCE:
                return  # who began the run may be about to tell
            await self._begin(begin)
        while await self._follow():
            self._num_idle = 0
        head, newest = self._archive.head, self._kept.chain.head
        is_level = head is not None and (head == newest or (head.branch == newest.branch and head.round > newest.round))
        self._num_idle = 0 if is_level else self._num_idle + 1
        if self._num_idle >= PATIENCE:
            self._num_idle = 0
            await self._begin()

    async def _begin(self, begin: Begin | None = None) -> None:
        """Keep rounds from the run's beginning on, or from the state that the anchor has."""
        kept = self._kept.kept
        assert kept is not None
        if begin is None:
            index = await self._compute.serve(lambda: self._copied(Digest(kept.index)))
            if not index:
                return  # the anchor has just taken another state
            begin = Begin(head=kept.head, charter=kept.charter, index=kept.index)
            if self._archive.head is not None and not self._archive.is_empty:
                self._tell(f"what came between round {self._archive.head.round} and {kept.head.round} is not archived")
        await self._compute.serve(partial(self._archive.begin, begin))

    async def _opening(self) -> Begin | None:
        """Return the beginning of the run, where a member tells it and nothing of its charter has changed since."""
        kept = self._kept.kept
        assert kept is not None
        for peer in self._ranking.furthest_first():
            request = messages.RoundsRequest(start=0, after=0)
            answer = await self._node.ask(peer, request, messages.RoundsAnswer, deadline_s=CALL_S)
            if answer is None or answer.opening is None:
                continue
            try:
                head = opened(self._node.run, answer.opening)
            except WireError:
                continue
            if head.charter == digest_of(kept.charter):
                return Begin(head=head, charter=kept.charter, opening=answer.opening)
        return None

    def _copied(self, name: Digest) -> bool:
        """Copy the state that the anchor has; False: it has just been replaced."""
        index = self._kept.index(name)
        for each in () if index is None else (name, *index.places()):
            data = self._kept.lookup(each)
            if data is None:
                return False
            self._archive.blobs.put(data)
        return index is not None

    async def _follow(self) -> bool:
        """Keep what follows on the newest round that is kept; return whether there was something."""
        taken = 0
        for certificate in await self._next():
            for part in certificate.manifest.parts:
                await self._keep_result(certificate, Digest(part.result))
            if not await self._compute.serve(partial(self._archive.write, certificate)):
                break
            self._archive.follow(certificate)
            taken += 1
            for wanted in counted_works(certificate.manifest):
                assert self._archive.stretch is not None
                self._pending[wanted.name] = _Pending(wanted, self._archive.stretch, self._clock.now())
        return taken > 0

    async def _next(self) -> tuple[Certificate, ...]:
        head, chain = self._archive.head, self._kept.chain
        if head is None or chain is None:
            return ()
        if chain.head.branch == head.branch and (found := chain.after(head.round, messages.MAX_CERTIFICATES)):
            return found
        if chain.head == head:
            return ()
        for peer in self._ranking.furthest_first():
            request = messages.ChainRequest(branch=head.branch, after=head.round)
            answer = await self._node.ask(peer, request, messages.ChainAnswer, deadline_s=CALL_S)
            if answer is not None and answer.certificates:
                return answer.certificates
        return ()

    async def _keep_result(self, certificate: Certificate, result: Digest) -> None:
        if self._archive.blobs.has(result):
            return
        data = self._kept.lookup(result)
        if data is None:
            owners = [PeerId(part.owner) for part in certificate.manifest.parts if part.result == result]
            holders = dict.fromkeys((*owners, *self._ranking.furthest_first()))
            linked = [each for each in holders if self._node.is_linked(each)]
            data = await small_from(self._node, linked, result, max(self._kept.state_nbytes, 1))
        await self._put(data)

    async def _put(self, data: Buffer) -> None:
        await self._compute.serve(lambda: self._archive.blobs.put(data))

    # --- works ---

    async def _greet(self) -> None:
        """Tell members that all of theirs is kept: who ends soon waits for it, though nothing of it is counted yet."""
        head = self._archive.head
        self._greeted = {peer for peer in self._greeted if self._node.is_linked(peer)}
        members = () if head is None else head.members
        new = [PeerId(peer) for peer in members if self._node.is_linked(peer) and peer not in self._greeted]

        async def greet(peer: PeerId) -> None:
            assert head is not None
            request = messages.WorkRequest(work=digest_of(head), keeps_all=True)  # of which it has none
            if await self._node.ask(peer, request, messages.WorkAnswer, deadline_s=CALL_S) is not None:
                self._greeted.add(peer)

        await asyncio.gather(*map(greet, new))

    async def _gather(self) -> None:
        """Fetch what was signed, and go on with the rest, of several peers at a time: whoever delivers slowly holds up
        nobody else's."""

        async def sign(pending: _Pending) -> None:
            async with self._room:
                await self._try(partial(self._find, pending))

        async def take(due: list[_Pending]) -> None:
            for pending in due:
                async with self._room:
                    await self._try(partial(self._take, pending))

        await asyncio.gather(*(sign(each) for each in self._pending.values() if each.kept is None))
        of_peer = dict[PeerId, list[_Pending]]()
        for each in self._pending.values():
            of_peer.setdefault(each.wanted.peer, []).append(each)
        self._taking = {peer: taking for peer, taking in self._taking.items() if not taking.done()}
        for peer in of_peer.keys() - self._taking.keys():
            self._taking[peer] = self._tasks.spawn(take(of_peer[peer]))

    async def _find(self, pending: _Pending) -> None:
        """Fetch what was signed."""
        pending.kept = await self._signed(pending)

    async def _take(self, pending: _Pending) -> None:
        """Fetch what is not here of one work, or give it up."""
        wanted, why = pending.wanted, ""
        try:
            if pending.kept is None:
                why = "nobody shows what was signed"
            elif self._node.is_linked(wanted.peer):
                work = opened_work(pending.kept.signed, wanted)
                why = await self._fetch(pending, pending.kept, work)
                if not why:
                    await self._done(pending)
                    return
            else:
                why = "it is not there"
        except (PeerError, NetError, Refused) as error:
            why = str(error)
        head = self._archive.head
        is_old = head is None or head.round - wanted.round > GIVE_UP_ROUNDS
        if is_old and self._clock.now() - pending.since > GIVE_UP_S:
            what = f"what {short(wanted.peer)} began with in its work that round {wanted.round} has counted"
            self._emit(Notice(text=f"{what} could not be had for the archive: {why}"))
            await self._done(pending)

    async def _done(self, pending: _Pending) -> None:
        self._pending.pop(pending.wanted.name, None)
        if self._node.is_linked(pending.wanted.peer):
            request = messages.WorkRequest(work=pending.wanted.name, keeps_all=True, is_done=True)
            await self._node.ask(pending.wanted.peer, request, messages.WorkAnswer, deadline_s=CALL_S)

    async def _signed(self, pending: _Pending) -> KeptWork:
        wanted = pending.wanted
        holders = dict.fromkeys((wanted.peer, *self._ranking.furthest_first()))
        linked = [each for each in holders if self._node.is_linked(each)]
        data = await small_from(self._node, linked, wanted.name, MAX_WORK_NBYTES)
        kept = KeptWork(signed=decode(data, Signed))
        opened_work(kept.signed, wanted)
        await self._compute.serve(lambda: pending.stretch.add(wanted.round, kept))
        return kept

    async def _fetch(self, pending: _Pending, kept: KeptWork, work: Work) -> str:
        """Keep what a work began with; return why that is not shown."""
        peer = pending.wanted.peer
        request = messages.WorkRequest(work=pending.wanted.name, keeps_all=True)
        answer = await self._node.call(peer, request, messages.WorkAnswer, deadline_s=CALL_S)
        if not answer.is_here:
            return answer.reason or "it does not say why"
        if not self._is_shown(work, answer):
            return "it shows states that it has not named"
        first, *later = answer.begins
        await self._keep_state(peer, Digest(first.state), lambda name: name != LOCAL)  # those are the run's
        for begin in later:
            await self._keep_state(peer, Digest(begin.state))
        await self._keep_state(peer, Digest(answer.ends[-1].state), lambda name: self._has_ends and name == LOCAL)
        if work.error is not None:
            await self._keep_state(peer, Digest(work.error))
        whole = KeptWork(signed=kept.signed, begins=answer.begins, ends=answer.ends)
        await self._compute.serve(lambda: pending.stretch.add(pending.wanted.round, whole))
        return ""

    def _is_shown(self, work: Work, answer: messages.WorkAnswer) -> bool:
        segments, trace = work.segments, Digest(work.trace)
        if not len(answer.begins) == len(answer.ends) == len(segments):
            return False
        assert self._archive.chain is not None
        audits = self._archive.chain.charter_in(Round(work.round)).audits
        every = audits.trace_every if audits else 1
        begins = [state_before(segments, every, number) for number in range(len(segments))]
        ends = [state_after(segments, every, number) for number in range(len(segments))]
        named = zip((*begins, *ends), (*answer.begins, *answer.ends), strict=True)
        return all(is_state(trace, segments, every, at, Digest(each.state), each.path) for at, each in named)

    async def _keep_state(
        self, peer: PeerId, name: Digest, is_wanted: Callable[[str], bool] = lambda _name: True
    ) -> None:
        """Fetch the list of a state, and the chunks of some of its vectors.

        Args:
            is_wanted: asked of the name of each.

        Raises:
            PayloadError: it is no state of this run's model.
        """
        if not self._archive.blobs.has(name):
            await self._put(await small_from(self._node, [peer], name, MAX_INDEX_NBYTES))
        data = await self._compute.serve(lambda: self._archive.blobs.read(name))
        index: StateIndex = decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)
        if len(index.vectors) > MAX_VECTORS or any(each.num > 2 * self._num_parameters for each in index.vectors):
            raise PayloadError(f"what {short(peer)} shows is larger than any state of this run")
        places = index.places({each.name for each in index.vectors if is_wanted(each.name)})
        missing = [Blob(digest=each, nbytes=at[0].nbytes) for each, at in places.items() if not self._has(each)]

        async def keep(_blob: Blob, data: Buffer) -> None:
            await self._put(data)

        await pull(self._node, missing, [peer], keep, self._clock)

    def _has(self, name: Digest) -> bool:
        return self._archive.blobs.has(name)

    @property
    def _num_parameters(self) -> int:
        """Return how many numbers the run's parameters are, by the state that the anchor has."""
        if not self._known_num and self._kept.kept is not None:
            index = self._kept.index(Digest(self._kept.kept.index))
            self._known_num = 0 if index is None else index.shape.get(OUTER, 0)
        return self._known_num

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._emit(Notice(text=text))
