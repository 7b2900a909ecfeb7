import pytest
import torch

from weft.codec.build import build
from weft.codec.config import Bf16Config, CodecConfig, Fp32Config, Int8Config
from weft.engine.numbers import Kind
from weft.stages.step import serving


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
    monkeypatch.setattr(serving, "kind_for", lambda _device: usual)
    assert serving.kind_with(build(codec), torch.device("cpu")) == expected
