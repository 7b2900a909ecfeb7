"""Explicit-state search of the round machine: every interleaving, within bounds, of a small electorate.

A world is the members' states and the set of all messages ever sent. A message stays in the set:
delivering it at any time, again, or never is reordering, duplication and loss. A partition is a set of
deliveries that never happen, so the search covers each of them too.

Merging and fetching take no time here: they succeed when somebody has the bytes, and fail otherwise.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.rng import stream
from weft.sync import decide, round
from weft.sync.machine import (
    Broadcast,
    Commit,
    Fetch,
    Leave,
    Merge,
    MergeDone,
    MergeFailed,
    Persist,
    Received,
    ResultHeld,
    Send,
    SetTimer,
    State,
    TimedOut,
    Trained,
    is_leading,
)
from weft.sync.messages import (
    Accept,
    Base,
    Collect,
    Committed,
    Goodbye,
    Holding,
    Manifest,
    Merged,
    Prepare,
    Promise,
    Propose,
    Ready,
    Refuse,
    Stuck,
    Vote,
)
from weft.sync.rules import Durable, leader
from weft.wire import digest


def peer(number: int) -> PeerId:
    return PeerId(f"{number:02d}" * 32)


def payload(owner: PeerId, part: int, life: int) -> Digest:
    return digest(f"payload {owner} {part} {life}".encode())


def first_base(num_members: int, num_parts: int = 1) -> Base:
    members = tuple(peer(number) for number in range(num_members))
    run = RunId("00" * 32)
    return Base(
        run=run,
        branch=BranchId(run),
        round=Round(0),
        previous=Digest(run),
        electorate=members,
        keeper=members[0],
        num_parts=num_parts,
        cursor=0,
        quota=1,
        committed_tokens=Tokens(0),
    )


class World(NamedTuple):
    states: tuple[int, ...]  # interned
    lives: tuple[int, ...]  # a restart loses the payload, so a new life serves another
    sent: int  # bit set of interned (sender, receiver, message)
    num_kills: int
    num_leaves: int
    chosen: int  # interned manifest that some member has committed, or NONE


NONE = -1


class Bounds(NamedTuple):
    num_attempts: int = 3
    num_kills: int = 1
    num_leaves: int = 0
    is_announced: bool = False  # every member has heard every announcement before the search begins
    is_carried: bool = False  # what is planned is at once merged and held by a majority; plans travel to nobody


UNWRITTEN = "a message left before what it promises was on disk"


@dataclass
class _Mailbox:
    """What a member in one state makes of the mail to it, as bit sets."""

    seen: int = 0
    dead: int = 0
    useful: int = 0


def is_on_disk(message: Any, disk: Durable) -> bool:
    """Return whether a crash now would leave what `message` binds its sender to."""
    match message:
        case Prepare(attempt=attempt) | Promise(attempt=attempt):
            return disk.promised >= attempt
        case Propose(attempt=attempt) | Accept(attempt=attempt):
            return disk.accepted is not None and disk.accepted.attempt == attempt
        case Goodbye():
            return disk.has_left
        case _:
            return True


class TwoManifests(AssertionError):
    """A world in which two members committed different manifests for one branch and round."""


class Search:
    """Explores all worlds breadth first, and stops at one that breaks the rule."""

    def __init__(self, base: Base, bounds: Bounds) -> None:
        self.base = base
        self.bounds = bounds
        self.num_commits = 0
        self.num_worlds = 0
        self._states: list[State] = []
        self._state_ids: dict[tuple[Any, ...], int] = {}
        self._mail: list[tuple[int, int, Any]] = []  # sender, receiver, message
        self._mail_ids: dict[tuple[int, int, Any], int] = {}
        self._inbox: list[int] = [0] * len(base.electorate)  # mail bits by receiver
        self._boxes: dict[int, _Mailbox] = {}
        self._manifest_ids: dict[Manifest, int] = {}
        self._steps: dict[tuple[int, Any], tuple[int, int, tuple[Any, ...], int]] = {}

    def run(self, limit: int) -> bool:
        """Explore at most `limit` worlds; return whether all were."""
        start = self.start()
        seen = {start}
        queue = deque([start])
        while queue:
            if len(seen) > limit:
                self.num_worlds = len(seen)
                return False
            for world in self.successors(queue.popleft()):
                world = self._without_dead_mail(world)
                if world not in seen:
                    seen.add(world)
                    queue.append(world)
        self.num_worlds = len(seen)
        return True

    def manifests(self) -> list[Manifest]:
        """Return every manifest that was committed in some world."""
        return list(self._manifest_ids)

    def some_worlds(self, num: int) -> list[World]:
        """Return worlds from all depths: walks that take a pseudo-random turn at each step, the same every time."""
        generator = stream(0, "walks")
        worlds = []
        while len(worlds) < num:
            world = self.start()
            for _ in range(int(generator.integers(1, 40))):
                following = list(self.successors(world))
                if not following:
                    break
                world = self._without_dead_mail(following[int(generator.integers(len(following)))])
            worlds.append(world)
        return worlds

    def commits_when_calm(self, world: World, dead: int | None, num_attempts: int) -> bool:
        """Return whether some live member commits once nothing is lost any more and timers run out as they should.

        Args:
            dead: a member that does nothing ever again.
            num_attempts: how many more leaders may be tried.
        """
        live = [number for number in range(len(self.base.electorate)) if number != dead]
        for number in live:  # a restarted member has trained again
            state = self._states[world.states[number]]
            if state.committed is None and state.me not in state.ready:
                world = self.train(world, number)
        for _ in range(num_attempts):
            world = self._deliver_all(world, live)
            for number in live:
                state = self._states[world.states[number]]
                world = self.apply(world, number, TimedOut(timer="grace", attempt=state.attempt))
            world = self._deliver_all(world, live)
            if any(self._states[world.states[number]].committed is not None for number in live):
                return True
            for number in live:
                state = self._states[world.states[number]]
                world = self.apply(world, number, TimedOut(timer="progress", attempt=state.attempt))
        return False

    def _deliver_all(self, world: World, live: list[int]) -> World:
        """Deliver to the living whatever there is, once each, until nothing new is said."""
        delivered = 0
        while True:
            fresh = world.sent & ~delivered
            if not fresh:
                return world
            mail = (fresh & -fresh).bit_length() - 1
            delivered |= 1 << mail
            if self._mail[mail][1] in live:
                world = self._deliver(world, self._mail[mail][1], mail)

    def describe(self, world: World) -> str:
        return "; ".join(str(self._states[state]) for state in world.states)

    def start(self) -> World:
        num = len(self.base.electorate)
        states = tuple(self._intern(round.begin(member, self.base)) for member in self.base.electorate)
        world = World(states, (0,) * num, 0, 0, 0, NONE)
        for number in range(num):
            world = self.train(world, number)
        if self.bounds.is_announced:
            for mail in range(len(self._mail)):
                world = self._deliver(world, self._mail[mail][1], mail)
        return world

    def train(self, world: World, number: int) -> World:
        me = self.base.electorate[number]
        parts = tuple(payload(me, part, world.lives[number]) for part in range(self.base.num_parts))
        return self.apply(world, number, Trained(tokens=Tokens(1), parts=parts))

    def successors(self, world: World) -> Iterator[World]:
        for number in range(len(world.states)):
            state = self._states[world.states[number]]
            for mail in self._useful_mail(world, number):
                yield self._deliver(world, number, mail)
            next_led = self._next_led(state)
            if state.committed is None and next_led < self.bounds.num_attempts:
                yield self._time_out_until(world, number, next_led)
            if not state.is_grace_over and state.plan is None and is_leading(state):
                yield self.apply(world, number, TimedOut(timer="grace", attempt=state.attempt))
            if world.num_kills < self.bounds.num_kills:
                yield self._kill(world, number)
            if world.num_leaves < self.bounds.num_leaves and not state.durable.has_left:
                yield self.apply(world, number, Leave())._replace(num_leaves=world.num_leaves + 1)

    def _useful_mail(self, world: World, number: int) -> Iterator[int]:
        """Yield the mail whose delivery can matter now."""
        bits = world.sent & self._look_at(world.states[number], number, world.sent).useful
        while bits:
            bit = bits & -bits
            bits ^= bit
            yield bit.bit_length() - 1

    def _without_dead_mail(self, world: World) -> World:
        """Drop the mail that no delivery, now or later, could make matter: worlds that differ in it are one."""
        sent = world.sent
        for number, state in enumerate(world.states):
            sent &= ~self._look_at(state, number, world.sent).dead
        return world._replace(sent=sent)

    def _look_at(self, state_id: int, number: int, sent: int) -> "_Mailbox":
        """Sort the mail that the member in this state may find into dead, useful, and neither."""
        box = self._boxes.setdefault(state_id, _Mailbox())
        bits = sent & self._inbox[number] & ~box.seen
        box.seen |= bits
        while bits:
            bit = bits & -bits
            bits ^= bit
            sender, _, message = self._mail[bit.bit_length() - 1]
            state = self._states[state_id]
            if _is_spent(self.base.electorate[sender], message, state):
                box.dead |= bit
            elif not isinstance(message, Ready) or (state.proposal is None and is_leading(state)):
                # An announcement can wait until its reader could plan: it stays in the set.
                box.useful |= bit
        return box

    def apply(self, world: World, number: int, event: Any) -> World:
        """Let a member take one step, and carry out at once what needs no message."""
        before = world.states[number]
        known = self._steps.get((before, event))
        if known is None:
            known = self._steps[before, event] = self._step(before, event)
        return self._settle(world, number, known)

    def _deliver(self, world: World, number: int, mail: int) -> World:
        before = world.states[number]
        known = self._steps.get((before, mail))
        if known is None:
            sender, _, message = self._mail[mail]
            event = Received(sender=self.base.electorate[sender], message=message)
            known = self._steps[before, mail] = self._step(before, event)
        return self._settle(world, number, known)

    def _step(self, before: int, event: Any) -> tuple[int, int, tuple[Any, ...], int]:
        state = self._states[before]
        number = self.base.electorate.index(state.me)
        after, outputs = round.step(state, event)
        sent, effects, chosen = 0, [], NONE
        disk = state.durable
        for output in outputs:
            match output:
                case Persist(durable=durable):
                    disk = durable
                case Send(to=to, message=message):
                    assert is_on_disk(message, disk), UNWRITTEN
                    sent |= self._post(number, self.base.electorate.index(to), message)
                case Broadcast(message=Collect() as plan) if self.bounds.is_carried:
                    effects.append(plan)
                case Merge() if self.bounds.is_carried:
                    pass
                case Broadcast(message=message):
                    assert is_on_disk(message, disk), UNWRITTEN
                    for other in range(len(self.base.electorate)):
                        if other != number:
                            sent |= self._post(number, other, message)
                case Merge() | Fetch():
                    effects.append(output)
                case Commit(manifest=manifest):
                    chosen = self._manifest_ids.setdefault(manifest, len(self._manifest_ids))
                case SetTimer():
                    pass
        assert disk == after.durable, "what a member must remember never reached its disk"
        return self._intern(after), sent, tuple(effects), chosen

    def _settle(self, world: World, number: int, taken: tuple[int, int, tuple[Any, ...], int]) -> World:
        after, sent, effects, chosen = taken
        states = (*world.states[:number], after, *world.states[number + 1 :])
        if chosen != NONE:
            self.num_commits += 1
            if world.chosen not in (NONE, chosen):
                raise TwoManifests(world)
        chosen = world.chosen if chosen == NONE else chosen
        world = World(states, world.lives, world.sent | sent, world.num_kills, world.num_leaves, chosen)
        for effect in effects:
            for event in self._outcome(world, effect):
                world = self.apply(world, number, event)
        return world

    def _outcome(self, world: World, effect: Merge | Fetch | Collect) -> list[Any]:
        if isinstance(effect, Collect):
            return self._carry_out(effect)
        plan, part = effect.plan, effect.part
        if isinstance(effect, Fetch):
            is_held = any(s.plan == plan and part in s.held for s in map(self._states.__getitem__, world.states))
            return [ResultHeld(plan=plan, part=part)] if is_held else []
        missing = []
        for contribution in plan.contributions:
            giver = self.base.electorate.index(contribution.peer)
            if contribution.parts[part] != payload(contribution.peer, part, world.lives[giver]):
                missing.append(contribution.peer)
        if missing:
            return [MergeFailed(plan=plan, part=part, missing=tuple(missing))]
        return [MergeDone(plan=plan, part=part, result=_merged(plan, part))]

    def _carry_out(self, plan: Collect) -> list[Any]:
        """What the leader hears when everybody does its part of the plan."""
        results = tuple(_merged(plan, part) for part in range(self.base.num_parts))
        holding = Holding(attempt=plan.attempt, revision=plan.revision, results=results)
        merged = [
            Merged(attempt=plan.attempt, revision=plan.revision, part=part, result=result)
            for part, result in enumerate(results)
        ]
        return [
            *(Received(sender=plan.owners[each.part], message=each) for each in merged),
            *(Received(sender=member, message=holding) for member in self.base.electorate),
        ]

    def _kill(self, world: World, number: int) -> World:
        """Kill a member and start it again from its disk. One that stays dead is one that nothing more reaches."""
        disk, _ = round.resume(self.base.electorate[number], self._states[world.states[number]].durable)
        states = (*world.states[:number], self._intern(disk), *world.states[number + 1 :])
        lives = (*world.lives[:number], world.lives[number] + 1, *world.lives[number + 1 :])
        return world._replace(states=states, lives=lives, num_kills=world.num_kills + 1)

    def _next_led(self, state: State) -> int:
        """Return the next attempt that this member leads. It times out until then in one go: in between it could
        only stop listening to older plans, which losing their messages does too."""
        turns = range(state.attempt + 1, state.attempt + 1 + len(self.base.electorate))
        return next(a for a in turns if leader(self.base, Attempt(a)) == state.me)

    def _time_out_until(self, world: World, number: int, attempt: int) -> World:
        while (at := self._states[world.states[number]].attempt) < attempt:
            world = self.apply(world, number, TimedOut(timer="progress", attempt=at))
        return world

    def _intern(self, state: State) -> int:
        key = _hashable(state)
        known = self._state_ids.get(key)
        if known is None:
            known = self._state_ids[key] = len(self._states)
            self._states.append(state)
        return known

    def _post(self, sender: int, receiver: int, message: Any) -> int:
        key = (sender, receiver, message)
        known = self._mail_ids.get(key)
        if known is None:
            known = self._mail_ids[key] = len(self._mail)
            self._mail.append((sender, receiver, message))
            self._inbox[receiver] |= 1 << known
        return 1 << known


def _is_spent(sender: PeerId, message: Any, receiver: State) -> bool:
    """Return whether no delivery of `message` to `receiver`, now or later, could make a difference.

    An outcome counts as spent: who hears it stops, and a member that stops later can do all that it could.
    """
    if receiver.committed is not None or receiver.durable.has_left or isinstance(message, Committed):
        return True
    match message:
        case Ready():
            return sender in receiver.ready
        case Refuse(promised=promised):
            return promised <= receiver.attempt
        case Collect(attempt=attempt, revision=revision):
            if receiver.plan is not None and (attempt, revision) <= (receiver.plan.attempt, receiver.plan.revision):
                return True
            return attempt < receiver.attempt
        case Merged() | Holding() | Stuck() | Promise() | Accept():
            return message.attempt < receiver.attempt
        case Prepare(attempt=attempt):
            return attempt < receiver.durable.promised
        case Propose(attempt=attempt):
            if receiver.durable.accepted == Vote(attempt=attempt, manifest=message.manifest):
                return True
            return not decide.may_accept(receiver.durable, attempt, message.manifest)
        case _:
            return False


def _merged(plan: Collect, part: int) -> Digest:
    return digest("".join(contribution.parts[part] for contribution in plan.contributions).encode())


def _first(item: tuple[Any, Any]) -> Any:
    return item[0]


def _hashable(state: State) -> tuple[Any, ...]:
    values = (getattr(state, field) for field in state.__struct_fields__)
    return tuple(tuple(sorted(value.items(), key=_first)) if isinstance(value, dict) else value for value in values)
