"""How far honest machines may lie apart: above what they were measured at, below what any cheat was."""

import pytest

from weft.peer.audit.steps import widened_by
from weft.verify.judge import Numerics, threshold, threshold_of_moments

# Of one step, measured: the largest honest distance, and the least of a cheat: in bf16 of one at the samples, for a
# learning rate one hundredth lower is not seen there.
HONEST: dict[Numerics, float] = {"fp32": 2.1e-6, "bf16": 8.1e-3}
LEAST_CHEAT: dict[Numerics, float] = {"fp32": 1.6e-3, "bf16": 9.4e-2}


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
def test_a_threshold_lies_between_honest_and_cheating_steps_with_a_margin(numerics: Numerics) -> None:
    assert 2.5 * HONEST[numerics] < threshold(numerics, 1) < LEAST_CHEAT[numerics] / 2.5


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
def test_of_more_steps_it_grows_and_more_slowly_than_they_do(numerics: Numerics) -> None:
    assert threshold(numerics, 1) < threshold(numerics, 4) < 4 * threshold(numerics, 1)


FIRST = 6.3e-2  # of bf16, measured


def test_the_first_step_of_an_optimizer_may_lie_farther_apart_in_bf16() -> None:
    assert 2.5 * FIRST < threshold("bf16", 1, is_new=True) < 0.3
    assert threshold("bf16", 1) < threshold("bf16", 100, is_new=True) < 1.1 * threshold("bf16", 100)
    for num_steps in (1, 100):
        assert threshold("fp32", num_steps, is_new=True) == threshold("fp32", num_steps)
        assert threshold("exact", num_steps, is_new=True) < 0.0


def test_of_exact_numbers_no_distance_is_held_for_honest() -> None:
    """Not even that of 0 and -0: states that are not equal to the bit have been computed otherwise."""
    for num_steps in (1, 100):
        assert threshold("exact", num_steps) < 0.0
        assert threshold_of_moments("exact", num_steps) < 0.0


def test_where_rounding_leads_farther_three_times_the_farthest_of_all_draws_is_held() -> None:
    """What turned signs come to differs as much from draw to draw: once a lease lay 3.6e-4 apart, and the first draw
    1.3e-4 (docs/adr/0112)."""
    draws = [{"local": 1.3e-4, "moment2": 1.5e-5}, {"local": 3.5e-4}, {"local": 5.3e-4, "moment2": 1.0e-5}]
    held = widened_by({"local": threshold("fp32", 2), "moment2": threshold_of_moments("fp32", 2)}, 2, draws)
    assert held["local"] == pytest.approx(3 * 5.3e-4)
    assert held["moment2"] == threshold_of_moments("fp32", 2)
    assert widened_by({"local": 1.5e-4}, 1, []) == {"local": 1.5e-4}
    assert widened_by({"local": 1.5e-4}, 4, [{"local": 1.0}]) == {"local": 5e-2}, "never farther than in bf16"
