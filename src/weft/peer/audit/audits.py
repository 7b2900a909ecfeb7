"""Both ends of audits in one peer, and what comes of them.

equal                     an event; of what a newcomer has brought and is not counted yet, a verdict, too
shown to be false         evidence for all members, each of whom checks it: the next manifest strikes out; and a verdict
                              of each who knows what the round has counted, so that it can be taken out
differs, unanswered       a verdict for all members, each of whom looks for itself:
                              more than half come to the same      a manifest strikes out, or counts that it did not
                                                                   answer (`weft.sync.governance`)
                              this peer finds nothing              the accuser is believed less, and then no more
training steps that lean  who makes them is looked at more often (`weft.verify.steering`)
far from most members     this machine rounds otherwise than they do: an event (`weft.verify.calibration`)
a seal broken             the auditor is believed less; not opened: looked at more often (`weft.verify.seals`)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

from msgspec import UNSET

from weft.config import alike
from weft.events import AuditorDoubted, Emit, MemberStrays, MergeAudited, MergeDoubted, WorkAudited, WorkDoubted
from weft.ids import Digest, PeerId, Round
from weft.net.messages import MAX_REASON_CHARS
from weft.peer.audit.auditor import Auditor
from weft.peer.audit.checks import Audit
from weft.peer.audit.counters import Counters
from weft.peer.audit.heads import Heads
from weft.peer.audit.kept import Kept
from weft.peer.audit.leases.earlier import Earlier
from weft.peer.audit.leases.starts import Starts
from weft.peer.audit.looking import is_heard, is_told
from weft.peer.audit.merges import Merge, Merges
from weft.peer.audit.outcome import ANSWER_ROUNDS, Found, unlike_told
from weft.peer.audit.sealing import Broken, Sealing
from weft.peer.audit.trace import Trace
from weft.peer.audit.worker import Worker
from weft.peer.context import Context
from weft.peer.round.driver import RoundDriver
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.run.trust import AuditedTrust
from weft.sync.governance import findings_in
from weft.sync.merge.reduce import EncodedPart
from weft.sync.records import quarantine
from weft.sync.records.acts import Finding, Warrant
from weft.sync.records.charter import Charter
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import Counted, Manifest, payload_of
from weft.tasks import Tasks
from weft.training.trainer import Trainer
from weft.verify.calibration import Apart, Calibration, Unlike
from weft.verify.draw import Draw
from weft.verify.evidence.evidence import Lie
from weft.verify.judge import threshold
from weft.verify.steering import Steering
from weft.verify.suspicion import Suspicion
from weft.wire import Signed, digest_of, seal

STEPS = "steps"  # of which somebody strays


@dataclass(frozen=True)
class _Taken:
    """What this peer audits with, once it takes part in rounds."""

    rounds: RoundDriver
    auditor: Auditor
    kept: Kept
    merges: Merges
    counters: Counters


class Audits:
    """
    Args:
        emit: may be called from any thread.
    """

    def __init__(
        self, context: Context, trainer: Trainer, replica: Replica, carry: Carry, emit: Emit, tasks: Tasks
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._replica = replica
        self._carry = carry
        self._tasks = tasks
        self.heads = Heads(context.folder.traces / "heads.bin", context.emit)
        self.trace = Trace(context, trainer, replica, carry, emit)
        self._sealing = Sealing(context, replica, self._seal_broken)
        self._worker = Worker(context, trainer, replica, self.trace, self.heads, self._sealing, tasks)
        self._starts = Starts(context, self.trace)
        self.earlier = Earlier(context, replica, self.heads, self.trace)
        self._taken: _Taken | None = None
        self._num_false = Counter[PeerId]()
        self._has_gone_on = False
        self.suspicion = Suspicion()
        self._steering = Steering()
        self._calibration = Calibration()
        self._told_unlike: Unlike | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether somebody keeps what this peer has done, and has not got all of it."""
        return self._starts.is_awaited

    def begin(self, rounds: RoundDriver) -> None:
        """Take part in these rounds' audits."""
        context, replica, heads, tasks = self._context, self._replica, self.heads, self._tasks
        kept = Kept(context, rounds)
        counters = Counters(context, replica, rounds, heads, kept)
        self._taken = _Taken(
            rounds,
            Auditor(
                *(context, self._trainer, replica, rounds, heads, kept, self.trace, self._sealing, tasks),
                self._work_found,
            ),
            kept,
            Merges(context, replica, rounds, heads, kept, counters, tasks, self._merge_found),
            counters,
        )
        for work in self.trace.works:  # others may have been started again, too
            rounds.works.keep(work)
        self._sealing.begin(rounds.works)
        rounds.go_back_by(self.earlier)
        rounds.acts.on_verdict(self._heard)
        rounds.acts.on_lie(self._proven)

    def note(self, manifest: Manifest, charter: Charter, state: StateIndex) -> None:
        """Note that the replicated vectors after a manifest, this peer's head, are those of an index."""
        self.heads.note(manifest, charter, state, self._context.clock.now())
        if (head := self.heads.known(digest_of(manifest))) is not None:
            self.earlier.note(head)
        if self._taken is not None and not self._has_gone_on:
            self._has_gone_on = True
            self._go_on(self._taken.rounds, manifest)

    def _go_on(self, rounds: RoundDriver, head: Manifest) -> None:
        """Go on where a process before this one was killed: it has looked more often at some, was drawn for audits that
        have not ended, and has heard what others found."""
        me, known = self._context.node.peer, self.heads.until(digest_of(head))
        told = rounds.acts.findings()
        for each in known:
            self._decided(each.manifest)
            for warrant in each.manifest.acts:
                told += zip(warrant.letters, findings_in(warrant), strict=False)  # an act holds no findings
        for letter, finding in told:
            if letter.signer == me and finding.outcome == "unanswered":
                self.suspicion.unanswered(PeerId(finding.peer), finding.round)
        for each in known:
            self._draw(each.manifest)
        self._hear_again()

    async def made(
        self, head: Manifest, encode: Callable[[], tuple[EncodedPart, ...]]
    ) -> tuple[tuple[EncodedPart, ...], Signed | None]:
        """Return the payload for the round after `head`, and how this peer came to it; None: it brings nothing, for it
        cannot say."""
        compute = self._context.compute
        async with self._context.learner_lock:
            payload = await compute.serve(encode)
            name = payload_of(part.digest for part in payload)
            work = await compute.train(lambda: self.trace.work(head, name))
        if self._taken is not None and work is not None:
            await self._taken.kept.keep({part.digest: part.encoded for part in payload})
        return payload, work

    async def settle(self, manifest: Manifest, counted: Counted | None, settle: Callable[[], None]) -> None:
        """Make the outer step of a round, and take up what it counts of this peer."""
        compute, is_offered = self._context.compute, self._carry.offered is not None
        async with self._context.learner_lock:
            await compute.train(self.trace.close)
            await compute.serve(settle)
            self.earlier.forget()
            await compute.train(lambda: self.trace.settle(manifest, counted, is_offered))
            self._carry.is_held = quarantine.has_held(self._replica.charter, self._context.node.peer)

    def follow(self, manifest: Manifest) -> None:
        """Draw what this peer audits of a round whose outer step is made."""
        assert self._taken is not None, "it has come to its rounds"
        self._worker.sweep()
        self._taken.kept.sweep(manifest)
        if manifest.has_result and (results := self._taken.kept.beside(manifest)):
            self._tasks.spawn(self._taken.kept.keep(results))
        self._taken.merges.sweep()
        self._taken.counters.follow(manifest)
        self._sealing.follow(manifest)
        self._decided(manifest)
        self._draw(manifest)
        self._hear_again()

    def _decided(self, manifest: Manifest) -> None:
        counted = [PeerId(each.peer) for each in manifest.contributions if each.work is not UNSET]
        self.suspicion.decided(manifest.round, manifest.members, counted)
        self._steering.decided(manifest.members)
        self._calibration.decided(manifest.members)

    def _draw(self, manifest: Manifest) -> None:
        assert self._taken is not None
        name, me, head = digest_of(manifest), self._context.node.peer, self._taken.rounds.chain.head
        electorate = self.heads.electorate(name)
        is_old = manifest.round + ANSWER_ROUNDS < head.round  # as of who catches up
        if self._replica.charter.audits and me in electorate and not is_old:
            draw = Draw(run=manifest.run, branch=manifest.branch, round=manifest.round, manifest=name)
            ticket = seal(self._context.identity, draw)
            self._taken.auditor.follow(manifest, ticket, self.suspicion.times)
            self._taken.merges.follow(manifest, ticket, self.suspicion.times)

    def _hear_again(self) -> None:
        """Look into what others have found: this peer may not have known the work, or the round."""
        assert self._taken is not None
        for letter, finding in self._taken.rounds.acts.findings():
            self._heard(letter, finding)

    def _heard(self, letter: Signed, verdict: Finding) -> None:
        about, me = PeerId(verdict.peer), self._context.node.peer
        if self._taken is None or not is_heard(me, letter.signer, about, self._num_false):
            return
        if verdict.outcome == "equal":
            return
        if not self._taken.auditor.look_again(letter, verdict):
            self._taken.merges.look_again(letter, verdict)

    def _seal_broken(self, auditor: PeerId, work: Digest, outcome: Broken, why: str) -> None:
        self._context.emit(AuditorDoubted(member=auditor, work=work, outcome=outcome, why=why))
        if outcome == "false":
            self._num_false[auditor] += 1
        elif (head := self._replica.head) is not None:
            self.suspicion.unanswered(auditor, head.round)

    def _merge_found(self, merge: Merge, found: Found) -> None:
        told = MergeAudited(round=merge.round, member=merge.owner, part=merge.part, result=merge.result)
        if found.outcome != "equal":
            self._context.emit(MergeDoubted(**alike(MergeDoubted, told), outcome=found.outcome, why=found.why))
        else:
            self._context.emit(told)
        self._conclude(merge.owner, merge.round, merge.result, merge.part, found, merge.accuser)

    def _work_found(self, audit: Audit, found: Found) -> None:
        told = WorkAudited(
            round=audit.round,
            member=audit.peer,
            work=audit.name,
            num_steps=audit.link.num_steps,
            distance=found.distance,
        )
        if found.outcome != "equal":
            self._context.emit(WorkDoubted(**alike(WorkDoubted, told), outcome=found.outcome, why=found.why))
        else:
            self._context.emit(told)
        peer, taken = audit.peer, self._taken
        self._compared(audit, peer, found)
        if taken is not None and taken.auditor.is_awaited(audit):
            if found.outcome == "unanswered":
                return  # it is not counted
            if found.outcome == "equal":
                self._tell(peer, audit.round, audit.name, audit.link.before, found)
        self._conclude(peer, audit.round, audit.name, audit.link.before, found, audit.accuser)

    def _compared(self, audit: Audit, peer: PeerId, found: Found) -> None:
        """Note how near this machine came to a member's training steps, and on which side."""
        trust, num_steps = self._replica.run.trust, audit.link.num_steps
        if not isinstance(trust, AuditedTrust) or trust.is_exact:
            return
        held = threshold(trust.numerics, num_steps, is_new=audit.is_new)
        if found.outcome == "equal":
            self._note_lean(audit, peer, found.lean, held)
        if found.outcome == "equal" or found.apart is not None:
            self._note_apart(peer, found.apart or Apart(0.0, held))

    def _note_lean(self, audit: Audit, peer: PeerId, lean: float, held: float) -> None:
        steered = self._steering.note(peer, lean, held)
        if steered is not None:
            self.suspicion.strays(peer, STEPS, steered.is_back)
            strays = MemberStrays(
                member=peer, round=audit.round, what=STEPS, value=steered.mean, usual=0.0, is_back=steered.is_back
            )
            self._context.emit(strays)

    def _note_apart(self, peer: PeerId, apart: Apart) -> None:
        if not isfinite(apart.distance):
            return  # no machine rounds like that
        self._calibration.note(peer, apart)
        unlike = self._calibration.unlike
        if unlike is None or not unlike.is_this:
            return
        if not self._told_unlike or (unlike.is_beyond and not self._told_unlike.is_beyond):
            self._told_unlike = unlike
            self._context.emit(unlike_told(unlike))

    def _proven(self, lie: Lie, _warrant: Warrant) -> None:
        """Say what a round has counted of work that is proven to be false: evidence does not tell."""
        round = None if lie.work is None else self.heads.counted_in(lie.work)
        if self._taken is None or lie.work is None or round is None or lie.peer == self._context.node.peer:
            return
        weighed = self._taken.counters.weighed(lie.peer, round, lie.work)
        if weighed is not UNSET:
            found = Found("differs", lie.what)
            self._taken.rounds.acts.take(self._verdict(lie.peer, round, lie.work, 0, found))

    def _conclude(
        self, peer: PeerId, round: Round, work: Digest, before: int, found: Found, accuser: PeerId | None
    ) -> None:
        """Tell all members of a fault, or believe who told of one less.

        Args:
            work, before: as in `Finding`.
        """
        if not is_told(found):
            if accuser is not None:
                self._num_false[accuser] += 1
            return
        if found.outcome == "unanswered":
            self.suspicion.unanswered(peer, round)
        self._tell(peer, round, work, before, found)

    def _tell(self, peer: PeerId, round: Round, work: Digest, before: int, found: Found) -> None:
        assert self._taken is not None
        if found.proof is not None:
            self._taken.rounds.acts.accuse(found.proof)
        self._taken.rounds.acts.take(self._verdict(peer, round, work, before, found))

    def _verdict(self, peer: PeerId, round: Round, work: Digest, before: int, found: Found) -> Signed:
        assert self._taken is not None
        verdict = Finding(
            run=self._replica.run.run,
            peer=peer,
            round=round,
            work=work,
            before=before,
            outcome=found.outcome,
            why=found.why[:MAX_REASON_CHARS],
            weighed=self._taken.counters.weighed(peer, round, work) if found.outcome == "differs" else UNSET,
        )
        return seal(self._context.identity, verdict)
