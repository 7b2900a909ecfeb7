"""The rounds of a run that is recorded, kept for who looks them up, and told to who was not there.

    HistoryRequest(start, after) ──►   a peer of the run
      ◄── HistoryAnswer(headers, links)

A newcomer asks for all rounds before its own. What it is told has to be what its head's history names: whoever tells
it, nothing else fits.

Failure:
- nobody tells, or what they tell does not fit: the next is asked, and all again later. Rounds do not depend on it.
- it cannot be written: an event says so once, and this process records no more.
"""

import asyncio

from msgspec import UNSET

from weft.errors import DataError, NetError, PeerError, Refused
from weft.events import Notice
from weft.ids import Digest, PeerId
from weft.ledger.header import HEADER_NBYTES
from weft.peer.chain import Chain
from weft.peer.context import Context
from weft.peer.group.records import GroupRecords
from weft.peer.messages import ANSWER_LINKS, MAX_HEADERS, HistoryAnswer, HistoryRequest
from weft.peer.state.replica import Replica
from weft.store.rounds import RoundsFile, is_history
from weft.sync.records.messages import Certificate, Manifest, claims_in
from weft.sync.records.proof import Link
from weft.sync.round.rules import is_majority
from weft.wire import encode

AGAIN_S = 30.0  # between two times that all are asked
CALL_S = 20.0
LINKS_NBYTES = 600_000  # of links in an answer: with the headers below what a call's body may have


class History:
    def __init__(self, context: Context, replica: Replica, records: GroupRecords) -> None:
        self._node = context.node
        self._compute = context.compute
        self._emit = context.emit
        self._replica = replica
        self._records = records
        self._file = RoundsFile(context.folder.rounds)
        self._is_on = replica.run.trust is not UNSET and context.settings.checkpoint_every_s > 0
        if self._is_on:
            context.node.serve(HistoryRequest, self._answer)

    async def keep(self, manifest: Manifest, chain: Chain, before: Manifest | None) -> None:
        """Keep a round whose outer step is made.

        Args:
            before: the manifest before, if it is known here.
        """
        if not self._is_on:
            return
        link = link_of(manifest, chain.certificate(manifest), before)
        known = [self._records.known(Digest(claim.record)) for claim in claims_in(manifest).values()]
        groups = [each for each in known if each is not None]
        try:
            await self._compute.serve(lambda: self._file.put(manifest, link, groups))
        except DataError as error:
            self._is_on = False
            self._emit(Notice(text=f"{error} This peer records no more rounds; its training goes on"))

    async def fill(self) -> None:
        """Ask others for the rounds before this peer's, until all are here."""
        while self._is_on and (head := self._replica.head) is not None:
            if await self._compute.serve(lambda head=head: self._is_whole(head)):  # type: ignore[misc]
                return
            for peer in sorted(self._node.peers):
                if await self._ask(peer, head):
                    break
            await asyncio.sleep(AGAIN_S)

    def _is_whole(self, head: Manifest) -> bool:
        return self._file.is_there and is_history(head, self._file.tree())

    async def _ask(self, peer: PeerId, head: Manifest) -> bool:
        headers, links = b"", tuple[Link, ...]()
        wanted, after = HEADER_NBYTES * int(head.round), -1
        try:
            while True:
                start = len(headers) // HEADER_NBYTES
                answer = await self._node.call(
                    peer, HistoryRequest(start=start, after=after), HistoryAnswer, deadline_s=CALL_S
                )
                headers, links = (headers + answer.headers)[:wanted], (*links, *answer.links)
                after = max([after, *(link.certificate.manifest.round for link in answer.links)])
                if not answer.links and (len(headers) == wanted or not answer.headers):
                    break
        except (PeerError, NetError, Refused):
            return False
        if len(headers) < wanted:
            return False
        earlier = tuple(link for link in links if link.certificate.manifest.round < head.round)
        try:
            return await self._compute.serve(lambda: self._file.fill(headers, earlier, head))
        except DataError:
            return False

    async def _answer(self, _peer: PeerId, request: HistoryRequest) -> HistoryAnswer:
        if not self._file.is_there:
            return HistoryAnswer(headers=b"", links=())
        return await self._compute.serve(lambda: self._found(request))

    def _found(self, request: HistoryRequest) -> HistoryAnswer:
        links, nbytes = list[Link](), 0
        for link in self._file.links(request.after, ANSWER_LINKS):
            nbytes += len(encode(link))
            if links and nbytes > LINKS_NBYTES:
                break
            links.append(link)
        return HistoryAnswer(headers=self._file.headers(request.start, MAX_HEADERS), links=tuple(links))


def link_of(manifest: Manifest, certificate: Certificate | None, before: Manifest | None) -> Link | None:
    """Return what shows that a round was decided, or that it began something; None: that is not known here."""
    if not manifest.parts:
        nothing = Certificate(attempt=manifest.attempt, manifest=manifest, votes=(), farewells=())
        return Link(certificate=nothing)
    if certificate is None:
        return None
    signers = {signed.signer for signed in certificate.votes}
    left = {signed.signer for signed in certificate.farewells}
    needs_keeper = before is not None and not is_majority(before.members, None, signers, left)
    return Link(certificate=certificate, before=before if needs_keeper else None)
