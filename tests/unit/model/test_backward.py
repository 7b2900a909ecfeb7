"""The two parts of a backward pass are the one that torch makes, bit for bit."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from msgspec import UNSET

from weft.model.backward import Passed, Recomputed, Recomputing, forward
from weft.model.config import AdapterConfig, ModelConfig, plain
from weft.model.flat import FlatModel, cut, flatten, layout, over
from weft.model.initial import initial_vector
from weft.model.sections import pieces, sections
from weft.model.transformer import SectionModule, Transformer

Make = Callable[..., ModelConfig]
NUM_TOKENS = 8


def families(small: Make) -> Iterator[ModelConfig]:
    kinds: list[dict[str, bool]] = [{}, {"has_qk_norm": True}, {"has_qkv_bias": True}]
    yield from (small(num_layers=3, is_tied=is_tied, **kind) for kind in kinds for is_tied in (False, True))
    few = AdapterConfig(rank=2, targets=("q_proj", "v_proj", "down_proj"))
    for adapter in (AdapterConfig(rank=3), few):
        yield small(num_layers=3, is_tied=True, has_qkv_bias=True, adapter=adapter)


def section_of(config: ModelConfig, number: int) -> FlatModel:
    section = sections(config, 3)[number]
    if config.adapter is not UNSET:
        with torch.device("meta"):
            module = SectionModule(config, section)
        vector = torch.randn(layout(config, section).num_parameters, generator=torch.Generator().manual_seed(2))
        return over(module, vector, cut(plain(config), initial_vector(plain(config), seed=1), section))
    flat = flatten(SectionModule(config, section), "cpu")
    flat.vector.copy_(cut(config, initial_vector(config, seed=1), section))
    return flat


def given(config: ModelConfig, number: int) -> torch.Tensor:
    if number == 0:
        return torch.randint(0, config.vocab_size, (2, NUM_TOKENS))
    return torch.randn(2, NUM_TOKENS, config.width)


def at_once(flat: FlatModel, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
    """Let torch go back, into the model's gradient."""
    x = x.detach().requires_grad_(x.is_floating_point())
    flat.module(x).backward(dy)
    return x.grad


def passed(flat: FlatModel, x: torch.Tensor) -> Passed:
    return forward(flat, lambda module: module(x), x)


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("number", range(3))
def test_both_parts_are_the_backward_pass_bit_for_bit(small: Make, kind: int, number: int) -> None:
    config = list(families(small))[kind]
    flat, x = section_of(config, number), given(config, number)
    dy = torch.randn(flat.module(x).shape)
    expected = at_once(flat, x, dy)
    gradient = flat.gradient.clone()
    flat.zero_gradient()

    split = passed(flat, x)
    found = split.input_gradient(dy)
    assert not flat.gradient.any()  # nothing counts yet
    assert (found is None) == (number == 0)
    assert found is None or torch.equal(found, expected)
    split.add_weight_gradients()
    assert torch.equal(flat.gradient, gradient)


def test_a_whole_model_goes_back_from_its_loss(small: Make) -> None:
    config = small(is_tied=True)
    flat = flatten(Transformer(config), "cpu")
    tokens = given(config, 0)
    targets = tokens.roll(-1, 1)
    flat.module.loss(tokens, targets).backward()
    gradient = flat.gradient.clone()
    flat.zero_gradient()
    split = forward(flat, lambda module: module.loss(tokens, targets), tokens)
    split.input_gradient()
    split.add_weight_gradients(0.5)
    assert torch.equal(flat.gradient, 0.5 * gradient)


def test_a_tied_matrix_that_lies_apart_gets_the_gradient_of_both_ends(small: Make) -> None:
    config = small(num_layers=2, is_tied=True)
    vector, tokens = initial_vector(config, seed=1), torch.randint(0, config.vocab_size, (2, NUM_TOKENS + 1))
    whole = flatten(Transformer(config), "cpu")
    whole.vector.copy_(vector)
    loss = whole.module.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    first, last, table = (flatten(SectionModule(config, each), "cpu") for each in pieces(config, 2))
    for part, piece in zip((first, last, table), pieces(config, 2), strict=True):
        part.vector.copy_(cut(config, vector, piece))
        if part is not table:
            part.use(table)

    out = passed(first, tokens[:, :-1].contiguous())
    x = out.output.clone()
    end = forward(last, lambda module: module.loss(x, tokens[:, 1:].contiguous()), x)
    out.input_gradient(end.input_gradient())
    assert not table.gradient.any()  # nothing counts yet
    for each in (out, end):
        each.add_weight_gradients()
    assert float(end.output) == float(loss.detach())
    for part, piece in zip((first, last, table), pieces(config, 2), strict=True):
        torch.testing.assert_close(part.gradient, cut(config, whole.gradient, piece), rtol=1e-5, atol=1e-8)


def test_what_is_dropped_adds_nothing_and_what_is_added_adds_once(small: Make) -> None:
    config = small(num_layers=3)
    flat = section_of(config, 1)
    xs = [given(config, 1) for _ in range(3)]
    dy = torch.randn_like(xs[0])
    for x in (xs[0], xs[2]):
        at_once(flat, x, dy)
    gradient = flat.gradient.clone()
    flat.zero_gradient()
    splits = [passed(flat, x) for x in xs]
    for split in splits:
        split.input_gradient(dy)
    for number in (0, 2, 0, 2):
        splits[number].add_weight_gradients()
    assert torch.equal(flat.gradient, gradient)


@pytest.mark.parametrize("number", range(3))
def test_passes_that_are_made_again_find_the_same_bit_for_bit_whatever_is_kept_of_them(
    small: Make, number: int
) -> None:
    config = small(num_layers=3)
    flat = section_of(config, number)
    xs = [given(config, number) for _ in range(4)]
    dys = [torch.randn(flat.module(x).shape) for x in xs]

    def found(
        forward_of: Callable[[Callable[[SectionModule], torch.Tensor], torch.Tensor], Passed | Recomputed],
    ) -> list[Any]:
        flat.zero_gradient()
        passes = [forward_of(lambda module, x=x: module(x), x.clone()) for x in xs]
        back = [split.input_gradient(dy) for split, dy in zip(passes, dys, strict=True)]
        for split in passes:
            split.add_weight_gradients(0.5)
        return [*(split.output for split in passes), *back, flat.gradient.clone()]

    expected = found(partial(forward, flat))
    for num_owed in (0, 1, 4):
        again = found(Recomputing(flat, num_owed).forward)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_what_a_dropped_pass_kept_is_free_at_once(small: Make) -> None:
    """It is held by nothing that only a collection would find: nodes of a graph are out of its sight."""
    flat, x = section_of(small(num_layers=3), 1), given(small(), 1)
    split = passed(flat, x)
    split.input_gradient(torch.ones_like(split.output))
    kept = [weakref.ref(cell.cell_contents) for owed in split._owed for cell in owed.__closure__ or ()]
    others = {id(each) for each in flat.module.parameters()}
    assert len(kept) > 3
    del split
    assert all(each() is None or id(each()) in others for each in kept)


def test_of_passes_that_are_made_again_the_last_alone_keep_what_weights_are_owed(small: Make) -> None:
    config = small(num_layers=3)
    flat, recomputed = section_of(config, 1), list[Recomputed]()
    recomputing = Recomputing(flat, num_owed=2)
    recomputed += [recomputing.forward(lambda module, x=x: module(x), x) for x in (given(config, 1) for _ in range(4))]
    assert not any(each.owes or each.output.requires_grad for each in recomputed)
    for each in recomputed:
        each.input_gradient(torch.ones_like(each.output))
    assert [each.owes for each in recomputed] == [False, False, True, True]
    recomputed[3].add_weight_gradients()  # who counts makes room
    recomputed[0].input_gradient(torch.ones_like(recomputed[0].output))
    assert [each.owes for each in recomputed] == [True, False, True, False]


def test_a_graph_serves_once(small: Make) -> None:
    flat, x = section_of(small(num_layers=3), 1), given(small(), 1)
    split = passed(flat, x)
    split.input_gradient(torch.ones_like(x))
    with pytest.raises(AssertionError, match="serves once"):
        split.input_gradient(torch.ones_like(x))


def test_in_half_precision_gradients_stay_close(small: Make) -> None:
    config = small(num_layers=3, has_qkv_bias=True)
    flat, x = section_of(config, 2), given(config, 2)
    dy = torch.randn(flat.module(x).shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = at_once(flat, x, dy)
        gradient = flat.gradient.clone()
        flat.zero_gradient()
        split = passed(flat, x)
    found = split.input_gradient(dy.to(split.output.dtype))
    split.add_weight_gradients()
    assert found is not None
    assert expected is not None
    assert torch.allclose(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    assert torch.allclose(flat.gradient, gradient, rtol=2e-2, atol=2e-2 * float(gradient.abs().max()))
