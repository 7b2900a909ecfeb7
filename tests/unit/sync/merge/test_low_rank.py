"""A few directions of each matrix: which they are, that they turn towards the largest, and degenerate ones."""

import pytest
import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.sync.merge.low_rank import LowRank, orthonormal
from weft.sync.method.choices import Choices, Factors, LowRankConfig, SgdConfig

SHAPES = ((40, 60), (7,), (30, 30), (3, 50))  # the last one is too small to gain anything
BOTH_WAYS = pytest.mark.parametrize("factors", ["both", "by_turns"])
NUM = 40 * 60 + 7 + 30 * 30 + 150 + 11


def numbers(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def of_rank(height: int, width: int, rank: int) -> Tensor:
    return numbers(height * rank, 1).view(height, rank) @ numbers(rank * width, 2).view(rank, width)


@pytest.mark.parametrize(("factors", "num"), [("both", 2 * 100 + 2 * 60), ("by_turns", 2 * 60 + 2 * 30)])
def test_much_less_is_sent_and_what_has_no_directions_as_it_is(factors: Factors, num: int) -> None:
    basis = LowRank(LowRankConfig(rank=2, factors=factors), SHAPES)
    assert basis.num_sent(NUM) == num + 7 + 150 + 11
    vector = numbers(NUM)
    state = basis.init()
    for round in (1, 2):
        back = basis.inverse(basis.forward(vector, state, round), state, round)
        for whole in (slice(2400, 2407), slice(3307, NUM)):
            assert torch.equal(back[whole], vector[whole])


@BOTH_WAYS
def test_a_matrix_of_that_rank_is_found_after_a_turn_each(factors: Factors) -> None:
    basis = LowRank(LowRankConfig(rank=2, factors=factors), SHAPES)
    vector, state = torch.zeros(NUM), basis.init()
    vector[:2400] = of_rank(40, 60, 2).flatten()
    left = []
    for round in (1, 2, 3):
        sent = basis.forward(vector, state, round)
        left.append(float((vector - basis.inverse(sent, state, round)).norm() / vector.norm()))
        basis.advance(sent, state, round)
    assert left[0] > 0.5
    assert left[1] < 1e-4
    assert left[2] < 1e-4


@BOTH_WAYS
def test_what_is_let_through_is_a_projection(factors: Factors) -> None:
    basis, vector = LowRank(LowRankConfig(rank=3, factors=factors), SHAPES), numbers(NUM)
    state = basis.init()
    for round in (1, 2):
        once = basis.inverse(basis.forward(vector, state, round), state, round)
        twice = basis.inverse(basis.forward(once, state, round), state, round)
        torch.testing.assert_close(once, twice, rtol=1e-4, atol=1e-4)
        assert float(once @ (vector - once)) == pytest.approx(0.0, abs=1e-2)


@pytest.mark.parametrize(
    "columns",
    [
        numbers(120).view(40, 3),
        torch.zeros(40, 3),
        numbers(40).view(40, 1).expand(40, 3),
        torch.cat([torch.zeros(40, 1), numbers(80).view(40, 2) * 1e-30], dim=1),
        1e30 * numbers(120).view(40, 3),
    ],
    ids=["any", "zero", "one direction", "tiny", "huge"],
)
def test_any_columns_have_an_orthonormal_basis_that_spans_them(columns: Tensor) -> None:
    basis = orthonormal(columns.contiguous())
    torch.testing.assert_close(basis.T @ basis, torch.eye(3), rtol=0, atol=2e-5)
    scale = columns.norm()
    if scale > 0:
        unit = (columns / scale).contiguous()
        torch.testing.assert_close(basis @ (basis.T @ unit), unit, rtol=0, atol=2e-5)


def test_without_feedback_a_few_directions_are_refused() -> None:
    with pytest.raises(ConfigError, match="feedback"):
        Choices(every=1, send="delta", apply=SgdConfig(), basis=LowRankConfig())
