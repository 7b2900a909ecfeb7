"""How far a rule merges from the mean of honest members, as the benchmark of merging tells it."""

import pytest
import torch
from benchmarks.merging import ATTACKS, EVERY, NUM_PEERS, RULES, forging, merged

from weft.sync.method.choices import Rule

Deltas = list[torch.Tensor]


def honest() -> Deltas:
    luck = torch.Generator().manual_seed(0)
    right = torch.randn(500, generator=luck)
    return [right + torch.randn(500, generator=luck) for _ in range(NUM_PEERS)]


def apart(attack: str, rule: Rule) -> float:
    told = list[float]()
    forging(ATTACKS[attack][0], rule, 0, told)(EVERY, honest())
    return told[0]


def test_the_mean_is_moved_as_far_as_an_attack_goes_and_no_rule_is() -> None:
    assert apart("none", "peers_mean") == 0.0
    assert apart("flip x 10", "peers_mean") == pytest.approx(2 * 11 / NUM_PEERS)
    assert all(apart("flip x 10", rule) < 1.0 for rule in RULES.values() if rule != "peers_mean")


def test_where_nobody_attacks_a_clipped_mean_is_the_mean() -> None:
    deltas = honest()
    torch.testing.assert_close(merged("clipped_mean", deltas), merged("peers_mean", deltas))
