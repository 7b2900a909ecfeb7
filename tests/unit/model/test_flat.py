from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
import torch
from benchmarks.rig.flat import two_groups
from torch import nn

from weft.errors import ConfigError
from weft.model.config import ModelConfig, num_parameters
from weft.model.flat import FlatModel, assemble, flatten, layout
from weft.model.transformer import Transformer

Make = Callable[..., ModelConfig]


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def test_the_layout_names_the_modules_parameters_and_their_shapes(variant: ModelConfig) -> None:
    spans = {span.name: span.shape for span in layout(variant)}
    assert spans == {name: tuple(p.shape) for name, p in Transformer(variant).named_parameters()}


def test_the_layout_has_no_gaps_and_puts_matrices_first(variant: ModelConfig) -> None:
    spans = list(layout(variant))
    assert spans[0].offset == 0
    assert all(a.stop == b.offset for a, b in pairwise(spans))
    assert spans[-1].stop == layout(variant).num_parameters
    assert [span.has_decay for span in spans] == sorted((len(span.shape) == 2 for span in spans), reverse=True)
    assert layout(variant).num_decayed == sum(span.num for span in spans if span.has_decay)


def test_flatten_keeps_the_values_of_a_built_model(variant: ModelConfig) -> None:
    model = Transformer(variant)
    tokens, _ = batch(variant)
    expected = model(tokens)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = flatten(model, "cpu")
    for span in flat.layout:
        assert torch.equal(flat.layout.view(flat.vector, span), before[span.name])
    assert torch.equal(model(tokens), expected)


def test_parameters_and_gradients_are_views_and_stay_views_through_training(variant: ModelConfig) -> None:
    flat = flatten(Transformer(variant), "cpu")
    for _ in range(2):
        flat.zero_gradient()
        flat.module.loss(*batch(variant)).backward()
        parameters = dict(flat.module.named_parameters())
        for span in flat.layout:
            parameter = parameters[span.name]
            assert parameter.data_ptr() == flat.vector.data_ptr() + 4 * span.offset
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == flat.gradient.data_ptr() + 4 * span.offset
            assert flat.gradient[span.offset : span.stop].abs().sum() > 0


def test_writing_the_vector_changes_the_model(small: Make) -> None:
    flat = flatten(Transformer(small()), "cpu")
    tokens, _ = batch(small())
    before = flat.module(tokens)
    flat.vector.mul_(1.5)
    assert not torch.allclose(flat.module(tokens), before)


def test_gradients_add_up_until_cleared(small: Make) -> None:
    flat = flatten(Transformer(small()), "cpu")
    tokens, targets = batch(small())
    flat.module.loss(tokens, targets).backward()
    once = flat.gradient.clone()
    flat.module.loss(tokens, targets).backward()
    assert torch.allclose(flat.gradient, 2 * once)
    flat.zero_gradient()
    assert not flat.gradient.any()


def test_flat_gradient_equals_that_of_a_plain_module(variant: ModelConfig) -> None:
    plain, model = Transformer(variant), Transformer(variant)
    model.load_state_dict(plain.state_dict())
    flat = flatten(model, "cpu")
    tokens, targets = batch(variant)
    plain.loss(tokens, targets).backward()
    flat.module.loss(tokens, targets).backward()
    plain_gradients = {name: p.grad for name, p in plain.named_parameters()}
    for span in flat.layout:
        gradient = plain_gradients[span.name]
        assert gradient is not None
        torch.testing.assert_close(flat.layout.view(flat.gradient, span), gradient)


def test_optimizing_the_two_groups_equals_optimizing_every_tensor(small: Make) -> None:
    def train(groups_of: Callable[[FlatModel], list[dict[str, object]]]) -> torch.Tensor:
        torch.manual_seed(1)
        flat = flatten(Transformer(small(is_tied=True)), "cpu")
        optimizer = torch.optim.AdamW(groups_of(flat), lr=1e-2)
        for _ in range(3):
            flat.zero_gradient()
            flat.module.loss(*batch(small())).backward()
            optimizer.step()
        return flat.vector

    def each(flat: FlatModel) -> list[dict[str, object]]:
        parameters = list(flat.module.parameters())
        return [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]

    def two(flat: FlatModel) -> list[dict[str, object]]:
        decayed, rest = two_groups(flat)
        return [{"params": [decayed], "weight_decay": 0.1}, {"params": [rest], "weight_decay": 0.0}]

    torch.testing.assert_close(train(two), train(each))


def test_a_model_on_meta_starts_at_zero_and_computes_once_filled(variant: ModelConfig) -> None:
    source = flatten(Transformer(variant), "cpu")
    flat = flatten(on_meta(variant), "cpu")
    assert not flat.vector.any()
    flat.vector.copy_(source.vector)
    tokens, targets = batch(variant)
    assert torch.equal(flat.module(tokens), source.module(tokens))
    flat.module.loss(tokens, targets).backward()
    assert flat.gradient.any()


def test_assemble_shares_the_vector_and_takes_no_gradient(variant: ModelConfig) -> None:
    source = flatten(Transformer(variant), "cpu")
    model = assemble(variant, source.vector)
    tokens, _ = batch(variant)
    assert torch.equal(model(tokens), source.module(tokens))
    assert not any(p.requires_grad for p in model.parameters())
    assert model.embed.weight.untyped_storage().data_ptr() == source.vector.untyped_storage().data_ptr()


def test_assemble_refuses_the_vector_of_another_config(small: Make) -> None:
    with pytest.raises(ConfigError, match=f"{num_parameters(small()):,} parameters, the vector 7 numbers"):
        assemble(small(), torch.zeros(7))


def test_a_half_precision_copy_stays_close_at_far_positions(small: Make) -> None:
    # Angles cast to bf16 would be off by radians here.
    config = small(max_seq_len=4096, is_tied=True)
    exact = Transformer(config)
    tokens = torch.randint(0, config.vocab_size, (1, 2048))
    expected = exact(tokens).detach()
    cast = Transformer(config)
    cast.load_state_dict(exact.state_dict())
    for half in (assemble(config, flatten(exact, "cpu").vector.bfloat16()), cast.bfloat16()):
        assert half.embed.weight.dtype == torch.bfloat16
        found = half(tokens).float()
        assert nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999


def test_equal_configs_have_equal_layouts(variant: ModelConfig) -> None:
    assert layout(variant) == layout(msgspec.convert(msgspec.to_builtins(variant), ModelConfig))
