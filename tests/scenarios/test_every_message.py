"""A member dies at each message of a round in turn, before it leaves or just after; the others go on.

What must hold is checked from the log: one replica after each manifest (R1), work counted once or still carried (R2),
nobody left out without a reason (R3), and no wait that measured times do not ask for (R4).
"""

import pytest

from scenarios import rules
from scenarios.swarm import EVERY, Life, Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import E3m0Config
from weft.events import MajorityLost, RoundCommitted
from weft.ids import PeerId
from weft.peer.messages import Handed
from weft.sync.method.presets import FedAvgConfig
from weft.sync.records.messages import Certificate, RoundMessage

ROUND = 5  # the first have measured too little for deadlines of their own
SMALL = FedAvgConfig(every=EVERY, codec=E3m0Config())  # 4 bits a number: all parts are handed
MAX_WAIT_S = 30.0  # gone after 8 s, and a few attempts of a few seconds each


Message = RoundMessage | Certificate | Handed


def play(swarm: Swarm, num_members: int, victim: int, number: int, is_sent: bool) -> bool:
    """Kill a member at its `number`-th message of a round; return whether it sent so many."""
    struck: list[float] = []

    async def scenario() -> None:
        members = await swarm.start("abcd"[:num_members])
        target, count = members[victim], 0
        for member in members:
            await swarm.round(member, ROUND - 1)

        def strike(life: Life, to: PeerId, message: object) -> bool:
            nonlocal count
            if life is not target.lives[0] or life.is_dead or not isinstance(message, Message):
                return True
            count += 1
            if count < number:
                return True
            swarm.watchers.remove(strike)
            struck.append(swarm.clock.now())
            if is_sent:
                life.task.get_loop().call_soon(swarm.kill, target)
                return True
            swarm.kill(target)
            return False

        swarm.watchers.append(strike)
        living = [member for member in members if member is not target]
        await swarm.round(living[0], ROUND + 1)
        if not struck:
            swarm.watchers.clear()
            living = members
        one_replica(await swarm.done(*living))

    swarm.run(scenario)
    swarm.check()
    if struck:
        for member in swarm.members.values():
            if not member.life.is_dead:
                assert_no_long_wait(member, struck[0])
    return bool(struck)


def assert_no_long_wait(member: Member, since: float) -> None:
    assert member.life.seen(MajorityLost) == []
    rules.no_long_wait([since, *member.life.times(RoundCommitted, since)], MAX_WAIT_S)


def play_all(make_swarm: MakeSwarm, num_members: int, victim: int, is_sent: bool) -> int:
    number = 1
    while play(make_swarm(num_rounds=8, num_peers=num_members), num_members, victim, number, is_sent):
        number += 1
    return number - 1


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_member_dies_as_it_hands_its_parts_to_their_owners(make_swarm: MakeSwarm, number: int) -> None:
    for victim in range(3):
        assert play(make_swarm(method=SMALL, num_rounds=8, num_peers=3), 3, victim, number, is_sent=False)


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 5])
def test_a_member_dies_at_some_messages_of_a_round(make_swarm: MakeSwarm, number: int) -> None:
    for victim in range(3):
        assert play(make_swarm(num_rounds=8, num_peers=3), 3, victim, number, is_sent=False)


@pytest.mark.slow
@pytest.mark.parametrize("is_sent", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("num_members", "victim"), [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_a_member_dies_at_each_message_of_a_round(
    make_swarm: MakeSwarm, num_members: int, victim: int, is_sent: bool
) -> None:
    assert play_all(make_swarm, num_members, victim, is_sent) >= 3 * (num_members - 1)
