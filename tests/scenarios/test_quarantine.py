"""Runs in which newcomers' first works count once others have done some of their training steps again."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from scenarios.cheats import Noise
from scenarios.swarm import Swarm
from scenarios.test_audits import ALWAYS, METHODS, doubts, of_merging, struck_out
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp32Config
from weft.errors import Removed
from weft.events import ActEnacted
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.worker import Worker
from weft.peer.messages import AuditAnswer, AuditRequest
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.method.presets import MethodConfig
from weft.sync.records import quarantine
from weft.sync.records.messages import Manifest

PLAIN = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0), codec=Fp32Config())
NUM = ALWAYS.quarantine
SOME = [METHODS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[1:])]


def manifests(swarm: Swarm) -> list[Manifest]:
    return sorted(swarm.chains.values(), key=lambda manifest: manifest.round)


def held(swarm: Swarm, peer: PeerId) -> list[tuple[Round, Digest]]:
    """Return what rounds have held of a member, in order."""
    return [(each.round, one.work) for each in manifests(swarm) for one in each.held or () if one.peer == peer]


def counted(swarm: Swarm, peer: PeerId) -> list[tuple[Round, Digest]]:
    """Return what rounds have counted of a member, in order."""
    return [(each.round, one.work) for each in manifests(swarm) for one in each.contributions if one.peer == peer]


@pytest.mark.parametrize("method", SOME, ids=lambda each: type(each).__name__)
def test_an_honest_newcomers_works_count_later_and_none_is_lost(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=20, num_peers=4, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        d = swarm.member("d")
        swarm.launch(d)
        one_replica(await swarm.done(*members, d))
        assert members[0].life.peer.replica.charter.quarantined is quarantine.UNSET

    swarm.run(scenario)
    d = swarm.member("d").id
    waited, came = held(swarm, d), counted(swarm, d)
    assert [work for _, work in waited] == [work for _, work in came[:NUM]], "the very works, each once"
    for (first, _), (then, _) in zip(waited, came, strict=False):
        assert first + 2 <= then <= first + 4
    assert len(came) > NUM + 2, "then its works count at once"
    assert doubts(swarm) == of_merging(swarm) == []
    assert [event for life in swarm.lives for event in life.seen(ActEnacted)] == []
    founders = {swarm.member(name).id for name in "abc"}
    assert all(one.peer == d for each in manifests(swarm) for one in each.held or ())
    assert {part.owner for each in manifests(swarm) if each.round < came[NUM - 1][0] for part in each.parts} <= founders
