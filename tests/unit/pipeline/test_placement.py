"""Who holds which stage: newcomers go where they gain most, moves gain something, nobody flaps or leaves one alone."""

from collections.abc import Sequence

import pytest

from weft.ids import PeerId
from weft.pipeline.placement import GAIN, Move, Stage, moves, stage_for
from weft.rng import stream


def peer(number: int) -> PeerId:
    return PeerId(f"{number:064x}")


def stages(*rates: Sequence[float]) -> list[dict[PeerId, float]]:
    """Return stages of peers with these rates; peers are numbered on."""
    found, number = [], 0
    for each in rates:
        found.append({peer(number + n): rate for n, rate in enumerate(each)})
        number += len(each)
    return found


def after(before: Sequence[Stage], made: Sequence[Move]) -> list[dict[PeerId, float]]:
    left = [dict(stage) for stage in before]
    for move in made:
        left[move.target][move.peer] = left[move.source].pop(move.peer)
    return left


def totals(found: Sequence[Stage]) -> list[float]:
    return [sum(stage.values()) for stage in found]


def test_a_newcomer_goes_to_the_weakest_stage_and_several_spread() -> None:
    assert stage_for(peer(99), stages([1, 1], [1], [4])) == 1
    assert stage_for(peer(99), stages([1], [], [1])) == 1
    assert {stage_for(peer(number), stages([1], [1], [1], [2])) for number in range(60)} == {0, 1, 2}


def test_the_weakest_stage_gets_the_peer_with_whom_both_are_strongest() -> None:
    before = stages([1.0, 2.0, 4.0], [2.0], [3.0, 3.0])
    assert moves(before)[0] == Move(peer(1), 0, 1)  # 5 and 4; with the 4 it would be 3 and 6


def test_as_many_move_as_gain_and_no_more() -> None:
    before = stages([1] * 9, [1], [1], [1] * 5)
    made = moves(before)
    assert sorted(totals(after(before, made))) == [4, 4, 4, 4]
    assert len(made) == 6
    assert moves(after(before, made)) == ()


@pytest.mark.parametrize("rates", [([1, 1, 1], [1, 1]), ([1], [1]), ([5], [1]), ([2, 2], [2, 2], [2, 2, 2])])
def test_what_gains_nothing_is_left(rates: tuple[list[float], ...]) -> None:
    assert moves(stages(*rates)) == ()


def test_a_gain_below_what_a_state_costs_is_left() -> None:
    least = 0.5 * GAIN
    assert moves(stages([1.0, least], [1.0])) == ()
    assert len(moves(stages([1.0, 4 * GAIN], [1.0]))) == 0  # the other would be weaker than before by nothing
    assert moves(stages([2.0, 4 * GAIN], [1.0])) == (Move(peer(1), 0, 1),)


def test_nobody_leaves_a_stage_alone_and_one_without_peers_gets_the_first() -> None:
    assert moves(stages([9.0], [1.0])) == ()
    made = moves(stages([9.0, 1.0], [], [8.0]))
    assert made == (Move(peer(1), 0, 1),)


def test_who_has_just_moved_stays() -> None:
    before = stages([1] * 4, [1])
    (first,) = moves(before)
    assert first.source == 0
    (second,) = moves(before, staying={first.peer})
    assert second.peer != first.peer
    assert moves(before, staying=set(before[0])) == ()


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_there_moves_never_weaken_the_weakest_and_end(seed: int) -> None:
    luck = stream(seed, "test")
    before = stages(*([float(luck.integers(1, 9)) for _ in range(luck.integers(1, 8))] for _ in range(6)))
    made = moves(before)
    left = after(before, made)
    assert min(totals(left)) >= min(totals(before))
    assert len({move.peer for move in made}) == len(made)
    assert all(stage for stage in left)
    assert moves(before) == made  # all come to the same


def test_where_sections_are_unequal_work_peers_settle_and_nobody_goes_to_and_fro() -> None:
    costs, left, num_moves = [0.5, 0.5, 2.0], stages([1] * 2, [1] * 2, [1] * 2), 0
    while made := moves(left, costs=costs):
        left, num_moves = after(left, made), num_moves + len(made)
    assert [len(stage) for stage in left] == [1, 1, 4]
    assert num_moves == 2
    assert stage_for(peer(99), left, costs) in (0, 1, 2)
    assert stage_for(peer(99), stages([1], [1], [1] * 3), costs) == 2  # three make less of it than one of the others
