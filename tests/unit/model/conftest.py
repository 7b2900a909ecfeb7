"""Small configs that between them use every flag, and models over them."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from weft.model.config import ModelConfig

_SMALL = {"vocab_size": 11, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "width": 16, "ffn_width": 24}
_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"is_tied": True},
    "qk_norm": {"has_qk_norm": True},
    "qkv_bias": {"has_qkv_bias": True},
    "head_width": {"head_width": 10, "is_tied": True, "has_qk_norm": True},
    "one_kv_head": {"num_kv_heads": 1},
    "scaled": {"rope_scaling": {"factor": 8.0, "original_seq_len": 16}, "num_kv_heads": 4},
}


def _small(**fields: Any) -> ModelConfig:
    return msgspec.convert({**_SMALL, "max_seq_len": 32, **fields}, ModelConfig)


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def small() -> Callable[..., ModelConfig]:
    """Make a small config; keywords replace its fields."""
    return _small


@pytest.fixture(params=_VARIANTS.values(), ids=_VARIANTS.keys())
def variant(request: pytest.FixtureRequest) -> ModelConfig:
    """Run the test once per variant of the family."""
    return _small(**request.param)
