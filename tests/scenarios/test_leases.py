"""Samples that were leased to who died are leased again, and every sample of an epoch is trained on by somebody."""

from collections import Counter

import pytest

from scenarios.swarm import LEASE_TOKENS, SEQ_LEN, Life, Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.events import MemberGone, RoundCommitted
from weft.ids import PeerId
from weft.sync.records.messages import Manifest, Ready

EACH = LEASE_TOKENS // SEQ_LEN  # samples that a member trains on in a round


def history(swarm: Swarm) -> list[Manifest]:
    known = swarm.heads | swarm.chains
    return [known[place] for place in sorted(known, key=lambda place: place[1])]


def counted_positions(swarm: Swarm) -> Counter[int]:
    """Return how often each sample was counted: all that a member was leased since it was last counted."""
    counted, held = Counter[int](), dict[PeerId, list[int]]()
    for manifest in history(swarm):
        for each in manifest.contributions:
            positions = held.pop(each.peer, [])
            assert each.tokens == len(positions) * SEQ_LEN
            counted.update(positions)
        for peer in manifest.left:
            held.pop(peer, None)
        for lease in manifest.leases:
            held.setdefault(lease.peer, []).extend(lease.positions().tolist())
    return counted


def kill_before_it_is_ready(swarm: Swarm, victim: Member, round: int) -> None:
    """Kill a member in `round` when it has trained, and before anybody hears of it."""

    def strike(life: Life, _to: PeerId, message: object) -> bool:
        is_now = life is victim.life and not life.is_dead and isinstance(message, Ready)
        if is_now and victim.peer.rounds.chain.base.round == round:  # type: ignore[union-attr]
            swarm.kill(victim)
        return not life.is_dead

    swarm.watchers.append(strike)


def test_what_was_leased_to_who_died_is_trained_by_others(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=10)

    async def scenario() -> None:
        *living, dead = await swarm.start("abcd")
        kill_before_it_is_ready(swarm, dead, 4)
        one_replica(await swarm.done(*living))

        (left,) = [manifest for manifest in history(swarm) if dead.id in manifest.left]
        lost = {
            position
            for manifest in history(swarm)
            if 3 <= manifest.round < left.round
            for lease in manifest.leases
            if lease.peer == dead.id
            for position in lease.positions().tolist()
        }
        assert len(lost) == EACH * (left.round - 3)
        trained = {position for member in living for position in swarm.positions[member.life]}
        assert lost <= trained
        assert history(swarm)[-1].leased_again == len(lost) * SEQ_LEN

    swarm.run(scenario)
    swarm.check()
    counted = counted_positions(swarm)
    last = history(swarm)[-2]  # what the last one leased was not trained on any more
    assert set(counted) == set(range(last.cursor))  # each, since the run began
    assert set(counted.values()) == {1}


@pytest.mark.full
def test_who_is_late_and_stays_keeps_its_samples(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=10)

    async def scenario() -> None:
        members = [swarm.member(name) for name in "abcd"]
        members[0].is_founder = True
        for member in members:
            swarm.launch(member, wait_for=4, train_s=40.0 if member is members[3] else 1.0)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()
    assert all(manifest.leased_again == 0 for manifest in history(swarm))
    assert any(lease.peer == swarm.member("d").id for manifest in history(swarm) for lease in manifest.uncounted)


def test_who_died_and_comes_back_is_leased_other_samples(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12)

    async def scenario() -> None:
        *living, dead = await swarm.start("abcd")
        kill_before_it_is_ready(swarm, dead, 4)
        await swarm.when(living[0], MemberGone)
        await swarm.when(living[0], RoundCommitted)
        swarm.watchers.clear()
        swarm.launch(dead)
        one_replica(await swarm.done(*living, dead))

    swarm.run(scenario)
    swarm.check()
    leased = Counter(
        position for manifest in history(swarm) for lease in manifest.leases for position in lease.positions().tolist()
    )
    again = sum(leased.values()) - len(leased)
    assert again * SEQ_LEN == history(swarm)[-1].leased_again > 0
