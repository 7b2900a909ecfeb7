"""A replica that goes back: the parameters of before, a new outer optimizer, and all else as it is."""

import pytest
import torch
from msgspec.structs import replace

from unit.peer.audit.test_heads import a_row
from unit.peer.tiny import run_config
from unit.sync.test_governance import ONE, RUN
from weft.codec.config import Fp32Config
from weft.errors import PayloadError
from weft.ids import Round
from weft.peer.state.replica import Replica
from weft.run.trust import AuditedTrust
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.records import rewinds
from weft.sync.records.acts import Act, Rewind, Warrant
from weft.sync.records.charter import Rewound
from weft.sync.records.messages import Manifest
from weft.wire import digest, seal


def going_back(replica: Replica, steward_run: str = RUN) -> Manifest:
    deed = Rewind(round=Round(20), manifest=digest(b"m"), state=digest(b"s"), reason="")
    act = Warrant(letters=(seal(ONE, Act(run=steward_run, serial=1, deed=deed)),))
    assert replica.head is not None
    return replace(
        a_row(1)[0],
        run=replica.head.run,
        branch=replica.head.branch,
        round=Round(30),
        acts=(act,),
        contributions=(),
        parts=(),
    )


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    run = replace(run_config(DiLoCoConfig(every=4, codec=Fp32Config())), trust=AuditedTrust(), stewards=(ONE.peer,))
    made = Replica(run, torch.randn(300))
    made.head = replace(a_row(1)[0], run=run.run, branch=run.run, round=Round(29), charter=digest(b"c"))
    for vector in made.state.values():
        vector.fill_(3.0)
    return made


def test_it_has_the_parameters_of_before_and_a_new_outer_optimizer(replica: Replica) -> None:
    manifest, earlier = going_back(replica, replica.run.run), torch.randn(300)
    replica.apply(manifest, (), earlier)
    assert torch.equal(replica.outer, earlier)
    assert replica.outer is not earlier
    assert replica.state
    assert all(torch.equal(replica.state[name], new) for name, new in replica.method.init(300).items())
    assert replica.head is manifest
    assert replica.charter.rewound == (Rewound(at=Round(30), to=Round(20)),)
    assert rewinds.decided(manifest) is not None


@pytest.mark.parametrize("earlier", [None, torch.zeros(7)], ids=["none", "another length"])
def test_without_these_parameters_nothing_changes(replica: Replica, earlier: torch.Tensor | None) -> None:
    before, head = replica.outer.clone(), replica.head
    with pytest.raises(PayloadError, match="whose parameters are not here"):
        replica.apply(going_back(replica, replica.run.run), (), earlier)
    assert torch.equal(replica.outer, before)
    assert replica.head is head
    assert all((vector == 3.0).all() for vector in replica.state.values())
