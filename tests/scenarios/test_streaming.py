"""Rounds of fragments, with inner steps made while they are decided."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from scenarios import rules
from scenarios.comings import assert_it_came, kill_two_in_turn, replace_in_mid_round
from scenarios.swarm import Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp32Config
from weft.events import BranchLeft, BranchOpened, PayloadOffered, RoundCommitted, StepDone, TrainsOn
from weft.sync.method.presets import StreamingConfig

METHOD = StreamingConfig(every=8, fragments=2, overlap=2, mix=0.5, codec=Fp32Config())


def round_s(swarm: Swarm) -> float:
    """Play a run whose steps take a second and whose rounds take some; return the mean time between two commits."""

    async def scenario() -> None:
        members = await swarm.start("abcd", train_s=1.0)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()
    waits = [after - before for life in swarm.lives for before, after in pairwise(life.times(RoundCommitted)[2:])]
    return sum(waits) / len(waits)


@pytest.mark.full
def test_inner_steps_go_on_while_a_fragment_is_on_its_way(make_swarm: MakeSwarm) -> None:
    settings: dict[str, Any] = {"num_rounds": 8, "delay_s": 0.3, "has_even_leases": False}
    swarm = make_swarm(method=METHOD, **settings)
    overlapped = round_s(swarm)
    every = METHOD.every // METHOD.fragments
    assert every * 1.0 <= overlapped
    waiting = round_s(make_swarm(method=msgspec.structs.replace(METHOD, overlap=0), **settings))
    assert waiting > every + 1.5
    assert overlapped < waiting - 1.4  # of two steps
    for life in swarm.lives:
        assert not life.seen(TrainsOn)  # that is for who has lost the majority
        assert len(life.seen(StepDone)) <= every * len(life.committed) + METHOD.overlap + every


@pytest.mark.full
@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_log_shows_which_inner_steps_end_while_a_fragment_is_in_flight(make_swarm: MakeSwarm, overlap: int) -> None:
    method = msgspec.structs.replace(METHOD, overlap=overlap)
    swarm = make_swarm(method=method, num_rounds=8, delay_s=0.3, has_even_leases=False)
    round_s(swarm)
    offered = [event for life in swarm.lives for event in life.seen(PayloadOffered)]
    for life in swarm.lives:
        in_flight: dict[int, int] = {}
        for _, event in life.events:
            match event:
                case PayloadOffered(round=round):
                    in_flight[round] = 0
                case StepDone() if in_flight:
                    in_flight[max(in_flight)] += 1
                case RoundCommitted(round=round, tokens=tokens):
                    assert in_flight.pop(round) == overlap
                    assert tokens == sum(each.tokens for each in offered if each.round == round)
        assert not in_flight


@pytest.mark.full
def test_one_dies_in_the_middle_of_a_round_and_another_joins(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHOD, num_rounds=9)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        e = swarm.member("e")
        replace_in_mid_round(swarm, b, e)
        await swarm.round(a, 4)
        one_replica(await swarm.done(*(each for each in members if each is not b), e))
        assert_it_came(e, a)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_who_is_killed_and_comes_back_goes_on(make_swarm: MakeSwarm, seed: int) -> None:
    swarm = make_swarm(num_rounds=14, method=METHOD, seed=seed)

    async def scenario() -> None:
        members = await swarm.start("abcd", train_s=1.0 + seed)
        one_replica(await kill_two_in_turn(swarm, members, seed, train_s=1.0 + seed))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_what_a_branch_counted_is_said_to_be_lost(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=40, num_peers=5, method=METHOD)

    async def scenario() -> None:
        members = await swarm.start("abcde", train_s=4.0)
        await swarm.round(members[0], 2)
        stay, go = members[:3], members[3:]
        swarm.cut(stay, go)
        await swarm.when(go[0], BranchOpened)
        await swarm.when(go[0], RoundCommitted)
        swarm.heal(stay, go)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        left = [event for member in members for event in member.life.seen(BranchLeft)]
        assert left
        assert all(event.kept == 0 and "fragment" in event.reason for event in left)

    swarm.run(scenario)
    rules.one_history([event for life in swarm.lives for event in life.committed])
    swarm.check(has_branches=True)
