"""What `round_traffic` says that rounds take, against the bytes that members fetch of one another, or are handed."""

from typing import Any

import msgspec
import pytest

from scenarios.conftest import Fetched
from scenarios.swarm import EVERY, Life
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Int8Config
from weft.events import RoundCommitted
from weft.ids import PeerId
from weft.peer.messages import Handed
from weft.peer.round.payloads import MAX_UNANSWERED
from weft.sync.costs import round_traffic
from weft.sync.method.choices import Choices, NesterovConfig, SampleConfig

DELTA = Choices(every=EVERY, send="delta", apply=NesterovConfig(), codec=Int8Config())
METHODS = {  # and the rounds while each of four members makes its inner steps
    "all": (DELTA, 1),
    "drawn": (msgspec.structs.replace(DELTA, among=SampleConfig(share=0.5)), 1),
    "ready": (msgspec.structs.replace(DELTA, wait="ready"), 4),
}


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_members_get_as_much_as_rounds_are_said_to_take(
    make_swarm: MakeSwarm, fetched: list[Fetched], name: str
) -> None:
    method, num_rounds = METHODS[name]
    swarm = make_swarm(method=method, num_rounds=12)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abcd")))

    swarm.run(scenario)
    swarm.check()
    expected = 4 * round_traffic(method, (), swarm.run_config.num_parameters, 4).received_nbytes / num_rounds
    assert sum(nbytes for *_, nbytes in fetched) / len(swarm.chains) == pytest.approx(expected, rel=0.1)


@pytest.mark.full
def test_who_knows_nothing_of_what_is_handed_asks_and_is_asked(make_swarm: MakeSwarm, fetched: list[Fetched]) -> None:
    """Of members one is from before the note: it drops what it is handed, and hands nothing."""
    swarm, num_rounds = make_swarm(method=DELTA, num_rounds=12), 12
    old, dropped = swarm.member("d").id, list[PeerId]()

    def leaves(life: Life, to: PeerId, message: Any) -> bool:
        is_lost = isinstance(message, Handed) and old in (life.member.id, to)
        if is_lost and to == old:
            dropped.append(life.member.id)
        return not is_lost

    async def scenario() -> None:
        swarm.watchers.append(leaves)
        members = await swarm.start("abcd")
        one_replica(await swarm.done(*members))
        for event in members[0].life.seen(RoundCommitted):
            assert event.contributors == tuple(sorted(each.id for each in members))

    swarm.run(scenario)
    swarm.check()
    for peer in swarm.members.values():
        asked = {(receiver, sender) for receiver, sender, *_ in fetched if peer.id in (receiver, sender)}
        assert len(asked) == 6  # by each of three others, and of each
        assert peer.id == old or dropped.count(peer.id) == MAX_UNANSWERED
    expected = 4 * round_traffic(DELTA, (), swarm.run_config.num_parameters, 4).received_nbytes
    assert sum(nbytes for *_, nbytes in fetched) / num_rounds == pytest.approx(expected, rel=0.1)
