"""A peer of one run: trains, takes part in rounds, keeps and gives the state, comes and goes.

    peer = Peer(run, context)
    outcome = await peer.found(wait_for=4)     # the run's maker
    outcome = await peer.join()                # everybody else

The main loop is short: train the leased samples, encode what they changed, announce it, make the outer step that the
members agree on, and go on. What a manifest did not count stays in the carry and goes into the next round. Everything
else happens beside it: requests for state and chain, branches, evaluation.

Failure:
- this peer missed rounds: it replays the results it finds, or fetches the whole state, and asks to be a member again.
- the majority is lost: after `orphan_after` those that remain open a branch.
- it is told to stop: it says goodbye, saves, and returns, wherever it stands. A step under way is waited for, and what
  warms up is not; of a long step the others hear the goodbye before its end.
- it is told to pause (`pausing`): it trains no more and frees its device, and stays a member that votes and follows.
- something breaks here (the disk, a loss that is not finite, weft itself): it says goodbye where it still can, and
  raises; the last checkpoint stays.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import UNSET

from weft import __version__
from weft.errors import ActVoid, PeerError, Removed
from weft.events import Emit, Event, Notice, PeerStarted, PeerStopped, WorkDropped
from weft.ids import BranchId, Digest, PeerId, Tokens
from weft.net.membership.full_mesh import Gone, Left, New, Recovered, Suspected
from weft.net.membership.membership import Membership
from weft.peer.audit.audits import Audits
from weft.peer.chain import Chain
from weft.peer.context import Context, Outcome
from weft.peer.fork import Split
from weft.peer.group.groups import Groups
from weft.peer.group.records import GroupRecords
from weft.peer.join.backpressure import Hold
from weft.peer.join.check import EntryCheck
from weft.peer.join.entrance import Entrance
from weft.peer.join.past import PastRounds
from weft.peer.join.state_transfer import StateServer
from weft.peer.loop.answers import WHY_PAUSED, Draws, Helpers
from weft.peer.loop.contribution import Ahead, LeaseTraining, Offering, leased_instead, until_needed
from weft.peer.loop.evaluate import evaluator_of, make_evaluator
from weft.peer.loop.lifecycle import Pause, Shutdown, Stopped
from weft.peer.loop.outliers import Sentinel
from weft.peer.loop.report import Report
from weft.peer.round.driver import Decided, Participation, RoundDriver
from weft.peer.state.autosave import Autosave
from weft.peer.state.carry import FORGOTTEN, FROM_FALSE_STATE, MADE_TWICE, OUTDATED, Carry
from weft.peer.state.checkpoint import Snapshot
from weft.peer.state.mixing import Met
from weft.peer.state.naming import StateNaming
from weft.peer.state.replica import Replica
from weft.run.config import Genesis, RunConfig
from weft.store.journal import Votes
from weft.sync.governance import votes_of
from weft.sync.records.acts import Act, Amend
from weft.sync.records.messages import GroupRecord, Manifest, claims_in, own_work
from weft.tasks import Tasks
from weft.training.device import best
from weft.training.rewarded import RewardedTrainer
from weft.training.trainer import Trainer
from weft.wire import seal

__all__ = ["Context", "Outcome", "Peer"]

COMPLETE = "the run is complete: nothing is left to train"
SLOWEST = 1e-3  # tokens a second
LAG_S = 1.0  # between two looks whether others are further

Begin = Callable[[], Coroutine[Any, Any, Manifest]]


@dataclass(frozen=True)
class InRounds:
    """What a peer works with once it takes part in rounds."""

    rounds: RoundDriver
    groups: Groups
    offering: Offering
    ahead: Ahead
    sentinel: Sentinel


class Peer:
    def __init__(self, run: Genesis, context: Context) -> None:
        self.context = context
        self.replica = Replica(run, context.initial)
        self._trainer = context.make_learner(_emit_from_thread(context.emit))
        self._carry = Carry(self._trainer, self.replica)
        self._records = GroupRecords(context, self._carry)
        self.pausing = Pause(context, self._trainer, self.replica, self.fail)
        self._tasks = Tasks(self.fail)
        helpers: Helpers | None = None
        self._draws: Draws | None = None
        if isinstance(self._trainer, RewardedTrainer) and isinstance(run, RunConfig) and not run.is_private:
            if context.settings.is_drawing_only:
                rests = lambda: len(self.pausing.reasons) > 1  # noqa: E731  # that it trains nothing is the first
                self._draws = Draws(context, self._trainer, self.replica, rests)
                self.pausing.want(WHY_PAUSED)
            else:
                helpers = Helpers(context, self._trainer, self.replica, self._tasks, self._should_break_off)
        self._audits: Audits | None = None
        self._entry_check: EntryCheck | None = None
        if self.replica.charter.audits is not UNSET and isinstance(self._trainer, Trainer):
            emit = _emit_from_thread(context.emit)
            self._audits = Audits(context, self._trainer, self.replica, self._carry, emit, self._tasks)
            given = context, self._trainer, self.replica
            self._entry_check = EntryCheck(*given, self.pausing.ended, self._should_break_off)
        self._trace = None if self._audits is None else self._audits.trace
        self._training = LeaseTraining(
            context, self._trainer, self._carry, self._should_break_off, helpers, self._trace
        )
        self._helpers = helpers
        self._report = Report(context, self.replica, self._carry, self._training)
        self._membership = Membership(context.node, context.clock, context.emit, self._report.heartbeat, context.reader)
        self._membership.on_change(self._on_member)
        self._participation = participation = Participation(context.node)
        self._shutdown = Shutdown(context.node, self._membership, self.replica, participation, context.emit)
        self._naming = StateNaming(context, self.replica)
        self._entrance = Entrance(
            context, self._membership, self.replica, self._carry, self._records, participation, self._naming
        )
        self._hold = Hold(context, participation)
        self.pin = StateServer(context, self.replica, self._entrance.legacies, participation).pin
        self._evaluator = make_evaluator(context, self._trainer, self.replica, self._should_break_off)
        self._past = PastRounds(context, self.replica, self._records)
        beside = (lambda: None) if self._trace is None else self._trace.save
        here = (lambda _manifest: None) if self._audits is None else self._audits.earlier.here
        self._autosave = Autosave(context, self.replica, self._carry, self._trainer, beside, here)
        self._in_rounds: InRounds | None = None
        self._has_saved = False  # its last checkpoint
        self._shown: BranchId | None = None  # whose parameters texts are drawn with
        self._amends: Amend | None = None  # what waits to be decided, however much is trained

    @property
    def run(self) -> Genesis:
        return self.replica.run

    @property
    def peer(self) -> PeerId:
        return self.context.node.peer

    @property
    def head(self) -> Manifest | None:
        """Return the manifest of the last outer step that this peer has made; None: it has no state yet."""
        return self.replica.head

    @property
    def rounds(self) -> RoundDriver | None:
        """Return the rounds that it has come to, as a member or a newcomer; None: it has no state of the run yet."""
        return self._participation.rounds

    @property
    def takes_part(self) -> bool:
        """Whether it has the state of the run, and has come to its rounds."""
        return self.rounds is not None

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is lost if it ends now: it takes no part yet, or has said goodbye and saved."""
        return self._has_saved or not self.takes_part

    @property
    def carried_tokens(self) -> Tokens:
        """Return what this peer has trained and no manifest it knows has counted."""
        return self._carry.tokens

    def record(self, name: Digest) -> GroupRecord | None:
        return self._records.known(name)

    def standing(self, peer: PeerId) -> int | None:
        """Return what another is to whoever looks for the run; see `Membership.standing`."""
        return self._membership.standing(peer)

    # --- life ---

    async def found(
        self, *, wait_for: int = 1, snapshot: Snapshot | None = None, amends: Amend | None = None
    ) -> Outcome:
        """Begin the run once `wait_for` peers (this one included) are here, or go on where `snapshot` stands.

        Args:
            amends: decided in the next round, by this peer as the run's only member.

        Raises:
            ActVoid: it may not amend the run so.
            Exception: something broke that this peer cannot go on with: a `WeftError`, or what is no fault of anybody's
                but weft's, the system's or torch's. It has said goodbye where it could.
        """

        async def begin() -> Manifest:
            self._report.enter("waiting for peers")
            await self._evaluator.begin()
            opening = await self._entrance.gather(wait_for)
            await self._autosave.save()  # before anybody hears of it: a run is begun once
            self._entrance.begin(opening)
            self._evaluator.tell_begun()
            return opening

        self._amends = amends
        return await self._live(begin, snapshot)

    async def join(self, *, snapshot: Snapshot | None = None) -> Outcome:
        """Take part in a run that others keep, for the first time or again, with what `snapshot` holds.

        Raises:
            Exception: as `found`.
        """
        return await self._live(self._entrance.enter, snapshot)

    def stop(self, reason: str) -> None:
        """Say goodbye, save and return from `found` or `join`, soon."""
        self._shutdown.ask(reason)

    async def _live(self, begin: Begin, snapshot: Snapshot | None) -> Outcome:
        try:
            self._tasks.spawn(self._shutdown.say_if_slow())
            with suppress(Stopped):
                await self._shutdown.unless_asked(self._start(snapshot))
                self._tasks.spawn(self._entrance.backpressure.watch())
                self._report.enter("joining")
                head = self.replica.head
                if head is None or not self.is_complete:
                    head = await self._shutdown.unless_asked(self._come(begin))
                    if self.is_complete:
                        self.context.emit(Notice(text=COMPLETE))
                if not self.is_complete:
                    if self._entry_check is not None:
                        await self._shutdown.unless_asked(self._entry_check.run(head))
                    await self._take_part(head)
            if isinstance(self._shutdown.failure, Removed):
                await self._autosave.save()
            if self._shutdown.failure is not None:
                raise self._shutdown.failure
            return await self._finish()
        except Exception as error:  # of whatever kind: nobody should wait until this peer is suspected
            await self._shutdown.say_if_possible(error)
            raise
        finally:
            await self._close()

    async def _come(self, begin: Begin) -> Manifest:
        head = self.replica.head
        if head is None:
            return await begin()
        promised = Votes(self.context.folder.durable).read()
        return await self._entrance.resume(head, promised)

    def fail(self, error: Exception) -> None:
        """End soon, for what this peer cannot go on with: `found` or `join` raises it."""
        self._shutdown.fail(error)

    # --- the main loop ---

    async def _take_part(self, head: Manifest) -> None:
        # Before anything asks to be counted in, or for an aggregator.
        await self._shutdown.unless_asked(self.pausing.renew())
        self._report.tell_graph(head)
        chain = Chain(head, self.replica.charter)
        self._autosave.hand_on(chain)
        rounds = RoundDriver(self.context, chain, self.replica.scope, self.fail)
        # Who trains nothing says that it is slow, and is leased little that nobody trains on.
        speed = lambda: SLOWEST if self._draws else self._training.tokens_per_s  # noqa: E731
        sentinel = Sentinel(self.peer, self.context.emit, self.run.method, rounds.merger)
        rounds.recall()
        if self._amends is not None:
            self._hand_in(rounds, self._amends)
        groups = Groups(self.context, rounds, self._records, self._evaluator, speed, self._tasks)
        offering = Offering(self.context, self.replica, self._carry, self._entrance.legacies, groups, self._audits)
        split = Split(self.run, self.context, rounds)
        is_staged = self.context.companion is not None  # where inner steps are made by all stages together
        is_bound = is_staged or self._trace is not None  # what was made ahead could not be told which lease it is of
        is_over = lambda: self._shutdown.is_asked or self.pausing.is_away or is_bound  # noqa: E731
        ahead = Ahead(self.context, self._training, self._carry, split.lost, is_over)
        self._in_rounds = mine = InRounds(rounds, groups, offering, ahead, sentinel)
        if self._audits is not None:
            self._audits.begin(rounds)
            sentinel.on_strays(self._audits.suspicion.strays)
        self._participation.enter(rounds)
        for peer in self._entrance.askers():
            rounds.notice(peer, "joining")
        rounds.begin()
        await self._past.begin(self._entrance.signed_opening)
        self._tasks.spawn(self._past.watch())
        # Of gossip nobody knows here which round's mean it is.
        if not head.is_gossip and (head.committed_tokens or not head.round):
            await self._shutdown.unless_asked(self._show(head))
        self._tasks.spawn(split.watch())
        if not is_staged:  # a leaf's payload goes through another, and its stage would not know what is in it
            self._tasks.spawn(groups.leaf.watch(lambda: self._entrance.backpressure.is_near))
        self._tasks.spawn(self._entrance.fork_watch.watch(rounds))
        self._tasks.spawn(self._watch_lag(mine))
        self._participation.read_early(rounds)
        while not self.is_finishing:
            await self._go_on(rounds)
            self._membership.pin(groups.pins())
            rounds.quorum.link_all(groups.links_electorate)
            if groups.is_outside:
                self._report.enter("joining")
                await self._shutdown.unless_asked(self.pausing.renew())
                await self._shutdown.unless_asked(self._entrance.be_counted_in(rounds))
            elif self.replica.head == rounds.chain.head:
                await self._take_turn(mine)
            while not rounds.decided.empty() and not self.is_finishing:
                await self._settle(mine, rounds.decided.get_nowait())

    def _hand_in(self, rounds: RoundDriver, amends: Amend) -> None:
        base = rounds.chain.base
        act = Act(run=base.run, serial=int(base.round), deed=amends)
        if (why_not := rounds.acts.take(seal(self.context.identity, act))) is not None:
            raise ActVoid(f"this run cannot be amended: {why_not}.")

    @property
    def is_finishing(self) -> bool:
        """Whether it trains no more: all is trained, or it was told to stop."""
        return self._shutdown.is_asked or self.is_complete

    def _should_break_off(self) -> bool:
        return self._shutdown.is_asked or self.pausing.is_on

    async def _take_turn(self, mine: InRounds) -> None:
        """Bring what this peer has to the present round, or say that it is paused, and wait for what is decided."""
        rounds, num_changes, turn = mine.rounds, self.pausing.num_changes, mine.groups.turn
        is_overdue = self._carry.is_overdue and self.context.companion is None
        if self._carry.offered is None and not self.pausing.is_away and not is_overdue:
            self._report.enter("training")
            async with self.context.learner_lock:
                self._trainer.apply_settings(self.replica.config)
            head = self.replica.head
            assert head is not None
            leased, holder = mine.groups.leased(head), None
            if not len(leased):
                holder, leased = leased_instead(rounds, self.peer, head)
            await self._training.make(
                head, leased, self.replica.config, lambda: turn.is_hurried, holder, lambda: rounds.is_outrun
            )
            if self._helpers is not None:
                self._helpers.end()
            if self._training.work is not None:
                rounds.timers.note_worked(self._training.took_s)
        await self._shutdown.unless_asked(self._hold.passed(lambda: self._is_needless_to_wait(rounds)))
        if not rounds.decided.empty() or self._shutdown.is_asked:
            return
        if self._carry.offered is None:
            await mine.offering.offer(rounds, turn)
        self._report.enter("paused" if self.pausing.is_away else "syncing")
        if self.pausing.is_away:
            self._training.forget()
            mine.offering.pass_on(turn)
        if self._draws is not None:
            self._draws.tell()
        if mine.ahead.num_more(self.replica.config):
            self._report.enter("training")
            await mine.ahead.make(rounds.chain.head, self.replica.config)
            await self._autosave.save_if_due()
        await self._settle_next(mine, num_changes)

    def _is_needless_to_wait(self, rounds: RoundDriver) -> bool:
        return rounds.inbox.has_quorum or not rounds.decided.empty() or self.pausing.is_on

    async def _settle_next(self, mine: InRounds, num_changes: int) -> None:
        """Wait for the next decision and make the outer step; return without one where there is something else to do:
        a pause begins or ends, or the majority is lost.

        Args:
            num_changes: of the pause, when this turn began.
        """
        began, rounds = self.context.clock.now(), mine.rounds
        deciding = asyncio.ensure_future(rounds.decided.get())
        changing = asyncio.ensure_future(self.pausing.change(num_changes))
        losing = asyncio.ensure_future(mine.ahead.wanted(self.replica.config))
        others = [changing, losing]
        if self._carry.offered is None:
            others.append(asyncio.ensure_future(until_needed(rounds, self.peer)))
            if self.context.companion is not None and not self.pausing.is_away:
                others.append(asyncio.ensure_future(self.context.companion.until_lost()))
        try:
            await self._shutdown.unless_asked(asyncio.wait((deciding, *others), return_when=asyncio.FIRST_COMPLETED))
        finally:
            for each in others:
                each.cancel()
            if not deciding.done():
                deciding.cancel()
        if deciding.done() and not deciding.cancelled():
            await self._settle(mine, deciding.result(), began)

    async def _settle(self, mine: InRounds, decided: Decided | None, began: float | None = None) -> None:
        """Make the outer step of a decided round; what it did not count stays in the carry."""
        if decided is None:
            return
        rounds, manifest = mine.rounds, decided.manifest
        if self.context.companion is not None:
            await self.context.companion.settling()
        own, tokens = own_work(manifest, self.peer), self._carry.due
        is_counted = own is not None
        if claims_in(manifest):
            is_counted = await self._shutdown.unless_asked(self._records.counts(manifest))
        if (donors := self._contradiction(rounds, manifest)) is not None:
            await self._start_over(rounds, donors)
            return
        try:
            results = (
                await self._shutdown.unless_asked(rounds.parts.results(manifest)) if manifest.contributions else ()
            )
            finding = None if self._audits is None else self._audits.earlier.find(manifest)
            earlier = None if finding is None else await self._shutdown.unless_asked(finding)
        except PeerError as error:
            text = f"round {manifest.round} cannot be replayed; this peer fetches a member's state instead: {error}"
            self.context.emit(Notice(text=text))
            await self._enter_anew(rounds, manifest, is_counted=is_counted)
            return
        made_twice = self._carry.made_twice(own) if is_counted else 0
        is_opening = self.replica.head is not None and self.replica.head.branch != manifest.branch
        is_doubtful = is_opening and mine.offering.is_in_doubt(manifest, rounds)
        if is_opening:
            await self._entrance.legacies.keep_fork()
        # Another payload than this process offered is one of before a restart, trained on the same lease.
        step, is_in_there = partial(self.replica.apply, manifest, results, earlier), is_counted or is_doubtful
        met = None
        if manifest.is_gossip:
            met = Met(decided.taken, decided.weights, is_known=self._carry.is_as_offered(own))
        electorate = () if self.replica.head is None else self.replica.head.members
        was_offered = self._carry.offered_to is not None
        settle = lambda: self._carry.settle(step, is_in_there, decided.fate, manifest.round, met)  # noqa: E731
        if self._audits is None:
            await self.context.compute.serve(settle)
        else:
            await self._audits.settle(manifest, own, settle)
        await self._go_on(rounds)
        if self._audits is not None:
            self._audits.follow(manifest)
        if self.context.companion is not None and await self.context.companion.settled(manifest, electorate):
            self._carry.give_up()
        mine.groups.leaf.settle(manifest, is_counted)
        self._report.tell_through(manifest, tokens, is_counted=is_counted, was_offered=was_offered)
        if not is_counted:
            self._report.tell_dropped(tokens, FORGOTTEN if is_opening else OUTDATED)
        elif made_twice:
            self.context.emit(WorkDropped(tokens=Tokens(made_twice), reason=MADE_TWICE))
        if manifest.contributions:
            self._report.tell_commit(decided, began)
            self._report.tell_mixing(decided)
            self._amends = None if manifest.acts else self._amends
            if (reason := self._report.tell_acts(manifest)) is not None:
                self.fail(Removed(reason))
            if evaluator_of(manifest) == self.peer and not self.is_complete and not self.pausing.is_away:
                since = self.context.clock.now()
                await self._evaluator.maybe(manifest)
                rounds.timers.note_apart(self.context.clock.now() - since)
        if earlier is None:
            await self._autosave.save_if_due()
        else:  # what is before it leads to it no more, once the parameters that it went back to are kept by nobody
            await self._autosave.save_if_possible()
        self._entrance.legacies.follow(manifest)
        if manifest.has_result or earlier is not None:
            await self._shutdown.unless_asked(self._show(manifest))

    async def _go_on(self, rounds: RoundDriver) -> None:
        """Name the state that this peer has now, and keep its round, where the run records its own."""
        if (found := await self._naming.find()) is None:
            return
        if self._naming.is_sure:
            rounds.name_state(*found)
        assert self.replica.head is not None
        if self._audits is not None and self._naming.index is not None:
            self._audits.note(self.replica.head, self.replica.charter, self._naming.index)
        await self._past.keep(self.replica.head, rounds.chain)

    def _contradiction(self, rounds: RoundDriver, manifest: Manifest) -> tuple[PeerId, ...] | None:
        """Return who gave this peer its state, if most members had another before `manifest`; None: they had not."""
        certificate, head = rounds.chain.certificate(manifest), self.replica.head
        if manifest.entry is UNSET or certificate is None or head is None:
            return None
        votes = votes_of(certificate, head.members, rounds.inbox.signatures.verify)
        return self._naming.contradiction(manifest, votes)

    async def _show(self, manifest: Manifest) -> None:
        """Let texts be drawn with the outer parameters, which a round has made."""
        if self.context.texts is None:
            return
        if self._shown not in (None, manifest.branch):  # its rounds have other numbers
            await self.context.texts.let_go(0)
        self._shown = manifest.branch
        await self.context.texts.settled(0, int(manifest.round), self.replica.outer)

    async def _enter_anew(self, rounds: RoundDriver, lost: Manifest, *, is_counted: bool) -> None:
        """Fetch the state of another member.

        Args:
            lost: a decision whose results can no longer be had.
        """
        if is_counted:
            settle = lambda: self._carry.settle(lambda: None, is_counted=True)  # noqa: E731  # it is in there
            async with self.context.learner_lock:
                await self.context.compute.serve(settle)
        self._carry.take_back()
        head = await self._shutdown.unless_asked(self._entrance.enter())
        rounds.restart(head, self.replica.charter, without=lost)

    async def _start_over(self, rounds: RoundDriver, donors: tuple[PeerId, ...]) -> None:
        """Fetch the state anew, because this peer's own is not the run's, and drop what was trained from there.

        Args:
            donors: who gave it.
        """
        self._entrance.distrust(donors)
        if num_carried := self._carry.tokens:
            self.context.emit(WorkDropped(tokens=num_carried, reason=FROM_FALSE_STATE))
        async with self.context.learner_lock:
            await self.context.compute.serve(self._carry.start_over)
        if self._audits is not None:
            self._audits.heads.forget()
        head = await self._shutdown.unless_asked(self._entrance.enter(has_own=False))
        rounds.restart(head, self.replica.charter)

    async def _watch_lag(self, mine: InRounds) -> None:
        """A member that missed a decision finds it in another's chain, or else gives its round up."""
        rounds, behind = mine.rounds, None
        while True:
            await asyncio.sleep(LAG_S)
            electorate = frozenset(rounds.chain.base.electorate) - {self.peer}
            if 2 * len(self.context.node.banned_by & electorate) > len(electorate):  # decided while it was away
                self.fail(Removed("most members refuse this key: it was banned for good while it was away."))
            rounds.reroute(self._membership.relayed())
            rounds.measure(self._report.speeds(self._membership, rounds.chain.head))
            head = rounds.chain.head
            mine.sentinel.look(head, self._membership, self._report.heartbeat(), self.replica.config.settings.tokens)
            is_behind = bool(self._entrance.fork_watch.ahead(head))
            is_left = behind == head or self._entrance.fork_watch.is_on_lesser_branch(head)
            if self._entrance.fork_watch.should_settle(head):
                continue
            if is_behind and is_left and not mine.groups.is_outside and not await self._entrance.catch_up(rounds):
                mine.groups.give_up()
            behind = head if is_behind else None

    # --- what others say ---

    def _on_member(self, change: object) -> None:
        if self._in_rounds is None:
            return
        groups = self._in_rounds.groups
        match change:
            case Suspected(peer=peer):
                groups.notice(peer, "suspected")
            case Gone(peer=peer) | Left(peer=peer):
                self._hold.forget(peer)
                groups.notice(peer, "gone")
            case Recovered(peer=peer) | New(peer=peer):
                groups.notice(peer, "alive")

    # --- the end ---

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do: the run is complete, and no act of here waits to be decided."""
        return self.replica.is_complete and self._amends is None

    async def _finish(self) -> Outcome:
        is_complete, is_saved = self.is_complete, False
        self._report.enter("finishing" if is_complete else "leaving")
        await self._tasks.aclose()  # branches and lag are no concern of who leaves
        if is_complete:
            if self.rounds is not None:
                self.rounds.close()
            # Before others are waited for: who is killed meanwhile has the end. There may be room for it later.
            is_saved = await self._autosave.save_if_possible()
            with suppress(Stopped):
                await self._shutdown.unless_asked(self._evaluator.finish())
                await self._shutdown.unless_asked(self._shutdown.linger(self._is_awaited))
        reason = "complete" if is_complete else self._shutdown.reason
        await self._shutdown.say(reason)
        if not is_saved:
            await self._autosave.save()
        self._has_saved = True
        self.context.emit(PeerStopped(reason=reason))
        return self._report.outcome(reason, self._evaluator)

    # --- small things ---

    def _is_awaited(self) -> bool:
        return self._audits is not None and self._audits.is_awaited

    async def _start(self, snapshot: Snapshot | None) -> None:
        context = self.context
        context.emit(
            PeerStarted(
                run=self.run.run,
                name=context.node.passport.name,
                software=f"weft {__version__}",
                device=best() if context.settings.device == "auto" else context.settings.device,
                num_parameters=self.run.num_parameters,
            )
        )
        await self.pausing.begin(lambda: None if snapshot is None else self._autosave.restore(snapshot))
        self._autosave.tell()
        if snapshot is not None:
            self._entrance.legacies.read()
        await self._membership.start()

    async def _close(self) -> None:
        if self.context.texts is not None:
            await self.context.texts.aclose()
        await self.pausing.aclose()
        await self._tasks.aclose()
        if self.rounds is not None:
            await self.rounds.aclose()
        await self._membership.aclose()


def _emit_from_thread(emit: Emit) -> Emit:
    """Return what emits on the event loop that runs now, from whatever thread it is called."""
    loop = asyncio.get_running_loop()

    def emit_soon(event: Event) -> None:
        loop.call_soon_threadsafe(emit, event)

    return emit_soon
