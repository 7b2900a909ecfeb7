"""A base in fewer bytes is the nearest that its numbers can be, and is computed with as the matrices that it means."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from unit.training.test_dropout import learner, sealed
from unit.training.test_rewarded import LENGTH
from weft.data.batch import Batches
from weft.model.config import AdapterConfig, ModelConfig, plain
from weft.model.flat import Held, assemble, held_nbytes, hold, layout, over
from weft.model.held import _NF4, GROUP, Numbers, held, product
from weft.model.initial import initial_vector
from weft.model.sections import sections
from weft.model.transformer import SectionModule, Transformer

Make = Callable[..., ModelConfig]
KINDS: tuple[Numbers, ...] = ("bf16", "int8", "nf4")
FEW = AdapterConfig(rank=2, targets=("q_proj", "v_proj", "down_proj"))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def reference(weight: Tensor, numbers: Numbers) -> Tensor:
    """Return what a matrix becomes, number by number."""
    found, rows, columns = weight.clone(), *weight.shape
    for row in range(rows):
        for column in range(columns):
            value, at = float(weight[row, column]), row * columns + column
            if numbers == "bf16":
                found[row, column] = value
            elif numbers == "int8":
                scale = float(weight[row].abs().max()) / 127
                found[row, column] = round(value / scale) * scale
            else:
                group = weight.flatten()[at // GROUP * GROUP : (at // GROUP + 1) * GROUP]
                scale = float(group.abs().max())
                found[row, column] = min(_NF4, key=lambda each: abs(value / scale - each)) * scale
    return found.bfloat16().float() if numbers == "bf16" else found


@pytest.mark.parametrize("numbers", KINDS)
@pytest.mark.parametrize("shape", [(5, 7), (3, 64), (9, 100)])
def test_each_number_is_the_nearest_there_is(numbers: Numbers, shape: tuple[int, int]) -> None:
    weight = drawn(*shape)
    torch.testing.assert_close(held(weight, numbers).dense(torch.float32), reference(weight, numbers))


@pytest.mark.parametrize("numbers", KINDS)
def test_a_row_of_zeros_stays_one(numbers: Numbers) -> None:
    weight = drawn(4, 64)
    weight[1] = 0.0
    dense = held(weight, numbers).dense(torch.float32)
    assert not dense[1].any()
    assert dense.isfinite().all()


@pytest.mark.parametrize("numbers", KINDS)
def test_a_product_and_its_way_back_are_those_of_the_matrix(numbers: Numbers) -> None:
    weight, bias, x = drawn(6, 64), drawn(6), drawn(2, 5, 64).requires_grad_()
    matrix = held(weight, numbers)
    dense, other = matrix.dense(torch.float32), x.detach().clone().requires_grad_()
    dy = drawn(2, 5, 6)
    y, expected = product(x, matrix, bias), linear(other, dense, bias)
    assert torch.equal(y, expected)
    y.backward(dy)
    expected.backward(dy)
    assert x.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize("numbers", KINDS)
@pytest.mark.parametrize("adapter", [AdapterConfig(rank=3), FEW], ids=["all matrices", "some"])
@pytest.mark.parametrize("number", [None, 0, 1, 2])
def test_a_model_is_that_of_the_matrices_that_are_meant(
    small: Make, numbers: Numbers, adapter: AdapterConfig, number: int | None
) -> None:
    config = small(num_layers=3, is_tied=True, has_qkv_bias=True, adapter=adapter)
    section = None if number is None else sections(config, 3)[number]
    vector, base = drawn(layout(config, section).num_parameters) / 5, initial_vector(plain(config), 1, section)
    kept = hold(config, base, section, numbers, torch.device("cpu"))
    assert isinstance(kept, Held)
    meant, spans = base.clone(), layout(plain(config), section)
    for span in spans:
        if span.name in kept.matrices:
            spans.view(meant, span).copy_(kept.matrices[span.name].dense(torch.float32))
    assert not torch.equal(meant, base)
    assert held_nbytes(config, section, numbers) == kept.nbytes

    first = section is None or section.is_first
    x = torch.randint(0, config.vocab_size, (2, 8)) if first else drawn(2, 8, config.width)
    found = list[tuple[Tensor, Tensor]]()
    for each in (kept, meant):
        with torch.device("meta"):
            module = Transformer(config) if section is None else SectionModule(config, section)
        model = over(module, vector.clone(), each)
        y = model.module(x)
        y.square().mean().backward()
        found.append((y.detach(), model.gradient))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert found[0][1].any()
    if section is None:
        logits = assemble(config, vector, kept)(x)
        torch.testing.assert_close(logits, found[0][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("numbers", "most"), [("bf16", 1e-3), ("int8", 5e-3), ("nf4", 0.1)])
def test_a_learner_holds_its_base_so_and_learns_nearly_the_same(tmp_path: Path, numbers: Numbers, most: float) -> None:
    of, places = sealed(tmp_path, None), np.arange(4)
    exact, outer = learner(tmp_path, of, [])
    rough, _ = learner(tmp_path, of, [], base_numbers=numbers)
    heldout = Batches(of.store, of.index, "heldout", LENGTH, 0)
    one, other = exact.evaluate(outer, heldout, 8).loss, rough.evaluate(outer, heldout, 8).loss
    assert one != other
    assert other == pytest.approx(one, rel=most)
    before = rough.gradient(places, 0, 1)[0].clone()
    assert float((before - exact.gradient(places, 0, 1)[0]).norm() / before.norm()) < 20 * most
    rough.park()
    rough.unpark()
    torch.testing.assert_close(rough.gradient(places, 0, 1)[0], before)
