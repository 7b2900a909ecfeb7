"""Peers whose run merges by a rule that few cannot move far, and one of them climbs where all others descend."""

from statistics import mean

import pytest

from scenarios.swarm import Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from scenarios.test_sentinels import EVERY, play, spoilt, times_the_rate
from weft.codec.config import Fp32Config, Int8Config
from weft.events import StepDone
from weft.sync.method.choices import Rule, SgdConfig, TrimmedMeanConfig
from weft.sync.method.presets import Choices, FedAvgConfig

RULES: tuple[Rule, ...] = ("clipped_mean", "centered_clip", "median", TrimmedMeanConfig())
NUM_ROUNDS = 10


def last_loss(swarm: Swarm) -> float:
    """Return what the three honest lost in their last steps."""
    honest = [life for life in swarm.lives if life.member.name != "d"]
    return mean(step.loss for life in honest for step in list(life.seen(StepDone))[-EVERY:])


def played(make_swarm: MakeSwarm, rule: Rule, *, climbs: bool) -> float:
    method = FedAvgConfig(every=EVERY, codec=Int8Config(), merge=rule)
    swarm = make_swarm(learns=True, method=method, num_rounds=NUM_ROUNDS)
    if climbs:
        spoilt(swarm, "d", times_the_rate(-10))
    play(swarm)
    return last_loss(swarm)


@pytest.mark.slow
def test_one_of_four_that_climbs_ruins_a_mean_and_no_other_rule(make_swarm: MakeSwarm) -> None:
    clean, ruined = (played(make_swarm, "peers_mean", climbs=climbs) for climbs in (False, True))
    assert ruined > clean + 0.5
    for rule in RULES:
        assert played(make_swarm, rule, climbs=True) < clean + 0.4 * (ruined - clean), rule


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_who_merges_does_not_matter(make_swarm: MakeSwarm, rule: Rule) -> None:
    found = []
    for merged_by in ("owners", "all"):
        choices = Choices(
            every=EVERY,
            send="delta",
            apply=SgdConfig(),
            codec=Int8Config(),
            reply_codec=Fp32Config(),
            merge=rule,
            merged_by=merged_by,
        )
        swarm = make_swarm(method=choices, num_rounds=5)

        async def scenario(swarm: Swarm = swarm) -> None:
            members = await swarm.start("abcd")
            outcomes = await swarm.done(*members)
            one_replica(outcomes)
            found.append(outcomes[0].replica)

        swarm.run(scenario)
        swarm.check()
    assert found[0] == found[1]
