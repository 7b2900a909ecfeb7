"""Texts of several paths, one after the other: whatever becomes of a part, a text goes on or ends, and says how."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from weft.clock import SystemClock
from weft.compose.paths.levels import Path
from weft.compose.paths.serving import Paths
from weft.engine.draw import Drawn
from weft.engine.text import Full, Text, Told, Wanted
from weft.errors import ConfigError, NotFinite

EVERY, CONTEXT, VOCAB = 4, 20, 100
WAIT_S = 0.01
PROMPT = (1, 2)


class Scripted:
    """An engine that draws the place of each token.

    Args:
        befalls: what becomes of a part, by how long the text is when it begins, instead of its tokens or after some;
            each once.
    """

    context, vocab_size = CONTEXT, VOCAB

    def __init__(self, befalls: Mapping[int, Sequence[Told]] | None = None) -> None:
        self.clock = SystemClock()
        self.asked = list[Wanted]()
        self.cancelled = list[Text]()
        self._befalls = dict(befalls or {})

    def begin(self, wanted: Wanted, num_more: int = 0) -> Text:
        start = len(wanted.prompt)
        script = self._befalls.pop(start, None)
        if script and isinstance(script[0], Full):
            raise script[0]
        self.asked.append(wanted)
        text = Text(wanted, self.cancelled.append, lambda _text: None, self.clock)
        text.began_s, text.num_shared = float(start), start
        stop = min(start + wanted.max_new_tokens, CONTEXT)
        for told in script or [*map(Drawn, range(start, stop)), "length"]:
            text.tell(told)
        return text

    def close(self) -> None:
        """End nothing: nothing is under way."""


class ByTurns(Paths):
    """Paths of which each part of a text takes another."""

    def __init__(self, one: Scripted, other: Scripted | None = None) -> None:
        engines: Any = {(0,): one, (1,): other or one}
        super().__init__(engines, [(0,), (1,)], None, (None, None), EVERY)  # type: ignore[arg-type]

    def path_of(self, words: Sequence[int], every: int | None) -> Path:
        return (len(words) // EVERY % 2,) if every else (0,)


async def drawn(text: Text) -> list[int]:
    return [each.token async for each in text]


@pytest.mark.parametrize(("most", "num"), [(0, 0), (1, 1), (2, 2), (9, 9), (200, CONTEXT - len(PROMPT))])
async def test_a_text_is_drawn_to_its_end_by_one_path_after_the_other(most: int, num: int) -> None:
    engines = Scripted(), Scripted()
    text = ByTurns(*engines).begin(Wanted("key", PROMPT, most))
    assert await drawn(text) == [*range(len(PROMPT), len(PROMPT) + num)]
    assert text.ended == "length"
    for number, engine in enumerate(engines):
        for asked in engine.asked:
            assert len(asked.prompt) // EVERY % 2 == number
            assert asked.prompt[: len(PROMPT)] == PROMPT
            assert asked.num_drawn == len(asked.prompt) - len(PROMPT)
    assert await drawn(text) == []


async def test_what_is_known_of_a_text_is_of_its_first_part() -> None:
    text = ByTurns(Scripted()).begin(Wanted("key", PROMPT, 10))
    assert (text.began_s, text.num_unread) == (None, 0)
    first = await anext(text)
    assert (first.token, text.num_unread) == (2, 1)
    await drawn(text)
    assert (text.began_s, text.num_shared) == (2.0, 2)


async def test_a_text_whose_first_token_ends_it_says_what_was_shared() -> None:
    text = ByTurns(Scripted({2: ["stop"]})).begin(Wanted("key", PROMPT, 10))
    assert await drawn(text) == []
    assert (text.ended, text.num_shared) == ("stop", 2)


@pytest.mark.parametrize("full", [[Full(WAIT_S)], [Drawn(4), Full(WAIT_S)]], ids=["refused", "makes way"])
async def test_a_text_that_is_under_way_waits_where_it_is_full(full: list[Told]) -> None:
    engine = Scripted({4: full})
    text = ByTurns(engine).begin(Wanted("key", PROMPT, 6))
    assert await drawn(text) == [2, 3, 4, 5, 6, 7]
    assert text.ended == "length"
    assert len(engine.asked[-1].prompt) == (4 if len(full) == 1 else 5)


@pytest.mark.parametrize("error", [Full(WAIT_S), NotFinite("NaN")])
async def test_one_that_has_not_begun_is_refused(error: Exception) -> None:
    text = ByTurns(Scripted({2: [error]})).begin(Wanted("key", PROMPT, 6))
    with pytest.raises(type(error)):
        await anext(text)
    assert text.ended == "cancelled"
    assert await drawn(text) == []


async def test_a_fault_in_the_middle_ends_it() -> None:
    broken = ValueError("broken")
    text = ByTurns(Scripted({4: [Drawn(4), broken]})).begin(Wanted("key", PROMPT, 6))
    tokens = [(await anext(text)).token for _ in range(3)]
    with pytest.raises(ValueError, match="broken"):
        await anext(text)
    assert (tokens, text.ended) == ([2, 3, 4], "cancelled")


class Faulty(ByTurns):
    """Paths whose router fails once a text has begun."""

    def path_of(self, words: Sequence[int], every: int | None) -> Path:
        if len(words) > len(PROMPT):
            raise ValueError("no path")
        return super().path_of(words, every)


async def test_a_router_that_fails_ends_it() -> None:
    text = Faulty(Scripted()).begin(Wanted("key", PROMPT, 6))
    assert [(await anext(text)).token for _ in range(2)] == [2, 3]
    with pytest.raises(ValueError, match="no path") as caught:
        await anext(text)
    assert caught.value.__context__ is None
    assert text.ended == "cancelled"


@pytest.mark.parametrize("num", [0, 1, 2])
async def test_one_that_is_cancelled_begins_no_other_part(num: int) -> None:
    engine = Scripted()
    text = ByTurns(engine).begin(Wanted("key", PROMPT, 10))
    tokens = [(await anext(text)).token for _ in range(num)]
    text.cancel()
    tokens += await drawn(text)
    assert len(tokens) <= 2, "no more than the part that was under way"
    assert text.ended == "cancelled"
    assert len(engine.asked) == (1 if num else 0)
    assert len(engine.cancelled) == len(engine.asked)


async def test_one_that_is_cancelled_waits_no_longer_for_room() -> None:
    engine = Scripted({4: [Full(3600.0)]})
    text = ByTurns(engine).begin(Wanted("key", PROMPT, 10))
    assert [(await anext(text)).token for _ in range(2)] == [2, 3]
    waiting = asyncio.ensure_future(anext(text, None))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    text.cancel()
    async with asyncio.timeout(5):
        assert await waiting is None
    assert text.ended == "cancelled"


async def test_a_mean_is_of_one_path_and_what_is_no_text_is_refused_at_once() -> None:
    engines = Scripted(), Scripted()
    paths = ByTurns(*engines)
    await drawn(paths.begin(Wanted("key", tuple(range(1, 6)), 1, is_mean=True)))
    assert [len(each.asked) for each in engines] == [1, 0]
    for prompt in ((), (VOCAB,), tuple([1] * CONTEXT)):
        with pytest.raises(ConfigError):
            paths.begin(Wanted("key", prompt, 1))
