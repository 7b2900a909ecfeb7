"""How long a text waits for its next token."""

from weft.texts.asking.patience import FIRST_S, GAPS, LEAST_S, MOST_S, Patience


def after(*gaps_s: float) -> Patience:
    patience = Patience()
    for gap_s in gaps_s:
        patience.came(gap_s)
    return patience


def test_before_tokens_came_what_members_say_counts() -> None:
    assert after().until_next_s(gap_s=0.1, ring_s=1.5) == GAPS * 1.5
    assert after(0.1).until_next_s(gap_s=0.1, ring_s=1.5) == GAPS * 1.5  # one gap tells little
    assert after().until_next_s(gap_s=0.01, ring_s=0.01) == FIRST_S


def test_a_text_that_draws_waits_a_multiple_of_its_usual_gap() -> None:
    assert after(*[0.5] * 9).until_next_s(gap_s=0.1, ring_s=9.0) == GAPS * 0.5
    assert after(*[0.001] * 9).until_next_s(gap_s=0.001, ring_s=9.0) == LEAST_S


def test_who_says_that_its_share_is_spent_just_now_is_waited_for() -> None:
    assert after(*[0.01] * 9).until_next_s(gap_s=3.0, ring_s=0.01) == GAPS * 3.0


def test_a_first_token_may_take_as_long_as_reading_all_of_the_text() -> None:
    assert after(*[0.01] * 9).until_first_s(first_s=5.0, ring_s=0.01) > 5.0
    assert after(*[0.01] * 9).until_first_s(first_s=0.0, ring_s=0.01) == FIRST_S


def test_nobody_waits_for_ever() -> None:
    assert after().until_next_s(gap_s=1e9, ring_s=1e9) == after().until_first_s(first_s=1e9, ring_s=1.0) == MOST_S
