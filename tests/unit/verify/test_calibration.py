"""A machine that rounds unlike most others knows that it is the odd one; that one of several does is not its own."""

import pytest

from weft.ids import PeerId
from weft.verify.calibration import Apart, Calibration

A, B, C = (PeerId(each * 64) for each in "abc")
HELD = 1.5e-4


def measured(**shares: float) -> Calibration:
    calibration = Calibration()
    for name, share in shares.items():
        calibration.note(PeerId(name * 64), Apart(share * HELD, HELD))
    return calibration


def test_where_all_is_near_there_is_nothing_to_say() -> None:
    assert Calibration().unlike is None
    assert measured(a=0.0, b=0.1).unlike is None


@pytest.mark.parametrize(
    ("shares", "num_unlike", "is_this", "is_beyond"),
    [
        ({"a": 0.2}, 1, False, False),
        ({"a": 0.2, "b": 0.01}, 1, False, False),
        ({"a": 0.2, "b": 0.3}, 2, True, False),
        ({"a": 0.2, "b": 3.0, "c": 0.0}, 2, True, True),
        ({"a": 300.0, "b": 0.0, "c": 0.0}, 1, False, True),
    ],
)
def test_of_two_or_more_it_is_this_machine_that_most_are_unlike(
    shares: dict[str, float], num_unlike: int, is_this: bool, is_beyond: bool
) -> None:
    found = measured(**shares).unlike
    assert found is not None
    assert (found.num_members, found.num_unlike) == (len(shares), num_unlike)
    assert (found.is_this, found.is_beyond) == (is_this, is_beyond)
    assert found.farthest.share == pytest.approx(max(shares.values()))


def test_of_each_member_the_farthest_counts_until_it_has_left() -> None:
    calibration = measured(a=0.5, b=0.2)
    calibration.note(A, Apart(0.0, HELD))
    assert calibration.unlike is not None
    assert calibration.unlike.farthest.share == 0.5
    calibration.decided([B, C])
    assert calibration.unlike is not None
    assert (calibration.unlike.farthest.share, calibration.unlike.num_members) == (0.2, 1)


def test_apart_from_all_is_who_came_near_to_nothing_of_two_members() -> None:
    assert not measured(a=3.0).is_apart_from_all
    both = measured(a=3.0, b=1.5)
    assert both.is_apart_from_all
    both.note(B, Apart(0.9 * HELD, HELD))
    assert not both.is_apart_from_all
