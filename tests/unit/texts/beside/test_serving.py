import msgspec
import pytest
import torch

from unit.stages.pieces import RUN
from weft.codec.build import build
from weft.codec.config import Bf16Config, CodecConfig, Fp32Config, Int8Config
from weft.engine.numbers import Kind
from weft.engine.step import page_nbytes
from weft.errors import ConfigError
from weft.run.machine import PeerConfig
from weft.texts import section
from weft.texts.beside.serving import cut_of, require_room
from weft.texts.section import kind_with
from weft.training.text_memory import LOG_SHARE


@pytest.mark.parametrize(
    ("codec", "usual", "expected"),
    [
        (Fp32Config(), "int8", "exact"),
        (Bf16Config(), "int8", "int8"),
        (Int8Config(), "int8", "int8"),
        (Fp32Config(), "bf16", "bf16"),
    ],
)
def test_numbers_are_exact_where_nothing_else_rounds_and_it_costs_nothing(
    codec: CodecConfig, usual: Kind, expected: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(section, "kind_for", lambda _device: usual)
    assert kind_with(build(codec), torch.device("cpu")) == expected


def test_room_for_less_than_a_page_is_refused_with_what_one_takes() -> None:
    num_layers = max(len(RUN.pieces[stage].layers) for stage in range(RUN.stages))
    page = page_nbytes(RUN.model, "fp32", num_layers)
    least = -(-page // (1 - LOG_SHARE))
    require_room(cut_of(RUN), PeerConfig(serve_nbytes=int(least) + 1), "fp32")
    with pytest.raises(ConfigError, match=r"serve_nbytes: .* 64 tokens of a stage of this run take [\d,]+\. Set"):
        require_room(cut_of(RUN), PeerConfig(serve_nbytes=int(least) - 2), "fp32")


@pytest.mark.parametrize("share", [0, -0.1, 1.1, "half"])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"serve_share": share}, PeerConfig)
