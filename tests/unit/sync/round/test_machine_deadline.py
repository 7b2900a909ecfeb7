"""How long is waited, from how long it took."""

from weft.sync.round.machine import FIRST_S, FLOOR_S, MIN_MEASURED, deadline_s


def test_before_anything_is_measured_the_wait_is_long() -> None:
    assert deadline_s([1.0] * (MIN_MEASURED - 1)) == FIRST_S


def test_it_is_the_median_and_three_deviations() -> None:
    assert deadline_s([10.0, 12.0, 14.0]) == 12.0 + 3 * 2.0
    assert deadline_s([10.0, 10.0, 10.0, 100.0]) == 10.0


def test_a_multiple_of_the_median_is_the_least_where_one_is_asked_for() -> None:
    assert deadline_s([10.0] * 5, 1.5) == 15.0
    assert deadline_s([10.0, 12.0, 14.0], 1.1) == 18.0


def test_it_is_never_short() -> None:
    assert deadline_s([0.1] * 5) == deadline_s([0.1] * 5, 1.5) == FLOOR_S
