"""Members die while a text is mended, and a stage has nobody for a while."""

import asyncio
from typing import Any

import pytest

from unit.engine.test_step import text_of
from unit.texts.stages import Served, of_the_whole, tokens_of, wanted
from unit.texts.test_stages import PROMPT, until_drawn
from weft.engine.text import TextBroken
from weft.ids import PeerId
from weft.texts import outbox
from weft.texts.asking.entry import WAIT_S
from weft.texts.asking.no_path import NoPath
from weft.texts.asking.path import Paths, Reserved
from weft.texts.asking.patience import FIRST_S
from weft.texts.asking.under_way import TextOfMembers


def num_taken(served: Served, peer: PeerId) -> int:
    """Return how many tokens of the only text a member has taken."""
    (member,) = [each for each in served.members if served.peer(each) == peer]
    return sum(text.sequence.num_taken for text in member._texts.values())


@pytest.mark.full
def test_who_sends_again_to_one_that_took_over_may_die_in_the_middle_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_PIECE", 64)
    monkeypatch.setattr(outbox, "MAX_INLINE_NBYTES", 8 << 10)  # what is sent again is fetched, piece by piece
    asked = wanted(text_of(400, 3), 12)
    (expected,) = of_the_whole(asked)
    served = Served(has_guesses=False)  # else it may be over before

    async def play() -> None:
        text = served.entry.begin(asked)
        assert isinstance(text, TextOfMembers)
        found = await until_drawn(served, text, 5)
        before = served.path()
        served.kill(1)
        while served.path()[1] == before[1] or not (taken := num_taken(served, served.path()[1])):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)
        assert 0 < taken < len(asked.prompt), "it has some of what it lacks"
        assert served.path()[0] == before[0]
        served.kill(0)
        assert found + await tokens_of(text) == expected
        assert [(each.stage, each.before, each.why) for each in text.course.mends] == [
            (1, before[1], "parted"),
            (0, before[0], "parted"),
        ]
        (pause_s,) = {each.pause_s for each in text.course.mends}
        assert pause_s is not None
        assert pause_s < FIRST_S, "nobody waited for what does not come"

    served.run(play)


def test_a_text_waits_for_a_stage_that_has_nobody_until_one_is_back() -> None:
    served = Served((1, 1))
    (expected,) = of_the_whole(asked := wanted(PROMPT, 20))

    async def play() -> None:
        text = served.entry.begin(asked)
        found = await until_drawn(served, text, 3)
        gone = served.peer(served.kill(1))
        rest = asyncio.ensure_future(tokens_of(text))
        await asyncio.sleep(0.8 * WAIT_S)
        assert not rest.done()
        back = await served.come(1)
        assert found + await rest == expected
        assert isinstance(text, TextOfMembers)
        (mend,) = text.course.mends
        assert (mend.before, mend.member) == (gone, served.peer(back))

    served.run(play)


def test_who_is_back_too_late_finds_a_text_ended_and_draws_the_next() -> None:
    served = Served((1, 1))
    (expected,) = of_the_whole(asked := wanted(PROMPT, 8))

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 20))
        await until_drawn(served, text, 3)
        served.kill(1)
        rest = asyncio.ensure_future(tokens_of(text))
        await asyncio.sleep(1.2 * WAIT_S)
        assert rest.done()
        with pytest.raises(NoPath, match="Nobody serves stage 2 of 2"):
            await rest
        back = await served.come(1)
        await asyncio.sleep(1)
        assert back.num_texts == 0
        assert await tokens_of(served.entry.begin(asked)) == expected

    served.run(play)


def test_a_fault_of_wefts_own_ends_a_text_that_begins_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served((1, 1))
    (expected,) = of_the_whole(asked := wanted(PROMPT, 8))
    reserve = Paths.reserve

    def fails(_paths: Paths, *_given: object, **_named: object) -> None:
        raise ZeroDivisionError("what was asked")

    async def play() -> None:
        loop, faults = asyncio.get_running_loop(), list[object]()
        loop.set_exception_handler(lambda _loop, context: faults.append(context.get("exception")))
        monkeypatch.setattr(Paths, "reserve", fails)
        async with asyncio.timeout(WAIT_S / 2):
            with pytest.raises(TextBroken, match=r"ZeroDivisionError at test_mends\.py:") as caught:
                await tokens_of(served.entry.begin(asked))
        assert "what was asked" not in str(caught.value)
        monkeypatch.setattr(Paths, "reserve", reserve)
        assert await tokens_of(served.entry.begin(asked)) == expected
        assert [type(each) for each in faults] == [ZeroDivisionError]

    served.run(play)


def test_who_goes_on_with_a_text_is_chosen_without_what_it_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members tell of it until it is closed there, as in a rest."""
    asked = list[tuple[Reserved | None, Reserved | None]]()
    reserve = Paths.reserve

    def noted(self: Paths, *given: Any, was: Reserved | None = None, **how: Any) -> Reserved | None:
        found = reserve(self, *given, was=was, **how)
        asked.append((was, found))
        return found

    monkeypatch.setattr(Paths, "reserve", noted)
    served = Served(has_guesses=False)
    (expected,) = of_the_whole(wanted(PROMPT, 200))

    async def play() -> None:
        text = served.entry.begin(wanted(PROMPT, 200))
        found = await until_drawn(served, text, 3)
        served.kill(1)
        assert found + await tokens_of(text) == expected
        (first, second) = [each for each in asked if each[1] is not None]
        assert first[0] is None
        assert second[0] is first[1]
        asked.clear()
        text = served.entry.begin(wanted(PROMPT, 200))
        while not text.is_behind():  # noqa: ASYNC110  # nobody reads it
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert await tokens_of(text) == expected
        rests = [was for was, found in asked if found is not None]
        assert len(rests) >= 2
        assert rests == [None] * len(rests)

    served.run(play)
