"""Parts that owners have merged, merged again by who was drawn: to the same bytes, or not.

    decided    each peer notes what the round was merged of, and writes down what others may need for it: its own
               payload, and what it has merged its part of
    drawn      by the ticket's signature, and the result's digest
    fetched    what each contribution has of the part, from who brought it, the owner, or who has found a fault
    found      equal | differs | unanswered

    traces/parts/7    of round 7, for as long as auditors may ask

Failure:
- a contribution can be had from nobody: the owner, who says that it has merged it, has not answered.
- this peer does not know what the round was merged of (it has heard of another payload, or was not there): it says
  nothing.
- it is started again: what it had written is gone. Who brought a payload has it, and its owner.
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.codec.codec import size_of
from weft.data.store import write_atomically
from weft.errors import NetError, PeerError, Refused
from weft.ids import Digest, PeerId, Round, short
from weft.peer.audit.found import Found
from weft.peer.audit.heads import Heads
from weft.peer.audit.patience import ANSWER_ROUNDS, ANSWER_S, ASK_AGAIN_S, Patience
from weft.peer.context import Context
from weft.peer.round.driver import RoundDriver
from weft.peer.state.replica import Replica
from weft.sync.merge import reduce
from weft.sync.records.acts import Finding
from weft.sync.records.messages import Base, Certificate, Collect, Contribution, Manifest, next_base
from weft.tasks import Tasks
from weft.verify.draw import drawn
from weft.wire import Buffer, Signed

KEPT_ROUNDS, KEPT_S = 3 * ANSWER_ROUNDS, 3 * ANSWER_S  # both over: others look again once one has asked in vain
MAX_DUE = 2  # rounds that are decided, and not yet written down: who catches up makes the steps of many
MAX_SHOWN = 4  # parts with a fault, of which this peer lets others have what it has fetched


@dataclass(frozen=True)
class Merge:
    """A part that a round has merged."""

    round: Round
    part: int
    owner: PeerId
    result: Digest
    told_by: PeerId | None = None  # who has found a fault with it
    accuser: PeerId | None = None  # the same, if it says that it is another


@dataclass
class _Round:
    """What a round was merged of.

    Args:
        plan: with the digests of all parts; None: not all of them were announced here.
        places: of what this peer has written of it, in its file.
    """

    manifest: Manifest
    plan: Collect | None
    path: Path
    at: float
    places: dict[Digest, range]

    def read(self, wanted: Digest) -> bytes | None:
        if (place := self.places.get(wanted)) is None:
            return None
        with self.path.open("rb") as file:
            file.seek(place.start)
            return file.read(len(place))


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
        tasks: Tasks,
        on_found: Callable[[Merge, Found], None],
    ) -> None:
        self._context = context
        self._replica = replica
        self._rounds = rounds
        self._heads = heads
        self._tasks = tasks
        self._on_found = on_found
        self._folder = context.folder.traces / "parts"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._known = dict[Round, _Round]()
        self._due = dict[Round, dict[Digest, Buffer]]()  # decided, and not yet written down
        self._brought = dict[Digest, Buffer]()  # what this peer has merged of the round that is under way
        self._shown = dict[Digest, Mapping[Digest, Buffer]]()  # by the result that has a fault
        self._begun = dict[tuple[Round, int], None]()
        rounds.on_decided(self._decided)
        rounds.merger.on_brought(self._brought.update)
        context.node.serve_blobs(self._lookup, is_patient=True)

    # --- what others may need ---

    def _decided(self, certificate: Certificate) -> None:
        manifest, brought = certificate.manifest, dict(self._brought)
        self._brought.clear()
        is_checked = self._rounds.chain.choices_in(manifest.round).is_merged_by_all  # before anybody votes
        if not self._replica.charter.audits or not manifest.has_result or is_checked:
            return
        merger = self._rounds.merger
        self._due[manifest.round] = {**merger.parts.offered, **brought}
        for forgotten in list(self._due)[:-MAX_DUE]:
            del self._due[forgotten]
        path, now = self._folder / str(manifest.round), self._context.clock.now()
        self._known[manifest.round] = _Round(manifest, merger.plan_behind(manifest), path, now, {})

    async def keep(self, manifest: Manifest) -> None:
        """Write down what a round was merged of, as far as it is here, before its memory is used for another.

        Raises:
            DiskFull, DataError: it cannot be written.
        """
        due, known = self._due.pop(manifest.round, {}), self._known.get(manifest.round)
        if known is not None and due:
            await self._context.compute.serve(lambda: self._write(known, due))
        now = self._context.clock.now()
        for round, each in list(self._known.items()):
            if round + KEPT_ROUNDS < manifest.round and now - each.at > KEPT_S:
                each.path.unlink(missing_ok=True)
                del self._known[round]

    def _write(self, known: _Round, due: Mapping[Digest, Buffer]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(known.path, due.values(), is_synced=False)
        at = 0
        for wanted, data in due.items():
            nbytes = memoryview(data).nbytes
            known.places[wanted] = range(at, at + nbytes)
            at += nbytes

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        for shown in self._shown.values():
            if wanted in shown:
                return shown[wanted]
        return next((data for each in self._known.values() if (data := each.read(wanted)) is not None), None)

    # --- audits ---

    def follow(self, manifest: Manifest, ticket: Signed, electorate: Sequence[PeerId]) -> None:
        """Draw what this peer merges again of a round whose outer step is made."""
        audits, num = self._replica.charter.audits, len(electorate)
        assert audits
        for part, each in enumerate(manifest.parts):
            is_drawn = drawn(ticket.signature, Digest(each.result), audits.rate, num, 1) is not None
            if is_drawn and each.owner != self._context.node.peer:
                self._begin(Merge(manifest.round, part, PeerId(each.owner), Digest(each.result)))

    def look_again(self, letter: Signed, verdict: Finding) -> bool:
        """Merge again what another has found a fault with; return whether it can be done here."""
        known = self._known.get(Round(verdict.round))
        parts = () if known is None else known.manifest.parts
        if not verdict.before < len(parts):
            return False
        part = parts[verdict.before]
        if (part.owner, part.result) != (verdict.peer, verdict.work):
            return False
        by, accuser = letter.signer, letter.signer if verdict.outcome == "differs" else None
        self._begin(Merge(verdict.round, verdict.before, PeerId(part.owner), Digest(part.result), by, accuser))
        return True

    def _begin(self, merge: Merge) -> None:
        if (merge.round, merge.part) not in self._begun:
            self._begun[merge.round, merge.part] = None
            for forgotten in [each for each in self._begun if each[0] + 2 * KEPT_ROUNDS < merge.round]:
                del self._begun[forgotten]
            self._tasks.spawn(self._run(merge))

    async def _run(self, merge: Merge) -> None:
        if (found := await self.look(merge)) is not None:
            self._on_found(merge, found)

    async def look(self, merge: Merge) -> Found | None:
        """Merge a part again; None: it cannot be done here."""
        known = self._known.get(merge.round)
        before = None if known is None else self._heads.known(Digest(known.manifest.previous))
        if known is None or known.plan is None or before is None:
            return None
        base = next_base(before.manifest, before.charter)
        here = reduce.cut(self._replica.scope.num_sent(base.round), base.uplinks)[merge.part]
        brought, why = await self._fetched(merge, known.plan, base, len(here))
        if why is not None:
            return Found("unanswered", why) if merge.owner in self._rounds.chain.base.electorate else None
        again = await self._rounds.merger.again(base, before.manifest.leases, known.plan, here, brought, merge.part)
        if again == merge.result:
            return Found("equal")
        self._shown[merge.result] = brought
        for forgotten in list(self._shown)[:-MAX_SHOWN]:
            del self._shown[forgotten]
        why = "merged something that is no payload" if again is None else "is not the mean of what was brought"
        return Found("differs", f"part {merge.part} of the round {why}")

    async def _fetched(
        self, merge: Merge, plan: Collect, base: Base, num: int
    ) -> tuple[dict[Digest, Buffer], str | None]:
        """Return what each contribution has of a part, and why it is not all."""
        patience, brought, why = Patience(self._rounds, self._context.clock), dict[Digest, Buffer](), "it has left"
        while not patience.is_over and merge.owner in self._rounds.chain.base.electorate:
            try:
                for each in plan.contributions:
                    wanted = each.parts[merge.part]
                    if wanted not in brought:
                        brought[wanted] = await self._from_any(each, wanted, merge, base, num)
                return brought, None
            except PeerError as error:
                why = str(error)
            await asyncio.sleep(ASK_AGAIN_S)
        return brought, why

    async def _from_any(self, each: Contribution, wanted: Digest, merge: Merge, base: Base, num: int) -> Buffer:
        """
        Raises:
            PeerError: nobody has it.
        """
        node = self._context.node
        if (mine := self._lookup(node.peer, wanted)) is not None or not num:
            return mine or b""
        codec = reduce.payload_codec_in(base.charter.settings.method.of_mean(), base.round, each)
        most, holders = size_of(codec, num).most, (each.peer, merge.owner, merge.told_by)
        for holder in dict.fromkeys(holder for holder in holders if holder not in (None, node.peer)):
            assert holder is not None
            if node.is_linked(holder):
                try:
                    return await node.fetch_within(holder, wanted, most, lambda size: memoryview(bytearray(size)))
                except (PeerError, NetError, Refused):
                    continue
        raise PeerError(f"nobody has what {short(each.peer)} brought to it")
