"""Rounds that wait for nobody: each member brings its delta when its own inner steps are done."""

import pytest

from scenarios import rules
from scenarios.comings import assert_it_came, kill_two_in_turn, replace_in_mid_round
from scenarios.swarm import EVERY, Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp32Config
from weft.events import RoundCommitted, RoundMissed
from weft.peer.round.driver import AT_WORK
from weft.sync.method.presets import AsyncDiLoCoConfig

METHOD = AsyncDiLoCoConfig(every=EVERY, codec=Fp32Config())


def num_counted(swarm: Swarm, member: Member) -> int:
    return sum(member.id in {each.peer for each in manifest.contributions} for manifest in swarm.chains.values())


@pytest.mark.full
@pytest.mark.parametrize(
    "has_even_leases", [pytest.param(True, marks=pytest.mark.slow), False], ids=["even", "by speed"]
)
def test_who_is_slow_delays_nobody_and_is_counted_when_it_is_done(make_swarm: MakeSwarm, has_even_leases: bool) -> None:
    swarm = make_swarm(num_rounds=18, num_peers=4, method=METHOD, has_even_leases=has_even_leases)
    fast: list[Member] = []
    slow: list[Member] = []

    async def scenario() -> None:
        fast.extend(await swarm.start("abc", train_s=2.0))
        slow.extend([swarm.member("s")])
        swarm.launch(slow[0], train_s=20.0)
        one_replica(await swarm.done(*fast, *slow))

    swarm.run(scenario)
    swarm.check()
    (s,) = slow
    counts = [num_counted(swarm, member) for member in fast]
    assert 1 <= num_counted(swarm, s) < min(counts)
    assert not any(event.reason == AT_WORK for life in swarm.lives for event in life.seen(RoundMissed))
    reasons = {why for life in swarm.lives for event in life.committed for why in event.left_out.values()}
    assert AT_WORK in reasons
    for member in fast:
        rules.no_long_wait(member.life.times(RoundCommitted), 8.0)
    # No lease is left behind: what was trained is counted or carried, and a member has one lease at a time.
    for manifest in swarm.chains.values():
        holders = [each.peer for each in (*manifest.leases, *manifest.uncounted)]
        assert len(holders) == len(set(holders))


@pytest.mark.full
def test_one_dies_in_the_middle_of_a_round_and_another_joins(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHOD, num_rounds=9)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        e = swarm.member("e")
        replace_in_mid_round(swarm, b, e)
        one_replica(await swarm.done(*(each for each in members if each is not b)))
        await swarm.done(e)
        assert_it_came(e, a)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_who_is_killed_and_comes_back_goes_on_with_its_lease(make_swarm: MakeSwarm, seed: int) -> None:
    swarm = make_swarm(num_rounds=14, num_peers=4, method=METHOD, seed=seed, has_even_leases=seed % 2 == 0)

    async def scenario() -> None:
        members = await swarm.start("abcd", train_s=1.0 + seed)
        await kill_two_in_turn(swarm, members, seed, train_s=1.0 + seed)

    swarm.run(scenario)
    swarm.check()
