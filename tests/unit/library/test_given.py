"""What is given to `weft.Sync` is looked at where it is given, and what is wrong is named with its value."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed

from unit.library.loops import small
from weft.errors import ConfigError
from weft.library.given import Machine, config_of, require_one_process, shown, whole
from weft.library.sync import Sync
from weft.run.config import SyncConfig
from weft.run.machine import PeerConfig
from weft.sync.method.presets import ChocoConfig, DiLoCoConfig, FedAvgConfig, StreamingConfig

FINE = SyncConfig(samples=10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": msgspec.structs.replace(FINE, samples=-1)}, r"config: samples is -1\. Allowed: .* at least 1"),
        ({"config": msgspec.structs.replace(FINE, samples=1.5)}, r"config: samples is 1\.5"),
        ({"config": msgspec.structs.replace(FINE, batch_size=0)}, r"config: batch_size is 0\. Allowed: .* at least 1"),
        ({"config": SyncConfig(samples=1, method=FedAvgConfig(every=0))}, r"config: method\.every is 0"),
        ({"config": SyncConfig(samples=1, stewards=(torch.zeros(1),))}, "config: a field is of no kind"),  # type: ignore[arg-type]
        ({"config": {"samples": 10}}, "config is .* of type dict. Allowed: a SyncConfig, or the path"),
        ({"config": FINE, "machine": {"home": "x"}}, r"machine is .* of type dict\. Allowed: a weft\.Machine"),
        ({"config": FINE, "machine": Machine(home=7)}, "machine: home is 7, of type int"),  # type: ignore[arg-type]
        ({"config": FINE, "machine": Machine(home="~/runs")}, "machine: home: ~/runs is not a path yet"),
        ({"config": FINE, "machine": Machine(settings={"name": "a"})}, "machine: settings is .* Allowed: a PeerConfig"),  # type: ignore[arg-type]
        ({"config": FINE, "machine": Machine(settings=PeerConfig(device="fpga"))}, "machine: settings: device is"),
        ({"config": FINE, "wait_for": 0}, r"wait_for is 0\. Allowed: a whole number of peers"),
        ({"config": FINE, "wait_for": -1}, "wait_for is -1"),
        ({"config": FINE, "wait_for": True}, "wait_for is True"),
        ({"ticket": 7}, "ticket is 7, of type int"),
        ({"config": FINE, "wish": "anew"}, r"wish is 'anew'\. Allowed: \"ask\" or \"go on\" or \"new\""),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_what_is_allowed(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sync(small(), **given)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "diloco"}, r"method is 'diloco', of type str\. Allowed: .*DiLoCoConfig\(every=30\)"),
        ({"method": DiLoCoConfig}, "method is .* of type StructMeta"),
        ({"peers": -3}, r"peers is -3\. Allowed: a whole number from 1"),
        ({"peers": "two"}, "peers is 'two'"),
    ],
)
def test_what_a_config_cannot_be_made_of_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SyncConfig(samples=10, **fields)


@pytest.mark.parametrize("method", [DiLoCoConfig(), FedAvgConfig(every=2), ChocoConfig(), StreamingConfig()])
def test_a_config_that_is_right_is_taken_as_it_is(method: Any, tmp_path: Path) -> None:
    config = SyncConfig(samples=10, method=method, orphan_after_s=5)
    assert config_of(config, SyncConfig, "config") == config
    (tmp_path / "loop.toml").write_text("samples = 3\n")
    assert config_of(tmp_path / "loop.toml", SyncConfig, "config") == SyncConfig(samples=3)


def test_samples_and_losses_are_numbers_of_any_kind() -> None:
    assert whole(torch.tensor(3)) == 3
    assert shown(torch.tensor([0.5], requires_grad=True)) == 0.5
    for none in (None, float("inf"), torch.tensor(torch.nan)):
        assert shown(none) != shown(none)  # NaN
    with pytest.raises(ConfigError, match=r"loss is a tensor of shape \(3,\)"):
        shown(torch.zeros(3))
    with pytest.raises(ConfigError, match="loss is 'low'"):
        shown("low")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_samples is 'four', of type str"):
        whole("four")
    with pytest.raises(ConfigError, match=r"num_samples is 3\.7, of type float\. Allowed: a whole number"):
        whole(3.7)


def test_one_rank_of_several_is_refused_and_one_of_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed.init_process_group("gloo", init_method=(tmp_path / "meet").as_uri(), rank=0, world_size=1)
    try:
        require_one_process()
        monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
        with pytest.raises(ConfigError, match=r"this process is rank 0 of 2 of torch\.distributed"):
            Sync(small(), FINE)
    finally:
        distributed.destroy_process_group()
