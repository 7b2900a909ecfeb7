"""Explicit-state search of the round machine: every interleaving, within bounds, of a small electorate.

A world is the members' states and the set of all messages ever sent. A message stays in the set: delivering it at any
time, again, or never is reordering, duplication and loss. A partition is a set of deliveries that never happen, and of
payloads that cannot be had, so the search covers each of them too.

Merging and fetching take no time here. A merge fails for any of the other contributors, who may be out of reach, and
always for those who lost their payload in a restart. A fetch succeeds: one that fails is a Holding that is lost.

Acts wait at some members, or at none. It does not know what membership says of peers (`Noticed`), but where all is
calm. `reduced` searches the same with fewer worlds.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import astuple

from charters import charter
from weft.ids import BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.rng import stream
from weft.sync.records.acts import Warrant
from weft.sync.records.messages import (
    MAX_UPLINK,
    Accept,
    Base,
    Contribution,
    Goodbye,
    Manifest,
    Prepare,
    Promise,
    Propose,
    Ready,
)
from weft.sync.round import round
from weft.sync.round.machine import (
    Broadcast,
    Commit,
    Fetch,
    Input,
    Leave,
    Merge,
    MergeDone,
    MergeFailed,
    Moved,
    Noticed,
    Output,
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
from weft.sync.round.rules import Durable
from weft.wire import digest

NONE = -1
NO_ACTS: Mapping[int, tuple[Warrant, ...]] = MappingProxyType({})


def peer(number: int) -> PeerId:
    return PeerId(f"{number:02d}" * 32)


def first_base(num_members: int, num_parts: int = 1, run: str = "00", stewards: tuple[PeerId, ...] = ()) -> Base:
    """Return what a round follows on; `run`, two digits, decides in which order the members lead."""
    members = tuple(peer(number) for number in range(num_members))
    run_id = RunId(run * 32)
    return Base(
        run=run_id,
        branch=BranchId(run_id),
        round=Round(0),
        previous=Digest(run_id),
        electorate=members,
        keeper=members[0],
        uplinks=(MAX_UPLINK,) * num_parts,
        cursor=1000,  # all of it leased and not counted yet
        quota=1,
        committed_tokens=Tokens(0),
        charter=charter(1, stewards=stewards),
    )


def contribution(base: Base, number: int, life: int) -> Contribution:
    """Return what a member offers in one of its lives: a restart loses its payload, and it trains another."""
    owner = base.electorate[number]
    parts = tuple(digest(f"payload {owner} {part} {life}".encode()) for part in range(base.num_parts))
    return Contribution(peer=owner, tokens=Tokens(1 + number + 10 * life), parts=parts)


def merged(contributions: Iterable[Contribution], part: int) -> Digest:
    return digest("".join(each.parts[part] for each in contributions).encode())


class World(NamedTuple):
    states: tuple[int, ...]  # interned
    lives: tuple[int, ...]  # how often each member was restarted
    sent: int  # bit set of interned (sender, receiver, message)
    num_kills: int
    num_leaves: int
    chosen: int  # interned manifest that some member has committed, or NONE


class Bounds(NamedTuple):
    num_attempts: int = 3
    num_kills: int = 1
    num_leaves: int = 0


class Taken(NamedTuple):
    """What one step of one member comes to."""

    after: int
    sent: int = 0
    effects: tuple[Merge | Fetch, ...] = ()
    chosen: int = NONE


UNWRITTEN = "a message left before what it promises was on disk"


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
    """Explores all worlds breadth first, and stops at one in which two manifests are committed."""

    def __init__(self, base: Base, bounds: Bounds, acts: Mapping[int, tuple[Warrant, ...]] = NO_ACTS) -> None:
        """
        Args:
            acts: that wait at a member, by its number, from the beginning of the round and of each of its lives.
        """
        self.base = base
        self.bounds = bounds
        self.acts = acts
        self.num_commits = 0
        self.num_worlds = 0
        self._seen: set[World] = set()
        self._states: list[State] = []
        self._state_ids: dict[tuple[Any, ...], int] = {}
        self._mail: list[tuple[int, int, Any]] = []  # sender, receiver, message
        self._mail_ids: dict[tuple[int, int, Any], int] = {}
        self._inbox: list[int] = [0] * len(base.electorate)  # mail bits by receiver
        self._manifest_ids: dict[Manifest, int] = {}
        self._proposed: set[Manifest] = set()
        self._steps: dict[tuple[int, Any], Taken] = {}
        self._restarts: dict[int, int] = {}
        self._waiting: dict[int, bool] = {}
        lives = range(bounds.num_kills + 1)
        self._offers = [[contribution(base, number, life) for life in lives] for number in range(len(base.electorate))]

    def run(self, limit: int) -> bool:
        """Explore about `limit` worlds; return whether that was all."""
        queue = deque([self.start()])
        while queue and self.num_worlds <= limit:
            for world in self.successors(queue.popleft()):
                if self._is_new(world):
                    self.num_worlds += 1
                    queue.append(world)
        return not queue

    def _is_new(self, world: World) -> bool:
        if world in self._seen:
            return False
        self._seen.add(world)
        return True

    def committed(self) -> set[Manifest]:
        """Return every manifest that was committed in some world."""
        return {manifest for manifest in self._manifest_ids if manifest.attempt < self.bounds.num_attempts}

    def proposed(self) -> set[Manifest]:
        """Return every manifest that was proposed in some world."""
        return {manifest for manifest in self._proposed if manifest.attempt < self.bounds.num_attempts}

    def some_worlds(self, num: int) -> list[World]:
        """Return worlds from all depths: walks that take a pseudo-random turn at each step, the same every time."""
        generator = stream(0, "walks")
        worlds = []
        while len(worlds) < num:
            world = self.start()
            for _ in range(int(generator.integers(1, 40))):
                following = [after for after in self.successors(world) if after != world]
                if not following:
                    break
                world = following[int(generator.integers(len(following)))]
            worlds.append(world)
        return worlds

    def commits_when_calm(self, world: World, dead: int | None, num_attempts: int) -> bool:
        """Return whether some live member commits once nothing is lost any more and timers run out as they should.

        Args:
            dead: a member that does nothing ever again, as the others have noticed; nobody can fetch its payload.
            num_attempts: how many more leaders may be tried.
        """
        live = [number for number in range(len(self.base.electorate)) if number != dead]
        if dead is not None:
            world = world._replace(lives=_put(world.lives, dead, NONE))
            silence = Noticed(peer=self.base.electorate[dead], status="suspected")
            for number in live:
                world = self._apply(world, number, silence)[0]
        for number in live:  # by now all have trained, restarted ones again
            world = self._train(world, number)[0]
        for _ in range(num_attempts):
            world = self._deliver_all(world, live)
            for number in live:
                attempt = self._state(world, number).attempt
                world = self._apply(world, number, TimedOut(timer="grace", attempt=attempt))[0]
            world = self._deliver_all(world, live)
            if any(self._state(world, number).committed is not None for number in live):
                return True
            for number in live:
                attempt = self._state(world, number).attempt
                world = self._apply(world, number, TimedOut(timer="progress", attempt=attempt))[0]
        return False

    def _deliver_all(self, world: World, live: list[int]) -> World:
        """Deliver to the living whatever there is, once each, until nothing new is said."""
        delivered = 0
        while fresh := world.sent & ~delivered:
            mail = next(ones(fresh))
            delivered |= 1 << mail
            if self._mail[mail][1] in live:
                world = self._deliver(world, mail)[0]
        return world

    def describe(self, world: World) -> str:
        return "; ".join(str(self._states[state]) for state in world.states)

    def start(self) -> World:
        num = len(self.base.electorate)
        begun = [round.begin(member, self.base) for member in self.base.electorate]
        states = tuple(self._intern(self._told(state, number)) for number, state in enumerate(begun))
        return World(states, lives=(0,) * num, sent=0, num_kills=0, num_leaves=0, chosen=NONE)

    def successors(self, world: World) -> Iterator[World]:
        """Yield the worlds one step on, within the bounds."""
        for after in self._moves(world):
            if all(self._states[state].attempt < self.bounds.num_attempts for state in after.states):
                yield after

    def _moves(self, world: World) -> Iterator[World]:
        for mail in ones(world.sent):
            yield from self._deliver(world, mail)
        for number in range(len(world.states)):
            state = self._state(world, number)
            yield from self._train(world, number)
            yield from self._time_out(world, number)
            if self._may_stop_waiting(world, number):
                yield from self._apply(world, number, TimedOut(timer="grace", attempt=state.attempt))
            if world.num_kills < self.bounds.num_kills:
                yield self._kill(world, number)
            if world.num_leaves < self.bounds.num_leaves and not state.durable.has_left:
                yield from self._leave(world, number)

    def _state(self, world: World, number: int) -> State:
        return self._states[world.states[number]]

    def _may_stop_waiting(self, world: World, number: int) -> bool:
        """Return whether a member waits for more announcements, to plan."""
        key = world.states[number]
        if key not in self._waiting:
            state = self._states[key]
            self._waiting[key] = not state.is_grace_over and state.plan is None and is_leading(state)
        return self._waiting[key]

    def _train(self, world: World, number: int) -> list[World]:
        mine = self._offers[number][world.lives[number]]
        return self._apply(world, number, Trained(ready=Ready(tokens=mine.tokens, parts=mine.parts)))

    def _time_out(self, world: World, number: int) -> list[World]:
        """Let a member give up its attempt for the next."""
        attempt = self._state(world, number).attempt
        if attempt + 1 >= self.bounds.num_attempts:
            return []
        return self._apply(world, number, TimedOut(timer="progress", attempt=attempt))

    def _kill(self, world: World, number: int) -> World:
        """Kill a member and start it again from its disk. One that stays dead is one that nothing more reaches.

        It resumes the round even where it has nothing of it on its disk: a driver has to know that it was there before.
        """
        before = world.states[number]
        if before not in self._restarts:
            resumed, _ = round.resume(self.base.electorate[number], self._states[before].durable)
            self._restarts[before] = self._intern(self._told(resumed, number))
        lives = _put(world.lives, number, world.lives[number] + 1)
        states = _put(world.states, number, self._restarts[before])
        return world._replace(states=states, lives=lives, num_kills=world.num_kills + 1)

    def _told(self, state: State, number: int) -> State:
        told, _ = round.step(state, Moved(acts=self.acts.get(number, ())))
        return told

    def _leave(self, world: World, number: int) -> list[World]:
        return [each._replace(num_leaves=world.num_leaves + 1) for each in self._apply(world, number, Leave())]

    def _deliver(self, world: World, mail: int) -> list[World]:
        sender, receiver, message = self._mail[mail]
        before = world.states[receiver]
        taken = self._steps.get((before, mail))
        if taken is None:
            event = Received(sender=self.base.electorate[sender], message=message)
            taken = self._steps[before, mail] = self._step(before, event)
        return self._settle(world, receiver, taken)

    def _apply(self, world: World, number: int, event: Input) -> list[World]:
        """Let a member take one step, and carry out at once what needs no message.

        Returns the worlds that it may lead to, the one in which everything succeeds first.
        """
        before = world.states[number]
        taken = self._steps.get((before, event))
        if taken is None:
            taken = self._steps[before, event] = self._step(before, event)
        return self._settle(world, number, taken)

    def _step(self, before: int, event: Input) -> Taken:
        after, outputs = round.step(self._states[before], event)
        return self._read(self._states[before], after, outputs)._replace(after=self._intern(after))

    def _read(self, before: State, after: State, outputs: Iterable[Output]) -> Taken:
        """Return what a step sends, wants carried out and commits; `after` is not interned."""
        number = self.base.electorate.index(before.me)
        sent, effects, chosen = 0, list[Merge | Fetch](), NONE
        disk = before.durable
        for output in outputs:
            match output:
                case Persist(durable=durable):
                    disk = durable
                case Send(to=to, message=message):
                    assert is_on_disk(message, disk), UNWRITTEN
                    sent |= self._post(number, self.base.electorate.index(to), message)
                case Broadcast(message=message):
                    assert is_on_disk(message, disk), UNWRITTEN
                    if isinstance(message, Propose):
                        self._proposed.add(message.manifest)
                    for other in range(len(self.base.electorate)):
                        sent |= self._post(number, other, message) if other != number else 0
                case Merge() | Fetch():
                    effects.append(output)
                case Commit(manifest=manifest):
                    chosen = self._manifest_ids.setdefault(manifest, len(self._manifest_ids))
                case SetTimer():
                    pass
        assert disk == after.durable, "what a member must remember never reached its disk"
        return Taken(NONE, sent, tuple(effects), chosen)

    def _settle(self, world: World, number: int, taken: Taken) -> list[World]:
        chosen = world.chosen
        if taken.chosen != NONE:
            self.num_commits += 1
            if chosen not in (NONE, taken.chosen):
                raise TwoManifests(self.describe(world))
            chosen = taken.chosen
        states = _put(world.states, number, taken.after)
        worlds = [world._replace(states=states, sent=world.sent | taken.sent, chosen=chosen)]
        for effect in taken.effects:
            ends = self._ends(effect, world.lives)
            worlds = [after for each in worlds for end in ends for after in self._apply(each, number, end)]
        return worlds

    def _ends(self, effect: Merge | Fetch, lives: tuple[int, ...]) -> list[Input]:
        """Return the ways in which a merge or fetch may end, success first."""
        plan, part = effect.plan, effect.part
        if isinstance(effect, Fetch):
            return [ResultHeld(plan=plan, part=part)]
        lost, others = set[PeerId](), []
        for each in plan.contributions:
            number = self.base.electorate.index(each.peer)
            if lives[number] == NONE or each != self._offers[number][lives[number]]:
                lost.add(each.peer)
            elif each.peer != plan.owners[part]:
                others.append(each.peer)
        missing = [lost.union(some) for num in range(len(others) + 1) for some in combinations(others, num)]
        failed = [MergeFailed(plan=plan, part=part, missing=tuple(sorted(each))) for each in missing if each]
        return failed if lost else [MergeDone(plan=plan, part=part, result=merged(plan.contributions, part)), *failed]

    def _intern(self, state: State) -> int:
        key = hashable(state)
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
            self._mail.append(key)
            self._inbox[receiver] |= 1 << known
        return 1 << known


def ones(bits: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, ascending."""
    while bits:
        bit = bits & -bits
        bits ^= bit
        yield bit.bit_length() - 1


def hashable(state: State) -> tuple[Any, ...]:
    return tuple(frozenset(value.items()) if isinstance(value, dict) else value for value in astuple(state))


def _put(values: tuple[int, ...], number: int, value: int) -> tuple[int, ...]:
    return (*values[:number], value, *values[number + 1 :])
