"""Rounds for which members are drawn: who is drawn trains, the others follow, and nobody waits for who is away."""

from itertools import pairwise

import pytest

from scenarios import rules
from scenarios.comings import kill_two_in_turn
from scenarios.swarm import Member, Swarm
from scenarios.test_faults import MakeSwarm
from weft.codec.config import Fp32Config
from weft.events import RoundCommitted, RoundMissed
from weft.ids import PeerId
from weft.peer.round.driver import RESTING
from weft.sync.method.choices import SampleConfig
from weft.sync.method.presets import FedAvgConfig
from weft.sync.records.messages import Manifest

HALF = FedAvgConfig(every=2, codec=Fp32Config(), among=SampleConfig(share=0.5))
ONE = FedAvgConfig(every=2, codec=Fp32Config(), among=SampleConfig(share=0.1))


def drawn_after(manifest: Manifest) -> set[PeerId]:
    return {lease.peer for lease in manifest.leases}


def history(swarm: Swarm) -> list[Manifest]:
    return [swarm.chains[place] for place in sorted(swarm.chains, key=lambda place: place[1])]


def test_each_round_counts_those_that_were_drawn_for_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12, num_peers=2, method=HALF)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1

    swarm.run(scenario)
    swarm.check()
    manifests = history(swarm)
    for before, after in pairwise(manifests):
        if len(before.members) == 4 and not before.joined:
            assert {each.peer for each in after.contributions} == drawn_after(before)
            assert len(after.contributions) == 2
    everybody = {each.peer for manifest in manifests for each in manifest.contributions}
    assert len(everybody) == 4
    events = [event for life in swarm.lives for event in life.committed]
    assert {reason for event in events for reason in event.left_out.values()} <= {
        RESTING,
        "it has just joined or come back, and nobody waits for it in its first round",
    }
    assert not any(life.seen(RoundMissed) for life in swarm.lives)
    rules.one_history(events)


def test_who_rests_trains_in_the_place_of_all_that_were_drawn_and_died(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12, num_peers=1, method=ONE, seed=3)
    killed: list[Member] = []

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 3)
        head = members[0].peer.replica.head
        assert head is not None
        (drawn,) = drawn_after(head)
        killed.append(next(member for member in members if member.id == drawn))
        swarm.kill(killed[0])
        await swarm.done(*(member for member in members if member is not killed[0]))

    swarm.run(scenario)
    swarm.check()
    (dead,) = killed
    times = sorted(at for life in swarm.lives if life.member is not dead for at in life.times(RoundCommitted))
    rules.no_long_wait(times, 30.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_run_with_a_sample_outlives_who_dies_and_comes_back(make_swarm: MakeSwarm, seed: int) -> None:
    swarm = make_swarm(num_rounds=16, num_peers=2, method=HALF, seed=seed)

    async def scenario() -> None:
        members = await swarm.start("abcde")
        await kill_two_in_turn(swarm, members, seed)

    swarm.run(scenario)
    swarm.check()
