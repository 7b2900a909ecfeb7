"""What a member makes of what it is told, and what whoever asks makes of the answers."""

import pytest

from weft.engine.scheduling.pages import PAGE
from weft.texts import sequence as rules
from weft.texts.asking.text import plan
from weft.texts.chain import chain_of, key_of, places
from weft.texts.log import Log, Strip
from weft.texts.sequence import Held, Marks, Rows, Sequence

KEY = key_of(b"", 0)
TOKENS = list(range(200))
CHAIN = chain_of(KEY, TOKENS)


def marks(num: int) -> Marks:
    at = places(num)
    return Marks(at, tuple(CHAIN[place] for place in at))


def rows(start: int, stop: int, attempt: int = 0) -> Rows:
    return Rows(attempt, start, CHAIN[start : stop + 1])


def reading(num: int = 10, send_from: int = 0) -> Sequence:
    """Return a sequence that has taken so many tokens and computed all."""
    sequence, _ = rules.opened(rules.begun(marks(num), 0), 0, marks(num), 0.0)
    sequence = rules.resumed(sequence, 0, 0, send_from, 0.0).sequence
    sequence = rules.taken(sequence, rows(0, num), 0.0).sequence
    return rules.computed(sequence, 0, CHAIN[1 : num + 1]).sequence


def test_places_have_all_pages_ends_and_the_last_ones_near_the_end() -> None:
    assert places(0) == (0,)
    assert places(3) == (0, 1, 2, 3)
    assert places(130) == (0, 64, 98, 114, 122, 126, 128, 129, 130)


def test_rows_attach_where_the_chain_is_the_same_and_nowhere_else() -> None:
    sequence = reading(10)
    assert rules.taken(sequence, rows(10, 12), 0.0).taken == (rows(10, 12),)
    for wrong in (rows(11, 12), Rows(0, 10, (CHAIN[9], CHAIN[11])), rows(10, 12, attempt=-1), rows(10, 12, attempt=1)):
        assert rules.taken(sequence, wrong, 0.0) == rules.Moved(sequence)


def test_rows_that_are_here_are_not_taken_again_and_others_in_their_place_are() -> None:
    sequence = reading(10)
    assert not rules.taken(sequence, rows(4, 8), 0.0).taken
    others = Rows(0, 4, chain_of(KEY, [7, 7], CHAIN[4]))
    moved = rules.taken(sequence, others, 0.0)
    assert moved.taken == (others,)
    assert (moved.sequence.num_taken, moved.sequence.num_computed, moved.sequence.log_from) == (6, 4, 0)


def test_nothing_moves_between_an_answer_and_the_order_to_go_on() -> None:
    sequence, held = rules.opened(reading(10), 1, marks(12), 0.0)
    assert held == Held(10, 0)
    late = rules.taken(sequence, rows(10, 12, attempt=0), 0.0)
    assert late == rules.Moved(sequence)
    early = rules.taken(sequence, rows(10, 12, attempt=1), 0.0).sequence
    assert early.num_taken == 10
    moved = rules.resumed(early, 1, 10, 7, 0.0)
    assert moved.sent == (7, 10)
    assert moved.taken == (rows(10, 12, attempt=1),)


def test_what_is_computed_is_sent_on_from_where_it_is_wanted() -> None:
    sequence = rules.taken(reading(10, send_from=9), rows(10, 14), 0.0).sequence
    assert rules.computed(sequence, 10, CHAIN[11:15]).sent == (10, 14)
    sequence, _ = rules.opened(sequence, 1, marks(12), 0.0)
    assert rules.computed(sequence, 10, CHAIN[11:15]).sent is None
    moved = rules.resumed(sequence, 1, 12, 11, 0.0)
    assert (moved.sequence.num_taken, moved.sent) == (12, None)
    assert rules.computed(moved.sequence, 10, CHAIN[11:15]).sent == (11, 12)


def test_what_was_cut_off_while_it_was_computed_counts_for_nothing() -> None:
    sequence = rules.taken(reading(10), rows(10, 14), 0.0).sequence
    others = Rows(0, 12, chain_of(KEY, [7, 7], CHAIN[12]))
    sequence = rules.taken(sequence, others, 0.0).sequence
    moved = rules.computed(sequence, 10, CHAIN[11:15])
    assert (moved.sequence.num_computed, moved.sent) == (12, (10, 12))


def test_members_find_out_how_far_they_agree() -> None:
    other = chain_of(KEY, [*TOKENS[:100], 7, 7, 7])
    assert rules.num_agreed(other, marks(103)) == 99
    assert rules.num_agreed(CHAIN[:51], marks(103)) == 0
    assert rules.num_agreed(CHAIN, marks(103)) == 103
    assert rules.num_agreed(chain_of(key_of(b"", 1), TOKENS), marks(103)) == 0


def test_what_came_with_an_older_attempt_is_dropped() -> None:
    sequence, _ = rules.opened(reading(10), 3, marks(10), 0.0)
    assert rules.opened(sequence, 2, marks(10), 0.0) == (sequence, None)
    assert rules.resumed(sequence, 2, 5, 0, 0.0) == rules.Moved(sequence)
    assert rules.closed(sequence, 2) is sequence
    assert rules.closed(sequence, 3) is None


def test_who_hears_nothing_forgets() -> None:
    assert not rules.is_idle(reading(), rules.IDLE_S - 1)
    assert rules.is_idle(reading(), rules.IDLE_S)


# --- orders to all stages ---


@pytest.mark.parametrize(
    ("held", "orders", "start"),
    [
        # All are new.
        ([(0, 0), (0, 0), (0, 0)], [(0, 0), (0, 0), (0, 199)], 0),
        # All are there, and the last has drawn: it tells it again.
        ([(200, 0), (200, 0), (200, 0)], [(200, 200), (200, 200), (200, 199)], 200),
        # The second is new: the first sends on all it has from its log.
        ([(200, 0), (0, 0), (200, 0)], [(200, 0), (0, 200), (200, 199)], 200),
        # ... of which it has no longer all: it computes again.
        ([(200, 70), (0, 0), (200, 0)], [(0, 0), (0, 200), (200, 199)], 0),
        # The last lacks some, and the log of the one before does not reach back so far: it begins at a page's end.
        ([(200, 0), (200, 190), (180, 0)], [(200, 128), (128, 180), (180, 199)], 200),
        # Pages of another text: none knows what came out of them.
        ([(128, 128), (64, 64), (128, 128)], [(64, 64), (64, 128), (128, 199)], 64),
    ],
)
def test_each_stage_is_told_what_to_keep_and_from_where_to_send_on(
    held: list[tuple[int, int]], orders: list[tuple[int, int]], start: int
) -> None:
    assert plan([Held(*each) for each in held], 199) == (orders, start)


# --- bytes by place ---


def of(start: int, stop: int) -> bytes:
    return b"".join(bytes([place, 255 - place]) for place in range(start, stop))


def test_a_strip_has_what_was_added_at_its_place() -> None:
    strip = Strip(2)
    for start, stop in ((0, 5), (5, 6), (6, 20)):
        strip.add(start, of(start, stop))
    assert strip.part(3, 9) == of(3, 9)
    strip.cut(8)
    assert (strip.part(0, 99), strip.nbytes) == (of(0, 8), 16)
    strip.add(7, of(100, 102))
    assert strip.part(6, 9) == of(6, 7) + of(100, 102)
    strip.forget(6)
    assert (strip.start, strip.stop, strip.part(0, 99)) == (6, 9, of(6, 7) + of(100, 102))
    strip.cut(0)
    assert (strip.start, strip.stop, strip.nbytes) == (0, 0, 0)


def test_of_logs_that_have_no_room_the_one_silent_longest_loses_first() -> None:
    log = Log(2, most_nbytes=20)
    for start in range(4):
        assert log.add(b"old", start, of(start, start + 1)) == []
    assert log.add(b"new", 0, of(0, 7)) == [(b"old", 1)]
    assert log.add(b"new", 7, of(7, 9)) == [(b"old", 3)]
    assert (log.part(b"old", 0, 9), log.part(b"new", 0, 9)) == (of(3, 4), of(0, 9))
    log.drop(b"new")
    assert log.nbytes == 2


def test_a_log_holds_what_was_put_there_last_even_where_it_has_no_room_for_it() -> None:
    log = Log(2, most_nbytes=4)
    assert log.add(b"old", 0, of(0, 1)) == []
    assert log.add(b"new", 0, of(0, 5)) == [(b"old", 1)]
    assert log.part(b"new", 0, 9) == of(0, 5)
    assert log.add(b"new", 5, of(5, 6)) == [(b"new", 5)]
    assert log.part(b"new", 0, 9) == of(5, 6)


def test_pages_are_64_tokens() -> None:
    assert PAGE == 64  # which the orders above are for
