import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from weft import wire
from weft.config import from_tree
from weft.errors import ConfigError, TooLarge, WireError
from weft.model.config import SIZES, Llama3Scaling, ModelConfig, check_size, named, num_parameters
from weft.model.flat import layout
from weft.model.transformer import Transformer

Make = Callable[..., ModelConfig]


def test_closed_form_counts_what_the_layout_and_the_module_hold(variant: ModelConfig) -> None:
    module = Transformer(variant)
    assert num_parameters(variant) == layout(variant).num_parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_a_named_size_has_about_the_parameters_of_its_name(size: str) -> None:
    found = num_parameters(named(size, 32_000, 1024))
    promised = {"35m": 35e6, "150m": 150e6, "400m": 400e6, "1b": 1e9, "3b": 3e9, "7b": 7e9}
    if size in promised:
        assert abs(found / promised[size] - 1) < 0.05
    assert num_parameters(named(size, 32_000, 1024)) == layout(named(size, 32_000, 1024)).num_parameters


def test_sizes_grow_and_nano_is_below_a_million_with_a_byte_vocabulary() -> None:
    counts = [num_parameters(named(size, 257, 256)) for size in SIZES]
    assert counts == sorted(counts)
    assert counts[0] < 1_000_000


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'2b'.*nano, tiny, 35m"):
        named("2b", 257, 128)


def test_a_named_size_refuses_a_vocabulary_out_of_range() -> None:
    with pytest.raises(ConfigError, match="vocab_size 1 "):
        named("nano", 1, 128)


@pytest.mark.parametrize(
    ("fields", "named_field"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"width": 18}, "width"),
        ({"head_width": 5}, "head_width"),
        ({"has_qk_norm": True, "has_qkv_bias": True}, "has_qkv_bias"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"norm_eps": math.nan}, "norm_eps"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_scaling": {"factor": 8.0, "original_seq_len": 8, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(fields: dict[str, Any], named_field: str, small: Make) -> None:
    with pytest.raises(ConfigError, match=named_field):
        from_tree({**msgspec.to_builtins(small()), **fields}, ModelConfig, where="run.toml")


def test_inconsistent_fields_are_refused_in_code_and_on_the_wire(small: Make) -> None:
    with pytest.raises(ConfigError, match="must divide num_heads = 4"):
        msgspec.structs.replace(small(), num_kv_heads=3)
    hostile = msgspec.msgpack.encode({**msgspec.to_builtins(small()), "num_kv_heads": 3})
    with pytest.raises(WireError):
        wire.decode(hostile, ModelConfig)


def test_a_model_of_a_trillion_parameters_is_refused_with_both_figures(small: Make) -> None:
    config = small(vocab_size=1 << 22, width=1 << 16, num_heads=512, ffn_width=1 << 18, num_layers=1024)
    assert num_parameters(config) > 1e12
    with pytest.raises(TooLarge, match=rf"{num_parameters(config):,}.*at most 1,000,000"):
        check_size(num_parameters(config), 1_000_000)


def test_a_model_of_exactly_the_limit_is_taken(small: Make) -> None:
    config = small()
    check_size(num_parameters(config), num_parameters(config))
    with pytest.raises(TooLarge):
        check_size(num_parameters(config), num_parameters(config) - 1)


def test_a_config_survives_its_canonical_bytes(small: Make) -> None:
    config = small(rope_scaling={"factor": 8, "original_seq_len": 8}, head_width=6)
    assert config.rope_scaling == Llama3Scaling(factor=8.0, original_seq_len=8)
    assert wire.decode(wire.encode(config), ModelConfig) == config
