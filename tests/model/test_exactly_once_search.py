"""Every interleaving of one micro-batch's life in a stage of three: it is counted once, or never where somebody died.

A world holds two senders of the micro-batch, of whom the first may be gone, or only seem so; the members' accounts; and
what was said. What was said stays said: an answer may come at any time, or never. Rounds are committed one at a time by
any majority of those that told their part; who was left out may be dropped, and may come back.

A kill takes a member's account with it. What it had contributed stays counted.

Worlds are remembered by a hash of 64 bits: among a few million, that two share one is as good as impossible.
"""

from collections import deque
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from weft.ids import PeerId
from weft.pipeline import exactly_once
from weft.pipeline.exactly_once import Attempt, BatchId, ExactlyOnce, Told

PEERS = tuple(PeerId(f"{number:02d}" * 32) for number in range(3))
BATCH = BatchId(PeerId("ff" * 32), 0)
DEAD = ExactlyOnce(told=Told(frozenset(), frozenset({BATCH, BatchId(BATCH.origin, 1)})))  # like no account that lives


class Sent(NamedTuple):
    """An attempt: who sent it to whom. The number is its place."""

    sender: int
    member: int
    is_computed: bool = False


class Commit(NamedTuple):
    reports: tuple[tuple[PeerId, Told], ...]
    electorate: frozenset[PeerId]


class World(NamedTuple):
    sent: tuple[Sent, ...] = ()
    taken: tuple[int | None, int | None] = (None, None)  # the attempt that each sender has accepted
    members: tuple[ExactlyOnce, ...] = (ExactlyOnce(),) * 3
    electorate: frozenset[PeerId] = frozenset(PEERS)
    commits: tuple[Commit, ...] = ()
    heard: tuple[int, ...] = (0,) * 3  # commits that each has taken up
    num_kills: int = 0
    is_clean: bool = True  # nobody was killed, or dropped and so given up


class Bounds(NamedTuple):
    num_attempts: int
    num_commits: int
    num_kills: int
    may_drop: bool = True


def with_member(world: World, number: int, changed: ExactlyOnce) -> World:
    return world._replace(members=(*world.members[:number], changed, *world.members[number + 1 :]))


def following(world: World, bounds: Bounds) -> Iterator[World]:
    alive = [number for number, each in enumerate(world.members) if each != DEAD]
    if len(world.sent) < bounds.num_attempts:
        for sender in (0, 1) if world.sent else (0,):
            for number in alive:
                yield world._replace(sent=(*world.sent, Sent(sender, number)))
    for number, sent in enumerate(world.sent):
        member, attempt = world.members[sent.member], Attempt(BATCH, number)
        if member == DEAD:
            if sent.is_computed and world.taken[sent.sender] is None:
                yield taken(world, sent.sender, number)
            continue
        if not sent.is_computed:
            computed = world._replace(
                sent=(*world.sent[:number], sent._replace(is_computed=True), *world.sent[number + 1 :])
            )
            yield with_member(computed, sent.member, member.computed(attempt))
            continue
        if world.taken[sent.sender] is None:
            yield taken(world, sent.sender, number)
        else:
            is_it = world.taken[sent.sender] == number
            yield with_member(world, sent.member, member.accepted(attempt) if is_it else member.refused(attempt))
        yield with_member(world, sent.member, member.doubted(attempt))
    yield from rounds(world, bounds, alive)
    if world.num_kills < bounds.num_kills:
        for number in alive:
            yield with_member(world, number, DEAD)._replace(num_kills=world.num_kills + 1, is_clean=False)


def taken(world: World, sender: int, attempt: int) -> World:
    both = list(world.taken)
    both[sender] = attempt
    return world._replace(taken=tuple(both))


def rounds(world: World, bounds: Bounds, alive: list[int]) -> Iterator[World]:
    now = len(world.commits)
    for number in alive:
        member, peer = world.members[number], PEERS[number]
        if world.heard[number] < now:
            yield hear(world, number)
        elif peer in world.electorate and member.told is None and now < bounds.num_commits:
            yield with_member(world, number, member.report())
    ready = [n for n in alive if world.members[n].told is not None and world.heard[n] == now]
    for num in range(len(world.electorate) // 2 + 1, len(ready) + 1):
        for counted in combinations(ready, num):
            yield from committed(world, counted, bounds, alive)


def committed(world: World, counted: tuple[int, ...], bounds: Bounds, alive: list[int]) -> Iterator[World]:
    reports = tuple((PEERS[number], told(world.members[number])) for number in counted)
    commit = Commit(reports, world.electorate)
    after = world._replace(commits=(*world.commits, commit))
    contributors = frozenset(PEERS[number] for number in counted)
    back = {PEERS[n] for n in alive if PEERS[n] not in world.electorate and world.heard[n] == len(world.commits)}
    nexts = {world.electorate | back}
    if bounds.may_drop:
        nexts |= {contributors | back, contributors, world.electorate}
    for electorate in nexts:
        is_dropping = bool({PEERS[number] for number in alive} - electorate)
        yield after._replace(electorate=electorate, is_clean=world.is_clean and not is_dropping)


def told(member: ExactlyOnce) -> Told:
    assert member.told is not None
    return member.told


def hear(world: World, number: int) -> World:
    commit = world.commits[world.heard[number]]
    closed = world.members[number].committed(PEERS[number], dict(commit.reports), commit.electorate)
    if closed.given_up and world.is_clean:
        raise GivenUp(world)
    heard = tuple(each + (n == number) for n, each in enumerate(world.heard))
    return with_member(world, number, closed.exactly_once)._replace(heard=heard)


def times_counted(world: World) -> int:
    return sum(BATCH in told.counted for commit in world.commits for _, told in commit.reports)


def brought_to_an_end(world: World, ends: dict[World, int]) -> int:
    """Return how often the micro-batch is counted once every answer has come, and all have contributed to three rounds.

    Args:
        ends: of worlds in which all has arrived: many lead to one of these.
    """
    world = arrived(world)
    if world not in ends:
        ends[world] = times_counted(all_contribute(arrived(all_contribute(arrived(all_contribute(world))))))
    return ends[world]


def arrived(world: World) -> World:
    for number, each in enumerate(world.heard):
        for _ in range(len(world.commits) - each):
            world = hear(world, number)
    for number, sent in enumerate(world.sent):
        if not sent.is_computed:
            continue
        if world.taken[sent.sender] is None:
            world = taken(world, sent.sender, number)
        member, attempt = world.members[sent.member], Attempt(BATCH, number)
        is_it = world.taken[sent.sender] == number
        world = with_member(world, sent.member, member.accepted(attempt) if is_it else member.refused(attempt))
    return world


def all_contribute(world: World) -> World:
    for number, member in enumerate(world.members):
        if member.told is None:
            world = with_member(world, number, member.report())
    return next(committed(world, (0, 1, 2), Bounds(0, 0, 0, may_drop=False), [0, 1, 2]))


class CountedTwice(AssertionError):
    pass


class NeverCounted(AssertionError):
    pass


class GivenUp(AssertionError):
    pass


def search(bounds: Bounds, first: World | None = None) -> int:
    """Look at every world that can come after `first`; return how many there are.

    Raises:
        CountedTwice: in one of them.
        NeverCounted: in one in which nobody died or was dropped, though all that is under way arrives.
        GivenUp: by a member that nobody had dropped.
    """
    first = first or World()
    seen, waiting, ends = {hash(first)}, deque([first]), dict[World, int]()
    while waiting:
        world = waiting.popleft()
        if times_counted(world) > 1:
            raise CountedTwice(world)
        has_computed = world.is_clean and any(sent.is_computed for sent in world.sent)
        if has_computed and (num := brought_to_an_end(world, ends)) != 1:
            raise (CountedTwice if num else NeverCounted)(world)
        for after in following(world, bounds):
            if hash(after) not in seen:
                seen.add(hash(after))
                waiting.append(after)
    return len(seen)


# Sent to one, who is slow, and then by another to a second one: both have computed, and both are accepted.
SENT_TWICE = World(
    sent=(Sent(0, 2, is_computed=True), Sent(1, 0, is_computed=True)),
    taken=(0, 1),
    members=(
        ExactlyOnce(asked=frozenset({Attempt(BATCH, 1)})),
        ExactlyOnce(),
        ExactlyOnce(asked=frozenset({Attempt(BATCH, 0)})),
    ),
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_commits", "num_kills"),
    [(1, 0), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((1, 1), (2, 0), (2, 1)))],
)
def test_no_interleaving_counts_a_micro_batch_twice(num_commits: int, num_kills: int) -> None:
    assert search(Bounds(2, num_commits, num_kills)) > 10_000


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_attempts", "num_commits", "num_kills"),
    [
        (2, 2, 0),
        (2, 2, 1),
        pytest.param(2, 3, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, 0, marks=pytest.mark.slow),
    ],
)
def test_what_two_senders_accept_is_counted_once(num_attempts: int, num_commits: int, num_kills: int) -> None:
    assert search(Bounds(num_attempts, num_commits, num_kills), SENT_TWICE) > 1_000


BROKEN: dict[str, tuple[Any, type[AssertionError]]] = {
    "all_told": (lambda reports, electorate: len(reports) * 2 > len(electorate), GivenUp),
    "may_count": (lambda _account: True, GivenUp),
    "settled": (lambda past, counted, assigned: past | counted, CountedTwice),
    "clashes": (lambda brought, settled_now: False, CountedTwice),
}


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.full if rule == "clashes" else ()) for rule in BROKEN]
)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, found = BROKEN[rule]
    monkeypatch.setattr(exactly_once, rule, broken)
    with pytest.raises(found):
        search(Bounds(2, 3, 0), SENT_TWICE)


def test_a_stage_that_counts_what_is_sent_whoever_accepts_it_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: ExactlyOnce, attempt: Attempt) -> ExactlyOnce:
        return self._replace(counted=self.counted | {attempt.batch})

    monkeypatch.setattr(ExactlyOnce, "accepted", at_once)
    with pytest.raises(CountedTwice):
        search(Bounds(2, 2, 0), SENT_TWICE)


def test_a_stage_that_lets_go_of_what_is_in_doubt_may_never_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactlyOnce, "_kept", lambda self, attempt: self._replace(asked=self.asked - {attempt}))
    with pytest.raises(NeverCounted):
        search(Bounds(2, 1, 0))
