"""Both ends of audits in one peer, and what comes of them.

equal                     an event
differs, unanswered       a verdict for all members, each of whom looks for itself:
                              more than half come to the same      a manifest strikes out, or counts that it did not
                                                                   answer (`weft.sync.governance`)
                              this peer finds nothing              the accuser is believed less, and then no more
"""

from collections import Counter
from collections.abc import Callable

from weft.config import alike
from weft.events import Emit, WorkAudited, WorkDoubted
from weft.ids import PeerId
from weft.net.messages import MAX_REASON_CHARS
from weft.peer.audit.auditor import Audit, Auditor, Found
from weft.peer.audit.heads import Heads
from weft.peer.audit.trace import Trace
from weft.peer.audit.worker import Worker
from weft.peer.context import Context
from weft.peer.round.driver import RoundDriver
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.sync.merge.reduce import EncodedPart
from weft.sync.records.acts import Finding
from weft.sync.records.messages import Counted, Manifest, payload_of
from weft.tasks import Tasks
from weft.training.trainer import Trainer
from weft.wire import Signed, seal

MOST_FALSE = 3  # accusations of one member that this peer could not find true: it looks into no more


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
        self._worker = Worker(context, trainer, replica, self.trace, self.heads, tasks)
        self._auditor: Auditor | None = None
        self._rounds: RoundDriver | None = None
        self._num_false = Counter[PeerId]()

    def begin(self, rounds: RoundDriver) -> None:
        """Take part in these rounds' audits."""
        self._rounds = rounds
        self._auditor = Auditor(
            self._context, self._trainer, self._replica, rounds, self.heads, self._tasks, self._found
        )
        rounds.acts.on_verdict(self._heard)

    async def made(
        self, head: Manifest, encode: Callable[[], tuple[EncodedPart, ...]]
    ) -> tuple[tuple[EncodedPart, ...], Signed | None]:
        """Return the payload for the round after `head`, and how this peer came to it; None: it brings nothing, for it
        cannot say."""
        compute = self._context.compute
        async with self._context.learner_lock:
            payload = await compute.serve(encode)
            name = payload_of(part.digest for part in payload)
            return payload, await compute.train(lambda: self.trace.work(head, name))

    async def settle(self, manifest: Manifest, counted: Counted | None, settle: Callable[[], None]) -> None:
        """Make the outer step of a round, and take up what it counts of this peer."""
        compute, is_offered = self._context.compute, self._carry.offered is not None
        async with self._context.learner_lock:
            await compute.train(self.trace.close)
            await compute.serve(settle)
            await compute.train(lambda: self.trace.settle(manifest, counted, is_offered))

    def follow(self, manifest: Manifest) -> None:
        """Draw what this peer audits of a round whose outer step is made."""
        assert self._auditor is not None, "it has come to its rounds"
        self._worker.sweep()
        self._auditor.follow(manifest)
        assert self._rounds is not None
        for letter, finding in self._rounds.acts.findings():  # this peer may not have known the work, or the round
            self._heard(letter, finding)

    def _heard(self, letter: Signed, verdict: Finding) -> None:
        by, me = letter.signer, self._context.node.peer
        if self._auditor is not None and me not in (by, verdict.peer) and self._num_false[by] < MOST_FALSE:
            self._auditor.look_again(letter, verdict)

    def _found(self, audit: Audit, found: Found) -> None:
        told = WorkAudited(
            round=audit.round,
            member=PeerId(audit.work.peer),
            work=audit.name,
            num_steps=audit.link.num_steps,
            distance=found.distance,
        )
        if found.outcome != "equal":
            self._context.emit(WorkDoubted(**alike(WorkDoubted, told), outcome=found.outcome, why=found.why))
            self._accuse(audit, found)
            return
        self._context.emit(told)
        if audit.accuser is not None:
            self._num_false[audit.accuser] += 1

    def _accuse(self, audit: Audit, found: Found) -> None:
        verdict = Finding(
            run=self._replica.run.run,
            peer=audit.work.peer,
            round=audit.round,
            work=audit.name,
            before=audit.link.before,
            outcome=found.outcome,
            why=found.why[:MAX_REASON_CHARS],
        )
        assert self._rounds is not None
        self._rounds.acts.take(seal(self._context.identity, verdict))
