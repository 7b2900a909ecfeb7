"""Runs whose members do some of each other's training steps again."""

from itertools import count
from typing import Any

import pytest

from scenarios.cheats import CHEATS
from scenarios.swarm import Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Int8Config
from weft.errors import Removed
from weft.events import ActEnacted, WorkAudited
from weft.run.trust import AuditedTrust
from weft.sync.method.presets import DiLoCoConfig, FedAvgConfig, MethodConfig, PulseConfig
from weft.training.trainer import Trainer

ALWAYS = AuditedTrust(audit_rate=1.0)
METHODS: tuple[MethodConfig, ...] = (
    DiLoCoConfig(every=2, codec=Int8Config()),
    FedAvgConfig(every=3, proximal=0.1),
    PulseConfig(every=2),
)


def audits(swarm: Swarm, but: str = "") -> list[WorkAudited]:
    """Return what members have found, one of them left out."""
    return [event for life in swarm.lives if life.member.name != but for event in life.seen(WorkAudited)]


@pytest.mark.parametrize("method", METHODS, ids=lambda each: type(each).__name__)
def test_honest_work_is_audited_and_found_equal(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=6, num_peers=3, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    assert len(audits(swarm)) >= 6
    assert {audit.outcome for audit in audits(swarm)} == {"equal"}, [audit.why for audit in audits(swarm)]
    assert {audit.distance for audit in audits(swarm)} == {0.0}  # one machine: to the last bit


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda each: each.__name__)
def test_who_computes_something_else_is_struck_out(make_swarm: MakeSwarm, cheat: type[Trainer]) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=24, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (cheat if next(made) == 3 else Trainer)(*given)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        one_replica(await swarm.done(a, b, c))
        with pytest.raises(Removed, match="They have done some of its training steps again"):
            await d.lives[-1].task

    swarm.run(scenario)
    enacted: list[Any] = [event for life in swarm.lives for event in life.seen(ActEnacted)]
    liar = swarm.member("d").id
    assert {(event.kind, event.subject) for event in enacted} == {("strike out", liar)}
    assert all(len(event.by) >= 3 and liar not in event.by for event in enacted)
    wrong = [audit for audit in audits(swarm, but="d") if audit.outcome != "equal"]
    assert {audit.member for audit in wrong} == {liar}
    assert {audit.outcome for audit in wrong} == {"differs"}
