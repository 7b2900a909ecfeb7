"""How far honest machines may lie apart: above what they were measured at, below what any cheat was."""

import pytest

from weft.verify.judge import Numerics, threshold

# Of one step, measured: the largest honest distance, and the least of a learning rate one hundredth lower.
HONEST: dict[Numerics, float] = {"fp32": 2.1e-6, "bf16": 1.0e-3}
LEAST_CHEAT = 1.0e-2


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
def test_a_threshold_lies_between_honest_and_cheating_steps_with_a_margin(numerics: Numerics) -> None:
    assert 2.5 * HONEST[numerics] < threshold(numerics, 1) < LEAST_CHEAT / 2.5


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
def test_of_more_steps_it_grows_and_more_slowly_than_they_do(numerics: Numerics) -> None:
    assert threshold(numerics, 1) < threshold(numerics, 4) < 4 * threshold(numerics, 1)
