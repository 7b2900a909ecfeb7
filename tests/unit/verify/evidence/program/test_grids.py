"""Grids, sums, powers and angles by numpy against those that members train with, to the bit."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.training.numerics import grids as by_torch
from weft.verify.evidence.program import grids
from weft.verify.evidence.program.grids import Array


def numbers(seed: int, rows: int, width: int, least: int = -45, most: int = 30) -> Array:
    """Return numbers of many sizes, some of them zeros."""
    luck = np.random.default_rng(seed)
    x = luck.standard_normal((rows, width)) * 10.0 ** luck.integers(least, most, (rows, width))
    return np.where(luck.random((rows, width)) < 0.1, 0.0, x).astype(np.float32)


shapes = given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 5), width=st.integers(1, 70))


@given(num=st.integers(1, 1 << 30))
def test_as_many_bits_are_kept(num: int) -> None:
    assert grids.product_bits(num) == by_torch.product_bits(num)


@shapes
@settings(deadline=None)
def test_grids_of_products_are_the_same(seed: int, rows: int, width: int) -> None:
    x = numbers(seed, rows, width)
    given_x = torch.from_numpy(x)
    for num in (width, 1, 600, 20_000):
        step = by_torch.step_of(given_x, 1, num)
        assert np.array_equal(grids.steps(x, num), step.numpy()[:, 0])
        assert np.array_equal(grids.gridded(x, num), by_torch.gridded(given_x, 1, num).numpy())
        assert np.array_equal(grids.whole(x, step.numpy()), by_torch.in_steps(given_x, step).numpy())


@shapes
@settings(deadline=None)
def test_sums_are_the_same(seed: int, rows: int, width: int) -> None:
    x = numbers(seed, rows, width, -30, 20)
    assert np.array_equal(grids.on_sums(x), by_torch.on_sums(torch.from_numpy(x), 1).numpy())
    assert np.array_equal(grids.total(x), by_torch.total(torch.from_numpy(x), 1).numpy()[:, 0])


def test_long_sums_are_the_same() -> None:
    for width in (1 << 12, (1 << 23) + 3):
        x = np.random.default_rng(width).standard_normal((1, width)).astype(np.float32)
        assert np.array_equal(grids.total(x), by_torch.total(torch.from_numpy(x), 1).numpy()[:, 0])


def test_powers_of_two_are_the_same_to_the_bit() -> None:
    luck = np.random.default_rng(3)
    edges = [0.0, -0.0, 0.5, -0.5, 126.0, -126.0, -125.99999, -127.0, -150.0, -1e30, -np.inf, 1e-40]
    x = np.concatenate((luck.uniform(-140, 126, 200_000), luck.standard_normal(50_000), edges)).astype(np.float32)
    assert grids.exp2(x).tobytes() == by_torch.exp2_(torch.from_numpy(x.copy())).numpy().tobytes()


def test_cosines_and_sines_are_the_same_to_the_bit() -> None:
    luck = np.random.default_rng(4)
    x = np.concatenate((luck.uniform(0, 2**20, 100_000), luck.uniform(0, 10, 50_000), [0.0])).astype(np.float32)
    for found, expected in zip(grids.turns(x), by_torch.turns(torch.from_numpy(x)), strict=True):
        assert found.tobytes() == expected.numpy().tobytes()
