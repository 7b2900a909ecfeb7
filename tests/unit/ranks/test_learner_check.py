"""What a site does not train is refused before anything is built, with a reason."""

import pytest
from msgspec import structs

from unit.peer.tiny import run_config
from weft.errors import ConfigError
from weft.ranks.launch import Rank, own_device
from weft.ranks.learner import check
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sync.method.choices import Choices, MuonConfig, SgdConfig
from weft.sync.method.presets import (
    AsyncDiLoCoConfig,
    AutoConfig,
    ChocoConfig,
    CocktailConfig,
    DdpConfig,
    DeMoConfig,
    DiLoCoConfig,
    FedAvgConfig,
    MethodConfig,
    PowerSgdConfig,
    SparseLoCoConfig,
    StreamingConfig,
)

CPU = PeerConfig(device="cpu")
RANK = Rank(rank=0, local_rank=0, num_ranks=2, num_local=2)


@pytest.mark.parametrize(
    "method", [DdpConfig(), FedAvgConfig(proximal=0.1), DiLoCoConfig(), AsyncDiLoCoConfig(), AutoConfig()]
)
def test_methods_that_compute_number_by_number_are_trained(method: MethodConfig) -> None:
    check(run_config(method), CPU)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        (ChocoConfig(), "neighbours"),
        (StreamingConfig(), "fragments"),
        (CocktailConfig(), "overlap, mix"),
        (SparseLoCoConfig(), "basis"),
        (DeMoConfig(), "basis"),
        (PowerSgdConfig(), "basis"),
        (Choices(every=5, send="delta", apply=SgdConfig(), merged_by="all"), "merged_by"),
    ],
)
def test_others_are_refused(method: MethodConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check(run_config(method), CPU)


@pytest.mark.parametrize(
    ("run", "settings", "what"),
    [
        (run_config(DiLoCoConfig(), optimizer=MuonConfig()), CPU, "muon"),
        (run_config(), structs.replace(CPU, precision="fp16"), "fp16"),
        (run_config(), structs.replace(CPU, is_compiled=True), "is_compiled"),
        (structs.replace(run_config(), trust=AuditedTrust()), CPU, "audited"),
    ],
)
def test_what_ranks_cannot_compute_is_refused(run: RunConfig, settings: PeerConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check(run, settings)


def test_ranks_on_the_cpu_keep_their_settings() -> None:
    assert own_device(CPU, RANK) == CPU
