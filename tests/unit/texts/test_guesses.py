"""Tokens that are taken before they are drawn change no text, whoever dies meanwhile; they make it come sooner."""

import asyncio
from dataclasses import replace

import pytest

from unit.engine.test_step import text_of
from unit.texts.stages import Served, drawn_by_the_whole, drawn_of, of_the_whole, tokens_of, wanted
from weft.engine.numbers import Kind
from weft.engine.scheduling.guess import MAX_GUESSED
from weft.engine.text import Wanted
from weft.texts.guessed import Guessed, Ring

WORDS = text_of(6, 4)


def repeating(num: int, temperature: float = 0.0, **options: object) -> Wanted:
    """Return a text that repeats itself often, and not always."""
    likely = {token: 9.0 - at for at, token in enumerate(WORDS[:3])}
    return wanted([*WORDS, *text_of(11, 5)] * 4, num, temperature, bias=likely, **options)


def num_guessed(served: Served) -> int:
    return sum(text.guessed._guesses._num_tried > 4.0 for each in served.members for text in each._texts.values())


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_texts_with_guesses_are_those_of_the_whole_model_and_come_sooner(temperature: float) -> None:
    asked = [replace(repeating(60, temperature), key=str(at)) for at in range(3)]
    expected = of_the_whole(*asked)
    took_s = {}

    for has_guesses in (True, False):
        served = Served(has_guesses=has_guesses)

        async def play(served: Served = served, has_guesses: bool = has_guesses) -> None:
            began = served.clock.now()
            texts = [served.entry.begin(each) for each in asked]
            assert await asyncio.gather(*map(tokens_of, texts)) == expected
            took_s[has_guesses] = served.clock.now() - began
            await asyncio.sleep(1)
            assert [(each.num_texts, each.num_held) for each in served.members] == [(0, 0)] * 6

        served.run(play)
    assert took_s[True] < took_s[False] / (1.5 if temperature == 0.0 else 1.05)


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_what_is_drawn_after_a_wrong_guess_is_the_same_to_the_bit_in_exact_numbers(kind: Kind) -> None:
    asked = repeating(70, 1.2, num_likeliest=3)
    (expected,) = drawn_by_the_whole(asked, kind=kind)
    served = Served(kind=kind)

    async def play() -> None:
        text = served.entry.begin(asked)
        found = [await anext(text) for _ in range(40)]
        assert num_guessed(served) == 1
        found += await drawn_of(text)
        assert [each.token for each in found] == [each.token for each in expected]
        if kind == "exact":
            assert found == expected

    served.run(play)


@pytest.mark.parametrize("options", [{"frequency": 0.1, "presence": 0.2}, {"repetition": 1.1}])
def test_penalties_count_what_was_drawn_and_no_guess(options: dict[str, object]) -> None:
    asked = repeating(60, 0.7, **options)
    (expected,) = of_the_whole(asked)
    served = Served()

    async def play() -> None:
        assert await tokens_of(served.entry.begin(asked)) == expected

    served.run(play)


@pytest.mark.parametrize("num", [3, pytest.param(17, marks=pytest.mark.full), pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_text_with_guesses_under_way_goes_on_after_a_death(stage: int, num: int) -> None:
    asked = repeating(80, 0.6)
    (expected,) = of_the_whole(asked)
    served = Served()

    async def play() -> None:
        text = served.entry.begin(asked)
        found = [(await anext(text)).token for _ in range(num)]
        served.kill(stage)
        assert found + await tokens_of(text) == expected

    served.run(play)


def test_tokens_that_end_a_text_end_it_within_guesses() -> None:
    (long,) = of_the_whole(repeating(60))
    stop = long[20]
    asked = replace(repeating(60), stop_ids=(stop,))
    served = Served()

    async def play() -> None:
        text = served.entry.begin(asked)
        assert await tokens_of(text) == long[: long.index(stop)]
        assert text.ended == "stop"
        await asyncio.sleep(1)
        assert not any(each.num_texts for each in served.members)

    served.run(play)


def test_guesses_are_right_as_far_as_what_is_told_says_so() -> None:
    guessed = Guessed()
    guessed.told(0, [1, 2, 3, 4, 1, 2, 3])
    assert guessed.next(2, 0.0) == [4, 1]
    assert guessed.next(2, 0.0) == [], "these are under way"
    before = guessed._guesses.rate
    guessed.told(7, [4])
    guessed.told(7, [4])
    assert guessed.next(2, 0.0) == []
    guessed.told(8, [9])
    assert guessed._guesses.rate < before
    assert guessed.next(2, 0.0) == [], "nothing followed these"
    guessed.told(9, [1, 2, 3])
    assert guessed.next(MAX_GUESSED, 0.0)[:2] == [4, 9]
    guessed.told(5, [2, 3, 4])  # what is known is told again
    assert guessed.stop == 12
    guessed.told(10, [7, 8])  # otherwise than before
    assert (guessed._start, guessed.stop) == (10, 12)
    guessed.told(100, [1])
    assert (guessed._start, guessed.stop) == (100, 101)


def test_a_row_is_dear_where_a_trip_is_short() -> None:
    ring = Ring(3)
    assert ring.row_share(0.002) == 0
    ring.note(0.1)
    assert ring.row_share(0.002) == pytest.approx(0.06)
