"""Whether a newcomer can catch up, and how far it is behind."""

import math

import pytest

from weft.peer.join.backpressure import RECENT_S, TELL_AFTER_S, CatchUp, Lag

RESULT_NBYTES = 1_000_000


def watched(round_s: float, nbytes_per_s: int, until: float = 60.0) -> CatchUp:
    pace = CatchUp(RESULT_NBYTES)
    for now in range(int(until) + 1):
        pace.look(float(now), int(now / round_s), nbytes_per_s * now, is_fetching=True)
    return pace


@pytest.mark.parametrize(("nbytes_per_s", "is_slower"), [(50_000, True), (199_000, True), (201_000, False)])
def test_a_line_is_slower_than_the_run_where_less_comes_than_is_added(nbytes_per_s: int, is_slower: bool) -> None:
    figures = watched(5.0, nbytes_per_s).too_slow()
    assert (figures is not None) == is_slower
    if figures is not None:
        assert figures.received_bps == pytest.approx(8 * nbytes_per_s)
        assert figures.added_bps == pytest.approx(8 * RESULT_NBYTES / 5.0)


@pytest.mark.parametrize(("round_s", "until"), [(1.0, TELL_AFTER_S - 1), (15.0, 44.0)])
def test_nothing_is_said_of_a_moment_nor_of_two_rounds(round_s: float, until: float) -> None:
    assert watched(round_s, 0, until).too_slow() is None
    assert watched(round_s, 0, until + 1).too_slow() is not None


def test_time_in_which_nothing_was_fetched_says_nothing_of_the_line() -> None:
    pace = watched(5.0, 300_000)
    for now in range(61, 600):
        pace.look(float(now), now // 5, 18_000_000, is_fetching=False)
    assert pace.too_slow() is None


def test_how_long_the_rest_takes_is_by_what_came_lately() -> None:
    pace = watched(5.0, 100_000)
    assert pace.needs_s(1_000_000) == pytest.approx(10.0)
    for now in range(61, 61 + int(RECENT_S)):
        pace.look(float(now), 20, 6_000_000 + (now - 60) * 800_000, is_fetching=True)
    assert pace.needs_s(1_000_000) == pytest.approx(1.25)
    assert pace.needs_s(0) == 0.0


def test_where_nothing_comes_it_takes_for_ever() -> None:
    assert watched(5.0, 0).needs_s(1) == math.inf


def test_lag_is_how_long_the_oldest_lacking_round_is_known() -> None:
    lag = Lag()
    for now in range(10):
        lag.note(3, 3, float(now))
    assert lag.lasts_s(3, 9.0) == 0.0
    lag.note(3, 4, 10.0)
    lag.note(3, 6, 12.0)
    assert lag.lasts_s(3, 15.0) == 5.0
    assert lag.lasts_s(4, 15.0) == 3.0
    lag.note(5, 6, 16.0)
    assert lag.lasts_s(5, 16.0) == 4.0
    assert lag.lasts_s(6, 16.0) == 0.0


def test_who_keeps_up_with_fast_rounds_is_never_far_behind() -> None:
    """Ten rounds a second, each of which it makes half a second later."""
    lag, longest_s = Lag(), 0.0
    for tick in range(200):
        now = tick / 2
        lag.note(int(10 * (now - 0.5)), int(10 * now), now)
        longest_s = max(longest_s, lag.lasts_s(int(10 * (now - 0.5)), now))
    assert longest_s <= 1.0


def test_who_falls_behind_is_further_behind_the_longer_it_lasts() -> None:
    """A round each five seconds, of which it makes two in three."""
    lag = Lag()
    for now in range(300):
        lag.note(now * 2 // 15, now // 5, float(now))
    assert lag.lasts_s(299 * 2 // 15, 299.0) > 90.0


def test_what_nobody_tells_of_any_more_is_not_lacked() -> None:
    lag = Lag()
    lag.note(3, 1_000_000, 0.0)
    assert lag.lasts_s(3, 60.0) == 60.0
    lag.note(3, 3, 60.0)
    assert lag.lasts_s(3, 61.0) == 0.0
