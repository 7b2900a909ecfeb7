"""Whatever comes and goes, pages add up, everybody is served, and nobody waits for ever."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.scheduling.budget import ALONE_S, FIRST_PIECE, GRAIN, SHARED_S, Budget
from weft.engine.scheduling.guess import Guesses, Worth
from weft.engine.scheduling.pace import ENOUGH, NUM_STEPS, Pace, pairs_of
from weft.engine.scheduling.pages import PAGE, PagePool, names_of
from weft.engine.scheduling.schedule import QUANTUM, Row, Scheduler, Sequence


def scheduler(num_pages: int = 64, max_rows: int = 8, max_running: int = 16) -> Scheduler:
    return Scheduler(PagePool(num_pages), Pace(), max_rows=max_rows, max_running=max_running)


def text(num: int, key: str = "a", seed: int = 0, max_tokens: int = 10_000) -> Sequence:
    return Sequence(key, [seed * 100_000 + at for at in range(num)], max_tokens)


def played(schedule: Scheduler) -> list[Row]:
    """Make one step, and draw. A draft model guesses rightly, but for the last token."""
    rows = [
        replace(row, guessed=(*[7] * (row.num_drafts - 1), 8)) if row.num_drafts else row for row in schedule.plan()
    ]
    schedule.done(rows)
    for row in rows:
        if row.draws:
            num = next((num for num, guessed in enumerate(row.guessed) if guessed != 7), len(row.guessed))
            row.sequence.tokens += [7] * (num + 1)
            schedule.guessed_right(row, num)
            assert len(row.sequence.tokens) - row.sequence.num_read == 1
    for sequence in schedule.to_draft():
        schedule.drafted(sequence, sequence.num_read)
    for sequence in {row.sequence for row in rows}:
        if sequence.drafts is not None and sequence.pages:
            assert len(sequence.names) * PAGE <= sequence.num_drafted <= sequence.num_read
            assert len(sequence.names) == sequence.num_read // PAGE
    schedule.pool.check()
    return rows


def test_a_step_draws_for_all_and_reads_pieces_of_whole_grains() -> None:
    schedule = scheduler()
    short, long = text(10), text(FIRST_PIECE + 90, seed=1)
    schedule.add(short)
    schedule.add(long)
    first = played(schedule)
    assert [(row.sequence, row.start, row.stop, row.draws) for row in first] == [
        (short, 0, 10, True),
        (long, 0, (FIRST_PIECE - 10) // GRAIN * GRAIN, False),
    ]
    second = played(schedule)
    assert [(row.sequence, row.start, row.draws) for row in second] == [(short, 10, True), (long, first[1].stop, True)]


def nums_drawn(sequences: list[Sequence], num_steps: int) -> list[int]:
    """Return how many tokens of each are drawn in so many steps with four rows, once all have read their prompts."""
    schedule = scheduler(max_rows=4)
    for sequence in sequences:
        schedule.add(sequence)
    while any(each.num_left != 1 for each in sequences):
        played(schedule)
    before = [len(each.tokens) for each in sequences]
    for _ in range(num_steps):
        played(schedule)
    return [len(each.tokens) - num for each, num in zip(sequences, before, strict=True)]


def test_where_too_many_draw_keys_do_by_turns_and_each_text_soon() -> None:
    many, few = [text(5, "many", seed) for seed in range(8)], [text(5, key, 100) for key in ("x", "y")]
    assert nums_drawn([*many, *few], 16) == [4] * 8 + [16] * 2


def test_where_more_keys_draw_than_there_are_rows_none_goes_before_others() -> None:
    many, few = [text(5, "many", seed) for seed in range(6)], [text(5, f"key {n}", 100 + n) for n in range(9)]
    num_drawn = nums_drawn([*many, *few], 250)
    assert sum(num_drawn) == 1000
    assert {sum(num_drawn[:6]), *num_drawn[6:]} <= set(range(95, 106))


def test_a_prompt_that_was_read_under_the_same_salt_is_read_once() -> None:
    schedule = scheduler()
    for salt, num_shared in ((b"x", 0), (b"x", 3 * PAGE), (b"y", 0)):
        sequence = Sequence("a", list(range(3 * PAGE + 1)), 10_000, salt)
        schedule.add(sequence)
        while not any(row.sequence is sequence and row.draws for row in played(schedule)):
            pass
        assert sequence.num_shared == num_shared
        schedule.remove(sequence)
        schedule.pool.check()


def test_at_least_one_token_is_read_however_much_is_shared() -> None:
    schedule = scheduler()
    for _ in range(2):
        sequence = text(2 * PAGE)
        schedule.add(sequence)
        rows = played(schedule)
        schedule.remove(sequence)
    assert [(row.start, row.stop) for row in rows] == [(PAGE, 2 * PAGE)]


def test_one_key_with_many_long_prompts_takes_half_of_the_reading() -> None:
    schedule = scheduler(num_pages=512, max_running=64)
    for number in range(12):
        schedule.add(text(12 * PAGE, key="greedy", seed=number))
    for number in range(3):
        schedule.add(text(12 * PAGE, key="modest", seed=50 + number))
    read = {"greedy": 0, "modest": 0}
    while read["modest"] < 3 * 12 * PAGE:
        for row in played(schedule):
            if row.stop - row.start > 1:
                read[row.sequence.key] += row.stop - row.start
    assert abs(read["greedy"] - read["modest"]) <= QUANTUM + FIRST_PIECE


def test_a_question_does_not_wait_behind_a_book_of_the_same_key() -> None:
    schedule, book, question = scheduler(num_pages=512), text(100 * PAGE), text(10, seed=1)
    schedule.add(book)
    played(schedule)
    schedule.add(question)
    assert any(row.sequence is question and row.draws for _ in range(2) for row in played(schedule))
    assert book.num_left > 90 * PAGE


def test_a_book_is_read_though_questions_of_its_key_keep_coming() -> None:
    def num_steps(has_questions: bool) -> int:
        schedule, book = scheduler(num_pages=4096, max_running=4096), text(40 * PAGE, max_tokens=50 * PAGE)
        schedule.add(book)
        for step in range(1000):
            rows = played(schedule)
            if any(row.sequence is book and row.draws for row in rows):
                return step
            for row in rows:
                if row.draws:
                    schedule.remove(row.sequence)
            for number in range(4 if has_questions else 0):
                schedule.add(text(FIRST_PIECE, seed=1 + 4 * step + number))
        raise AssertionError

    assert num_steps(has_questions=True) <= 2 * num_steps(has_questions=False) + 2


def test_a_question_of_a_key_that_comes_new_waits_behind_no_book_of_others() -> None:
    schedule = scheduler(num_pages=4096, max_running=64)
    for number in range(12):
        schedule.add(text(100 * PAGE, key=f"reader {number}", seed=number))
    for _ in range(20):
        played(schedule)
    questions = [text(FIRST_PIECE // 2, key=f"new {number}", seed=20 + number) for number in range(4)]
    for each in questions:
        schedule.add(each)
    first, second = ([row.sequence for row in played(schedule) if row.stop - row.start > 1] for _ in range(2))
    assert (first, second) == (questions[:2], questions[2:])


def test_keys_that_ask_again_and_again_come_new_once() -> None:
    """Their questions fill a step each: if each came first, nothing else would be read."""

    def num_steps(num_askers: int) -> int:
        schedule, book = scheduler(num_pages=4096), text(40 * PAGE, key="reader", max_tokens=50 * PAGE)
        schedule.add(book)
        asks_at = dict.fromkeys(range(num_askers), 0)
        for step in range(1000):
            for asker in [each for each, at in asks_at.items() if at == step]:
                schedule.add(text(FIRST_PIECE, key=f"asker {asker}", seed=1 + 10 * step + asker))
            for row in played(schedule):
                if row.sequence is book and row.draws:
                    return step
                if row.draws:
                    schedule.remove(row.sequence)
                    asks_at[int(row.sequence.key.split()[1])] = step + 2  # it has read the answer
        raise AssertionError

    assert num_steps(4) <= 5 * num_steps(0) + 5


def test_of_prompts_as_long_as_each_other_the_first_is_read_to_its_end_first() -> None:
    schedule, texts = scheduler(num_pages=512), [text(10 * PAGE, seed=seed) for seed in range(3)]
    for each in texts:
        schedule.add(each)
    order = list[Sequence]()
    while len(order) < len(texts):
        order += [row.sequence for row in played(schedule) if row.draws and row.sequence not in order]
    assert order == texts


def test_where_pages_run_out_the_youngest_of_the_greediest_key_gives_its_own_up_and_goes_on_later() -> None:
    schedule = scheduler(num_pages=8)
    old, young, other = text(2 * PAGE, max_tokens=1), text(2 * PAGE, seed=1), text(PAGE, key="b", seed=2)
    for each in (old, young, other):
        schedule.add(each)
    while young.num_left > 1 or not young.pages or not other.pages:
        played(schedule)
    while schedule.num_yielded == 0:
        played(schedule)
    assert not young.pages
    assert old.pages
    assert other.pages
    drawn = len(young.tokens)
    schedule.remove(old)
    while len(young.tokens) == drawn:
        assert played(schedule)
    assert young.pages


def test_a_large_prompt_is_not_passed_by_small_ones_for_ever() -> None:
    schedule = scheduler(num_pages=10)
    running = text(5 * PAGE, seed=1)
    schedule.add(running)
    while running.num_left > 1:
        played(schedule)
    large = text(8 * PAGE, key="b", seed=2)
    schedule.add(large)
    played(schedule)
    small = text(10, key="c", seed=3)
    schedule.add(small)
    played(schedule)
    assert not small.pages
    schedule.remove(running)
    played(schedule)
    assert large.pages
    played(schedule)
    assert small.pages


def test_what_a_step_reads_beside_others_is_bounded_by_their_slow_down() -> None:
    pace = Pace()
    for num in (1, 2, 4):
        pace.note(num, 0, 0.010 + 0.001 * num)
        pace.note(num, 128, 0.010 + 0.001 * num + 128 * 0.0001)
    assert pace.step_s(4, 100) == pytest.approx(0.024)
    assert pace.readable(0, pace.step_s(4, 0)) == pytest.approx(140, abs=1)
    schedule = Scheduler(PagePool(64), pace, max_rows=8, max_running=8)
    drawing = text(4, seed=1)
    schedule.add(drawing)
    played(schedule)
    schedule.add(text(1000))
    (_, piece) = played(schedule)
    assert piece.stop - piece.start == 96  # 110 could be read


def test_a_token_at_a_long_prompts_end_takes_longer_than_one_at_its_beginning() -> None:
    pace = Pace()
    for start in (0, 320, 640, 960):
        for num in (16, 64):
            pace.note(8, num, 0.040 + 0.0005 * num + 1e-6 * pairs_of(start, num), pairs_of(start, num))
        pace.note(8, 0, 0.040)
    assert pairs_of(320, 3) == 320 + 321 + 322
    assert pace.read_s(960, 64) == pytest.approx(0.0005 * 64 + 1e-6 * pairs_of(960, 64))
    for start in (0, 960):
        num = Budget(pace, 8).readable(start)
        assert pace.read_s(start, num) <= 0.040 < pace.read_s(start, num + 1)
    assert Budget(pace, 8).readable(0) > 1.5 * Budget(pace, 8).readable(960) > GRAIN


def test_where_nobody_draws_a_step_lasts_as_long_as_it_may() -> None:
    pace = Pace()
    pace.note(1, 0, 0.020)
    for num in (64, 128):
        pace.note(1, num, 0.020 + num * 0.001)
    for alone_s in (ALONE_S, SHARED_S):
        num = Budget(pace, 0, alone_s=alone_s).readable(0)
        assert pace.step_s(0, num) <= alone_s < pace.step_s(0, num + 2)


def test_what_reading_takes_is_known_however_long_only_draws_were_made() -> None:
    pace = Pace()
    pace.note(1, 64, 0.020 + 0.064)
    for _ in range(200):
        pace.note(1, 0, 0.020)
    assert pace.knows_reading
    assert Budget(pace, 1).readable(0) == pytest.approx(20, abs=1)


@pytest.mark.parametrize("most_drawn", [3, 8, 24])
def test_what_reading_takes_is_known_where_more_draw_than_ever_did_alone(most_drawn: int) -> None:
    """Some read in each step, for minutes: what drawing takes without them is known of few rows."""
    pace = Pace()

    def took_s(num_drawn: int, num_read: int) -> float:
        return 0.040 + 0.004 * max(num_drawn - 2, 0) + 0.001 * num_read  # two rows take as long as one

    for number in range(20):
        pace.note(1 + number % 2, 0, took_s(1 + number % 2, 0))
    for number in range(200):
        num_drawn = 2 + number * (most_drawn - 2) // 200
        num_read = max(GRAIN, pace.readable(0, pace.step_s(num_drawn, 0)) // GRAIN * GRAIN)
        pace.note(num_drawn, num_read, took_s(num_drawn, num_read), pairs_of(0, num_read))
    alone_s = took_s(most_drawn, 0)
    assert pace.step_s(most_drawn, 0) == pytest.approx(alone_s, rel=0.25)
    assert pace.readable(0, alone_s) == pytest.approx(alone_s / 0.001, rel=0.4)


def test_a_little_is_read_in_each_step_however_long_it_takes() -> None:
    pace = Pace()
    pace.note(1, 16, 1.001)
    pace.note(1, 0, 0.001)
    budget = Budget(pace, 1)
    assert budget.readable(0) == GRAIN
    budget.take(0, GRAIN)
    assert not budget.is_left


names = st.sampled_from("ab")
acts = st.lists(
    st.one_of(
        st.tuples(st.just("add"), names, st.integers(1, 4 * PAGE), st.integers(0, 1), st.booleans(), st.booleans()),
        st.tuples(st.just("step")),
        st.tuples(st.just("end"), st.integers(0, 5)),
    ),
    max_size=40,
)


@given(acts)
@settings(max_examples=80, deadline=None)
def test_whatever_comes_pages_add_up_and_all_are_served_in_the_end(acts: list[tuple[object, ...]]) -> None:
    schedule = scheduler(num_pages=9, max_rows=3, max_running=4)
    live: list[Sequence] = []
    for act in acts:
        match act:
            case ("add", str(key), int(num), int(seed), bool(has_guesses), bool(has_drafts)):
                live.append(text(num, key, seed, max_tokens=num + 40))
                live[-1].guesses = Guesses() if has_guesses else None
                live[-1].drafts = Worth() if has_drafts else None
                schedule.add(live[-1])
            case ("end", int(number)) if number < len(live):
                schedule.remove(live.pop(number))
            case _:
                played(schedule)
        schedule.pool.check()
    for _ in range(60 * len(live) + 1):
        rows = played(schedule)
        assert rows or not live
        assert sum(len(row.guessed) for row in rows) <= 3 - 1  # beside the one that it is guessed for
        assert all(len(each.tokens) <= each.max_tokens for each in live)
        for sequence in [each for each in live if len(each.tokens) >= each.max_tokens]:
            schedule.remove(sequence)
            live.remove(sequence)
    assert not live
    schedule.pool.check()
    assert schedule.pool.num_room == 9


def test_names_depend_on_all_that_came_before_and_on_the_salt() -> None:
    tokens = list(range(3 * PAGE))
    known = names_of(tokens, b"s")
    assert len(known) == 3
    assert names_of(tokens, b"s", known[:1]) == known
    assert names_of([9, *tokens[1:]], b"s")[2] != known[2]
    assert not set(names_of(tokens, b"t")) & set(known)


def test_how_long_drawing_takes_is_learnt_anew_after_some_steps() -> None:
    pace = Pace()
    for _ in range(ENOUGH + 1):
        pace.note(1, 0, 0.01)
    assert pace.step_s(1, 0) == pytest.approx(0.01)
    for _ in range(NUM_STEPS):
        pace.note(1, 0, 0.03)
        pace.step_s(1, 0)
    assert pace.step_s(1, 0) == pytest.approx(0.03, rel=0.1)


def test_a_step_that_reads_counts_at_once() -> None:
    pace = Pace()
    for _ in range(ENOUGH + 1):
        pace.note(1, 0, 0.01)
    assert not pace.knows_reading
    pace.note(1, 16, 0.03, 120)
    assert pace.knows_reading
