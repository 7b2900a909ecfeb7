"""Peers whose run merges by a rule that few cannot move far, and one of them climbs where all others descend."""

from statistics import mean

import pytest

from scenarios.swarm import Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from scenarios.test_sentinels import EVERY, play, spoilt, times_the_rate
from weft.codec.config import Fp32Config, Int8Config
from weft.events import StepDone
from weft.sync.method.choices import MultiKrumConfig, Rule, SgdConfig, TrimmedMeanConfig
from weft.sync.method.presets import Choices, FedAvgConfig

RULES: tuple[Rule, ...] = ("clipped_mean", "centered_clip", "median", TrimmedMeanConfig(), MultiKrumConfig())
NUM_ROUNDS = 10
NEAR = 1.1  # times the loss without an attack; 1.06 was seen


def last_loss(swarm: Swarm) -> float:
    """Return what the honest lost in their last steps."""
    honest = [life for life in swarm.lives if life.member.name != "d"]
    return mean(step.loss for life in honest for step in list(life.seen(StepDone))[-EVERY:])


def played(make_swarm: MakeSwarm, rule: Rule, *, climbs: bool, names: str = "abcd") -> float:
    method = FedAvgConfig(every=EVERY, codec=Int8Config(), merge=rule)
    num = len(names)
    swarm = make_swarm(learns=True, method=method, num_rounds=NUM_ROUNDS, num_peers=num, peers=num)
    if climbs:
        spoilt(swarm, "d", times_the_rate(-10))
    play(swarm, names)
    return last_loss(swarm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "rules"),
    [("abcd", RULES[:-1]), ("abcde", RULES[-1:])],  # of four, Multi-Krum leaves nobody out
    ids=["four", "five"],
)
def test_one_that_climbs_ruins_a_mean_and_no_other_rule(
    make_swarm: MakeSwarm, names: str, rules: tuple[Rule, ...]
) -> None:
    clean, ruined = (played(make_swarm, "peers_mean", climbs=climbs, names=names) for climbs in (False, True))
    assert ruined > 2 * clean
    for rule in rules:
        assert played(make_swarm, rule, climbs=True, names=names) < NEAR * clean, rule


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
        swarm = make_swarm(method=choices, num_rounds=5, num_peers=5, peers=5)

        async def scenario(swarm: Swarm = swarm) -> None:
            members = await swarm.start("abcde")
            outcomes = await swarm.done(*members)
            one_replica(outcomes)
            found.append(outcomes[0].replica)

        swarm.run(scenario)
        swarm.check()
    assert found[0] == found[1]
