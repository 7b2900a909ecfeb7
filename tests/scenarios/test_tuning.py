"""`method = "auto"`: how often members synchronise, and in which bytes, follows from what rounds take."""

from itertools import pairwise

import pytest

from scenarios.comings import assert_it_came, replace_in_mid_round
from scenarios.test_faults import MakeSwarm, one_replica
from weft.events import MethodTuned, RoundCommitted
from weft.sync.method.presets import AutoConfig
from weft.sync.records.tuning import PACE, SOON

STEP_S = 0.5
NUM_STEPS = 600  # of each member


@pytest.mark.full
@pytest.mark.parametrize(
    ("delay_s", "is_slow"), [(0.3, True), pytest.param(0.001, False, marks=pytest.mark.slow)], ids=["far", "near"]
)
def test_all_go_over_at_once_to_what_the_links_bear(make_swarm: MakeSwarm, delay_s: float, is_slow: bool) -> None:
    swarm = make_swarm(method=AutoConfig(), num_rounds=NUM_STEPS, delay_s=delay_s, has_even_leases=False)

    async def scenario() -> None:
        members = await swarm.start("abcd", train_s=STEP_S)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()
    told = [life.seen(MethodTuned) for life in swarm.lives]
    assert told[0]
    assert all(each == told[0] for each in told)
    rounds = [event.round for event in told[0]]
    everies = [event.every for event in told[0]]
    least = [SOON if later > earlier else PACE for earlier, later in pairwise(everies)]
    assert all(after - before >= pace for (before, after), pace in zip(pairwise(rounds), least, strict=True))
    assert rounds[0] >= SOON
    first, last = told[0][0], told[0][-1]
    assert "5 % are allowed" in first.reason
    assert (first.waited_s > 0.05 * (first.waited_s + first.worked_s)) == is_slow
    assert (last.every > 30) == is_slow
    times = {
        event.round: at
        for event, at in zip(swarm.lives[0].committed, swarm.lives[0].times(RoundCommitted), strict=True)
    }
    late = [times[round] - times[round - 1] for round in times if round > last.round + 1 and round < max(times)]
    assert len(late) >= 2
    waited = sorted(1 - last.every * STEP_S / took_s for took_s in late)
    assert waited[len(waited) // 2] < 0.06


@pytest.mark.slow
def test_who_comes_after_a_change_goes_on_with_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=AutoConfig(), num_rounds=NUM_STEPS, delay_s=0.2, has_even_leases=False)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd", train_s=STEP_S)
        await swarm.when(a, MethodTuned)
        e = swarm.member("e")
        replace_in_mid_round(swarm, b, e)
        await swarm.round(a, a.peer.replica.head.round + 2)  # type: ignore[union-attr]
        one_replica(await swarm.done(*(each for each in members if each is not b), e))
        assert_it_came(e, a)

    swarm.run(scenario)
    swarm.check()
