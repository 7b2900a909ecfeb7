"""How far a peer may train on ahead of its leases."""

import pytest

from weft.peer.loop.contribution import MOST_ROUNDS, num_more


@pytest.mark.parametrize(
    ("num_ahead", "is_lost", "has_offered", "sends_gradient", "expected"),
    [
        (0, True, True, False, 80),
        (79, True, True, False, 1),
        (80, True, True, False, 0),
        (100, True, True, False, 0),  # H was amended meanwhile
        (0, False, True, False, 0),
        (0, True, False, False, 0),
        (0, True, True, True, 0),
    ],
)
def test_who_waits_without_a_majority_trains_on_for_four_rounds_steps_in_all(
    num_ahead: int, is_lost: bool, has_offered: bool, sends_gradient: bool, expected: int
) -> None:
    assert MOST_ROUNDS == 4
    found = num_more(20, num_ahead, is_lost=is_lost, has_offered=has_offered, sends_gradient=sends_gradient)
    assert found == expected
