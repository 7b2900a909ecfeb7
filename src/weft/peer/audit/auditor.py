"""An auditor's part: it draws, asks, does the steps again, and says what came of it.

    decided    a ticket of its own signature draws what it audits (`weft.verify.draw`)
    claimed    it is not more than such steps come to                                      (`weft.peer.audit.checks`)
    asked      lists of states: what each segment began and ended with, what the payload was made of, and what the steps
               begin with
    followed   each state follows from what was before it, and the payload from the last   (`weft.peer.audit.checks`)
    done       the same steps on this machine
    sealed     the digest of what it came to, and of a number that it keeps: before it is shown the worker's (`sealing`)
    opened     what the worker came to: equal, or as near as two honest machines are, or not; then the seal, too
    rounded    in fp32, where it is not: the steps three times more, to see how far rounding leads (`steps`)

    found      equal | differs | unanswered

Where anybody can be shown that it differs, that is found with it (`proving`): then nobody has to vote.

Failure:
- the worker does not answer within `Patience`, or shows what it has not named, or delivers so slowly that it is not
  done in as much time as several answers may take: unanswered.
- this machine cannot do the steps (no memory, paused), or does not know what a segment began at: it says nothing.
- the worker has left: likewise.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import UNSET
from torch import Tensor

from weft.cost.audits import MAX_DOUBTING
from weft.errors import CheckpointError, DataError, NetError, NotFinite, OutOfMemory, PeerError, Refused
from weft.ids import Digest, PeerId, Round
from weft.keys import verify
from weft.peer.audit.checks import Audit, Begun, Checks, Differs, NotShown, Unknown
from weft.peer.audit.heads import Head, Heads
from weft.peer.audit.kept import Kept
from weft.peer.audit.looking import (
    Came,
    Event,
    Looking,
    Looks,
    Made,
    Measured,
    Missing,
    Opened,
    Unable,
    Untrue,
    chosen,
    is_equal,
    step,
)
from weft.peer.audit.outcome import ASK_AGAIN_S, MAX_CAME, TOLD_ROUNDS, TOLD_S, Found, Patience
from weft.peer.audit.proofs.operations import Doubted, Gradients
from weft.peer.audit.proofs.proving import of_step, shown_state
from weft.peer.audit.sealing import Sealing
from weft.peer.audit.steps import (
    LOCAL,
    Away,
    Compared,
    by_moments,
    distance,
    farthest,
    followed,
    held_of,
    is_told_by_moments,
    lean,
    led_apart,
    repeat,
    some_roundings_off,
    why_beyond,
    widened_by,
    words_of,
)
from weft.peer.audit.trace import Trace
from weft.peer.context import Context
from weft.peer.messages import AuditAnswer, AuditOpened, AuditRequest, AuditSealed, NamedState
from weft.peer.round.driver import RoundDriver
from weft.peer.state.replica import Replica
from weft.run.config import RunConfig
from weft.run.trust import AuditedTrust
from weft.store.chunks import state_index
from weft.sync.records import quarantine
from weft.sync.records.acts import Finding, Warrant
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import Manifest
from weft.sync.records.work import Link, MadeStep, Work, link, link_from, num_links, num_states
from weft.tasks import Tasks, to_the_end
from weft.training.trainer import Trainer
from weft.verify.draw import drawn
from weft.verify.evidence.records import ShownState
from weft.verify.evidence.steps import GRADIENT
from weft.verify.judge import NUM_ROUNDINGS, Followed
from weft.wire import Signed, claimed, digest_of, unseal

MAX_BEGUN = 1024  # audits that are remembered
CALL_S = 20.0

OnWork = Callable[[Work], object]


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
    unreached: str | None = None  # why no training leads to what is shown, if none does
    begun: tuple[Tensor, Head] | None = None  # the outer parameters that the steps' segment began at


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
        trace: Trace,
        sealing: Sealing,
        tasks: Tasks,
        on_found: Callable[[Audit, Found], None],
    ) -> None:
        self._context = context
        self._trainer = trainer
        self._replica = replica
        self._rounds = rounds
        self._heads = heads
        self._sealing = sealing
        self._tasks = tasks
        self._on_found = on_found
        self._checks = Checks(context, trainer, replica, rounds.works, heads, kept, trace)
        # Works and states before steps, each of which is looked at once; and who has found a fault with which works.
        self._begun: dict[tuple[Digest, int | PeerId], None] = {}
        self._looks = Looks()
        self._rounding = asyncio.Lock()  # what it holds is held once
        self._doubting = dict[PeerId, asyncio.Semaphore]()  # by who has found a fault
        self._sought = dict[Digest, dict[PeerId, OnWork]]()  # works that are asked for, and whose tickets wait for them

    def follow(self, manifest: Manifest, ticket: Signed, times: Callable[[PeerId], float]) -> None:
        """Draw which works this peer audits of a round that is decided, and whose outer step is made.

        Args:
            times: as often as others a peer is audited.
        """
        charter = self._replica.charter
        audits = charter.audits
        assert audits
        of, heads = digest_of(manifest), self._heads
        judges, cleared = partial(heads.judges, of), partial(heads.was_cleared, of)
        for peer, name, rate, num in chosen(manifest, charter, ticket, judges, times, cleared):
            begin = partial(self._drawn, manifest.round, name, ticket, rate, num, audits.trace_every)
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
        audits, name = self._replica.charter.audits, Digest(verdict.work)
        if not self._is_recent(verdict.round):
            return False
        if not audits or verdict.round not in (self._heads.counted_in(name), self._heads.held_in(name)):
            return False
        if (work := self._rounds.works.known(name)) is not None:
            return self._doubted(letter, verdict, audits.trace_every, work)
        self._seek(name, PeerId(verdict.peer), letter, partial(self._doubted, letter, verdict, audits.trace_every))
        return True

    def _is_recent(self, round: Round) -> bool:
        """Return whether a work was counted, or began to wait, so lately that its worker has to be able to show it."""
        newest, now = self._rounds.chain.head.round, self._context.clock.now()
        return self._heads.is_recent(round, newest, TOLD_ROUNDS, TOLD_S, now)

    def _doubted(self, letter: Signed, verdict: Finding, trace_every: int, work: Work) -> bool:
        doubted, name = link_from(work.segments, trace_every, verdict.before), Digest(verdict.work)
        if work.peer != verdict.peer or doubted is None:
            return False
        if (name, letter.signer) in self._begun:
            return True  # of one work what each doubts first: a worker need not show more
        is_new, newest = (name, doubted.before) not in self._begun, self._rounds.chain.head.round
        if verdict.outcome == "unanswered" and is_new and not self._looks.may(letter.signer, newest):
            return True
        self._begun[name, letter.signer] = None
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
        if not self._has_vote(audit.peer):
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
                is_over = audit.until() or (patience.is_over and not self.is_awaited(audit))
                event = Missing(str(error), self._has_vote(audit.peer), is_over, first.is_over)
                shown = _Shown(shown.answer)
            if isinstance(event, Came) and num_came < MAX_CAME:
                num_came += 1
                patience = self._patience()  # what follows may be as slow as this machine's own line
            looking = step(looking, event)
        found = looking.found
        if found is not None and is_equal(found) and shown.unreached is not None:
            found = Found("differs", shown.unreached)  # the steps may be right where nobody has trained
        return found, shown.after

    async def _act(self, audit: Audit, looking: Looking, shown: _Shown) -> Event:
        match looking.phase:
            case "asking":
                self._checks.claim(audit)
                shown.answer = await self._asked(audit)
                return Came()
            case "making":
                await self._make(audit, shown)
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
        """Return whether a work waits for others to look at it: it gains nothing by silence."""
        return self._awaits(audit.peer, audit.round, audit.name)

    def _awaits(self, peer: PeerId, round: Round, name: Digest) -> bool:
        return quarantine.awaits(self._rounds.chain.charter, peer, round, name)

    def _is_over(self, whole: Patience, peer: PeerId, round: Round, name: Digest) -> bool:
        return whole.is_over and not self._awaits(peer, round, name)

    def _patience(self, times: int = 1) -> Patience:
        return Patience(self._rounds, self._context.clock, times)

    def _has_vote(self, peer: PeerId) -> bool:
        return peer in self._rounds.chain.base.electorate

    async def _run(self, audit: Audit) -> None:
        if audit.ticket.kind != Finding.__name__:
            await self._begun_now(audit)
            return
        async with self._doubting.setdefault(audit.ticket.signer, asyncio.Semaphore(MAX_DOUBTING)):
            if self._is_recent(audit.round):
                await self._begun_now(audit)

    async def _begun_now(self, audit: Audit) -> None:
        until = partial(self._is_over, self._patience(1 + MAX_CAME), audit.peer, audit.round, audit.name)
        if not self._trainer.is_parked and (found := await self.look(replace(audit, until=until))) is not None:
            self._on_found(audit, found)

    # --- step by step ---

    async def _asked(self, audit: Audit) -> AuditAnswer:
        request = AuditRequest(work=audit.name, ticket=audit.ticket)
        answer = await self._context.node.call(audit.peer, request, AuditAnswer, deadline_s=CALL_S)
        if not answer.is_ready:
            raise NotShown(answer.reason)
        return answer

    async def _make(self, audit: Audit, shown: _Shown) -> None:
        """Check what the worker shows, and make the steps."""
        work, link, answer = audit.work, audit.link, shown.answer
        assert answer is not None
        checks, heads = self._checks, self._checks.heads_of(work)
        await checks.begins(audit, answer, heads)
        last = await checks.index(audit, answer.last, num_states(work.segments, checks.trace_every) - 1, work)
        outer, head = await checks.outer(audit, heads[-1]), heads[link.segment]
        why = await checks.payload(audit, answer, last, Begun(len(heads) - 1, heads, outer))
        if head is not heads[-1]:
            outer = await checks.outer(audit, head)
        shown.begun = outer, head
        shown.before, no_training = await checks.drawn_from(audit, answer, Begun(link.segment, heads, outer))
        shown.unreached = no_training or why
        shown.mine = await self._repeated(audit, shown.before, outer, head)

    async def _repeated(self, audit: Audit, state: dict[str, Tensor], outer: Tensor, head: Head) -> dict[str, Tensor]:
        """Return the state that this machine comes to by the steps."""
        link, run, segment = audit.link, self._replica.run, audit.work.segments[audit.link.segment]
        try:
            async with self._context.learner_lock:
                made = self._context.compute.train(
                    lambda: repeat(
                        self._trainer,
                        run,
                        head,
                        segment,
                        state,
                        outer,
                        audit.num_before_segment,
                        link.first,
                        link.num_steps,
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
        opened = await self._context.node.call(audit.peer, request, AuditOpened, deadline_s=CALL_S)
        return opened, await self._checks.index(audit, opened.after, audit.link.before + 1, audit.work)

    async def _compared(self, audit: Audit, shown: _Shown) -> Found:
        serve, trust = self._context.compute.serve, self._replica.run.trust
        assert isinstance(trust, AuditedTrust)
        own, index, before, mine = shown.own, shown.theirs, shown.before, shown.mine
        assert own is not None
        assert index is not None
        theirs = await self._checks.pulled(audit, index)
        unequal = [each for each in mine if index.vector(each).chunks != own.vector(each).chunks]
        apart = await serve(lambda: {each: distance(before[each], mine[each], theirs[each]) for each in unequal})
        held = held_of(trust.numerics, audit.link.num_steps, {LOCAL, *apart}, is_new=audit.is_new)
        why, far = why_beyond(apart, held), None if trust.is_exact else farthest(apart, held)
        if unequal and is_told_by_moments(trust.numerics, far):
            found = await self._followed(audit, Compared(before, mine, theirs, apart))
            if found is not None:
                why, far = by_moments(trust.numerics, found, why, far)
        if trust.numerics == "fp32" and why is not None:
            held = widened_by(held, audit.link.num_steps, await self._rounded(audit, shown))
            why, far = why_beyond(apart, held), farthest(apart, held)
        if why is not None:
            shows = await self._proof_of_step(audit, shown, theirs)
            return Found("differs", why, max(apart.values()), shows, far)
        side = await serve(lambda: lean(before[LOCAL], mine[LOCAL], theirs[LOCAL]) if LOCAL in apart else 0.0)
        return Found("equal", distance=apart.get(LOCAL, 0.0), apart=far, lean=side)

    async def _followed(self, audit: Audit, both: Compared) -> Followed | None:
        """Return how the worker's parameters lie to its own moments; None: that cannot be told."""
        segment, link = audit.work.segments[audit.link.segment], audit.link
        head, run = self._heads.known(Digest(segment.head)), self._replica.run
        if head is None or link.num_steps != 1:
            return None
        return await self._context.compute.serve(
            lambda: followed(run, head, segment, link.first, audit.num_before_segment, both)
        )

    async def _rounded(self, audit: Audit, shown: _Shown) -> list[dict[str, float]]:
        """Return how far rounding alone leads by these steps, by vector, each time that they are made once more."""
        found = list[dict[str, float]]()
        async with self._rounding:
            for number in range(NUM_ROUNDINGS):
                with suppress(Differs):
                    found.append(await self._led(audit, shown, number))
        return found

    async def _led(self, audit: Audit, shown: _Shown, number: int) -> dict[str, float]:
        serve = self._context.compute.serve
        assert shown.begun is not None
        off = await serve(partial(some_roundings_off, shown.before, number))
        away = await self._repeated(audit, off, *shown.begun)
        made = shown.before, shown.mine
        return await serve(partial(led_apart, audit.link.num_steps, made, (off, away)))

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
            index = await self._checks.listed(audit, Digest(made.gradient))
            if index.shape != {GRADIENT: self._checks.shape[LOCAL]}:
                return None
            slope = (await self._checks.pulled(audit, index))[GRADIENT]
            before = shown_state(named, await self._checks.listed(audit, Digest(named.state)))
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
        gradients = Gradients(
            self._context,
            self._trainer,
            run.data,
            partial(self._checks.listed, audit),
            partial(self._checks.pulled, audit),
        )
        try:
            return await gradients.proof(doubted, self._patience())
        except NotShown:
            return None
