"""The same search in far fewer worlds: of worlds that differ little, it explores one that can do all the others can.

Such a world may do more than a real one. What holds of it holds of them; what goes wrong in it has to be looked at.

    who commits stops   A leader goes on as if the last vote had not come, and what it would commit is noted: one that
                        has stopped can do nothing that it cannot.
    plans bind nobody   To follow a plan touches no disk; it only makes a member deaf to other plans. So everybody
                        merges and holds for each plan at once, in passing, and forgets it; who owns a part says both
                        that it is merged and that it is stuck. Whether and when the leader hears of it stays open.
    leading in one go   Until it proposes, a leader binds nobody, and others see nothing of it but plans. What it reads
                        stays in the set. So its steps can wait for its last plan, and are then taken at once. Only in
                        the first attempt, which needs no promises, could a leader plan anew after a restart: then all
                        that can have been said about its plans is in the set.
    announcements       All others hear of a payload as soon as it can exist, its owner when it leads: only plans depend
                        on it. Farewells too are read by leaders alone; for others they are timers.
    one turn each       No member leads twice within the bounds. So who is refused by too many, or hears of a later
                        attempt, has nothing left to do in its own but to vote, and a timer may run out for all attempts
                        up to the one that its owner leads.
    refusals            Whoever may be in a later attempt by then has said so. Whether and when the leader hears of it
                        stays open; which attempt it is does not matter.
    dead mail           Mail that can change nothing any more, after a restart neither, is dropped: the machine is asked
                        whether it really changes nothing.
    more mail           is more choice: a world is left out if another, the same but for its mail, has all of that.

It does not know progress: nobody here stops after a commit, and no leader has to plan.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from model.world import NO_ACTS, NONE, Bounds, Search, Taken, World, hashable, ones
from weft.ids import Attempt, PeerId
from weft.sync.records.acts import Warrant
from weft.sync.records.messages import (
    Accept,
    Base,
    Collect,
    Committed,
    Goodbye,
    Holding,
    Merged,
    Prepare,
    Promise,
    Propose,
    Ready,
    Refuse,
    Stuck,
    Vote,
)
from weft.sync.round import round, rules
from weft.sync.round.machine import (
    Broadcast,
    Commit,
    Input,
    Merge,
    Received,
    State,
    TimedOut,
    is_leading,
    replace,
    results_of,
)
from weft.sync.round.rules import leader
from weft.wire import digest_of

AboutPlans = Collect | Merged | Holding | Stuck | Refuse


class Standing(NamedTuple):
    """What a member may do as a leader, now and within the bounds."""

    is_at_the_head: bool  # of its attempt: leads it, or waits for the promises that let it
    is_before_proposal: bool
    is_leading: bool
    leads_later: bool
    may_begin_anew: bool  # after a restart: as if it had never led


@dataclass
class Mailbox:
    """What a member in one state makes of the mail that it has looked at, as bit sets."""

    seen: int = 0
    dead: int = 0
    voting: int = 0  # moves it as a voter
    counting: int = 0  # votes for what it has proposed
    leading: int = 0  # of use to it before it proposes
    due: int = 0  # and that at once


class Led(NamedTuple):
    """What may come of a leader that has not proposed yet."""

    proposals: frozenset[Taken]
    about_plans: int  # mail that it may cause before


class NotDead(AssertionError):
    """Mail was dropped that does something: the reductions no longer fit the machine."""


class ReducedSearch(Search):
    def __init__(self, base: Base, bounds: Bounds, acts: Mapping[int, tuple[Warrant, ...]] = NO_ACTS) -> None:
        super().__init__(base, bounds, acts)
        if bounds.num_attempts > len(base.electorate):
            raise ValueError("some member would lead twice: only the whole search covers that")
        self._leaders = [leader(base, Attempt(attempt)) for attempt in range(len(base.electorate))]
        self._first = base.electorate.index(self._leaders[0])
        self._canonical_ids: dict[int, int] = {}
        self._standings: dict[int, Standing] = {}
        self._boxes: dict[tuple[int, bool], Mailbox] = {}
        self._promises = 0  # mail bits by kind
        self._about_plans = 0
        self._to_helpers = 0  # about plans of others
        self._to_voters = 0
        self._most_mail: dict[World, list[int]] = {}
        self._led: dict[tuple[int, int, tuple[int, ...]], Led] = {}
        self._helped: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def _is_new(self, world: World) -> bool:
        known = self._most_mail.setdefault(world._replace(sent=0), [])
        if any(world.sent & ~sent == 0 for sent in known):
            return False
        known[:] = [sent for sent in known if sent & ~world.sent]
        known.append(world.sent)
        return True

    # --- moves of a world ---

    def start(self) -> World:
        world = super().start()
        for number in range(len(world.states)):
            world = self._announce(world, number)
        return world

    def _moves(self, world: World) -> Iterator[World]:
        for number in range(len(world.states)):
            if not self._state(world, number).durable.has_left:
                for after in self._moves_of(world, number):
                    yield self._without_dead_mail(self._count_votes(self._with_refusals(after)))

    def _moves_of(self, world: World, number: int) -> Iterator[World]:
        for mail in ones(world.sent & self._look_at(world, number).voting):
            yield from self._deliver(world, mail)
        if self._standing(world, number).is_before_proposal:
            for proposal in self._lead(world, number).proposals:
                yield from self._settle(world, number, proposal)
        yield from self._time_out(world, number)
        if world.num_kills < self.bounds.num_kills:
            yield self._kill(world, number)
        if world.num_leaves < self.bounds.num_leaves:
            yield from self._leave(world, number)

    def _time_out(self, world: World, number: int) -> list[World]:
        """Let a member give up attempts until it leads."""
        if not self._standing(world, number).leads_later:
            return []
        while True:
            expired = TimedOut(timer="progress", attempt=self._state(world, number).attempt)
            (world,) = self._apply(world, number, expired)
            if self._leads(self.base.electorate[number], self._state(world, number).attempt):
                return [world]

    def _kill(self, world: World, number: int) -> World:
        after = super()._kill(world, number)
        after = after._replace(states=tuple(map(self._canonical_id, after.states)))
        first = self._standing(world, self._first)
        # Where a later kill may hit the leader, what its plans would have merged from this life must be there by then.
        is_last = after.num_kills == self.bounds.num_kills
        if (number == self._first or not is_last) and first.is_before_proposal and first.may_begin_anew:
            after = after._replace(sent=after.sent | self._lead(world, self._first).about_plans)
        return self._announce(after, number)

    def _announce(self, world: World, number: int) -> World:
        """Let all others hear of a payload; its owner learns of it when it leads."""
        mine = self._offers[number][world.lives[number]]
        ready = Ready(tokens=mine.tokens, parts=mine.parts)
        sent = world.sent
        for other in range(len(world.states)):
            sent |= self._post(number, other, ready) if other != number else 0
        return world._replace(sent=sent)

    def _count_votes(self, world: World) -> World:
        while True:
            boxes = [self._look_at(world, number) for number in range(len(world.states))]
            votes = [mail for box in boxes for mail in ones(world.sent & box.counting)]
            if not votes:
                return world
            (world,) = self._deliver(world, votes[0])

    def _without_dead_mail(self, world: World) -> World:
        sent = world.sent
        for number in range(len(world.states)):
            sent &= ~self._look_at(world, number).dead
        return world._replace(sent=sent)

    def _step(self, before: int, event: Input) -> Taken:
        taken = super()._step(before, event)
        return taken._replace(after=self._canonical_id(taken.after))

    def _canonical_id(self, state: int) -> int:
        known = self._canonical_ids.get(state)
        if known is None:
            known = self._canonical_ids[state] = self._intern(self._canonical(self._states[state]))
        return known

    def _canonical(self, state: State) -> State:
        """Return the state without what can no longer matter, and as if it had not committed."""
        if state.committed is not None:
            state = replace(state, committed=None, votes=frozenset(self.base.electorate))
        is_back = state.is_back and state.attempt == 0 and self._leads(state.me, state.attempt)
        bare = State(me=state.me, durable=state.durable, attempt=state.attempt, is_back=is_back, acts=state.acts)
        if not self._is_at_the_head(state):
            return bare
        # A majority that has promised stays one: of whom it was made no longer matters.
        promises = dict.fromkeys(self.base.electorate) if state.attempt else {}
        if state.proposal is not None:
            bare = replace(bare, proposal=state.proposal, votes=state.votes, farewells=state.farewells)
            return replace(bare, promises=promises)
        return replace(state, promises=promises) if is_leading(state) and not self.bounds.num_leaves else state

    # --- who is in a later attempt ---

    def _with_refusals(self, world: World) -> World:
        """Let everybody refuse what comes from leaders of attempts before the one that it has promised."""
        sent = world.sent
        for number in range(len(world.states)):
            durable = self._state(world, number).durable
            for mail in ones(world.sent & self._inbox[number] & self._to_voters):
                message = self._received(mail).message
                if message.attempt < durable.promised and not durable.has_left:
                    sent |= self._refused(number, message)
        return world._replace(sent=sent)

    def _refused(self, number: int, message: Any) -> int:
        """Return the mail of a member that is in a later attempt than a leader's message, where there can be one."""
        later = Attempt(message.attempt + 1)
        if not isinstance(message, Collect | Prepare | Propose) or later >= self.bounds.num_attempts:
            return 0
        to = self.base.electorate.index(leader(self.base, message.attempt))
        return self._post(number, to, Refuse(attempt=message.attempt, promised=later))

    # --- who leads ---

    def _leads(self, member: PeerId, attempt: int) -> bool:
        return self._leaders[attempt % len(self._leaders)] == member

    def _is_at_the_head(self, state: State) -> bool:
        if not self._leads(state.me, state.attempt) or state.durable.has_left:
            return False
        return state.me in state.promises if state.attempt > 0 else is_leading(state)

    def _standing(self, world: World, number: int) -> Standing:
        key = world.states[number]
        known = self._standings.get(key)
        if known is None:
            state = self._states[key]
            resumed, _ = round.resume(state.me, state.durable)
            is_at_the_head = self._is_at_the_head(state)
            known = self._standings[key] = Standing(
                is_at_the_head=is_at_the_head,
                is_before_proposal=is_at_the_head and state.proposal is None,
                is_leading=is_leading(state),
                leads_later=any(self._leads(state.me, a) for a in range(state.attempt + 1, self.bounds.num_attempts)),
                may_begin_anew=not state.durable.has_left and is_leading(resumed),
            )
        return known

    # --- a leader before it proposes ---

    def _lead(self, world: World, number: int) -> Led:
        mail = world.sent & self._look_at(world, number).leading
        key = (world.states[number], mail, world.lives)
        known = self._led.get(key)
        if known is None:
            known = self._led[key] = self._lead_in_one_go(world._replace(sent=mail, chosen=NONE), number)
        return known

    def _lead_in_one_go(self, start: World, number: int) -> Led:
        proposals, about_plans = set[Taken](), 0
        seen, stack = {start}, [start]
        while stack:
            world = stack.pop()
            if self._gathers_promises(world) and self._standing(world, number).is_leading:
                # Any that come later can only make it propose again what was accepted.
                led = self._lead(world._replace(sent=world.sent & ~self._promises), number)
                proposals, about_plans = proposals | led.proposals, about_plans | led.about_plans
            for after in self._moves_to_proposal(world, number):
                about_plans |= after.sent & self._about_plans
                if not self._standing(after, number).is_before_proposal:
                    sent = after.sent & ~start.sent & ~self._about_plans
                    proposals.add(Taken(after.states[number], sent, (), after.chosen))
                    continue
                after = after._replace(sent=after.sent & self._look_at(after, number).leading)
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        return Led(frozenset(proposals), about_plans)

    def _gathers_promises(self, world: World) -> bool:
        """Return whether a leader still reads promises: without farewells nothing else comes first."""
        return world.sent & self._promises > 0 and not self.bounds.num_leaves

    def _moves_to_proposal(self, world: World, number: int) -> Iterator[World]:
        due = world.sent & self._inbox[number] & self._look_at(world, number).due
        if self._gathers_promises(world):
            due &= self._promises
        for mail in ones(due):
            yield from map(self._helped_by_all, self._deliver(world, mail))
        if not self._gathers_promises(world):
            yield from map(self._helped_by_all, self._train(world, number))
            if self._may_stop_waiting(world, number):
                expired = TimedOut(timer="grace", attempt=self._state(world, number).attempt)
                yield from map(self._helped_by_all, self._apply(world, number, expired))

    def _helped_by_all(self, world: World) -> World:
        """Let everybody merge and hold, in passing, for the plans that it is told of."""
        while True:
            sent = world.sent
            for number in range(len(world.states)):
                mail = world.sent & self._inbox[number] & self._to_helpers
                key = (number, mail, world.lives)
                if mail and key not in self._helped:
                    self._helped[key] = self._help(number, mail, world.lives)
                sent |= self._helped[key] if mail else 0
            if sent == world.sent:
                return world
            world = world._replace(sent=sent)

    def _help(self, number: int, mail: int, lives: tuple[int, ...]) -> int:
        """Return all that a member can say about plans, in whichever order it hears of them."""
        start = round.begin(self.base.electorate[number], self.base)
        events = [self._received(each) for each in ones(mail)]
        said = 0
        seen, stack = {hashable(start)}, [start]
        for each in ones(mail):
            said |= self._refused(number, self._received(each).message)
        while stack:
            for after, sent in self._helping(stack.pop(), events, lives):
                said |= sent
                if hashable(after) not in seen:
                    seen.add(hashable(after))
                    stack.append(after)
        return said

    def _helping(self, state: State, events: list[Input], lives: tuple[int, ...]) -> Iterator[tuple[State, int]]:
        """Yield where each of `events` leads, its effects carried out, and what is said on the way."""
        for event in events:
            after, outputs = round.step(state, event)
            assert after.durable == state.durable, "a member has bound itself to a plan"
            taken = self._read(state, after, outputs)
            ways = [(after, taken.sent)]
            for effect in taken.effects:
                ends = self._ends(effect, lives)
                ways = [(end, sent | more) for way, sent in ways for end, more in self._helping(way, ends, lives)]
            yield from ways

    # --- mail ---

    def _post(self, sender: int, receiver: int, message: Any) -> int:
        bit = super()._post(sender, receiver, message)
        if isinstance(message, Promise):
            self._promises |= bit
        elif isinstance(message, AboutPlans):
            self._about_plans |= bit
            self._to_helpers |= 0 if self._leads(self.base.electorate[receiver], message.attempt) else bit
        elif isinstance(message, Prepare | Propose):
            self._to_voters |= bit
        return bit

    def _received(self, mail: int) -> Received:
        sender, _, message = self._mail[mail]
        return Received(sender=self.base.electorate[sender], message=message)

    def _look_at(self, world: World, number: int) -> Mailbox:
        """Sort the mail as a member in this state sees it, which is the same in all worlds."""
        can_restart = world.num_kills < self.bounds.num_kills
        key = (world.states[number], can_restart)
        box = self._boxes.get(key)
        if box is None:
            box = self._boxes[key] = Mailbox()
        fresh = world.sent & ~box.seen
        if fresh:
            box.seen |= fresh
            standing = self._standing(world, number)
            will_lead = standing.leads_later or (can_restart and standing.may_begin_anew)
            for mail in ones(fresh):
                self._sort(mail, world.states[number], standing, will_lead, box)
        return box

    def _sort(self, mail: int, member: int, standing: Standing, will_lead: bool, box: Mailbox) -> None:
        """Put one piece of mail where it belongs; what is for others, or for later, belongs nowhere.

        Args:
            member: its state.
            will_lead: whether it may come to lead later or, after a restart, again.
        """
        state, event, bit = self._states[member], self._received(mail), 1 << mail
        is_about_plans = isinstance(event.message, AboutPlans)
        is_mine = self.base.electorate[self._mail[mail][1]] == state.me
        if (is_mine or is_about_plans) and standing.is_before_proposal and is_use_to_leader(event, state):
            box.leading |= bit
            box.due |= bit if is_due(event, state) else 0
        elif is_about_plans:
            is_for_me = self._leads(state.me, event.message.attempt)
            box.dead |= bit if is_for_me and (event.message.attempt > 0 or not will_lead) else 0
        elif is_mine and is_use_to_voter(event, state):
            box.voting |= bit
        elif is_mine and standing.is_at_the_head and is_use_to_proposer(event, state):
            box.counting |= bit if isinstance(event.message, Accept) else 0
            box.voting |= bit if isinstance(event.message, Goodbye) else 0
        elif is_mine and not (will_lead and isinstance(event.message, Ready | Goodbye)):
            self._check_dead(event, state)
            box.dead |= bit

    def _check_dead(self, event: Received, state: State) -> None:
        if isinstance(event.message, Committed):
            return  # it would stop
        after, outputs = round.step(state, event)
        is_beyond = after.attempt >= self.bounds.num_attempts
        has_committed = len(state.votes) == len(self.base.electorate)
        has_led = any(isinstance(each, Broadcast | Merge | Commit) for each in outputs) and not has_committed
        if not is_beyond and (has_led or after.durable != state.durable):
            raise NotDead(f"{event} at {state}")


def is_use_to_voter(event: Received, state: State) -> bool:
    match event.message:
        case Prepare(attempt=attempt):
            return attempt > state.durable.promised and not state.durable.has_left
        case Propose(attempt=attempt, manifest=manifest):
            is_accepted = state.durable.accepted == Vote(attempt=attempt, manifest=manifest)
            return not is_accepted and rules.may_accept(state.durable, attempt, manifest)
        case _:
            return False


def is_use_to_proposer(event: Received, state: State) -> bool:
    """Return whether a leader that has proposed has something still to count."""
    match event.message:
        case Accept(attempt=attempt, manifest=manifest) if state.proposal is not None:
            is_for_it = attempt == state.attempt and manifest == digest_of(state.proposal)
            return is_for_it and event.sender not in state.votes
        case Goodbye() if state.proposal is not None:  # fewer votes may then be enough, or those it has too few
            return event.sender not in state.farewells
        case _:
            return False


def is_use_to_leader(event: Received, state: State) -> bool:
    """Return whether a leader that has not proposed may do something about mail, now or when it is further on."""
    match event.message:
        case Ready():
            return event.sender not in state.ready
        case Promise(attempt=attempt, accepted=accepted):
            # After a farewell it looks again at promises that it knows.
            is_news = state.promises.get(event.sender, NONE) != accepted or len(state.farewells) > 0
            return attempt == state.attempt and is_news
        case Goodbye():
            return event.sender not in state.farewells
        case Refuse(attempt=attempt):
            return attempt == state.attempt and event.sender not in state.refusals
        case Collect() | Merged() | Holding() | Stuck():
            return event.message.attempt == state.attempt and event.message.revision >= state.revision
        case _:
            return False


def is_due(event: Received, state: State) -> bool:
    """Return whether it may do so now."""
    is_of_plan = state.plan is not None
    match event.message:
        case Merged(revision=revision, part=part):
            return is_of_plan and revision == state.revision and part not in state.results
        case Holding(revision=revision, results=results):  # of other results than the leader's counts for nothing
            return is_of_plan and revision == state.revision and results == results_of(state)
        case Stuck(revision=revision, missing=missing):
            return is_of_plan and revision == state.revision and not state.unusable.issuperset(missing)
        case _:
            return True
