"""Majorities lost and found: pairs of which one dies, swarms cut in two, and branches that meet."""

import asyncio
from collections.abc import Callable

import pytest

from scenarios.swarm import TRAIN_S, Member, Swarm
from weft.events import (
    BranchOpened,
    CheckpointSaved,
    MajorityLost,
    MemberGone,
    Notice,
    RoundCommitted,
    StateJoined,
    TrainsOn,
)
from weft.peer.chain import branch_name, open_branch
from weft.peer.fork import CHECK_S, ORPHAN_AFTER_PAIR_S, ORPHAN_AFTER_S, UNREACHED_S
from weft.peer.messages import BranchBegin, BranchConsent, BranchProposal

MakeSwarm = Callable[..., Swarm]
ROUND_S = 1.0  # of virtual time, beside the inner steps


def keeper_first(a: Member, b: Member) -> tuple[Member, Member]:
    keeper = a.peer.rounds.chain.base.keeper  # type: ignore[union-attr]
    return (a, b) if a.id == keeper else (b, a)


@pytest.mark.parametrize("is_founder_killed", [True, False])
def test_of_two_the_one_without_the_tie_breaker_opens_a_branch_and_the_other_joins_it(
    make_swarm: MakeSwarm, is_founder_killed: bool
) -> None:
    swarm = make_swarm(num_rounds=30, num_peers=2, train={"tokens": 24 * 64})

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        victim = a if is_founder_killed else b
        stays = b if is_founder_killed else a
        while True:  # until the victim is the tie-breaker
            event = await swarm.when(stays, RoundCommitted)
            if stays.peer.rounds.chain.base.keeper == victim.id and event.round >= 2:  # type: ignore[union-attr]
                break
        swarm.kill(victim)
        at = swarm.clock.now()
        await swarm.when(stays, RoundCommitted, lambda event: event.branch != swarm.run_config.run)
        assert swarm.clock.now() - at <= ORPHAN_AFTER_PAIR_S + CHECK_S + TRAIN_S + ROUND_S
        (opened,) = stays.life.seen(BranchOpened)
        assert opened.members == (stays.id,)
        assert stays.life.times(MemberGone)[0] - at <= 8.5
        assert stays.life.seen(MajorityLost)[0].alive == 1
        swarm.launch(victim)
        outcomes = await swarm.done(a, b)
        assert {outcome.reason for outcome in outcomes} == {"complete"}
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert {event.branch for event in victim.life.committed} == {opened.branch}

    swarm.run(scenario)


def test_of_two_the_tie_breaker_goes_on_as_the_majority(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(a, 2)
        keeper, other = keeper_first(a, b)
        swarm.kill(other)
        await swarm.done(keeper)
        assert keeper.life.seen(MajorityLost) == []
        assert keeper.life.seen(BranchOpened) == []
        assert keeper.life.seen(TrainsOn) == []

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_strict_run_that_fell_silent_waits_for_a_majority_to_come_back(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6, is_strict=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        for member in members:
            await swarm.round(member, 3)
            await member.peer._autosave.save()
        for member in members:
            swarm.kill(member)
        a, *others = members
        swarm.launch(a)
        await asyncio.sleep(ORPHAN_AFTER_S + 20)
        assert a.life.committed == []
        for member in others:
            swarm.launch(member)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert all(member.life.seen(BranchOpened) == [] for member in members)
        assert len({event.branch for member in members for life in member.lives for event in life.committed}) == 1

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_strict_minority_says_so_and_waits_and_its_work_is_counted_later(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=10, num_peers=5, is_strict=True)

    async def scenario() -> None:
        members = await swarm.start("abcde", train_s=8.0)
        a, b, c, d, e = members
        for member in members:
            await swarm.round(member, 1)
        swarm.cut([a, b, c], [d, e])
        await asyncio.sleep(ORPHAN_AFTER_S + 20)
        assert a.life.committed[-1].round > 3
        for member in (d, e):
            (lost,) = member.life.seen(MajorityLost)
            assert (lost.alive, lost.electorate, lost.opens_branch_in_s) == (2, 5, None)
            assert member.life.seen(BranchOpened) == []
            assert member.life.committed[-1].round <= 2
        swarm.heal([a, b, c], [d, e])
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert all(member.life.seen(StateJoined) == [] for member in (d, e))  # by the chain
        last = a.life.committed[-1]
        assert {d.id, e.id} <= set(last.contributors)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_minority_opens_a_branch_and_comes_over_when_the_branches_meet(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12, num_peers=5)

    async def scenario() -> None:
        members = await swarm.start("abcde", train_s=8.0)
        a, b, c, d, e = members
        await swarm.round(a, 1)
        at = swarm.clock.now()
        swarm.cut([a, b, c], [d, e])
        opened = await swarm.when(d, BranchOpened)
        assert swarm.clock.now() - at == pytest.approx(ORPHAN_AFTER_S, abs=4)
        assert opened.members == tuple(sorted((d.id, e.id)))
        await swarm.when(e, RoundCommitted, lambda event: event.branch == opened.branch)
        swarm.heal([a, b, c], [d, e])
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert all(event.branch == swarm.run_config.run for event in a.life.committed)
        for member in (d, e):
            assert any("went on apart from this peer" in event.text for event in member.life.seen(Notice))

    swarm.run(scenario)


def test_a_link_that_freezes_for_a_moment_costs_no_member(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 2)
        swarm.cut([a], [b])
        await asyncio.sleep(4)
        swarm.heal([a], [b])
        outcomes = await swarm.done(a, b, c)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert a.life.seen(MemberGone) == b.life.seen(MemberGone) == []

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_member_given_up_for_gone_comes_back_with_its_carry(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd", train_s=3.0)
        await swarm.round(a, 1)
        swarm.cut([d], [a, b, c])
        await swarm.when(a, RoundCommitted, lambda event: d.id in swarm.chains[event.branch, event.round].left)
        swarm.heal([d], [a, b, c])
        await swarm.when(a, RoundCommitted, lambda event: d.id in event.contributors)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
@pytest.mark.parametrize("returns", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_is_back_from_an_older_checkpoint_votes_in_no_round_again(make_swarm: MakeSwarm, returns: bool) -> None:
    """Rounds that a and c decided, b has not seen. Without c, a and b are a majority that must not decide them anew."""
    swarm = make_swarm(num_rounds=120, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        saved = await swarm.when(a, CheckpointSaved, lambda event: event.round > 5)
        swarm.cut([b], [a, c])
        await swarm.round(a, saved.round + 2)  # and b is still of the electorate
        swarm.cut_power(a)
        swarm.cut([c], [a, b])
        swarm.heal([a], [b])
        await asyncio.sleep(0.5)
        at = swarm.clock.now()
        swarm.launch(a)
        if returns:
            await asyncio.sleep(ORPHAN_AFTER_S / 2)
            assert a.life.committed == []
            swarm.heal([c], [a, b])
        outcomes = await swarm.done(a, b)
        assert len({outcome.replica for outcome in outcomes}) == 1
        opened = [member.life.seen(BranchOpened) for member in (a, b)]
        if returns:
            assert opened == [[], []]
            assert {event.branch for event in a.life.committed} == {swarm.run_config.run}
        else:
            assert [event.members for events in opened for event in events] == 2 * [tuple(sorted((a.id, b.id)))]
            assert a.life.times(BranchOpened)[0] - at < ORPHAN_AFTER_S + UNREACHED_S + 20

    swarm.run(scenario)


def test_an_opening_that_comes_after_the_decision_is_not_followed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8, num_peers=3)

    async def scenario() -> None:
        a, _, c = members = await swarm.start("abc")
        await swarm.round(c, 2)
        base = c.peer.rounds.chain.base  # type: ignore[union-attr]
        pair = (a.id, c.id)
        opening = open_branch(base, pair, a.id, branch_name(base, pair, a.id))
        c.peer.rounds.quorum.has_majority = lambda: False  # type: ignore[method-assign, union-attr]
        consent = await a.peer.context.node.call(
            c.id, BranchProposal(opening=opening, opener=a.id), BranchConsent, deadline_s=1.0
        )
        del c.peer.rounds.quorum.has_majority  # type: ignore[union-attr]
        assert consent.is_given
        await swarm.round(c, base.round)
        a.peer.context.node.post(c.id, BranchBegin(opening=opening))
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert c.life.seen(BranchOpened) == []

    swarm.run(scenario)
