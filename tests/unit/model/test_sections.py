"""Sections: cut alike by all, as equal as layers allow, and together the whole model, bit for bit."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from benchmarks.rig.flat import join

from weft.errors import ConfigError
from weft.model.config import ModelConfig, num_parameters
from weft.model.flat import FlatModel, attach, cut, flatten, layout
from weft.model.initial import initial_vector
from weft.model.sections import Section, num_section_parameters, pieces, sections
from weft.model.transformer import SectionModule, Transformer

Make = Callable[..., ModelConfig]


def batch(config: ModelConfig, num: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, config.vocab_size, (num, 9))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 7, 12])
@pytest.mark.parametrize("vocab_size", [2, 11, 600, 5000])
def test_a_cut_is_the_most_equal_one_that_layers_allow(
    small: Make, is_tied: bool, num_layers: int, vocab_size: int
) -> None:
    config = small(is_tied=is_tied, num_layers=num_layers, vocab_size=vocab_size)
    for num in range(1, num_layers + 1):
        found = sections(config, num)
        assert [each.number for each in found] == list(range(num))
        assert (found[0].layers.start, found[-1].layers.stop) == (0, num_layers)
        assert all(a.layers.stop == b.layers.start for a, b in pairwise(found))
        assert all(each.layers for each in found)
        sizes = sorted(num_section_parameters(config, each) for each in found)
        others = all_cuts(config, num)
        assert max(sizes) == min(map(max, others))
        assert sum(size**2 for size in sizes) == min(sum(s**2 for s in cut) for cut in others)


def all_cuts(config: ModelConfig, num: int) -> list[list[int]]:
    """Return the sizes of the sections in every cut."""

    def cuts(first: int, left: int) -> list[list[int]]:
        if left == 1:
            return [[config.num_layers - first]]
        stops = range(first + 1, config.num_layers - left + 2)
        return [[stop - first, *rest] for stop in stops for rest in cuts(stop, left - 1)]

    @cache
    def size(number: int, start: int, stop: int) -> int:
        has_table = number == 0 or (config.is_tied and number == num - 1)
        return layout(config, Section(number, num, range(start, stop), has_table)).num_parameters

    found = []
    for counts in cuts(0, num):
        starts = [sum(counts[:number]) for number in range(num)]
        found.append([size(number, starts[number], starts[number] + counts[number]) for number in range(num)])
    return found


def test_a_section_has_the_parameters_that_its_layout_says(variant: ModelConfig) -> None:
    for num in (1, 2):
        for section in sections(variant, num):
            spans = layout(variant, section)
            assert spans.num_parameters == num_section_parameters(variant, section)
            module = SectionModule(variant, section)
            assert {s.name: s.shape for s in spans} == {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert num_section_parameters(variant, sections(variant, 1)[0]) == num_parameters(variant)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_in_pieces_a_tied_matrix_is_there_once(small: Make, num: int) -> None:
    config = small(num_layers=4, is_tied=True)
    found = pieces(config, num)
    assert sum(num_section_parameters(config, each) for each in found) == num_parameters(config)
    names = [span.name for each in found for span in layout(config, each)]
    assert sorted(names) == sorted(span.name for span in layout(config))
    assert [each.layers for each in found[:num]] == [each.layers for each in sections(config, num)]
    assert found[num:] == (() if num == 1 else (Section(num, num, range(0), has_table=True),))
    assert pieces(small(num_layers=4, is_tied=False), num) == sections(small(num_layers=4, is_tied=False), num)


def test_the_parts_of_a_vector_are_the_whole(variant: ModelConfig) -> None:
    vector = initial_vector(variant, seed=3)
    for num in (1, 2):
        parts = [cut(variant, vector, section) for section in sections(variant, num)]
        assert torch.equal(join(variant, parts), vector)
    with pytest.raises(ConfigError, match="section 1 of 2 has"):
        join(variant, [parts[0], parts[1][:-1]])


@pytest.mark.parametrize("num", [0, 3])
def test_more_sections_than_layers_are_refused(small: Make, num: int) -> None:
    with pytest.raises(ConfigError, match=f"stages: {num} of a model of 2 layers. Allowed: 1 to 2"):
        sections(small(), num)


def parts_of(config: ModelConfig, vector: torch.Tensor, num: int, *, has_recompute: bool) -> list[FlatModel]:
    parts = []
    for section in sections(config, num):
        flat = flatten(SectionModule(config, section, has_recompute=has_recompute), "cpu")
        flat.vector.copy_(cut(config, vector, section))
        parts.append(flat)
    return parts


def step(parts: list[FlatModel], tokens: torch.Tensor, targets: torch.Tensor, share: float = 1.0) -> float:
    """Send a micro-batch through all sections and back, as peers do: nothing but activations and their gradients."""
    inputs, x = [], tokens
    for part in parts[:-1]:
        inputs.append(x)
        x = part.module(x).detach().requires_grad_()  # not under no_grad: matrices are cut in other ways there
    loss = share * parts[-1].module.loss(x, targets)
    loss.backward()
    gradient = x.grad
    for part, given in reversed(list(zip(parts[:-1], inputs, strict=True))):
        again = given.detach().requires_grad_(given.is_floating_point())
        part.module(again).backward(gradient)
        gradient = again.grad
    return float(loss.detach())


def gradient_of(config: ModelConfig, parts: list[FlatModel]) -> torch.Tensor:
    """Return the whole's gradient; that of a tied matrix is the sum of both ends'."""
    found = join(config, [part.gradient for part in parts])
    if config.is_tied and len(parts) > 1:
        table = next(span for span in layout(config) if span.name == "embed.weight")
        last = next(span for span in parts[-1].layout if span.name == "embed.weight")
        found[table.offset : table.stop] += parts[-1].gradient[last.offset : last.stop]
    return found


def families(small: Make) -> list[ModelConfig]:
    kinds: list[dict[str, bool]] = [{}, {"has_qk_norm": True}, {"has_qkv_bias": True}]
    return [small(num_layers=4, is_tied=is_tied, **kind) for kind in kinds for is_tied in (False, True)]


@pytest.mark.parametrize("has_recompute", [False, True])
@pytest.mark.parametrize("kind", range(6))
def test_sections_compute_what_the_whole_does_bit_for_bit(small: Make, kind: int, has_recompute: bool) -> None:
    config = families(small)[kind]
    vector = initial_vector(config, seed=1)
    tokens, targets = batch(config)
    whole = flatten(Transformer(config), "cpu")
    attach(whole.module, vector.clone())
    loss = whole.module.loss(tokens, targets)
    gradients = torch.autograd.grad(loss, [dict(whole.module.named_parameters())[s.name] for s in whole.layout])
    expected = torch.cat([each.flatten() for each in gradients])
    for num in range(1, config.num_layers + 1):
        parts = parts_of(config, vector, num, has_recompute=has_recompute)
        assert step(parts, tokens, targets) == float(loss.detach())
        assert torch.equal(gradient_of(config, parts), expected)


@pytest.mark.parametrize("kind", range(6))
def test_micro_batches_add_up_to_the_whole(small: Make, kind: int) -> None:
    config = families(small)[kind]
    vector = initial_vector(config, seed=1)
    tokens, targets = batch(config, num=6)
    (whole,) = parts_of(config, vector, 1, has_recompute=False)
    loss = step([whole], tokens, targets)
    for num in range(2, config.num_layers + 1):
        parts = parts_of(config, vector, num, has_recompute=False)
        pieces = zip(tokens.split(2), targets.split(2), strict=True)
        assert sum(step(parts, *piece, share=1 / 3) for piece in pieces) == pytest.approx(loss, rel=1e-6)
        found = gradient_of(config, parts)
        assert float((found - whole.gradient).norm() / whole.gradient.norm()) < 1e-6
