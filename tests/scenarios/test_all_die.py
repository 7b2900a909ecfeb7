"""All members are killed at once, at any moment of a round, and come back: to the newest round that was committed."""

import asyncio

import pytest

from scenarios.swarm import Life, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.events import BranchOpened, Notice
from weft.ids import PeerId, Round
from weft.run.machine import PeerConfig
from weft.sync.records.messages import Certificate, RoundMessage
from weft.wire import digest_of

ROUND = 7
SETTINGS = PeerConfig(device="cpu", micro_batch=2, checkpoint_every_s=4.0)


def play(swarm: Swarm, number: int, *, settings: PeerConfig = SETTINGS) -> bool:
    """Kill all at the `number`-th message of a round, and start them again; return whether there were so many."""
    struck: list[str] = []

    async def scenario() -> None:
        members = await swarm.start("abc", settings=settings)
        for member in members:
            await swarm.round(member, ROUND - 1)
        decided: dict[Round, str] = {}
        count = 0

        def strike(life: Life, _to: PeerId, message: object) -> bool:
            nonlocal count
            if isinstance(message, Certificate):
                decided[message.manifest.round] = digest_of(message.manifest)
            if life.is_dead or not isinstance(message, RoundMessage | Certificate):
                return not life.is_dead
            count += 1
            if count == number:
                struck.append(type(message).__name__)
                for member in members:
                    swarm.kill(member)
            return count < number

        swarm.watchers.append(strike)
        await members[0].life.has_ended.wait()
        swarm.watchers.clear()
        decided |= {each.round: each.manifest for member in members for each in member.life.committed}
        newest = max(decided)
        await asyncio.sleep(3.0)
        members[0].is_founder = False  # all come back by `weft join`: a maker that finds nobody goes on at once
        for member in members:
            swarm.launch(member, settings=settings)
        one_replica(await swarm.done(*members))
        for member in members:
            assert member.life.seen(BranchOpened) == []
        firsts = [member.life.committed[0].round for member in members]
        # Who had it on disk goes on from the newest; the others hear of it. Who comes last may find one more decided.
        assert newest <= min(firsts) <= newest + 1 <= max(firsts), "a round was lost"
        assert any(
            "loaded the checkpoint of round" in event.text for member in members for event in member.life.seen(Notice)
        )
        for round, name in decided.items():
            known = [manifest for place, manifest in swarm.chains.items() if place[1] == round]
            assert {digest_of(manifest) for manifest in known} <= {name}

    swarm.run(scenario)
    swarm.check()
    return bool(struck)


@pytest.mark.parametrize("number", [1, 13, 17])
def test_all_are_killed_in_a_round_and_none_that_was_committed_is_lost(make_swarm: MakeSwarm, number: int) -> None:
    assert play(make_swarm(num_rounds=12, num_peers=3), number)


@pytest.mark.slow
def test_all_are_killed_at_each_message_of_a_round(make_swarm: MakeSwarm) -> None:
    for number in range(1, 26):
        assert play(make_swarm(num_rounds=12, num_peers=3), number)


@pytest.mark.full
@pytest.mark.parametrize("ages", [pytest.param((20, 19, 18), marks=pytest.mark.slow), (20, 16, 12)])
def test_after_a_power_cut_all_go_on_from_the_newest_checkpoint(
    make_swarm: MakeSwarm, ages: tuple[int, int, int]
) -> None:
    """None has a vote in the round after its own; what it voted on is on disk, the results of later rounds are not."""
    swarm = make_swarm(num_rounds=40, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        for age, member in sorted(zip(ages, members, strict=True), key=lambda each: each[0]):
            await swarm.round(member, age)
            await member.peer._autosave.save()
        for member in members:
            await swarm.round(member, 25)
        for member in members:
            swarm.cut_power(member)
        await asyncio.sleep(1.0)
        members[0].is_founder = False
        for member in members:
            swarm.launch(member)
        one_replica(await swarm.done(*members))
        assert [member.life.committed[0].round for member in members] == 3 * [ages[0] + 2]  # after the branch's opening

    swarm.run(scenario)
