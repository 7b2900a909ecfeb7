"""Products of matrices to the same bits in any order, near to the true ones, and what has none."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.codec.exact import grid_bits, matmul


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 64, 64), (7, 300, 5), (3, 5000, 2)])
def test_a_product_is_near_the_true_one(shape: tuple[int, int, int]) -> None:
    n, k, m = shape
    a, b = randn(n, k, seed=1), randn(k, m, seed=2)
    true = a.double() @ b.double()
    bound = (
        k * 2.0 ** (2 - grid_bits(k)) * a.double().abs().amax(1, keepdim=True) * b.double().abs().amax(0, keepdim=True)
    )
    assert ((matmul(a, b).double() - true).abs() <= bound + 1e-7 * true.abs()).all()


@given(st.permutations(range(40)), st.integers(1, 40))
def test_the_order_of_summation_changes_no_bit(order: list[int], split: int) -> None:
    a, b = 10 ** randn(6, 40, seed=3), 10 ** randn(40, 5, seed=4)
    whole = matmul(a, b)
    assert torch.equal(matmul(a[:, order], b[order]), whole)
    assert torch.equal(torch.cat([matmul(row.unsqueeze(0), b) for row in a]), whole)
    assert split


def test_a_batch_is_each_of_its_products() -> None:
    a, b = randn(3, 4, 8, seed=5), randn(3, 8, 2, seed=6)
    assert torch.equal(matmul(a, b), torch.stack([matmul(*pair) for pair in zip(a, b, strict=True)]))


def test_sums_are_exact_where_fp32_would_lose_them() -> None:
    a = torch.tensor([[2.0**20, 1.0, -(2.0**20)]])
    assert matmul(a, torch.ones(3, 1)).item() == 1.0
    assert (torch.tensor([2.0**30]) + 1.0 - 2.0**30).item() == 0.0


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3.0e38])
def test_the_largest_and_the_smallest_numbers_have_a_grid(value: float) -> None:
    found = matmul(torch.tensor([[value, 0.0]]), torch.tensor([[0.5], [1.0]]))
    assert found.item() == np.float32(np.float32(value) * 0.5)


def test_so_many_products_have_no_exact_sum() -> None:
    assert grid_bits(64) == 24
    assert grid_bits(1 << 15) == 20
    with pytest.raises(ValueError, match="no exact sum"):
        grid_bits(1 << 60)
