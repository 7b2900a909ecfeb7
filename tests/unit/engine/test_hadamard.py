"""Rows that are turned before they are rounded to eight bits."""

import numpy as np
import pytest
import torch

from weft import rng
from weft.engine.hadamard import BLOCK, Turn
from weft.engine.numbers import MATRICES, Kind

CPU = torch.device("cpu")


def drawn(*shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.stream(0, "turned").standard_normal(shape)).float()


def reference(x: torch.Tensor, block: int) -> np.ndarray:
    """As Sylvester's construction has it: row i and column j agree in sign where i & j has an even number of ones."""
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    return (x.double().numpy().reshape(-1, block) @ signs).reshape(x.shape)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(("width", "block"), [(576, BLOCK), (64, BLOCK), (16, 16), (24, 8), (5, 1)])
def test_a_row_times_the_matrix(width: int, block: int, is_whole: bool) -> None:
    x = drawn(7, width)
    x[2] = 0
    found = Turn(width, CPU, is_whole=is_whole)(x)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, reference(x, block), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_row_and_a_weight_that_are_turned_have_the_product_that_they_had(is_whole: bool) -> None:
    x, weight = drawn(3, 96), drawn(40, 96)
    turn = Turn(96, CPU, is_whole=is_whole)
    torch.testing.assert_close(turn(x) @ turn.of_weight(weight).t(), x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_in_exact_numbers_a_row_has_the_same_bits_beside_any_others() -> None:
    x = drawn(300, 576) * 10.0 ** drawn(300, 1)
    turn = Turn(576, CPU, is_whole=True)
    together = turn(x)
    for some in (slice(0, 1), slice(5, 12), slice(17, 300)):
        assert torch.equal(turn(x[some]), together[some])


@pytest.mark.parametrize("kind", ["int8", "exact"])
def test_one_number_a_thousand_times_as_large_costs_the_others_little(kind: Kind) -> None:
    """Unturned, all others would be rounded to 0."""
    x, weight = drawn(4, 256), drawn(64, 256)
    x[:, 7] = 1000.0
    weight[:, 7] /= 1000.0  # as trained models have it: what is large is multiplied by little
    expected = x @ weight.t()
    found = MATRICES[kind](weight)(x)
    unturned = (x / (1000 / 127)).round() * (1000 / 127) @ weight.t()
    assert float((found - expected).norm()) < 0.5 * float((unturned - expected).norm())
