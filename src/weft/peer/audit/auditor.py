"""An auditor's part: it draws, asks, does the steps again, and says what came of it.

    decided    a ticket of its own signature draws what it audits (`weft.verify.draw`)
    claimed    so many steps of these leases are so many tokens, and no round has counted the leases before
    asked      lists of states, each checked against the work's trace: what each segment began and ended with, what the
               payload was made of, and what the steps begin with
    followed   the first state is the run's, with the optimizer of the work before; each segment begins where the one
               before has ended, moved along with the outer parameters; the payload is made of the last state
    done       the same steps on this machine
    sealed     the digest of what it came to, and of a number that it keeps: before it is shown the worker's (`sealing`)
    opened     what the worker came to: equal, or as near as two honest machines are, or not; then the seal, too

    found      equal | differs | unanswered

Where anybody can be shown that it differs, that is found with it (`proving`): then nobody has to vote.

Failure:
- the worker does not answer within `Patience`, or shows what it has not named: unanswered.
- this machine cannot do the steps (no memory, paused), or does not know what a segment began at: it says nothing.
- the worker has left: likewise.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite

import torch
from msgspec import UNSET
from torch import Tensor

from weft.errors import CheckpointError, DataError, NetError, NotFinite, OutOfMemory, PeerError, Refused, WireError
from weft.ids import Digest, PeerId, Round
from weft.keys import verify
from weft.peer.audit.heads import Head, Heads
from weft.peer.audit.kept import Kept, room
from weft.peer.audit.looking import (
    Came,
    Event,
    Looking,
    Made,
    Measured,
    Missing,
    Opened,
    Unable,
    Untrue,
    is_equal,
    is_named,
    step,
)
from weft.peer.audit.operations import Doubted, Gradients
from weft.peer.audit.outcome import ANSWER_ROUNDS, ANSWER_S, ASK_AGAIN_S, Found, Patience
from weft.peer.audit.proving import ground, of_step, proof, shown_state
from weft.peer.audit.sealing import Sealing
from weft.peer.audit.steps import ERROR, LOCAL, Away, method_at, named_error, payload_of_end, repeat, shape_of, words_of
from weft.peer.context import Context
from weft.peer.group.records import lease_of
from weft.peer.messages import AuditAnswer, AuditOpened, AuditRequest, AuditSealed, NamedState
from weft.peer.round.driver import RoundDriver
from weft.peer.state.replica import Replica
from weft.peer.state.state_client import StateClient
from weft.run.config import RunConfig
from weft.run.trust import AuditedTrust
from weft.store.chunks import state_index
from weft.sync.merge.method import OUTER
from weft.sync.records import quarantine
from weft.sync.records.acts import Finding, Warrant
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import Manifest, parts_in, payload_of, works_in
from weft.sync.records.work import Link, MadeStep, Work, link, link_from, num_links, num_states, state_before
from weft.tasks import Tasks, to_the_end
from weft.training.device import first_line
from weft.training.trainer import Trainer
from weft.verify.draw import drawn
from weft.verify.evidence.records import Falsehood, ShownState
from weft.verify.evidence.steps import GRADIENT
from weft.verify.evidence.works import prove_claim, prove_move, prove_payload, prove_start
from weft.verify.judge import threshold, threshold_of_moments
from weft.wire import Buffer, Signed, claimed, decode, digest, digest_of, unseal

MAX_BEGUN = 1024  # audits that are remembered
DOUBTED = -1  # in place of a state's number: a fault was found with the work
CALL_S = 20.0
MAX_CAME = 2  # answers that give a worker more time: it may answer for ever, and let nothing be fetched

OnWork = Callable[[Work], object]


@dataclass(frozen=True)
class Audit:
    """One that is under way."""

    round: Round  # whose manifest counts it
    name: Digest
    work: Work
    link: Link
    ticket: Signed  # its own draw, or another's verdict
    accuser: PeerId | None = None  # who says that the steps differ


class NotShown(Exception):
    """The worker does not show what it named, or not yet."""


class Unknown(Exception):
    """What the steps began at is not known here."""


class Differs(Exception):
    """It has named something that is not so.

    Args:
        proof: as of `Found`.
    """

    def __init__(self, why: str, proof: Warrant | None = None) -> None:
        super().__init__(why)
        self.proof = proof


@dataclass
class _Shown:
    """What one audit has come to."""

    answer: AuditAnswer | None = None
    before: dict[str, Tensor] = field(default_factory=dict)
    mine: dict[str, Tensor] = field(default_factory=dict)
    own: StateIndex | None = None  # of `mine`
    after: NamedState | None = None  # what the worker came to
    theirs: StateIndex | None = None
    opened: AuditOpened | None = None


class Auditor:
    """Of one peer.

    Args:
        on_found: told what came of each audit.
    """

    def __init__(
        self,
        context: Context,
        trainer: Trainer,
        replica: Replica,
        rounds: RoundDriver,
        heads: Heads,
        kept: Kept,
        sealing: Sealing,
        tasks: Tasks,
        on_found: Callable[[Audit, Found], None],
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._replica = replica
        self._rounds = rounds
        self._heads = heads
        self._kept = kept
        self._sealing = sealing
        self._tasks = tasks
        self._on_found = on_found
        self._client = StateClient(context.node, context.compute, context.clock)
        self._begun: dict[tuple[Digest, int], None] = {}  # works and states before steps: each is looked at once
        self._sought = dict[Digest, dict[PeerId, OnWork]]()  # works that are asked for, and whose tickets wait for them
        self._shape = shape_of(trainer)  # of each state

    def follow(
        self, manifest: Manifest, ticket: Signed, electorate: Sequence[PeerId], times: Callable[[PeerId], float]
    ) -> None:
        """Draw which works this peer audits of a round that is decided, and whose outer step is made.

        Args:
            times: as often as others a peer is audited.
        """
        me, audits = self._context.node.peer, self._replica.charter.audits
        assert audits
        held = {each.work for each in manifest.held or ()}
        for peer, name in works_in(manifest):
            if peer == me or (name in held and me in quarantine.members(self._replica.charter)):
                continue
            if name not in held and self._heads.held_in(name) is not None:
                continue  # it was looked at as it waited
            rate = len(electorate) - 1.0 if name in held else times(peer) * audits.rate
            if drawn(ticket.signature, name, rate, len(electorate), 1) is None:
                continue
            begin = partial(self._drawn, manifest.round, name, ticket, rate, len(electorate), audits.trace_every)
            if (work := self._rounds.works.known(name)) is not None:
                begin(work)
            else:
                self._seek(name, peer, ticket, begin)

    def _drawn(
        self, round: Round, name: Digest, ticket: Signed, rate: float, num_electors: int, trace_every: int, work: Work
    ) -> None:
        number = drawn(ticket.signature, name, rate, num_electors, num_links(work.segments, trace_every))
        if number is not None:
            self._begin(round, name, work, link(work.segments, trace_every, number), ticket)

    def look_again(self, letter: Signed, verdict: Finding) -> bool:
        """Audit what another has found a fault with; return whether it can be done here."""
        audits, name, newest = self._replica.charter.audits, Digest(verdict.work), self._rounds.chain.head.round
        if not self._heads.is_recent(verdict.round, newest, 2 * ANSWER_ROUNDS, 2 * ANSWER_S, self._context.clock.now()):
            return False  # long ago: nobody need be able to show it any more
        if not audits or verdict.round not in (self._heads.counted_in(name), self._heads.held_in(name)):
            return False
        if (work := self._rounds.works.known(name)) is not None:
            return self._doubted(letter, verdict, audits.trace_every, work)
        self._seek(name, PeerId(verdict.peer), letter, partial(self._doubted, letter, verdict, audits.trace_every))
        return True

    def _doubted(self, letter: Signed, verdict: Finding, trace_every: int, work: Work) -> bool:
        doubted, name = link_from(work.segments, trace_every, verdict.before), Digest(verdict.work)
        if work.peer != verdict.peer or doubted is None:
            return False
        if (name, DOUBTED) in self._begun:
            return True  # of one work the steps that are doubted first: a worker need not show more
        self._begun[name, DOUBTED] = None
        self._begin(verdict.round, name, work, doubted, letter)
        return True

    def _seek(self, name: Digest, peer: PeerId, ticket: Signed, then: OnWork) -> None:
        """Ask for a work that a process before this one may have heard, and go on once it is here."""
        if name not in self._sought:
            self._sought[name] = {}
            self._tasks.spawn(self._find(name, peer))
        self._sought[name].setdefault(ticket.signer, then)

    async def _find(self, name: Digest, peer: PeerId) -> None:
        patience = self._patience()
        while not patience.is_over and self._has_vote(peer):
            work = await self._rounds.works.fetch(name, [peer])
            if work is not None:
                for then in self._sought[name].values():
                    then(work)
                break
            await asyncio.sleep(ASK_AGAIN_S)
        del self._sought[name]

    def _begin(self, round: Round, name: Digest, work: Work, link: Link, ticket: Signed) -> None:
        if (name, link.before) in self._begun:
            return
        self._begun[name, link.before] = None
        for forgotten in list(self._begun)[:-MAX_BEGUN]:
            del self._begun[forgotten]
        accuser = None
        if ticket.kind == Finding.__name__ and claimed(ticket, Finding).outcome == "differs":
            accuser = ticket.signer
        self._tasks.spawn(self._run(Audit(round, name, work, link, ticket, accuser)))

    async def look(self, audit: Audit) -> Found | None:
        """Do an audit; None: it cannot be done here."""
        if not self._has_vote(PeerId(audit.work.peer)):
            return None
        found, after = await self._looked(audit)
        self._sealing.open(audit.name, audit.link.before, after if found is not None and is_equal(found) else None)
        return found

    async def _looked(self, audit: Audit) -> tuple[Found | None, NamedState | None]:
        """Return what an audit comes to, and what the worker has shown that it came to."""
        looking, shown, num_came = Looking(), _Shown(), 0
        patience = first = self._patience()
        while looking.phase != "ended":
            try:
                event = await self._act(audit, looking, shown)
            except Differs as error:
                event = Untrue(str(error), error.proof)
            except (Unknown, Away, OutOfMemory):
                event = Unable()
            except (NotShown, PeerError, NetError, Refused) as error:
                await asyncio.sleep(ASK_AGAIN_S)
                is_over = patience.is_over and not self.is_awaited(audit)  # what waits gains nothing by silence
                event = Missing(str(error), self._has_vote(PeerId(audit.work.peer)), is_over, first.is_over)
                shown = _Shown(shown.answer)
            if isinstance(event, Came) and num_came < MAX_CAME:
                num_came += 1
                patience = self._patience()  # what follows may be as slow as this machine's own line
            looking = step(looking, event)
        return looking.found, shown.after

    async def _act(self, audit: Audit, looking: Looking, shown: _Shown) -> Event:
        match looking.phase:
            case "asking":
                self._require_claim(audit)
                shown.answer = await self._asked(audit)
                return Came()
            case "making":
                assert shown.answer is not None
                shown.before, shown.mine = await self._made(audit, shown.answer)
                shown.own = await self._context.compute.serve(lambda: state_index(shown.mine))
                return Made(digest_of(shown.own))
            case "opening":
                assert looking.made is not None
                shown.opened, shown.theirs = await self._opened(audit, looking.made)
                shown.after = shown.opened.after
                return Opened(digest_of(shown.theirs))
            case "comparing":
                return Measured(await self._compared(audit, shown))
            case "ended":
                raise AssertionError("an audit that has ended does nothing")

    def is_awaited(self, audit: Audit) -> bool:
        """Return whether a work waits for others to look at it."""
        charter, peer = self._rounds.chain.charter, PeerId(audit.work.peer)
        return quarantine.awaits(charter, peer, audit.round, audit.name)

    def _patience(self) -> Patience:
        return Patience(self._rounds, self._context.clock)

    def _has_vote(self, peer: PeerId) -> bool:
        return peer in self._rounds.chain.base.electorate

    async def _run(self, audit: Audit) -> None:
        if not self._trainer.is_parked and (found := await self.look(audit)) is not None:
            self._on_found(audit, found)

    # --- step by step ---

    async def _made(self, audit: Audit, answer: AuditAnswer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Check what the worker shows; return the state before the steps, and what this machine comes to by them."""
        work, link = audit.work, audit.link
        heads = [self._heads.known(Digest(segment.head)) for segment in work.segments]
        if any(head is None for head in heads):
            raise Unknown
        known = [head for head in heads if head is not None]
        await self._check_begins(audit, answer, known)
        last = await self._index(audit, answer.last, num_states(work.segments, self._trace_every) - 1, work)
        outer, head = (await self._pulled(audit, _alone(known[-1].outer)))[OUTER], known[link.segment]
        await self._check_payload(audit, answer, last, known[-1], outer)
        if head is not known[-1]:
            outer = (await self._pulled(audit, _alone(head.outer)))[OUTER]
        state = await self._pulled(audit, await self._index(audit, answer.before, link.before, work))
        return state, await self._repeated(audit, state, outer, head)

    async def _repeated(self, audit: Audit, state: dict[str, Tensor], outer: Tensor, head: Head) -> dict[str, Tensor]:
        """Return the state that this machine comes to by the steps."""
        work, link, run = audit.work, audit.link, self._replica.run
        num_before = work.num_before + sum(segment.num_steps for segment in work.segments[: link.segment])
        segment = work.segments[link.segment]
        try:
            async with self._context.learner_lock:
                made = self._context.compute.train(
                    lambda: repeat(
                        self._trainer, run, head, segment, state, outer, num_before, link.first, link.num_steps
                    )
                )
                return await to_the_end(made)  # the trainer is this peer's own again
        except (DataError, CheckpointError) as error:
            raise Differs(str(error)) from None
        except NotFinite as error:
            raise Differs(f"its state is none to go on from: {error}") from None

    async def _opened(self, audit: Audit, made: Digest) -> tuple[AuditOpened, StateIndex]:
        """Seal what this machine came to; return what the worker did, and the list of that."""
        letter = self._sealing.tell(audit.name, audit.link.before, made)
        request = AuditSealed(work=audit.name, ticket=audit.ticket, letter=letter)
        opened = await self._context.node.call(PeerId(audit.work.peer), request, AuditOpened, deadline_s=CALL_S)
        return opened, await self._index(audit, opened.after, audit.link.before + 1, audit.work)

    async def _compared(self, audit: Audit, shown: _Shown) -> Found:
        serve, trust = self._context.compute.serve, self._replica.run.trust
        assert isinstance(trust, AuditedTrust)
        own, index, before, mine = shown.own, shown.theirs, shown.before, shown.mine
        assert own is not None
        assert index is not None
        theirs = await self._pulled(audit, index)
        unequal = [each for each in mine if index.vector(each).chunks != own.vector(each).chunks]
        apart = await serve(lambda: {each: distance(before[each], mine[each], theirs[each]) for each in unequal})
        most = {LOCAL: threshold(trust.numerics, audit.link.num_steps)}
        others = threshold_of_moments(trust.numerics, audit.link.num_steps)
        wrong = [each for each, far in apart.items() if not far <= most.get(each, others)]
        if wrong:
            what = "parameters" if wrong == [LOCAL] else f"numbers ({', '.join(wrong)})"
            why, far = f"it came to other {what} by these training steps", max(apart.values())
            return Found("differs", why, far, await self._proof_of_step(audit, shown, theirs))
        return Found("equal", distance=apart.get(LOCAL, 0.0))

    def _require_claim(self, audit: Audit) -> None:
        """
        Raises:
            Differs, Unknown: as `_check_claim`.
        """
        work = audit.work
        try:
            self._check_claim(work)
        except Differs as error:
            heads = [self._heads.known(Digest(segment.head)) for segment in work.segments]
            grounds = [(head.manifest, head.charter) for head in heads if head is not None]
            raise Differs(str(error), self._proof(audit, lambda: prove_claim(work, grounds))) from None

    def _proof(self, audit: Audit, prove: Callable[[], Falsehood], *more: Signed | None) -> Warrant | None:
        """Return what shows that a work is false.

        Args:
            more: letters that it takes beside the work.
        """
        letters = [letter for letter in (self._rounds.works.signed(audit.name), *more) if letter is not None]
        return proof(letters, prove) if len(letters) == 1 + len(more) else None

    async def _proof_of_step(self, audit: Audit, looked: _Shown, theirs: dict[str, Tensor]) -> Warrant | None:
        """Return what shows that the optimizer did not make a step, if it did not: by the gradient that the worker has
        signed, which may be another than this machine's."""
        opened, letter = looked.opened, self._rounds.works.signed(audit.name)
        head = self._heads.known(Digest(audit.work.segments[audit.link.segment].head))
        named = None if looked.answer is None else looked.answer.before
        if opened is None or opened.made is UNSET or opened.after is None or looked.theirs is None:
            return None
        if head is None or letter is None or named is None:
            return None
        try:
            made = unseal(opened.made, MadeStep, verify)
            index = await self._listed(audit, Digest(made.gradient))
            if index.shape != {GRADIENT: self._shape[LOCAL]}:
                return None
            slope = (await self._pulled(audit, index))[GRADIENT]
            before = shown_state(named, await self._listed(audit, Digest(named.state)))
        except (Differs, NotShown, PeerError, NetError, Refused):
            return None  # who shows nothing is judged by a majority
        letters, states = (letter, opened.made), (before, shown_state(opened.after, looked.theirs))
        vectors = (looked.before, theirs)
        found = await self._context.compute.serve(lambda: of_step(letters, head, states, vectors, slope))
        return found or await self._proof_of_gradient(audit, letter, made, head, before, looked.before[LOCAL])

    async def _proof_of_gradient(
        self, audit: Audit, letter: Signed, made: MadeStep, head: Head, before: ShownState, parameters: Tensor
    ) -> Warrant | None:
        """Return what shows that a gradient is not that of its samples, if it is not.

        Args:
            letter: the work; made: what its worker signed of the step.
            before: the state before the step, and its `parameters`.
        """
        run, segment = self._replica.run, audit.work.segments[audit.link.segment]
        assert isinstance(run, RunConfig)
        try:
            words = await self._context.compute.train(
                lambda: words_of(self._trainer, run, head, segment, audit.link.first)
            )
        except DataError:
            return None
        doubted = Doubted(letter, audit.ticket, audit.name, made, head, before, parameters, words)
        gradients = Gradients(self._context, self._trainer, run.data, self._list_of, self._vectors_of)
        return await gradients.proof(doubted, self._patience())

    async def _proof_of_payload(
        self, audit: Audit, answer: AuditAnswer, head: Head, vectors: tuple[Tensor, Tensor], right: Sequence[Buffer]
    ) -> Warrant | None:
        """Return what shows that a payload was not made of the last state, if it was not.

        Args:
            vectors: the parameters that the work began with, and those that it ended with.
            right: the parts of the payload that was to be made of them.
        """
        work, parts = audit.work, parts_in(self._kept.listed(Digest(audit.work.payload)) or b"")
        if len(parts) != len(right) or not answer.begins or answer.last is None:
            return None
        try:
            payload = [await self._part(audit, each, own) for each, own in zip(parts, right, strict=True)]
            named = answer.begins[0], answer.last
            first, last = [shown_state(each, await self._listed(audit, Digest(each.state))) for each in named]
        except (Differs, PeerError, NetError, Refused):
            return None
        before, after = (each.numpy() for each in vectors)
        return await self._context.compute.serve(
            lambda: self._proof(
                audit, lambda: prove_payload(work, ground(head), (first, last), (before, after), payload, right)
            )
        )

    async def _part(self, audit: Audit, wanted: Digest, own: Buffer) -> Buffer:
        """Return a part of the work's payload, which is no longer than this machine's own."""
        num, node = memoryview(own).nbytes, self._context.node
        return await node.fetch_within(PeerId(audit.work.peer), wanted, num, room) if num else b""

    def _check_claim(self, work: Work) -> None:
        """Check that what is claimed is as much as so many steps of these leases take."""
        tokens, before = 0, None
        for number, segment in enumerate(work.segments):
            head = self._heads.known(Digest(segment.head))
            if head is None:
                oldest = self._heads.oldest
                if oldest is not None and oldest <= segment.round:
                    raise Differs("it names a round that there has not been")
                raise Unknown
            if head.manifest.round != segment.round or (number and head.manifest.previous != before):
                raise Differs("its segments do not follow each other from round to round")
            mine = len(lease_of(head.manifest.leases, PeerId(work.peer)))
            if segment.num_steps and segment.holder != work.peer and mine:
                raise Differs("it trained on what was leased to another")
            tokens += segment.num_steps * head.charter.settings.tokens_per_step
            before = digest_of(head.manifest)
        if tokens != work.tokens:
            raise Differs("it claims other tokens than its training steps take")
        counted = self._heads.last_counted(PeerId(work.peer), Round(work.round))
        if counted is not None and work.segments[0].round < counted:
            raise Differs("it trained on samples that a round had counted already")

    async def _check_begins(self, audit: Audit, answer: AuditAnswer, heads: Sequence[Head]) -> None:
        """Check what the first state of each segment follows from."""
        work, every = audit.work, self._trace_every
        if len(answer.begins) != len(heads) or len(answer.ends) != len(heads) - 1:
            raise NotShown("it does not show how its segments begin and end")
        for number, (head, named) in enumerate(zip(heads, answer.begins, strict=True)):
            at = state_before(work.segments, every, number)
            begin = await self._index(audit, named, at, work)
            if number == 0:
                if begin.vector(LOCAL).chunks != head.outer.chunks:
                    raise Differs("it did not begin at the run's parameters")
                await self._check_optimizer(audit, answer, shown_state(named, begin), begin.without(LOCAL))
                continue
            ended = await self._index(audit, answer.ends[number - 1], at - 1, work)
            if ended.without(LOCAL) != begin.without(LOCAL):
                before, after = shown_state(answer.ends[number - 1], ended), shown_state(named, begin)
                prove = partial(prove_move, work, ground(heads[0]), number, before, after)
                raise Differs("its optimizer is another after a round", self._proof(audit, prove))
            moved = await self._moved(audit, ended, heads[number - 1], head)
            if moved != begin.vector(LOCAL).chunks:
                raise Differs("it did not keep what it had when it was moved to other parameters")

    async def _moved(self, audit: Audit, ended: StateIndex, head: Head, after: Head) -> tuple[str, ...]:
        """Return the digests of what a segment's last parameters are after the next round: as far from the outer ones
        as before."""
        local = (await self._pulled(audit, ended, {LOCAL}))[LOCAL]
        outer = (await self._pulled(audit, _alone(head.outer)))[OUTER]
        moved = (await self._pulled(audit, _alone(after.outer)))[OUTER]
        delta = method_at(self._replica.run, head).delta

        def chunks() -> tuple[str, ...]:
            return state_index({LOCAL: moved.sub_(delta(outer, local))}).vector(LOCAL).chunks

        return await self._context.compute.serve(chunks)

    async def _check_optimizer(
        self, audit: Audit, answer: AuditAnswer, first: ShownState, memory: tuple[VectorIndex, ...]
    ) -> None:
        """Check that the first optimizer is that of the work before, or a new one.

        Args:
            first: the first state; memory: its optimizer.
        """
        work = audit.work
        if work.follows is None:
            zeros = {each.name: torch.zeros(each.num) for each in memory}
            fresh = await self._context.compute.serve(lambda: state_index(zeros))
            is_said = not work.num_before and work.error is None
            if fresh.vectors != memory or not is_said:
                prove = partial(prove_start, work, None, first if is_said else None)
                raise Differs("it says that its optimizer is new, and it is not", self._proof(audit, prove))
            return
        follows = Digest(work.follows)
        before_it = self._rounds.works.known(follows) or await self._rounds.works.fetch(follows, [PeerId(work.peer)])
        if before_it is None or answer.followed is None:
            raise NotShown("it does not show the work that its optimizer goes on from")
        counted_in, oldest = self._heads.counted_in(follows), self._heads.oldest
        if before_it.peer != work.peer or before_it.run != work.run:
            raise Differs("its optimizer goes on from work that was not its own")
        if counted_in is None and oldest is not None and before_it.round > oldest:
            raise Differs("its optimizer goes on from work that no round has counted")
        letter = self._rounds.works.signed(follows)
        if work.num_before != before_it.num_before + before_it.num_steps or work.error != before_it.left:
            by_words = self._proof(audit, partial(prove_start, work, letter), letter)
            raise Differs("it does not go on from the work that it names", by_words)
        at = num_states(before_it.segments, self._trace_every) - 1
        ended = await self._index(audit, answer.followed, at, before_it)
        if ended.without(LOCAL) != memory:
            prove = partial(prove_start, work, letter, first, shown_state(answer.followed, ended))
            raise Differs("its optimizer does not go on from the work that it names", self._proof(audit, prove, letter))

    async def _check_payload(
        self, audit: Audit, answer: AuditAnswer, last: StateIndex, head: Head, outer: Tensor
    ) -> None:
        """Check that the payload was made of the last state."""
        work, error = audit.work, None
        local = (await self._pulled(audit, last, {LOCAL}))[LOCAL]
        if work.error is not None:
            index = await self._listed(audit, Digest(work.error))
            if index.shape.keys() != {ERROR} or index.shape[ERROR] > 2 * outer.numel():
                raise Differs("what its codec had left before is no such thing")
            error = (await self._pulled(audit, index))[ERROR]
        try:
            parts, left = await self._context.compute.serve(lambda: self._encoded(work, head, outer, local, error))
        except (NotFinite, RuntimeError, ValueError) as failure:  # of its numbers, or of how many there are
            raise Differs(f"no payload can be made of its last state: {first_line(failure)}") from None
        if payload_of(map(digest, parts)) != work.payload:
            found = await self._proof_of_payload(audit, answer, head, (outer, local), parts)
            raise Differs("its payload is not what its training steps came to", found)
        if left != work.left:
            raise Differs("what its codec left is not what it says")

    def _encoded(
        self, work: Work, head: Head, outer: Tensor, local: Tensor, error: Tensor | None
    ) -> tuple[tuple[Buffer, ...], Digest | None]:
        run, scope = self._replica.run, self._replica.scope
        encoded, left = payload_of_end(run, head, scope, Round(work.round), outer, local, error)
        return encoded, named_error(left)

    # --- what the worker shows ---

    @property
    def _trace_every(self) -> int:
        audits = self._replica.charter.audits
        assert audits
        return audits.trace_every

    async def _asked(self, audit: Audit) -> AuditAnswer:
        request = AuditRequest(work=audit.name, ticket=audit.ticket)
        answer = await self._context.node.call(PeerId(audit.work.peer), request, AuditAnswer, deadline_s=CALL_S)
        if not answer.is_ready:
            raise NotShown(answer.reason)
        return answer

    async def _index(self, audit: Audit, named: NamedState | None, number: int, work: Work) -> StateIndex:
        """Return the list of a state that the worker shows, which is the one of this number that the work has named."""
        if named is None:
            raise NotShown("it does not show a state that it has named")
        if not is_named(Digest(work.trace), work.segments, self._trace_every, number, named):
            raise NotShown("it shows a state that it has not named")
        index = await self._listed(audit, Digest(named.state))
        if index.shape != self._shape:
            raise Differs("what it has named is no state of this model")
        return index

    async def _listed(self, audit: Audit, name: Digest) -> StateIndex:
        return await self._list_of(PeerId(audit.work.peer), name)

    async def _list_of(self, peer: PeerId, name: Digest) -> StateIndex:
        data = await self._context.node.fetch_small(peer, name, MAX_INDEX_NBYTES)
        try:
            return decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)  # type: ignore[no-any-return]
        except WireError as error:
            raise Differs(f"what it has named is no state: {error}") from None

    async def _pulled(self, audit: Audit, index: StateIndex, names: set[str] | None = None) -> dict[str, Tensor]:
        """Return vectors of an index, all fetched of the worker."""
        return await self._vectors_of(PeerId(audit.work.peer), index, names)

    async def _vectors_of(self, peer: PeerId, index: StateIndex, names: set[str] | None = None) -> dict[str, Tensor]:
        wanted = [each for each in index.vectors if names is None or each.name in names]
        vectors = {each.name: torch.empty(each.num) for each in wanted}

        def put(name: str, start: int, data: Buffer) -> None:
            piece = torch.frombuffer(bytearray(data), dtype=torch.float32)
            vectors[name][start : start + len(piece)] = piece

        await self._client.pull(index, [peer], put, names)
        return vectors


def distance(before: Tensor, mine: Tensor, theirs: Tensor) -> float:
    """Return how far two states lie apart, relative to what the steps changed: infinite where one is no number."""
    moved, apart = float((mine - before).double().norm()), float((theirs - mine).double().norm())
    if not isfinite(apart):
        return inf
    return apart / moved if moved else inf if apart else 0.0


def _alone(vector: VectorIndex) -> StateIndex:
    return StateIndex(vectors=(vector,))
