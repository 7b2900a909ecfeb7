"""Runs whose members do some of each other's training steps again."""

from typing import Any

import pytest

from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Int8Config
from weft.events import WorkAudited
from weft.run.trust import AuditedTrust
from weft.sync.method.presets import DiLoCoConfig, FedAvgConfig, MethodConfig, PulseConfig

ALWAYS = AuditedTrust(audit_rate=1.0)
METHODS: tuple[MethodConfig, ...] = (
    DiLoCoConfig(every=2, codec=Int8Config()),
    FedAvgConfig(every=3, proximal=0.1),
    PulseConfig(every=2),
)


def found(swarm: Any) -> list[WorkAudited]:
    return [event for life in swarm.lives for event in life.seen(WorkAudited)]


@pytest.mark.parametrize("method", METHODS, ids=lambda each: type(each).__name__)
def test_honest_work_is_audited_and_found_equal(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=6, num_peers=3, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    audits = found(swarm)
    assert len(audits) >= 6
    assert {audit.outcome for audit in audits} == {"equal"}, [audit.why for audit in audits]
    assert {audit.distance for audit in audits} == {0.0}  # one machine: to the last bit
