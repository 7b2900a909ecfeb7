"""Texts that share a row: each is computed as if it stood alone."""

from collections.abc import Callable

import pytest
import torch

from weft.model.config import ModelConfig
from weft.model.sections import sections
from weft.model.transformer import SectionModule, Transformer

LENGTHS = (5, 1, 4)
POSITIONS = torch.cat([torch.arange(num) for num in LENGTHS])[None]
TARGETS = torch.tensor([[7, -100, 3, 4, -100, -100, 2, -100, 5, -100]])


def tokens_of(config: ModelConfig) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (1, sum(LENGTHS)))


def test_a_text_in_a_row_has_the_logits_that_it_has_alone(variant: ModelConfig) -> None:
    model, tokens = Transformer(variant), tokens_of(variant)
    in_rows = model(tokens, positions=POSITIONS).split(LENGTHS, dim=1)
    alone = [model(part) for part in tokens.split(LENGTHS, dim=1)]
    for found, expected in zip(in_rows, alone, strict=True):
        torch.testing.assert_close(found, expected)


def test_windows_count_within_a_text(small: Callable[..., ModelConfig]) -> None:
    config = small(window=3, num_layers=3, first_windowed=1)
    model, tokens = Transformer(config), tokens_of(config)
    in_rows = model(tokens, positions=POSITIONS).split(LENGTHS, dim=1)
    for found, part in zip(in_rows, tokens.split(LENGTHS, dim=1), strict=True):
        torch.testing.assert_close(found, model(part))


@pytest.mark.parametrize("has_recompute", [False, True])
def test_loss_and_gradient_are_those_of_the_texts_alone(small: Callable[..., ModelConfig], has_recompute: bool) -> None:
    config = small()
    model, tokens = Transformer(config, has_recompute=has_recompute), tokens_of(config)
    parameters = list(model.parameters())
    loss = model.loss(tokens, TARGETS, POSITIONS)
    alone = [
        torch.nn.functional.cross_entropy(model(part)[0], targets[0], reduction="sum")
        for part, targets in zip(tokens.split(LENGTHS, 1), TARGETS.split(LENGTHS, 1), strict=True)
    ]
    expected = torch.stack(alone).sum() / 5
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters))


def test_where_nothing_is_predicted_loss_and_gradient_are_zero(small: Callable[..., ModelConfig]) -> None:
    model = Transformer(small())
    loss = model.loss(tokens_of(small()), torch.full_like(TARGETS, -100), POSITIONS)
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, list(model.parameters())))


def test_sections_one_after_another_are_the_whole(small: Callable[..., ModelConfig]) -> None:
    config = small(num_layers=3)
    whole, tokens = Transformer(config), tokens_of(config)
    x = tokens
    for section in sections(config, 3):
        module = SectionModule(config, section)
        module.load_state_dict({name: whole.state_dict()[name] for name in module.state_dict()})
        x = module(x, positions=POSITIONS)
    torch.testing.assert_close(x, whole(tokens, positions=POSITIONS))
