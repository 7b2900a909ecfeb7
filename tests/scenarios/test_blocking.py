"""Newcomers whose lines are slower than the run: what they are told, and whom the run waits for, and for how long.

A round adds 1.8 MB of results, and the state has 14.4 MB. Inner steps of a round take five seconds, unless a scenario
says otherwise, so that the run adds some 2.9 Mbit/s.
"""

import asyncio
from itertools import pairwise

import pytest

from scenarios.swarm import Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from scenarios.test_join import Paced, lay, small
from weft.events import JoinTooSlow, Notice, RoundCommitted, RunBlocked, RunUnblocked, StateJoined
from weft.peer.join.backpressure import LEAST_REST_S, SILENT_S
from weft.run.machine import PeerConfig

LEASE_S = 5.0
ROUND_S = 6.0  # a round on fast lines, and some
FIRST_S = 8.0  # the first in which a newcomer is waited for


def settings(*, is_blocking: bool = False, max_blocked_s: float = 600.0) -> PeerConfig:
    return PeerConfig(device="cpu", micro_batch=2, is_blocking=is_blocking, max_blocked_s=max_blocked_s)


def join(swarm: Swarm, name: str = "n", *, is_blocking: bool = True, mbit: float | None = 1.0) -> Member:
    newcomer = swarm.member(name)
    if mbit is not None:
        lay(newcomer, up=mbit, down=mbit)
    swarm.launch(newcomer, compute=Paced(LEASE_S), settings=settings(is_blocking=is_blocking))
    return newcomer


async def run_of(swarm: Swarm, names: str, max_blocked_s: float = 600.0) -> list[Member]:
    members = await swarm.start(names, compute=Paced(LEASE_S), settings=settings(max_blocked_s=max_blocked_s))
    await asyncio.gather(*(swarm.round(member, 1) for member in members))
    return members


def longest_wait(member: Member, since: float) -> float:
    times = [since, *member.life.times(RoundCommitted, since)]
    return max(after - before for before, after in pairwise(times))


@pytest.mark.full
def test_who_does_not_ask_for_it_stops_nobody_and_is_told_both_figures(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=40)

    async def scenario() -> None:
        a, b = await run_of(swarm, "ab")
        newcomer = join(swarm, is_blocking=False)
        began = swarm.clock.now()
        told = await swarm.when(newcomer, JoinTooSlow)
        assert 0.8e6 < told.received_bps < 1.05e6
        assert 2.0e6 < told.added_bps < 3e6  # three rounds or four in twenty seconds
        assert not told.is_blocking
        await swarm.round(a, 16)
        assert newcomer.life.committed == []  # whatever it has, it never has what the members have
        assert longest_wait(a, began) < ROUND_S
        assert not a.life.seen(RunBlocked) + b.life.seen(RunBlocked)
        assert len(newcomer.life.seen(JoinTooSlow)) == 1

    swarm.run(scenario)


@pytest.mark.full
def test_members_wait_for_who_asks_until_it_is_in_and_then_go_on(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=13)

    async def scenario() -> None:
        members = await run_of(swarm, "abc")
        newcomer = join(swarm)
        await swarm.when(newcomer, JoinTooSlow, lambda told: told.is_blocking)
        ended = await swarm.when(members[0], RunUnblocked)
        assert ended.reason == "it has caught up"
        assert (
            ended.blocked_s < 1.1 * 8 * (14.5e6 + 4 * 1.9e6) / 1e6
        )  # what the state and four results take on its line
        head = members[0].peer.head
        assert head is not None
        assert newcomer.peer.head == head
        for member in members:
            (blocked,) = member.life.seen(RunBlocked)
            assert blocked.by == newcomer.id
        joined = await swarm.round(members[0], head.round + 1)
        at = swarm.clock.now()
        assert newcomer.id in swarm.chains[joined.branch, joined.round].members
        lay(newcomer, up=20, down=20)  # else it would be left behind again
        await swarm.when(newcomer, RoundCommitted, lambda event: newcomer.id in event.contributors)
        assert longest_wait(members[0], at) < FIRST_S
        one_replica(await swarm.done(*members, newcomer))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_who_is_in_and_falls_behind_again_is_told_once_more_and_may_leave(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=40)

    async def scenario() -> None:
        a, _ = await run_of(swarm, "ab")
        newcomer = join(swarm)
        assert not (await swarm.when(newcomer, JoinTooSlow)).is_in
        ended = await swarm.when(a, RunUnblocked)
        assert ended.reason == "it has caught up"
        told = await swarm.when(newcomer, JoinTooSlow)
        assert (told.is_in, told.is_blocking) == (True, False)
        assert told.received_bps < 1.05e6
        assert told.received_bps <= told.added_bps
        newcomer.peer.stop("its person read it")
        (left,) = await swarm.done(newcomer)
        assert left.reason == "its person read it"
        assert len(newcomer.life.seen(JoinTooSlow)) == 2
        assert len(a.life.seen(RunBlocked)) == 1

    swarm.run(scenario)


@pytest.mark.slow
def test_a_line_that_is_fast_enough_stops_nobody_though_it_may(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=30)

    async def scenario() -> None:
        members = await run_of(swarm, "ab")
        newcomer = join(swarm, mbit=8.0)
        await swarm.when(newcomer, RoundCommitted, lambda event: newcomer.id in event.contributors)
        assert not newcomer.life.seen(JoinTooSlow)
        one_replica(await swarm.done(*members, newcomer))
        assert not members[0].life.seen(RunBlocked)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_a_newcomer_that_dies_while_members_wait_frees_them(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=10)

    async def scenario() -> None:
        members = await run_of(swarm, "abc")
        newcomer = join(swarm)
        await swarm.when(members[0], RunBlocked)
        await asyncio.sleep(20.0)
        swarm.kill(newcomer)
        died_at = swarm.clock.now()
        await swarm.when(members[0], RoundCommitted)
        assert swarm.clock.now() - died_at < SILENT_S + 3.0
        assert {member.life.seen(RunUnblocked)[0].reason for member in members} <= {"it is gone", "it fell silent"}
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_no_member_waits_longer_than_its_machine_allows(make_swarm: MakeSwarm) -> None:
    """Nor does it wait again for the same key, nor for long if another follows."""
    swarm = small(make_swarm, num_rounds=40)

    async def scenario() -> None:
        members = await run_of(swarm, "abc", max_blocked_s=40.0)
        newcomer = join(swarm)
        await swarm.when(members[0], RunBlocked)
        began = swarm.clock.now()
        ended = await swarm.when(members[0], RunUnblocked)
        assert ended.blocked_s <= 40.0 + 1e-6
        assert newcomer.life.seen(StateJoined) == []
        told = await swarm.when(newcomer, Notice, lambda event: "do not wait" in event.text)
        assert "in 3" in told.text  # nine times as long as it waited
        await swarm.round(members[0], 14)
        assert longest_wait(members[0], began) < 40.0 + ROUND_S
        assert all(len(member.life.seen(RunBlocked)) == 1 for member in members)

    swarm.run(scenario)


@pytest.mark.full
def test_who_would_need_far_too_long_is_declined_at_once(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=40)

    async def scenario() -> None:
        members = await run_of(swarm, "ab", max_blocked_s=10.0)
        newcomer = join(swarm)
        told = await swarm.when(newcomer, Notice, lambda event: "do not wait" in event.text)
        assert "at most 10 s" in told.text
        await swarm.round(members[0], 12)
        assert not members[0].life.seen(RunBlocked)

    swarm.run(scenario)


@pytest.mark.slow
def test_one_newcomer_is_waited_for_at_a_time(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=40)

    async def scenario() -> None:
        members = await run_of(swarm, "abc")
        first = join(swarm, "n")
        await asyncio.sleep(3.0)
        second = join(swarm, "o", mbit=0.9)
        told = await swarm.when(second, Notice, lambda event: "do not wait" in event.text)
        assert "another newcomer" in told.text
        assert first.life.seen(Notice, swarm.clock.now()) == []
        ended = await swarm.when(members[0], RunUnblocked)
        assert (ended.by, ended.reason) == (first.id, "it has caught up")
        freed_at = swarm.clock.now()
        lay(first, up=20, down=20)
        await swarm.round(members[0], members[0].life.committed[-1].round + 5)
        assert longest_wait(members[0], freed_at) < FIRST_S
        assert swarm.clock.now() - freed_at < LEAST_REST_S

    swarm.run(scenario)


@pytest.mark.slow
def test_a_majority_that_does_not_want_to_wait_is_not_held_up_by_the_rest(make_swarm: MakeSwarm) -> None:
    swarm = small(make_swarm, num_rounds=40)

    async def scenario() -> None:
        a, b, c, d = (swarm.member(name) for name in "abcd")
        a.is_founder = True
        for member in (a, b, c, d):
            limit_s = 600.0 if member is d else 0.0
            swarm.launch(member, wait_for=4, compute=Paced(LEASE_S), settings=settings(max_blocked_s=limit_s))
        await swarm.round(a, 1)
        began = swarm.clock.now()
        newcomer = join(swarm)
        told = await swarm.when(newcomer, Notice, lambda event: "do not wait" in event.text)
        assert "3 of 4" in told.text
        assert "this machine waits for nobody" in told.text
        await swarm.round(a, 14)
        assert longest_wait(a, began) < ROUND_S
        assert longest_wait(d, began) < ROUND_S + SILENT_S

    swarm.run(scenario)
