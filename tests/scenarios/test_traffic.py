"""What `round_traffic` says that rounds take, against the bytes that members fetch of one another."""

import msgspec
import pytest

from scenarios.conftest import Fetched
from scenarios.swarm import EVERY
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Int8Config
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
def test_members_fetch_as_much_as_rounds_are_said_to_take(
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
