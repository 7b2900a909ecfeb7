"""Members that were in the run before come again, with what their checkpoints hold, and meet what has become of it."""

import asyncio
import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from scenarios.swarm import Member
from scenarios.test_faults import MakeSwarm, one_replica
from weft.events import (
    BranchLeft,
    BranchOpened,
    MajorityLost,
    Notice,
    RoundCommitted,
    Sponsored,
    StateJoined,
    StepDone,
    WorkDropped,
)
from weft.peer.fork import ORPHAN_AFTER_PAIR_S, ORPHAN_AFTER_S, TOGETHER_S
from weft.peer.join.entrance import JOINING_EXPIRES_S
from weft.peer.join.state_transfer import StateServer
from weft.peer.state.carry import FORGOTTEN
from weft.peer.state.checkpoint import Snapshot, load
from weft.sim import world

FAST_S = 0.1  # a lease: rounds follow each other within less than a second


async def stop(*members: Member) -> None:
    for member in members:
        member.peer.stop("asked to")
    await asyncio.gather(*(member.life.task for member in members))


def num_committed(member: Member, life: int) -> int:
    return int(member.lives[life].committed[-1].committed_tokens)


def test_who_left_and_comes_again_goes_on_with_its_inner_optimizer_and_its_carry(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=9)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        await stop(b)
        await swarm.round(a, 5)
        swarm.launch(b)
        await swarm.when(b, StateJoined)
        one_replica(await swarm.done(*members))
        first, second = ([event.step for event in life.seen(StepDone)] for life in b.lives)
        assert second[0] == first[-1] + 1
        assert b.id in a.life.committed[-1].contributors

    swarm.run(scenario)
    swarm.check()


def test_who_is_left_alone_goes_on_when_it_says(make_swarm: MakeSwarm) -> None:
    """It had heard nothing for a while before it said so, and has waited for so long already."""
    swarm = make_swarm(num_rounds=30, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab", train_s=4.0)
        await swarm.round(a, 3)
        swarm.kill(b)
        lost = await swarm.when(a, MajorityLost)
        assert lost.opens_branch_in_s is not None
        at = swarm.clock.now()
        await swarm.when(a, BranchOpened)
        assert swarm.clock.now() - at == pytest.approx(lost.opens_branch_in_s, abs=1.0)
        await stop(a)

    swarm.run(scenario)


def test_who_comes_back_into_a_long_round_trains_through_another_until_a_round_counts_it_in(
    make_swarm: MakeSwarm,
) -> None:
    """That there is room is said with it: it is no leaf for good."""
    swarm = make_swarm(num_rounds=9)

    async def scenario() -> None:
        a, _, c = await swarm.start("abc", train_s=20.0)
        await swarm.round(a, 2)
        await stop(c)
        await swarm.round(a, 4)
        swarm.launch(c, train_s=20.0)
        told = await swarm.when(c, Sponsored)
        assert told.has_room is True
        await swarm.when(a, RoundCommitted, lambda event: c.id in event.contributors and event.num_through == 0)
        assert c.peer._in_rounds.groups.leaf.aggregator is None  # type: ignore[union-attr]

    swarm.run(scenario)


@pytest.mark.full
def test_who_goes_on_from_a_checkpoint_does_not_hold_its_vectors_twice(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, read = make_swarm(num_rounds=9), list[weakref.ref[Tensor]]()

    def noted(folder: Path, **options: Any) -> Snapshot:
        found = load(folder, **options)
        read.extend(weakref.ref(vector) for vector in (*found.replicated.values(), found.private["local"]))
        return found

    monkeypatch.setattr(world, "load", noted)

    async def scenario() -> None:
        _, b, *_ = members = await swarm.start("abcd")
        await swarm.round(b, 2)
        await stop(b)
        swarm.launch(b)
        await swarm.round(b, 4)
        gc.collect()
        assert len(read) == 2
        assert [vector() for vector in read] == [None, None]
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


@pytest.mark.full
def test_who_comes_again_and_is_set_back_to_a_state_pinned_for_another_says_what_it_drops(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it hears of a round that counts it once more, which does not count what it has trained since."""
    monkeypatch.setattr(StateServer, "_at_hand", lambda donor, _wanted, _present: next(iter(donor._pins), None))
    swarm = make_swarm(num_rounds=14)

    async def scenario() -> None:
        _, _, c, d = members = await swarm.start("abcd")
        await swarm.round(c, 2)
        swarm.kill(d)
        swarm.launch(d)
        pinned = await swarm.when(d, StateJoined)
        await swarm.round(c, pinned.round + 1)
        await swarm.when(c, StepDone)
        await stop(c)
        assert c.peer.carried_tokens > 0
        swarm.launch(c)
        one_replica(await swarm.done(*members))
        before, after = (life.committed for life in c.lives)
        assert after[0].round <= before[-1].round
        assert any(each.reason == FORGOTTEN for each in c.life.seen(WorkDropped))

    swarm.run(scenario)
    swarm.check()


def test_a_killed_member_is_back_in_the_very_round_without_fetching_a_state(make_swarm: MakeSwarm) -> None:
    """Its checkpoint is that of the round before, so nothing is left to fetch."""
    swarm = make_swarm(num_rounds=5)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd", train_s=5.0)
        await swarm.round(b, 2)
        await b.peer._autosave.save()
        swarm.kill(b)
        swarm.launch(b)
        one_replica(await swarm.done(*members))
        assert b.life.seen(StateJoined) == []
        assert b.id in a.life.committed[2].contributors

    swarm.run(scenario)
    swarm.check()


def test_a_state_that_the_maker_has_lost_comes_back_with_a_joiner(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(b, 3)
        await stop(a)
        await stop(b)
        shutil.rmtree(a.folder.root)
        swarm.launch(a, wait_for=2)
        swarm.launch(b)
        await swarm.when(a, StateJoined)
        one_replica(await swarm.done(a, b))
        assert min(event.round for event in a.life.committed) > 3
        assert num_committed(a, 1) > num_committed(b, 0)

    swarm.run(scenario)


@pytest.mark.parametrize(
    ("pause_s", "train_s"),
    [(0.0, FAST_S), pytest.param(0.0, 5.0, marks=pytest.mark.slow), pytest.param(3.0, 5.0, marks=pytest.mark.slow)],
)
def test_who_went_on_alone_brings_that_back_to_the_maker(make_swarm: MakeSwarm, pause_s: float, train_s: float) -> None:
    """The maker, which left first, begins a branch where it stood; the other's counts more, and both go on with it."""
    swarm = make_swarm(num_rounds=40, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab", train_s=train_s)
        await swarm.round(a, 2)
        await stop(a)
        await swarm.round(b, 12)
        await stop(b)
        swarm.launch(a, train_s=train_s)
        await asyncio.sleep(pause_s)
        swarm.launch(b, train_s=train_s)
        both = await swarm.when(b, RoundCommitted, lambda event: {a.id, b.id} == set(event.contributors))
        assert both.round > 12
        assert both.branch == b.lives[0].committed[-1].branch
        one_replica(await swarm.done(a, b))

    swarm.run(scenario)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pause_s", "train_s"),
    [pytest.param(0.0, FAST_S, marks=pytest.mark.slow), (0.5, 5.0), pytest.param(3.0, 5.0, marks=pytest.mark.slow)],
)
def test_members_that_all_left_in_one_round_meet_again(make_swarm: MakeSwarm, pause_s: float, train_s: float) -> None:
    """Nobody may decide that round any more: the maker opens a branch, and the others come to it."""
    swarm = make_swarm(num_rounds=20, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc", train_s=train_s)
        await swarm.round(a, 4)
        await stop(a, b, c)
        swarm.launch(a, train_s=train_s)
        await asyncio.sleep(pause_s)
        swarm.launch(b, train_s=train_s)
        swarm.launch(c, train_s=train_s)
        at = swarm.clock.now()
        await swarm.when(b, RoundCommitted, lambda event: len(event.contributors) == 3)
        assert swarm.clock.now() - at < TOGETHER_S + JOINING_EXPIRES_S + 2 * train_s + 10  # nobody is waited for
        opened = [event for member in (a, b, c) for event in member.life.seen(BranchOpened)]
        assert all(event.is_everybody is True and "all are back" in event.reason for event in opened)
        assert not [event for member in (a, b, c) for event in member.life.seen(MajorityLost)]
        one_replica(await swarm.done(a, b, c))
        assert num_committed(a, 1) > num_committed(a, 0)

    swarm.run(scenario)


def test_who_comes_again_after_the_end_adds_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=3)

    async def scenario() -> None:
        members = await swarm.start("ab")
        before, _ = await swarm.done(*members)
        swarm.launch(members[0])
        (outcome,) = await swarm.done(members[0])
        assert (outcome.reason, outcome.replica) == ("complete", before.replica)
        assert outcome.loss is not None
        assert members[0].life.committed == []
        assert members[0].life.seen(StepDone) == []

    swarm.run(scenario)


@pytest.mark.full
@pytest.mark.parametrize("is_maker", [pytest.param(False, marks=pytest.mark.slow), True], ids=["joined", "made it"])
@pytest.mark.parametrize("num_peers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_who_comes_back_to_nobody_waits_for_them_and_then_goes_on_alone(
    make_swarm: MakeSwarm, num_peers: int, is_maker: bool
) -> None:
    """As long as a minority of the run waits: 15 s of two peers, 60 s of more. Its maker waits as well."""
    swarm = make_swarm(num_rounds=16, num_peers=num_peers)

    async def scenario() -> None:
        members = await swarm.start("abc"[:num_peers])
        await swarm.round(members[0], 3)
        await stop(*members)
        at = swarm.clock.now()
        first, *others = members if is_maker else (members[1], members[0], *members[2:])
        swarm.launch(first)
        alone = await swarm.when(first, RoundCommitted)
        assert alone.contributors == (first.id,)
        wait_s = ORPHAN_AFTER_PAIR_S if num_peers == 2 else ORPHAN_AFTER_S
        assert wait_s < swarm.clock.now() - at < wait_s + 20
        for member in others:
            swarm.launch(member)
        await swarm.when(first, RoundCommitted, lambda event: len(event.contributors) == num_peers)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


def test_who_joined_and_comes_back_to_nobody_meets_the_others_while_it_waits(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8, num_peers=3)

    async def scenario() -> None:
        a, b, c = members = await swarm.start("abc")
        await swarm.round(a, 3)
        await a.peer._autosave.save()
        await b.peer._autosave.save()
        for member in members:
            swarm.kill(member)
        swarm.launch(b)
        await asyncio.sleep(20)
        assert b.life.committed == []
        swarm.launch(a)
        swarm.launch(c)
        one_replica(await swarm.done(*members))
        assert all(life.seen(BranchOpened) == [] for life in swarm.lives)

    swarm.run(scenario)


@pytest.mark.full
def test_a_newcomer_is_nobody_to_go_on_with_before_the_other_members_have_had_their_time(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=16, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        await stop(*members)
        at = swarm.clock.now()
        swarm.launch(members[0])
        await asyncio.sleep(1)
        newcomer = swarm.member("d")
        swarm.launch(newcomer)
        alone = await swarm.when(members[0], RoundCommitted)
        assert set(alone.contributors) <= {members[0].id, newcomer.id}
        assert ORPHAN_AFTER_S < swarm.clock.now() - at < ORPHAN_AFTER_S + 20
        told = [event.text for event in members[0].life.seen(Notice) if "no other member answers" in event.text]
        assert len(told) == 1
        for member in members[1:]:
            swarm.launch(member)
        one_replica(await swarm.done(*members, newcomer))

    swarm.run(scenario)


@pytest.mark.full
def test_who_joined_a_strict_run_and_comes_back_to_nobody_waits(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=20, num_peers=2, is_strict=True)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(a, 3)
        while a.peer.head is None or a.peer.head.leader != a.id:  # of two, the tie-breaker alone is the majority
            await swarm.when(a, RoundCommitted)
        await swarm.round(b, a.peer.head.round)
        await a.peer._autosave.save()
        await b.peer._autosave.save()
        swarm.kill(a)
        swarm.kill(b)
        swarm.launch(b)
        await asyncio.sleep(600)
        assert b.life.committed == []
        assert b.life.is_running
        swarm.launch(a)
        one_replica(await swarm.done(a, b))

    swarm.run(scenario)


@pytest.mark.full
@pytest.mark.parametrize("has_committed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_who_goes_over_and_is_killed_goes_on_from_where_its_checkpoint_stands(
    make_swarm: MakeSwarm, has_committed: bool
) -> None:
    """Before its first commit in the other branch, that is the one it has left, whose work it brings nobody there."""
    swarm = make_swarm(num_rounds=40, num_peers=2)

    async def scenario() -> None:
        members = await swarm.start("ab", train_s=4.0)
        await swarm.round(members[0], 2)
        base = members[0].peer.rounds.chain.base  # type: ignore[union-attr]
        stays, goes = sorted(members, key=lambda member: member.id != base.keeper)
        swarm.cut([stays], [goes])
        opened = await swarm.when(goes, BranchOpened)
        await swarm.round(goes, opened.round + 3)
        await goes.peer._autosave.save()
        swarm.heal([stays], [goes])
        await swarm.when(goes, BranchLeft)
        if has_committed:
            await swarm.when(goes, RoundCommitted, lambda event: event.branch == base.branch)
            await asyncio.sleep(0.1)  # its checkpoint is written
        swarm.kill(goes)
        swarm.cut([stays], [goes])
        goes.is_founder = True  # it goes on where nobody is there
        swarm.launch(goes, train_s=4.0)
        alone = await swarm.when(goes, RoundCommitted)
        assert (alone.branch == opened.branch) == (not has_committed)
        swarm.heal([stays], [goes])
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check(has_branches=True)
