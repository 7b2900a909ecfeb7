"""The band of the others, and progress, on values whose answer is known."""

import numpy as np
import pytest

from weft.ids import PeerId
from weft.peer.loop.outliers import BEGUN, DUE, FIRST_ROUNDS, IN_A_ROW, STRETCH, WINDOW, Band, Progress, Strayed, usual

A, B, C, D = (PeerId(name) for name in "abcd")


def shown(band: Band, rounds: list[dict[PeerId, float]]) -> list[Strayed]:
    return [change for values in rounds for change in band.take(values)]


def like_the_others(num: int, seed: int = 0, scatter: float = 0.05) -> list[dict[PeerId, float]]:
    """Return losses of four members that fall together, and scatter."""
    rng = np.random.default_rng(seed)
    return [
        {peer: 5 * 0.97**number + scatter * float(rng.standard_normal()) for peer in (A, B, C, D)}
        for number in range(num)
    ]


def but(rounds: list[dict[PeerId, float]], peer: PeerId, by: float) -> list[dict[PeerId, float]]:
    return [values | {peer: values[peer] + by} for values in rounds]


@pytest.mark.parametrize("scatter", [0.0, 0.05, 0.5])
def test_nobody_is_named_where_all_are_alike(scatter: float) -> None:
    for seed in range(10):
        assert not shown(Band(share=0.1), like_the_others(60, seed, scatter))


@pytest.mark.parametrize("by", [3.0, -3.0])
def test_who_leaves_the_band_is_named_once_and_once_when_it_is_back(by: float) -> None:
    rounds, band = like_the_others(60), Band(share=0.1)
    assert not shown(band, rounds[:20])
    (left,) = shown(band, but(rounds[20:40], C, by))
    assert (left.peer, left.is_back) == (C, False)
    assert abs(left.value - left.usual) > 2
    (back,) = shown(band, rounds[40:])
    assert (back.peer, back.is_back) == (C, True)


def test_fewer_than_three_in_a_row_say_nothing() -> None:
    rounds, band = like_the_others(40), Band(share=0.1)
    for number in range(0, 40, IN_A_ROW):
        odd = but(rounds[number : number + IN_A_ROW - 1], B, 3.0)
        assert not shown(band, [*odd, *rounds[number + IN_A_ROW - 1 : number + IN_A_ROW]])


def test_who_has_shown_little_is_judged_by_nothing_and_nobody_by_it() -> None:
    rounds = like_the_others(WINDOW)
    assert not shown(Band(), but(rounds, D, 9.0)[: WINDOW - 1])
    two = [{A: 1.0, B: 9.0} for _ in range(50)]
    assert not shown(Band(), two)  # each is the only other


def test_half_of_the_others_cannot_move_the_band_onto_an_honest_member() -> None:
    rounds = but(like_the_others(40), C, 4.0)
    assert {change.peer for change in shown(Band(share=0.1), rounds)} == {C}


def test_a_band_is_no_narrower_than_asked() -> None:
    rounds = [{A: 1.0, B: 1.0, C: 1.0, D: 1.4} for _ in range(20)]
    assert not shown(Band(width=0.41), rounds)
    assert not shown(Band(width=0.2, share=0.21), rounds)
    assert shown(Band(width=0.2, share=0.19), rounds)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_band_is_wider_by_the_slack_of_a_member_on_one_side(side: float) -> None:
    rounds = [{A: 1.0, B: 1.0, C: 1.0, D: 1.0 + 0.4 * side} for _ in range(20)]
    for slack, is_named in ((0.3 * side, True), (0.5 * side, False), (-0.5 * side, True)):
        band = Band()
        assert bool([change for values in rounds for change in band.take(values, {D: slack})]) == is_named


def test_who_left_is_forgotten() -> None:
    band = Band(share=0.1)
    (left,) = shown(band, but(like_the_others(20), C, 3.0))
    band.keep((A, B, D))
    assert not shown(band, like_the_others(20))  # as another: it is nothing that is back
    assert left.peer == C


def progress(losses: list[float], begins: int = 0, whole: int = 100) -> list[int]:
    """Return after which rounds it was said that there is no progress, in a run of so many."""
    one, said = Progress(), list[int]()
    for round, loss in enumerate(losses, begins + 1):
        if one.take(round, round / whole, loss) is not None:
            said.append(round)
    return said


def test_a_loss_that_falls_is_progress_however_slowly() -> None:
    assert not progress([5.0 - 0.01 * number for number in range(100)])


def test_no_progress_is_said_once_as_soon_as_it_can_be_told() -> None:
    assert progress([5.0] * 100) == [max(2 * STRETCH, round(100 * DUE))]
    assert len(progress([3.0] * STRETCH + [4.0 + number for number in range(80)])) == 1


def test_it_is_said_again_after_there_was_some() -> None:
    losses = [5.0] * 20 + [4.0] * 20 + [6.0] * 20
    assert len(progress(losses)) == 2


def test_who_did_not_see_the_run_begin_says_nothing() -> None:
    assert not progress([5.0] * 60, begins=round(100 * BEGUN))
    assert not progress([5.0] * 6, begins=FIRST_ROUNDS, whole=8)


@pytest.mark.parametrize("num", [5, 8, 12, 15, 16, 19, 24, 30])
def test_a_run_of_few_rounds_is_judged_too(num: int) -> None:
    """The last round is not heard of: the run is over."""
    for losses in ([5.0] * num, [5.0 + 0.1 * number for number in range(num)]):
        (said,) = progress(losses[:-1], whole=num)
        assert said <= max(4, num / 2)


@pytest.mark.parametrize("num", [5, 8, 12, 15, 16, 19, 24, 30])
def test_a_run_of_few_rounds_that_learns_is_left_alone_though_losses_scatter(num: int) -> None:
    for seed in range(200):
        luck = np.random.default_rng(seed)
        losses = [5.5 - 2 * number / num + 0.1 * float(luck.standard_normal()) for number in range(num)]
        assert not progress(losses[:-1], whole=num), (seed, losses)


def test_the_usual_loss_is_that_of_three_or_of_all_where_these_are_fewer() -> None:
    assert usual([], 1) is None
    assert [usual([1.0], num) for num in (1, 2, 4)] == [1.0, None, None]
    assert [usual([1.0, 2.0], num) for num in (2, 4)] == [1.5, None]
    assert usual([1.0, 2.0, 5.0], 4) == 2.0
