"""Products and sums that have no order, and functions of single numbers: to the bit as they are defined."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unit.training.numerics import reference
from weft.codec.exact import matmul
from weft.training.numerics import grids
from weft.training.numerics.grids import (
    exp2_,
    gridded,
    in_steps,
    log,
    on_sums,
    product,
    product_bits,
    roots,
    step_of,
    total,
    turns,
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_a_product_is_that_of_its_definition(scale: float) -> None:
    a, b = 10 ** randn(5, 37, seed=1) * randn(5, 37, seed=2) * scale, 10 ** randn(37, 4, seed=3)
    assert np.array_equal(product(a, b.t().contiguous()).numpy(), reference.product(a.numpy(), b.numpy()))


@pytest.mark.parametrize("num", [512, 700, 3000])
def test_with_so_many_numbers_it_is_that_of_codecs(num: int) -> None:
    """Of fewer, theirs keeps more bits."""
    a, b = randn(9, num, seed=1), randn(num, 5, seed=2)
    assert torch.equal(product(a, b.t()), matmul(a, b))


@given(st.permutations(range(60)), st.sampled_from([7, 100, 1 << 17]))
def test_neither_order_nor_pieces_change_a_bit(order: list[int], piece: int) -> None:
    a, b = 10 ** randn(40, 60, seed=4), 10 ** randn(60, 7, seed=5)
    whole = product(a, b.t())
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(grids, "PIECE", piece)
        assert torch.equal(product(a[:, order], b[order].t()), whole)
    assert torch.equal(total(a[:, order], 1), total(a, 1))


@pytest.mark.parametrize("num", [1, 2, 511, 512, 513, 2048, 2049, 1 << 15, 1 << 20])
def test_no_sum_of_the_largest_numbers_leaves_what_float64_holds(num: int) -> None:
    """Each is rounded up to the end of its grid; in any order, partial sums are whole and at most 2^53."""
    most = 2 ** product_bits(num)
    assert num * most**2 <= 2**53
    x = torch.full((1, num), float(np.nextafter(np.float32(2), np.float32(0))))
    assert in_steps(x, step_of(x, 1)).max() == most
    assert gridded(x, 1).max() == 2.0
    assert product(x, x).item() == 4.0 * num


def test_as_many_bits_are_kept_as_sums_allow() -> None:
    assert [product_bits(num) for num in (1, 512, 513, 2048, 8192, 1 << 17)] == [22, 22, 21, 21, 20, 18]
    assert on_sums(torch.tensor([[1.0, 3e-10]]), 1)[0, 1] == 0.0
    assert on_sums(torch.tensor([[1.0, 5e-9]]), 1)[0, 1] > 0.0


def test_a_sum_is_that_of_its_definition() -> None:
    x = 10 ** (3 * randn(50, 33, seed=6)) * randn(50, 33, seed=7)
    x[3] = 0.0
    x[4] *= 1e-38
    assert total(x, 1).flatten().tolist() == [reference.total(list(row)) for row in x.numpy()]
    assert torch.equal(total(x.t(), 0).flatten(), total(x, 1).flatten())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38])
def test_what_is_no_number_or_nearly_none_makes_none(bad: float) -> None:
    """Where fp32 has no room for the grid, a step stops with its loss, and does not go on with something else."""
    x = torch.ones(2, 3)
    x[0, 1] = bad
    found = product(x, torch.ones(2, 3))
    assert not found[0].isfinite().any()
    assert found[1].eq(3.0).all()
    if bad != 3e38:
        assert not total(x, 1)[0].isfinite().any()
    assert not exp2_(torch.tensor([-bad if bad > 0 else math.nan, math.nan])).gt(0).any()


def test_numbers_too_small_for_a_grid_are_nothing() -> None:
    x = torch.tensor([[1e-45, -1e-40, 1e-38]])
    assert gridded(x, 1).tolist() == [[0.0, 0.0, 2.0**-126]]
    assert in_steps(x, step_of(x, 1)).tolist() == [[0.0, -0.0, 1.0]]
    assert product(torch.zeros(2, 3), torch.ones(1, 3)).eq(0.0).all()


def test_powers_are_those_of_their_definition() -> None:
    x = torch.cat((torch.linspace(-130, 126, 4001), torch.tensor([-126.0, -125.99999, -0.5, 0.5, 0.0, -math.inf])))
    found = exp2_(x.clone())
    assert found.tolist() == [float(reference.exp2(each)) for each in x.numpy()]
    is_some = x > -126
    true = torch.exp2(x.double())
    assert ((found - true) / true)[is_some].abs().max() < 3e-7
    assert exp2_(torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]
    y = randn(grids.PIECE, seed=9).sub_(3)
    assert torch.equal(exp2_(y.clone()), torch.cat([exp2_(part.clone()) for part in y.split(1000)]))


def test_logarithms_and_roots_are_those_of_their_definition() -> None:
    x = torch.cat((torch.linspace(1, 300, 3001, dtype=torch.float64), torch.tensor([2.0**40, 1 + 2.0**-30])))
    assert log(x).tolist() == [reference.log(float(each)) for each in x]
    assert (log(x) - x.log()).abs().max() < 1e-14
    assert roots(x).tolist() == [math.sqrt(each) for each in x.tolist()]


def test_angles_are_turned_within_half_a_bit() -> None:
    angles = torch.cat((torch.linspace(0, 7, 5001), torch.arange(0, 1 << 20, 91).float()))
    cos, sin = turns(angles)
    assert (cos - angles.double().cos()).abs().max() < 2.0**-25 + 1e-9
    assert (sin - angles.double().sin()).abs().max() < 2.0**-25 + 1e-9
    assert (cos[0], sin[0]) == (1.0, 0.0)
