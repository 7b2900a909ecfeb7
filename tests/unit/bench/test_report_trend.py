"""How far a row is behind the yardstick, by length."""

import math

import pytest

from weft.bench.report import Trend, fit, gap_of


def test_a_gap_is_between_equal_seeds() -> None:
    gap = gap_of({0: 1.1, 1: 2.4, 2: 9.0}, {0: 1.0, 1: 2.0})
    assert gap is not None
    assert gap.mean == pytest.approx(0.15)
    assert gap.deviation == pytest.approx(0.1 / math.sqrt(2))
    assert gap_of({0: 1.0}, {1: 1.0}) is None
    alone = gap_of({0: 1.2}, {0: 1.0})
    assert alone is not None
    assert alone.deviation is None


def test_a_fit_finds_the_power_that_it_came_from() -> None:
    trend = fit({steps: 3.0 * steps**-0.5 for steps in (500, 1000, 2000)})
    assert trend is not None
    assert (trend.scale, trend.exponent) == (pytest.approx(3.0), pytest.approx(0.5))
    assert trend.steps_to(0.01) == pytest.approx(90_000)


def test_what_does_not_close_never_arrives() -> None:
    trend = fit({500: 0.1, 1000: 0.2})
    assert trend is not None
    assert trend.steps_to(0.01) == math.inf
    assert Trend(1.0, 1e-6).steps_to(0.01) == math.inf


@pytest.mark.parametrize("gaps", [{500: 0.1}, {500: 0.1, 1000: -0.01}, {500: 0.1, 1000: 0.0}])
def test_nothing_is_fitted_to_what_is_not_behind(gaps: dict[int, float]) -> None:
    assert fit(gaps) is None
