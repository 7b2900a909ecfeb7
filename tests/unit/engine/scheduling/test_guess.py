"""What is guessed is what stood there before, as many tokens as pay."""

import pytest

from weft.engine.scheduling.guess import GRAM, MAX_GUESSED, TRY_EVERY, Guesses, num_worth
from weft.engine.scheduling.pace import Pace


def test_what_followed_the_same_tokens_last_is_guessed() -> None:
    guesses, tokens = Guesses(), [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert guesses.guess(tokens, 2, 0.0) == [4, 5]
    tokens += [7, 7, 1, 2, 3]
    assert guesses.guess(tokens, 3, 0.0) == [7, 7, 1], "the last place counts"
    assert guesses.guess([*tokens, 8], 3, 0.0) == [], "these tokens never stood there before"
    assert Guesses().guess([1] * (GRAM - 1), 3, 0.0) == []


def test_what_repeats_itself_is_guessed_to_go_on_so() -> None:
    assert Guesses().guess([5, 6] * 4, 7, 0.0) == [5, 6, 5, 6, 5, 6, 5]
    assert Guesses().guess([5] * 9, 100, 0.0) == [5] * MAX_GUESSED


@pytest.mark.parametrize(
    ("rate", "row_share", "num"), [(0.0, 0.0, 0), (1.0, 0.9, MAX_GUESSED), (0.5, 0.0, MAX_GUESSED), (0.5, 0.6, 0)]
)
def test_so_many_are_guessed_as_pay(rate: float, row_share: float, num: int) -> None:
    assert num_worth(rate, row_share) == num


def test_the_number_of_guesses_is_the_best() -> None:
    for rate in (0.2, 0.5, 0.7, 0.9, 0.97):
        for row_share in (0.02, 0.15, 0.4, 0.8):
            speeds = [(1 - rate ** (num + 1)) / (1 - rate) / (1 + num * row_share) for num in range(MAX_GUESSED + 1)]
            assert num_worth(rate, row_share) == speeds.index(max(speeds))


def test_where_guesses_are_wrong_they_end_and_are_tried_again_from_time_to_time() -> None:
    guesses, tokens, nums = Guesses(), [1, 2, 3, 4, 1, 2, 3], []
    for _ in range(40 + 3 * TRY_EVERY):
        guessed = guesses.guess(tokens, MAX_GUESSED, 0.15)
        guesses.note(len(guessed), 0)
        nums.append(len(guessed))
    assert nums[0] > 1
    assert sum(nums[40:]) == 3
    while guesses.rate < 0.9:
        guesses.note(2, 2)
    assert len(guesses.guess(tokens, MAX_GUESSED, 0.15)) > 2


def test_a_row_costs_more_of_a_token_the_more_are_drawn() -> None:
    pace = Pace()
    assert pace.row_share(1) == 0
    for num in range(1, 9):
        pace.note(num, 0, 0.020 + 0.004 * num)
    assert pace.row_share(1) == pytest.approx(4 / 24)
    assert pace.row_share(8) == pytest.approx(32 / 52)
