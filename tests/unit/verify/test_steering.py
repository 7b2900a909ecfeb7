"""Steering within what is held for honest shows in signs, and rounding does not."""

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.verify.steering import FALSE_ALARM, LASTS, SHARE, Steering, chance, is_one_sided

A, B = (PeerId(each * 64) for each in "ab")
HELD = 1.5e-4
FEWEST = 21  # of one side, before anything is said


@pytest.mark.parametrize("num", range(1, LASTS + 1))
def test_fair_signs_raise_a_false_alarm_once_in_a_million_at_most(num: int) -> None:
    """Counted over all that so many signs can be, exactly."""
    alarms = sum(comb(num, longer) for longer in range(num + 1) if chance(longer, num - longer) <= FALSE_ALARM)
    assert alarms <= FALSE_ALARM * 2**num


@given(st.integers(0, LASTS), st.integers(0, LASTS))
def test_a_chance_is_one_whichever_side_it_is_and_falls_as_they_grow_apart(longer: int, shorter: int) -> None:
    assert 0.0 < chance(longer, shorter) <= 1.0
    assert chance(longer, shorter) == chance(shorter, longer)
    if longer >= shorter:
        assert chance(longer + 1, shorter) <= chance(longer, shorter)


def test_chances_are_those_of_a_fair_coin() -> None:
    assert [chance(0, 0), chance(1, 0), chance(2, 0), chance(2, 1)] == [1.0, 1.0, 0.5, 1.0]
    assert chance(6, 1) == 2 * (7 + 1) / 128


def told(leans: list[float]) -> list[tuple[int, bool]]:
    """Return after how many steps something is said, and whether the peer is back."""
    steering, found = Steering(), list[tuple[int, bool]]()
    for number, lean in enumerate(leans, 1):
        if (steered := steering.note(A, lean, HELD)) is not None:
            found.append((number, steered.is_back))
    return found


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_who_scales_each_step_within_the_threshold_is_found_after_some_audits(side: float) -> None:
    assert told([side * 5e-5] * 64) == [(FEWEST, False)]
    every_third = [side * 5e-5 if number % 3 == 0 else 0.0 for number in range(80)]
    assert told(every_third) == [(3 * FEWEST - 2, False)], "the last 64 have enough of them"
    assert told([side * 5e-5 if number % 4 == 0 else 0.0 for number in range(400)]) == [], "and so few have not"


@given(st.lists(st.floats(-SHARE * HELD * 0.999, SHARE * HELD * 0.999), min_size=100, max_size=200))
def test_what_lies_nearer_than_machines_may_differ_has_no_side(leans: list[float]) -> None:
    """Two machines may well round to one side each time, by next to nothing."""
    assert told(leans) == []
    assert told([SHARE * HELD * 0.99] * 100) == []


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_steps_on_both_sides_are_none(sides: list[bool]) -> None:
    leans = [HELD / 2 if side else -HELD / 2 for side in sides for side in (side, not side)]
    assert told(leans) == []
    assert not is_one_sided(leans)


def test_who_stops_is_back_once_its_last_steps_no_longer_show_it() -> None:
    found = told([HELD / 3] * 30 + [0.0] * 64)
    assert found[0] == (FEWEST, False)
    assert found[1][1]
    assert len(found) == 2


def test_each_peer_is_tested_alone_and_who_comes_again_anew() -> None:
    steering = Steering()
    for _ in range(FEWEST - 1):
        assert steering.note(A, HELD / 3, HELD) is None
        assert steering.note(B, HELD / 3, HELD) is None
    steering.decided([A])
    assert steering.note(B, HELD / 3, HELD) is None
    steered = steering.note(A, HELD / 3, HELD)
    assert steered is not None
    assert (steered.num, steered.mean, steered.is_back) == (FEWEST, pytest.approx(HELD / 3), False)
