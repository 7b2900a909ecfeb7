"""Parts that owners have merged, merged again by who was drawn: to the same bytes, or not.

    kept       each peer writes down its payload before it announces it, and what was brought to its part before it says
               what that came to: others may need either
    decided    each peer notes the parts whose owners it has heard to say the very result that the manifest names, of
               the very plan: a leader can put any result beside anybody's name
    told       who has found a fault shows others what the owner has said, which need not have told all
    drawn      by the ticket's signature, and the result's digest
    fetched    what each contribution has of the part, and what false works have of it that are taken out, from who
               brought it, the owner, or who has found a fault
    found      equal | differs | unanswered; with it, where one block of it is enough, what shows that to anybody

    traces/heard/    what the owners of a round's parts have said, by the digest of its manifest

Failure:
- a contribution can be had from nobody: the owner, who says that it has merged it, has not answered.
- this peer has not heard the owner or the plan: it says nothing.
- what was heard is gone, or damaged: likewise.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from weft.codec.codec import Codec, size_of
from weft.data.store import write_atomically
from weft.errors import DataError, DiskFull, NetError, PeerError, Refused, WireError
from weft.events import Notice
from weft.ids import Digest, PeerId, Round, short
from weft.keys import verify
from weft.peer.audit.counters import Counters
from weft.peer.audit.heads import Head, Heads
from weft.peer.audit.kept import Kept, is_plan_of, room
from weft.peer.audit.looking import Looks
from weft.peer.audit.outcome import ANSWER_ROUNDS, ANSWER_S, ASK_AGAIN_S, Found, Patience
from weft.peer.audit.proofs.proving import of_merge
from weft.peer.context import Context
from weft.peer.messages import MergedAnswer, MergedRequest
from weft.peer.round.driver import RoundDriver
from weft.peer.state.replica import Replica
from weft.sync.merge import reduce
from weft.sync.merge.counter import Piece
from weft.sync.merge.counter import wanted as wanted_of
from weft.sync.records.acts import Finding, Warrant
from weft.sync.records.messages import Base, Certificate, Collect, Manifest, Merged, RoundNote, next_base
from weft.sync.records.parts import cut
from weft.tasks import Tasks
from weft.verify.draw import drawn
from weft.wire import Buffer, Record, Signed, decode, digest_of, encode, unseal

CALL_S = 20.0
MAX_HEARD_NBYTES = 4 << 20  # of a round: with 32 members a plan has 70 kB, a manifest less


@dataclass(frozen=True)
class Merge:
    """A part that a round has merged."""

    manifest: Digest
    round: Round
    part: int
    owner: PeerId
    result: Digest
    accuser: PeerId | None = None  # who says that it is another


class Heard(Record, frozen=True, kw_only=True):
    """A round, as this peer has followed it."""

    manifest: Manifest
    plan: Collect  # with the digests of all parts
    parts: tuple[int, ...]  # whose owners have said of this plan what the manifest names
    letters: tuple[Signed | None, ...] = ()  # of these parts: what the owners have signed


def is_word_of(letter: Signed, known: Heard, part: int) -> bool:
    """Return whether the owner of a part has signed this of what a round has counted, and of the same plan."""
    result, manifest = known.manifest.parts[part], known.manifest
    try:
        note = unseal(letter, RoundNote, verify)
    except WireError:
        return False
    said = note.message
    is_here = (letter.signer, note.branch, note.round) == (result.owner, manifest.branch, manifest.round)
    if not isinstance(said, Merged) or not is_here:
        return False
    named = said.part, said.result, said.plan, said.head
    return named == (part, result.result, digest_of(known.plan), manifest.previous)


class Merges:
    """Of one peer.

    Args:
        on_found: told what came of each.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        rounds: RoundDriver,
        heads: Heads,
        kept: Kept,
        counters: Counters,
        tasks: Tasks,
        on_found: Callable[[Merge, Found], None],
    ) -> None:
        self._context = context
        self._replica = replica
        self._rounds = rounds
        self._heads = heads
        self._kept = kept
        self._counters = counters
        self._tasks = tasks
        self._on_found = on_found
        self._heard = context.folder.traces / "heard"
        self._known = self._recalled()  # by manifest, oldest first
        for each in self._known.values():
            kept.note(each.manifest.round, each.plan)
        self._shown = dict[Digest, tuple[Round, Mapping[Digest, Buffer]]]()  # by the result that has a fault
        self._begun = dict[tuple[Digest, int], Round]()
        self._looks = Looks()
        self._one_at_a_time = asyncio.Lock()  # each holds as much as a payload
        rounds.on_decided(self._decided)
        context.node.serve(MergedRequest, self._on_request)
        context.node.serve_blobs(self._lookup, is_patient=True)

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        return next((shown[wanted] for _, shown in self._shown.values() if wanted in shown), None)

    def sweep(self) -> None:
        """Forget what nobody can ask for any more, once `Kept` has."""
        is_listed = self._kept.is_listed
        for name in [name for name, each in self._known.items() if not is_listed(each.manifest.round)]:
            with suppress(OSError):
                (self._heard / name).unlink(missing_ok=True)
            del self._known[name]
        self._begun = {key: round for key, round in self._begun.items() if is_listed(round)}
        self._shown = {name: shown for name, shown in self._shown.items() if is_listed(shown[0])}

    # --- audits ---

    def _decided(self, certificate: Certificate) -> None:
        manifest, (plan, results) = certificate.manifest, self._rounds.told
        if not self._kept.is_audited(manifest.round) or plan is None or not is_plan_of(plan, manifest):
            return
        if any(each.legacy is not None for each in plan.contributions):
            return
        heard = tuple(
            number
            for number, part in enumerate(manifest.parts)
            if (part.owner, part.result) == (plan.owners[number], results.get(number))
        )
        name, by = digest_of(manifest), digest_of(plan)
        letters = tuple(self._rounds.inbox.merged(manifest.parts[part].owner, part, by) for part in heard)
        self._keep(name, Heard(manifest=manifest, plan=plan, parts=heard, letters=letters))
        self._kept.note(manifest.round, plan)

    def _keep(self, name: Digest, heard: Heard) -> None:
        self._known[name] = heard
        try:
            write_atomically(self._heard / name, [encode(heard)], is_synced=False)
        except (DiskFull, DataError) as error:
            self._context.emit(Notice(text=f"started again, this peer could not audit parts of before: {error}"))

    def _recalled(self) -> dict[Digest, Heard]:
        """Return what a process before this one has heard."""
        found = list[Heard]()
        for path in self._heard.glob("*"):
            with suppress(OSError, WireError):
                found.append(decode(path.read_bytes(), Heard, max_nbytes=MAX_HEARD_NBYTES))
        return {digest_of(each.manifest): each for each in sorted(found, key=lambda each: each.manifest.round)}

    def follow(self, manifest: Manifest, ticket: Signed, times: Callable[[PeerId], float]) -> None:
        """Draw what this peer merges again of a round whose outer step is made; arguments as of `Auditor.follow`."""
        audits, name, me = self._replica.charter.audits, digest_of(manifest), self._context.node.peer
        assert audits
        for part, each in enumerate(manifest.parts):
            owner, result = PeerId(each.owner), Digest(each.result)
            judges, rate = self._heads.judges(name, owner), times(owner) * audits.rate
            if owner == me or me not in judges:
                continue
            if drawn(ticket.signature, result, rate, len(judges), 1) is not None:
                self._begin(Merge(name, manifest.round, part, owner, result))

    def look_again(self, letter: Signed, verdict: Finding) -> bool:
        """Merge again what another has found a fault with; return whether it can be done here, or was."""
        now, newest = self._context.clock.now(), self._rounds.chain.head.round
        if not self._heads.is_recent(verdict.round, newest, 2 * ANSWER_ROUNDS, 2 * ANSWER_S, now):
            return False  # long ago: nobody need be able to show it any more
        for name, known in self._known.items():
            parts = known.manifest.parts if known.manifest.round == verdict.round else ()
            if verdict.before < len(parts) and parts[verdict.before].result == verdict.work:
                owner, accuser = parts[verdict.before].owner, letter.signer if verdict.outcome == "differs" else None
                again = Merge(name, verdict.round, verdict.before, owner, Digest(verdict.work), accuser)
                is_new = (name, again.part) not in self._begun
                if accuser is None and is_new and not self._looks.may(letter.signer, newest):
                    return True
                if owner != verdict.peer:
                    return False
                if again.part not in known.parts:
                    self._tasks.spawn(self._learn(again, letter.signer))
                return again.part not in known.parts or self._begin(again)
        return False

    async def _on_request(self, _peer: PeerId, request: MergedRequest) -> MergedAnswer:
        known = self._known.get(Digest(request.manifest))
        letters = {} if known is None else dict(zip(known.parts, known.letters, strict=False))
        return MergedAnswer(letter=letters.get(request.part))

    async def _learn(self, merge: Merge, by: PeerId) -> None:
        """Merge a part again whose owner this peer has not heard, once another shows what that has said of it."""
        request = MergedRequest(manifest=merge.manifest, part=merge.part)
        try:
            answer = await self._context.node.call(by, request, MergedAnswer, deadline_s=CALL_S)
        except (PeerError, NetError, Refused):
            return
        known = self._known.get(merge.manifest)
        if known is None or answer.letter is None or not is_word_of(answer.letter, known, merge.part):
            return
        if merge.part not in known.parts:
            parts, letters = (*known.parts, merge.part), (*known.letters, answer.letter)
            self._keep(merge.manifest, replace(known, parts=parts, letters=letters))
        self._begin(merge)

    def _begin(self, merge: Merge) -> bool:
        """Return whether it is or was looked at here."""
        if self._before(merge) is None:
            return False
        if (merge.manifest, merge.part) not in self._begun:
            self._begun[merge.manifest, merge.part] = merge.round
            self._tasks.spawn(self._run(merge))
        return True

    def _before(self, merge: Merge) -> Head | None:
        """Return what the round began at; None: of this part or of that nothing is known here."""
        known = self._known.get(merge.manifest)
        is_heard = known is not None and merge.part in known.parts
        return self._heads.known(Digest(known.manifest.previous)) if known is not None and is_heard else None

    async def _run(self, merge: Merge) -> None:
        if (found := await self.look(merge)) is not None:
            self._on_found(merge, found)

    async def look(self, merge: Merge) -> Found | None:
        """Merge a part again; None: it cannot be done here."""
        known, before = self._known.get(merge.manifest), self._before(merge)
        if known is None or before is None:
            return None
        base = next_base(before.manifest, before.charter)
        here = cut(self._replica.scope.num_sent(base.round), base.uplinks)[merge.part]
        patience = Patience(self._rounds, self._context.clock)
        async with self._one_at_a_time:
            fetched, why = await self._fetched(merge, known.plan, base, here, patience)
            if why is not None:
                return Found("unanswered", why) if self._has_vote(merge.owner) else None
            (pieces, brought), leases = fetched, before.manifest.leases
            again = await self._rounds.merger.again(base, leases, known.plan, here, brought, merge.part, pieces)
            if again is not None and again.digest == merge.result:
                return Found("equal")
            self._shown[merge.result] = merge.round, brought
            found = (
                None if again is None else await self._proof(merge, known, before, len(here), again.encoded, brought)
            )
        what = "something that is no payload" if again is None else "something else than what was brought"
        return Found("differs", f"of part {merge.part} of the round it has merged {what}", proof=found)

    async def _proof(
        self, merge: Merge, known: Heard, before: Head, num: int, right: Buffer, brought: Mapping[Digest, Buffer]
    ) -> Warrant | None:
        """Return what shows that a part was merged otherwise."""
        letters = dict(zip(known.parts, known.letters, strict=False))
        letter, most = letters.get(merge.part), memoryview(right).nbytes
        result = self._rounds.chain.result(merge.result)
        if letter is None:
            return None
        try:
            if result is None:
                result = await self._context.node.fetch_within(merge.owner, merge.result, most, room)
        except (PeerError, NetError, Refused):
            return None
        shown, plan = result, known.plan
        return await self._context.compute.serve(lambda: of_merge(letter, before, plan, num, shown, right, brought))

    async def _fetched(
        self, merge: Merge, plan: Collect, base: Base, here: range, patience: Patience
    ) -> tuple[tuple[tuple[Piece, ...], dict[Digest, Buffer]], str | None]:
        """Return what is taken out of a part, the bytes of that and of what each contribution has of it, and why it is
        not all; None: it is."""
        pieces, brought, why = tuple[Piece, ...](), dict[Digest, Buffer](), "it has left"
        method = base.charter.settings.method.of_mean()
        while self._has_vote(merge.owner):
            try:
                pieces = await self._counters.pieces(base.charter, plan, here)
                for each in plan.contributions:
                    codec, wanted = reduce.payload_codec_in(method, base.round, each), each.parts[merge.part]
                    if wanted not in brought:
                        brought[wanted] = await self._from_any(PeerId(each.peer), wanted, merge, codec, len(here))
                for term, num in wanted_of(pieces):
                    if term.digest not in brought:
                        brought[term.digest] = await self._from_any(term.by, term.digest, merge, term.codec, num)
                return (pieces, brought), None
            except PeerError as error:
                why = str(error)
            if patience.is_over:
                break
            await asyncio.sleep(ASK_AGAIN_S)
        return (pieces, brought), why

    async def _from_any(self, by: PeerId, wanted: Digest, merge: Merge, codec: Codec, num: int) -> Buffer:
        """
        Args:
            by: who has brought it.

        Raises:
            PeerError: nobody has it.
        """
        node, told = self._context.node, self._rounds.acts.findings()
        if (mine := self._lookup(node.peer, wanted) or self._counters.here(wanted)) is not None or not num:
            return mine or b""
        most, limit_s = size_of(codec, num).most, self._rounds.parts.limit_s(codec)
        tellers = (letter.signer for letter, finding in told if finding.work == merge.result)
        for holder in dict.fromkeys((by, merge.owner, *tellers)):
            if holder != node.peer and node.is_linked(holder):
                with suppress(PeerError, NetError, Refused, TimeoutError):
                    async with asyncio.timeout(limit_s):
                        return await node.fetch_within(holder, wanted, most, room)
        raise PeerError(f"nobody shows what {short(by)} brought to it")

    def _has_vote(self, peer: PeerId) -> bool:
        return peer in self._rounds.chain.base.electorate
