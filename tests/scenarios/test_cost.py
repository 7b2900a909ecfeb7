"""The cost model in place of torch: rounds are what they are with models, and nothing is learnt."""

import math

import pytest

from scenarios.swarm import LEASE_TOKENS
from scenarios.theatre import NUM_ROUNDS, Theatre
from weft.events import Evaluated, RoundCommitted
from weft.sim.scenario import Drop, Kill


@pytest.mark.full
def test_a_play_without_models_takes_the_same_time_and_the_same_bytes(theatre: Theatre) -> None:
    """All that differs is what the bytes say."""
    seen = []
    for compute in ("real", "cost"):
        played = theatre(up_mbit=5.0, scenario={"compute": compute})
        theatre.check(played)
        commits = theatre.heard(RoundCommitted)
        seen.append([(at, event.round, event.sent_nbytes, event.contributors, event.tokens) for at, event in commits])
    assert len(seen[0]) == 4 * NUM_ROUNDS
    for one, other in zip(*seen, strict=True):
        assert one == (pytest.approx(other[0], abs=0.1), other[1], pytest.approx(other[2], rel=0.02), *other[3:])


def test_payloads_of_peers_differ_and_the_outer_parameters_move(theatre: Theatre) -> None:
    played = theatre(scenario={"compute": "cost"})
    for manifest in played.manifests:
        payloads = [each.payload for each in manifest.contributions]
        assert len(set(payloads)) == len(payloads)
    results = [manifest.parts[0].result for manifest in played.manifests if manifest.contributions]
    assert len(set(results)) == NUM_ROUNDS
    told = theatre.heard(Evaluated)
    assert told
    assert all(event.loss == pytest.approx(math.log(257), rel=0.02) for _, event in told)


@pytest.mark.full
def test_faults_befall_peers_without_models_as_others(theatre: Theatre) -> None:
    faults = Kill(peer="lab-1", at_round=3, returns_after_s=5.0), Drop(peer="lab", at_s=0.0, share=0.2)
    played = theatre(*faults, scenario={"compute": "cost"})
    theatre.check(played)
    assert [machine.end for machine in played.machines] == 4 * ["complete"]
    assert all(machine.counted % LEASE_TOKENS == 0 for machine in played.machines)
