"""Who of a stage computes with whom."""

import pytest

from weft.ids import PeerId
from weft.stages.table import leaders, team_of, teams

A, B, C, D, E = (PeerId(letter * 64) for letter in "abcde")


def test_all_find_the_same_teams_in_whatever_order_they_know_members() -> None:
    assert teams([D, A, C, E, B], 2) == teams([A, B, C, D, E], 2) == [(A, B), (C, D), (E,)]
    assert leaders([D, A, C, E, B], 2) == {A, C, E}


@pytest.mark.parametrize(("peer", "team"), [(A, (A, B, C)), (C, (A, B, C)), (D, (D,)), (E, (E,))])
def test_a_member_left_over_computes_alone(peer: PeerId, team: tuple[PeerId, ...]) -> None:
    assert team_of(peer, [A, B, C, D], 3) == team


def test_too_few_for_a_team_all_compute_alone() -> None:
    assert teams([A, B], 3) == [(A,), (B,)]
    assert leaders([A, B], 3) == {A, B}
