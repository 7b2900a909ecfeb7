"""Which runs can be audited, and what that makes of a machine's settings."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch

from unit.peer.tiny import run_config
from weft.config import from_tree
from weft.errors import ConfigError
from weft.run.amend import first_charter
from weft.run.config import RunConfig, RunFile, SyncConfig
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust, RecordedTrust
from weft.sync.method.choices import MuonConfig
from weft.sync.method.presets import FedAvgConfig
from weft.sync.records.charter import AuditTerms, ExactTerms, GradientTerms
from weft.training.device import Device, as_audited, check_fits, choose
from weft.wire import digest_of

AUDITED = {"trust": {"type": "audited"}}


def run_file(**fields: Any) -> RunFile:
    train = {"tokens": 10_000, "schedule": {"type": "constant"}}
    return from_tree({"name": "a", "train": train, "peers": 3, **AUDITED, **fields}, RunFile, where="run.toml")


@pytest.mark.parametrize(
    "method",
    [
        {"type": "fedavg"},
        {"type": "fedavg", "proximal": 0.1},
        {"type": "diloco", "codec": {"type": "e3m0"}},
        {"type": "pulse"},
    ],
    ids=str,
)
def test_methods_of_steps_between_rounds_can_be_audited(method: Mapping[str, Any]) -> None:
    assert run_file(method=method).trust == AuditedTrust()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"method": {"type": "ddp"}}, "sends gradients"),
        ({"method": {"type": "streaming"}}, "go on while a round is decided"),
        ({"method": {"type": "sparseloco"}}, "reply_feedback"),
        ({"method": {"type": "noloco"}}, "exchange with neighbours"),
        ({"method": {"type": "async-diloco"}}, "wait for nobody"),
        ({"is_private": True}, "is_private"),
        ({"stages": 2}, "sends gradients (ddp"),
        ({"peers": 40}, "peers: those without a vote"),
        ({"peers": 2}, "peers: of fewer than 3"),
        ({"peers": 1}, "peers: of fewer than 3"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_refused_with_what_to_change(fields: Mapping[str, Any], why: str) -> None:
    usual = {"method": {"type": "diloco"}}
    with pytest.raises(ConfigError, match=re.escape(why)) as error:
        run_file(**(usual | dict(fields)))
    assert "recorded" in str(error.value) or "members" in str(error.value)


STAGED = {"stages": 2, "method": {"type": "ddp"}, "trust": {"type": "audited", "quarantine": 0}}


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "int8", "int4"])
def test_stages_whose_members_have_the_same_parameters_in_a_round_can_be_audited(name: str) -> None:
    run = run_file(**STAGED, pipeline={"activations": {"type": name}})
    assert run.trust == AuditedTrust(quarantine=0)
    assert run_file(**STAGED, pipeline={"gradients": {"type": name}}).trust == run.trust


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"method": {"type": "diloco"}}, "other parameters each"),
        ({"trust": {"type": "audited"}}, "Set trust.quarantine = 0"),
        ({"trust": {"type": "audited", "quarantine": 0, "trace_every": 2}}, "trust.trace_every"),
        ({"trust": {"type": "audited", "quarantine": 0, "micro_batch": 2}}, "trust.micro_batch"),
        ({"trust": {"type": "audited", "quarantine": 0, "numerics": "bf16"}}, "sections are computed in fp32"),
        ({"trust": {"type": "audited", "quarantine": 0, "numerics": "exact"}}, "sections are computed in fp32"),
        ({"pipeline": {"activations": {"type": "lplr"}}}, "pipeline.activations"),
        ({"pipeline": {"activations": {"type": "aqsgd"}}}, "pipeline.activations"),
        ({"pipeline": {"gradients": {"type": "lplr"}}}, "pipeline.gradients"),
        ({"pipeline": {"split": {"by": "heads", "members": 2}}}, "pipeline.split"),
    ],
    ids=str,
)
def test_stages_in_which_nobody_else_can_compute_the_same_are_refused(fields: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        run_file(**(STAGED | dict(fields)))


def test_bytes_that_are_others_in_each_round_cannot_wait() -> None:
    codec, step = {"type": "random_k", "kept": 16, "largest": 4}, {"type": "sgd", "lr": 1.0}
    method = {"type": "custom", "every": 2, "send": "delta", "apply": step, "codec": codec, "feedback": 0.9}
    method["reply_codec"] = {"type": "int8"}
    with pytest.raises(ConfigError, match=re.escape("Set trust.quarantine = 0")):
        run_file(method=method)
    trust = {"type": "audited", "quarantine": 0}
    assert run_file(method=method, trust=trust).trust == AuditedTrust(quarantine=0)


EXACT = {"trust": {"type": "audited", "numerics": "exact"}}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"optimizer": {"type": "muon"}}, "train.optimizer: muon has no exact numbers"),
        ({"loss": {"type": "orpo"}}, "train.loss: exact numbers are of cross entropy"),
    ],
    ids=str,
)
def test_what_has_no_exact_numbers_is_refused_with_what_to_change(fields: Mapping[str, Any], why: str) -> None:
    train = {"tokens": 10_000, "schedule": {"type": "constant"}, **fields}
    with pytest.raises(ConfigError, match=re.escape(why)) as error:
        run_file(train=train, **EXACT)
    assert "fp32" in str(error.value)
    assert run_file(**EXACT).trust == AuditedTrust(numerics="exact")


def test_adapters_have_no_exact_numbers() -> None:
    model, adapter = {"type": "folder", "path": "model"}, {"type": "lora"}
    with pytest.raises(ConfigError, match="adapter, model: exact numbers are of models of which all is trained"):
        run_file(model=model, adapter=adapter, **EXACT)
    assert run_file(model=model, adapter=adapter).adapter is not None


def test_a_config_that_came_from_elsewhere_is_refused_alike() -> None:
    run, trust = run_config(), AuditedTrust(numerics="exact")
    assert msgspec.structs.replace(run, trust=trust).trust == trust
    with pytest.raises(ConfigError, match="muon has no exact numbers"):
        msgspec.structs.replace(run, trust=trust, train=msgspec.structs.replace(run.train, optimizer=MuonConfig()))


def test_loops_of_ones_own_cannot_be_audited() -> None:
    with pytest.raises(ConfigError, match="your own loop"):
        SyncConfig(samples=100, trust=AuditedTrust())
    assert SyncConfig(samples=100, trust=RecordedTrust()).trust == RecordedTrust()


def test_a_charter_says_how_often_and_what_is_audited() -> None:
    run = run_config()
    assert first_charter(run).audits is msgspec.UNSET
    audited = msgspec.structs.replace(run, trust=AuditedTrust(audit_rate=0.25, trace_every=4))
    assert first_charter(audited).audits == AuditTerms(rate=0.25, trace_every=4, quarantine=3)
    without = msgspec.structs.replace(run, trust=AuditedTrust(audit_rate=0.25, quarantine=0))
    assert first_charter(without).audits == AuditTerms(rate=0.25, trace_every=1)
    assert first_charter(audited).is_recorded is True


def test_a_charter_says_what_steps_in_exact_numbers_are_computed_by() -> None:
    run = msgspec.structs.replace(run_config(), trust=AuditedTrust(numerics="exact"))
    audits = first_charter(run).audits
    assert audits
    gradient = GradientTerms(model=run.model, micro_batch=4, seed=run.seed, data=digest_of(run.data))
    assert audits.exact == ExactTerms(
        optimizer=run.train.optimizer, clip=run.train.clip, num_decayed=run.vector.num_decayed, gradient=gradient
    )


def test_a_charter_says_of_which_samples_gradients_are_where_that_can_be_shown() -> None:
    def terms(run: RunConfig, micro_batch: int = 0) -> GradientTerms | msgspec.UnsetType:
        trust = AuditedTrust(numerics="exact", micro_batch=micro_batch)
        audits = first_charter(msgspec.structs.replace(run, trust=trust)).audits
        assert audits
        assert audits.exact
        return audits.exact.gradient

    for micro_batch, found in ((0, 4), (3, 3), (9, 4)):
        told = terms(run_config(), micro_batch)
        assert told
        assert told.micro_batch == found
    assert terms(run_config(FedAvgConfig(every=2, proximal=0.1))) is msgspec.UNSET


# --- a machine's settings ---


def test_numerics_and_micro_batch_are_the_runs() -> None:
    run = msgspec.structs.replace(run_config(), trust=AuditedTrust(numerics="bf16", micro_batch=1))
    bound = as_audited(run, PeerConfig(device="cpu"))
    assert (bound.precision, bound.micro_batch) == ("bf16", 1)
    whole = msgspec.structs.replace(run, trust=AuditedTrust())
    assert as_audited(whole, PeerConfig()).micro_batch == run.train.batch_size
    assert as_audited(run_config(), PeerConfig(precision="fp16")).precision == "fp16"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"precision": "bf16"}, "precision"),
        ({"micro_batch": 1}, "micro_batch"),
        ({"base_numbers": "int8"}, "base_numbers"),
        ({"is_compiled": True}, "is_compiled"),
    ],
)
def test_a_machine_that_would_compute_otherwise_is_refused(settings: dict[str, Any], name: str) -> None:
    run = msgspec.structs.replace(run_config(batch_size=2), trust=AuditedTrust())
    peer = PeerConfig(device="cpu", **settings)
    with pytest.raises(ConfigError, match=f"^{name}: .* Set {name} to"):
        as_audited(run, peer)
    with pytest.raises(ConfigError, match=f"^{name}: "):
        check_fits(run, peer, choose(PeerConfig(device="cpu")))


def test_exact_numbers_are_computed_on_a_cpu_and_the_machine_is_told_so() -> None:
    run = msgspec.structs.replace(run_config(), trust=AuditedTrust(numerics="exact"))
    for settings in ({}, {"precision": "fp32"}, {"device": "cpu"}):
        bound = as_audited(run, PeerConfig(**settings))
        assert (bound.precision, bound.device) == ("fp32", "cpu")
    for settings, name in (({"device": "cuda"}, "device"), ({"precision": "bf16"}, "precision")):
        with pytest.raises(ConfigError, match=f"^{name}: .* Set {name} to"):
            as_audited(run, PeerConfig(**settings))
    gpu = Device(torch.device("cuda"), "fp32", "a GPU, which a machine's settings would choose")
    assert check_fits(run, PeerConfig(), gpu) == run.train.batch_size


def test_a_trainer_of_such_a_run_takes_all_samples_at_a_time() -> None:
    run = msgspec.structs.replace(run_config(batch_size=2), trust=AuditedTrust())
    device = choose(PeerConfig(device="cpu"))
    assert device.torch == torch.device("cpu")
    assert check_fits(run, PeerConfig(device="cpu"), device) == 2
