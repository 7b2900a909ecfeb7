"""The rounds of a run that records them, kept for who looks them up, and told to who was not there.

    RoundsRequest(start, after) ──►   a peer of the run
      ◄── RoundsAnswer(opening, headers, milestones)

A newcomer asks for all rounds before its own. Headers have to be those that its head names, milestones those rounds',
each signed by the members before it: whoever tells them, nothing else fits.

Failure:
- nobody tells, or what they tell does not fit: the next is asked, and all again later. Rounds do not depend on it.
- it cannot be written or read: an event says so once, and this process records no more.
"""

import asyncio
from collections.abc import Callable

from msgspec import UNSET

from weft.errors import DataError, NetError, PeerError, Refused, WireError
from weft.events import Notice
from weft.ids import Digest, PeerId
from weft.ledger.header import HEADER_NBYTES
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.group.records import GroupRecords
from weft.peer.messages import MAX_HEADERS, MAX_TOLD_MILESTONES, RoundsAnswer, RoundsRequest
from weft.peer.state.replica import Replica
from weft.store.rounds import RoundsFile
from weft.sync.records.messages import Certificate, Manifest, claims_in
from weft.sync.records.proof import Milestone, changes_members, is_opening
from weft.wire import Signed, digest_of, encode

AGAIN_S = 30.0  # between two times that all are asked
CALL_S, ALL_S = 20.0, 120.0  # one answer, and all of one peer
ANSWER_NBYTES = 600_000  # of milestones in an answer: with the headers below what a call's body may have
MAX_NBYTES = 256 << 20  # of milestones that are read of one peer


class PastRounds:
    def __init__(self, context: Context, replica: Replica, records: GroupRecords) -> None:
        self._node = context.node
        self._compute = context.compute
        self._emit = context.emit
        self._replica = replica
        self._records = records
        self._file = RoundsFile(context.folder.rounds)
        self._is_on = replica.run.trust is not UNSET and context.settings.checkpoint_every_s > 0
        self._last: Digest | None = None  # the manifest that was kept last
        self._has_gap = asyncio.Event()  # before it
        self._asking: set[PeerId] = set()
        if self._is_on:
            context.node.serve(RoundsRequest, self._answer)

    async def begin(self, opening: Signed | None) -> None:
        """Keep how the run began, where that was said to this process."""
        if self._is_on and opening is not None:
            await self._guarded(lambda: self._file.begin(opening))

    async def keep(self, manifest: Manifest, chain: Chain) -> None:
        """Keep a round whose outer step is made, or whose state was fetched."""
        if not self._is_on or self._last == (name := digest_of(manifest)):
            return
        milestone = milestone_of(manifest, chain.certificate(manifest))
        known = [self._records.known(Digest(claim.record)) for claim in claims_in(manifest).values()]
        groups = [each for each in known if each is not None]
        await self._guarded(lambda: self._file.put(manifest, milestone, groups))
        if self._last is None or self._last != manifest.previous:
            self._has_gap.set()
        self._last = name

    async def _guarded(self, put: Callable[[], None]) -> None:
        try:
            await self._compute.serve(put)
        except DataError as error:
            self._give_up(error)

    def _give_up(self, error: DataError) -> None:
        self._is_on = False
        self._emit(Notice(text=f"{error} This peer records no more rounds; its training goes on"))

    # --- of others ---

    async def watch(self) -> None:
        """Ask others for the rounds before this peer's, each time that there are some."""
        while True:
            await self._has_gap.wait()
            self._has_gap.clear()
            try:
                while self._is_on and not await self._is_filled():  # noqa: ASYNC110  # others are asked again
                    await asyncio.sleep(AGAIN_S)
            except DataError as error:
                self._give_up(error)

    async def _is_filled(self) -> bool:
        run, head = self._replica.run.run, self._replica.head
        if head is None or await self._compute.serve(lambda: self._file.is_whole(run, head)):
            return True
        for peer in sorted(self._node.peers):
            try:
                async with asyncio.timeout(ALL_S):
                    opening, headers, milestones = await self._told(peer, head)
            except (PeerError, NetError, Refused, WireError, TimeoutError):
                continue
            fill = lambda: self._file.fill(run, opening, headers, milestones, head)  # noqa: B023, E731  # at once
            if await self._compute.serve(fill):
                return True
        return False

    async def _told(self, peer: PeerId, head: Manifest) -> tuple[Signed, bytes, list[Milestone]]:
        """Return what a peer tells of the rounds before `head`.

        Raises:
            PeerError, NetError, Refused: it does not answer.
            WireError: it answers what was not asked for, or does not know how the run began.
        """
        opening: Signed | None = None
        headers, milestones, nbytes, wanted = bytearray(), list[Milestone](), 0, HEADER_NBYTES * head.round
        after = 0
        while True:
            request = RoundsRequest(start=len(headers) // HEADER_NBYTES, after=after)
            answer = await self._node.call(peer, request, RoundsAnswer, deadline_s=CALL_S)
            opening = answer.opening or opening
            headers += answer.headers[: wanted - len(headers)]
            for each in answer.milestones:
                manifest = each.certificate.manifest
                if manifest.round <= after:
                    raise WireError("milestones are told in order")
                after = manifest.round
                nbytes += len(encode(each))
                if after <= head.round and changes_members(manifest):
                    milestones.append(each)
            is_more = len(answer.milestones) > 0 and after <= head.round
            if len(answer.headers) % HEADER_NBYTES:
                raise WireError("headers are told whole")
            if nbytes > MAX_NBYTES or not (is_more or (answer.headers and len(headers) < wanted)):
                break
        if opening is None:
            raise WireError("how the run began is not known there")
        return opening, bytes(headers), milestones

    async def _answer(self, peer: PeerId, request: RoundsRequest) -> RoundsAnswer:
        if peer in self._asking or not self._is_on or not self._file.is_there:
            return RoundsAnswer(opening=None, headers=b"", milestones=())
        self._asking.add(peer)
        try:
            return await self._compute.serve(lambda: self._found(request))
        finally:
            self._asking.discard(peer)

    def _found(self, request: RoundsRequest) -> RoundsAnswer:
        found, nbytes = list[Milestone](), 0
        for each in self._file.milestones(request.after, MAX_TOLD_MILESTONES):
            nbytes += len(encode(each))
            if found and nbytes > ANSWER_NBYTES:
                break
            found.append(each)
        headers = self._file.headers(request.start, MAX_HEADERS)
        return RoundsAnswer(opening=self._file.opening(), headers=headers, milestones=tuple(found))


def milestone_of(manifest: Manifest, certificate: Certificate | None) -> Milestone | None:
    """Return what shows that a round was decided, or that it began a branch; None: that is not known here."""
    if is_opening(manifest):
        nothing = Certificate(attempt=manifest.attempt, manifest=manifest, votes=(), farewells=())
        return Milestone(certificate=nothing) if manifest.round else None
    return None if certificate is None else Milestone(certificate=certificate)
