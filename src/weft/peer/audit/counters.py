"""What false works have moved, taken out of the model again: what this peer adds to that, and what it says of it.

    found        a verdict says what the mean was made of that has counted the work             `weighed`
    struck out   the charter has it, where a majority says alike (`weft.sync.records.counters`)
    planned      whoever leads and knows that round names the work                              `_recalled`
    merged       each owner takes out what lies in its part, and whoever audits that does, too  `gather`, `pieces`
    decided      an event; where it cannot be done, an event says why                           `follow`

Everything is fetched by names that follow from the charter alone:

    charter ──► manifest of the round ──► lists of parts, results ──► parts of payloads

so who joined since can do its share. Manifests and lists are small; of payloads the parts are kept that were brought to
each owner, and each peer's own (`Kept`), and of rounds the results.

Failure:
- who leads knows nothing of the round, because it came later or was started again: the next leader does.
- something can be had from nobody: the round goes on without, and later ones try. A peer that has asked in vain
  `MOST_TRIES` times plans it no more.
- no round of `WITHIN` could: nothing is taken out.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import UNSET, UnsetType

from weft.errors import PeerError, WireError
from weft.events import WorkStays, WorkTakenOut
from weft.ids import Digest, PeerId, Round, short
from weft.ledger.tree import HASH_NBYTES
from weft.net.blobs.blobs import first_of
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.peer.audit.heads import Head, Heads
from weft.peer.audit.kept import Kept
from weft.peer.context import Context
from weft.peer.round.driver import RoundDriver
from weft.peer.round.merge import TakenOut
from weft.peer.state.replica import Replica
from weft.sync.governance import accused, findings_in, read_lie
from weft.sync.merge.counter import Piece, pieces, wanted
from weft.sync.records.acts import Weighed
from weft.sync.records.charter import Charter, FalseWork
from weft.sync.records.counters import WITHIN, due, of, why_none
from weft.sync.records.messages import Certificate, Collect, Manifest, next_base, parts_in
from weft.sync.records.rewinds import is_dropped
from weft.sync.round.shares import is_plain, weighed
from weft.wire import MAX_RECORD_NBYTES, Buffer, decode, digest_of, encode

MAX_LIST_NBYTES = 2 * HASH_NBYTES * MAX_MEMBERS
SMALL_S = 20.0
MOST_TRIES = 2
DISAGREED = "the members that judged it did not say alike what was counted of it"
UNSAID = "no majority of those that judge has said in time what was counted of it"
MIXED = "that round had taken in what a branch had trained, or taken out another false work"
CHANGED = "the method was changed meanwhile"
LOST = "not all that it takes was kept by somebody"


def why_not(head: Head, before: Head) -> str:
    """Return why nothing can be taken out of what a round has counted; empty: it can.

    Args:
        before: what it began at.
    """
    return why_none(before.charter.settings.method) or ("" if is_plain(head.manifest) else MIXED)


class Counters:
    """Of one peer."""

    def __init__(self, context: Context, replica: Replica, rounds: RoundDriver, heads: Heads, kept: Kept) -> None:
        self._context = context
        self._replica = replica
        self._rounds = rounds
        self._heads = heads
        self._kept = kept
        self._num_lacked = Counter[tuple[PeerId, Round]]()
        rounds.on_decided(self._decided)
        rounds.merger.recall_by(self.gather)
        context.node.serve_blobs(self._lookup)

    def _lookup(self, _peer: PeerId, wanted: Digest) -> bytes | None:
        known = self._heads.known(wanted)
        return None if known is None else encode(known.manifest)

    # --- for verdicts ---

    def weighed(self, peer: PeerId, round: Round, work: Digest) -> Weighed | UnsetType:
        """Return what the mean was made of that has counted a work; unset: it cannot be taken out, or is none here."""
        if (known := self._counted(round, work)) is None:
            return UNSET
        head, before = known
        if why_not(head, before):
            return UNSET
        return weighed(next_base(before.manifest, before.charter), head.manifest, before.manifest.leases, peer) or UNSET

    def _counted(self, round: Round, work: Digest) -> tuple[Head, Head] | None:
        """Return the round of this peer's own history that counts a work, and the one before; None: none is known."""
        head = None if self._replica.head is None else self._heads.at(self._replica.head, round)
        before = None if head is None else self._heads.known(Digest(head.manifest.previous))
        if head is None or before is None or all(each.work != work for each in head.manifest.contributions):
            return None
        return head, before

    # --- for rounds ---

    def _decided(self, _certificate: Certificate) -> None:
        self._rounds.recall_false(frozenset(self._recalled()))

    def _recalled(self) -> Iterator[PeerId]:
        """Yield whose false works this peer knows well enough to plan that they are taken out."""
        for each in due(self._rounds.chain.base):
            known = self._heads.known(Digest(each.weighed.manifest))
            counted = () if known is None else known.manifest.contributions
            is_lacked = self._num_lacked[PeerId(each.peer), each.round] >= MOST_TRIES
            if counted and not is_lacked and all(self._kept.listed(Digest(one.payload)) for one in counted):
                yield PeerId(each.peer)

    async def gather(self, charter: Charter, plan: Collect, here: range) -> TakenOut:
        """Return what a plan takes out of a part, with its bytes.

        Args:
            charter: by which the round is computed.
            here: the elements of the part.
        """
        found, brought, lacking = tuple[Piece, ...](), dict[Digest, Buffer](), list[PeerId]()
        for peer in plan.counters or ():
            try:
                mine = await self._pieces(charter, peer, here)
                for term, num in wanted(mine):
                    if term.digest not in brought:
                        data = self.here(term.digest)
                        fetch = self._rounds.parts.from_any
                        brought[term.digest] = data or await fetch(term.by, term.digest, term.codec, num)
                found += mine
            except PeerError:
                lacking.append(peer)
                if (false := of(charter, peer)) is not None:
                    self._num_lacked[peer, false.round] += 1
        return TakenOut(found, brought, tuple(lacking))

    async def pieces(self, charter: Charter, plan: Collect, here: range) -> tuple[Piece, ...]:
        """Return what a plan takes out of a part; arguments as of `gather`.

        Raises:
            PeerError: what that is made of can be had from nobody.
        """
        found = [await self._pieces(charter, peer, here) for peer in plan.counters or ()]
        return tuple(piece for each in found for piece in each)

    def here(self, wanted: Digest) -> Buffer | None:
        """Return a part of a payload, or a result; None: it is not here."""
        mine = self._kept.part(wanted)
        return self._rounds.chain.result(wanted) if mine is None else mine

    async def _pieces(self, charter: Charter, peer: PeerId, here: range) -> tuple[Piece, ...]:
        if (false := of(charter, peer)) is None:
            raise PeerError(f"nothing is to be taken out of {short(peer)}")
        manifest = await self._manifest(Digest(false.weighed.manifest))
        lists = {PeerId(each.peer): await self._list(Digest(each.payload)) for each in manifest.contributions}
        choices, num = charter.settings.method.of_mean(), self._replica.scope.num_sent(manifest.round)
        try:
            listed = {each: parts_in(data) for each, data in lists.items()}
            return pieces(peer, false.weighed, manifest, listed, choices, num, here)
        except (
            ArithmeticError,
            LookupError,
            ValueError,
        ) as error:  # what most judges have signed does not fit together
            raise PeerError(f"what was counted of {short(peer)} cannot be taken out: {error}") from None

    async def _manifest(self, name: Digest) -> Manifest:
        if (known := self._heads.known(name)) is not None:
            return known.manifest
        try:
            manifest: Manifest = decode(await self._fetch_small(name, MAX_RECORD_NBYTES), Manifest)
        except WireError as error:
            raise PeerError(f"manifest {short(name)} is none: {error}") from None
        return manifest

    async def _list(self, payload: Digest) -> bytes:
        return self._kept.listed(payload) or await self._fetch_small(payload, MAX_LIST_NBYTES)

    async def _fetch_small(self, name: Digest, most: int) -> bytes:
        """
        Raises:
            PeerError: nobody has it.
        """
        node = self._context.node

        async def fetch(peer: PeerId) -> bytes:
            try:
                async with asyncio.timeout(SMALL_S):
                    return await node.fetch_small(peer, name, most)
            except TimeoutError:
                raise PeerError(f"{short(peer)} did not deliver it in time") from None

        holders = [each for each in self._rounds.chain.base.electorate if node.is_linked(each)]
        return await first_of(holders, fetch, lambda: f"blob {short(name)}")

    # --- in words ---

    def follow(self, manifest: Manifest) -> None:
        """Say what becomes of false works, after a round whose outer step is made."""
        works = self._replica.charter.false_works or ()
        for each in works:
            if each.taken_out == manifest.round and each.peer in (manifest.counters or ()):
                told = WorkTakenOut(round=manifest.round, member=PeerId(each.peer), counted_in=each.round)
                self._context.emit(told)
        for warrant in manifest.acts:
            peer, verdicts = accused(warrant), findings_in(warrant)
            if peer is not None and verdicts:
                self._tell_struck_out(manifest, peer, verdicts[0].round, Digest(verdicts[0].work))
            elif peer is not None and (work := read_lie(warrant).work) is not None:
                self._tell_proven(manifest, peer, work)
        for each in works:
            if each.taken_out is UNSET and manifest.round == each.round + WITHIN:
                self._tell_stays(manifest, PeerId(each.peer), each.round, self._why(each))
        self._tell_unsaid(manifest)

    def _tell_struck_out(self, manifest: Manifest, peer: PeerId, round: Round, work: Digest) -> None:
        """Say where nothing can be taken out of what a key has just been struck out for: training steps, not a part."""
        known = self._counted(round, work)
        if known is None or is_dropped(self._replica.charter, round):
            return
        works = self._replica.charter.false_works or ()
        false = next((each for each in works if (each.peer, each.round, each.taken_out) == (peer, round, UNSET)), None)
        if false is None:
            self._tell_stays(manifest, peer, round, why_not(*known) or DISAGREED)
        elif manifest.round > round + WITHIN:
            self._tell_stays(manifest, peer, round, self._why(false))

    def _tell_proven(self, manifest: Manifest, peer: PeerId, work: Digest) -> None:
        """Say where nothing can be taken out of work that is proven false: else verdicts say what is."""
        round = self._heads.counted_in(work)
        known = None if round is None else self._counted(round, work)
        if round is None or known is None or is_dropped(self._replica.charter, round):
            return
        if (why := why_not(*known)) or manifest.round > round + WITHIN:
            self._tell_stays(manifest, peer, round, why or UNSAID)

    def _tell_unsaid(self, manifest: Manifest) -> None:
        """Say where evidence has struck a key out, and no majority has said in time what was counted of its work."""
        round, last = Round(manifest.round - WITHIN), self._heads.until(digest_of(manifest))[-1 - WITHIN :]
        said = {(each.peer, each.round) for each in self._replica.charter.false_works or ()}
        for peer, work in dict.fromkeys(_proven(each.manifest for each in last)):
            known = self._counted(round, work) if (peer, round) not in said else None
            if known is not None and not why_not(*known) and not is_dropped(self._replica.charter, round):
                self._tell_stays(manifest, peer, round, UNSAID)

    def _why(self, false: FalseWork) -> str:
        return LOST if false.weighed.method == digest_of(self._replica.charter.settings.method) else CHANGED

    def _tell_stays(self, manifest: Manifest, peer: PeerId, round: Round, why: str) -> None:
        self._context.emit(WorkStays(round=manifest.round, member=peer, counted_in=round, why=why))


def _proven(manifests: Iterable[Manifest]) -> list[tuple[PeerId, Digest]]:
    """Return whom rounds have struck out by evidence, and for which works."""
    lies = [
        read_lie(each) for manifest in manifests for each in manifest.acts if accused(each) and not findings_in(each)
    ]
    return [(each.peer, each.work) for each in lies if each.work is not None]
