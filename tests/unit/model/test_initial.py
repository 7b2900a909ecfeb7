from collections.abc import Callable
from math import sqrt

import numpy as np
import pytest
import torch

from weft import wire
from weft.model import initial
from weft.model.config import ModelConfig, named
from weft.model.flat import layout
from weft.model.initial import initial_vector
from weft.rng import integers64, stream

Make = Callable[..., ModelConfig]


def digest(vector: torch.Tensor) -> str:
    return wire.digest(vector.numpy().astype("<f4").tobytes())


def test_first_weights_are_these_bits(small: Make) -> None:
    # Changes only if what every run starts from is changed on purpose.
    found = digest(initial_vector(small(has_qkv_bias=True), seed=7))
    assert found == "c4cfdef2c428e110eae2618659406e6438205556ddb2c73a92a8122da15d11a3"


def test_a_weight_is_the_scaled_sum_of_four_words(small: Make) -> None:
    config = small()
    span = next(span for span in layout(config) if span.name == "layers.1.ffn.down.weight")
    words = [int(word) for word in integers64(stream(3, "initial", span.name), 5)]
    sums = [sum((word >> shift) & 0xFFFF for shift in (0, 16, 32, 48)) - 131070 for word in words]
    scale = np.float32(0.02 / sqrt(2 * config.num_layers) / sqrt((2**32 - 1) / 3))
    expected = [float(np.float32(s) * scale) for s in sums]
    assert initial_vector(config, 3)[span.offset : span.offset + 5].tolist() == expected


def test_chunks_do_not_change_the_numbers(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = initial_vector(small(), 3)
    monkeypatch.setattr(initial, "_CHUNK", 7)
    assert torch.equal(initial_vector(small(), 3), whole)


def test_matrices_have_the_promised_deviation_and_the_rest_is_neutral() -> None:
    config = named("nano", 257, 128)
    vector, spans = initial_vector(config, 1), layout(config)
    for span in spans:
        values = spans.view(vector, span)
        if not span.has_decay:
            assert torch.equal(values, torch.ones(span.shape))
            continue
        is_residual = span.name.endswith((".attention.out.weight", ".ffn.down.weight"))
        std = 0.02 / sqrt(8) if is_residual else 0.02
        assert values.std().item() == pytest.approx(std, rel=0.03)
        assert abs(values.mean().item()) < 4 * std / sqrt(span.num)
        assert values.abs().max().item() < 3.47 * std


def test_biases_start_at_zero(small: Make) -> None:
    config = small(has_qkv_bias=True)
    vector, spans = initial_vector(config, 1), layout(config)
    biases = [spans.view(vector, span) for span in spans if span.name.endswith(".bias")]
    assert len(biases) == config.num_layers
    assert not any(bias.any() for bias in biases)


def test_seeds_differ_and_a_tensor_does_not_depend_on_the_others(small: Make) -> None:
    assert not torch.equal(initial_vector(small(), 1), initial_vector(small(), 2))
    name = "layers.0.attention.qkv.weight"
    found = []
    for config in (small(), small(vocab_size=13)):
        span = next(span for span in layout(config) if span.name == name)
        found.append(layout(config).view(initial_vector(config, 1), span))
    assert torch.equal(*found)
