"""The data file: every figure says where it comes from."""

import pytest
import torch

from weft.errors import ConfigError
from weft.plan.profiles import device, known, line
from weft.run.machine import PeerConfig
from weft.training.device import choose


def test_every_row_has_a_source_and_says_what_was_not_read() -> None:
    for each in known().device:
        assert len(each.source) > 10, each.name
        fields = set(type(each).__struct_fields__)
        assert set(each.remembered) <= fields
        assert each.read or each.remembered or "reckoned" in each.source, each.name
        assert bool(each.price_per_hour) == bool(each.price_source)
    for each in known().line:
        assert each.read or "assum" in each.source or "round figure" in each.source or each.is_one_machine, each.name


@pytest.mark.parametrize("name", [each.name for each in known().device])
def test_a_rate_is_of_the_precision_that_a_peer_chooses_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: row.capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: row.capability)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: row.kind == "gpu" and row.capability is None)
    chosen = choose(PeerConfig())
    assert chosen.is_cpu == (row.kind == "cpu")
    assert row.precision == chosen.precision


def test_names_are_used_once() -> None:
    for rows in (known().device, known().line):
        names = [row.name for row in rows]
        assert len(names) == len(set(names)) >= 9


def test_there_are_consumers_gpus_data_centres_apples_and_processors() -> None:
    for name in ("rtx4090", "rtx3090", "h100-sxm", "a100-sxm", "t4", "m3-max", "cpu-avx2-8"):
        assert device(name).name == name
    assert device(known().defaults.cluster_device).price_per_hour


@pytest.mark.parametrize(("name", "words"), [("RTX 4090", "is rtx4090 meant"), ("abacus", "Known: rtx3060")])
def test_an_unknown_device_is_told_which_there_are(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        device(name)


def test_an_unknown_line_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"is fibre meant\? Known: home, dsl"):
        line("fiber")
