"""Answers of a form are those of one machine, whoever draws them, and whoever dies meanwhile."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from unit.texts.stages import FORMS, TOKENIZER, Served, drawn_by_the_whole, drawn_of, wanted
from weft.chat.grammar import Calls, Form, FormWanted
from weft.chat.vocabulary import Vocabulary
from weft.engine.draw import Drawn
from weft.engine.engine import Wanted
from weft.texts.member import Member

END = TOKENIZER.end_of_text
PROMPT = [int(each) for each in TOKENIZER.encode("what is it? ")]
NAMES = {"enum": ["red", "green", "blue"]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": NAMES,
        "of": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 3,
            "maxItems": 5,
        },
        "more": {"type": "string", "minLength": 20, "maxLength": 40, "pattern": "^[a-f ]*$"},
    },
    "required": ["name", "of", "more"],
    "additionalProperties": False,
}
TOOL = {"type": "object", "properties": {"n": NAMES}, "required": ["n"], "additionalProperties": False}
CALLS = Calls({"look": TOOL}, ("look",), "arguments", "<tool_call>\n", "\n", "\n</tool_call>", False)
KINDS = {"schema": FormWanted(schema=SCHEMA, ends=(END,)), "tool": FormWanted(calls=CALLS, ends=(END,))}


def of_form(form: FormWanted, num: int = 200, temperature: float = 0.8, **options: object) -> Wanted:
    asked = wanted(PROMPT, num, temperature, **options)
    return replace(asked, stop_ids=form.ends, constraint=FORMS.made(form))


def again(asked: Wanted) -> Wanted:
    """Return the same text for another engine: a form goes on with its text."""
    assert isinstance(asked.constraint, Form)
    return replace(asked, constraint=asked.constraint.copy())


def text_of(drawn: list[Drawn]) -> str:
    return b"".join(Vocabulary(TOKENIZER).piece(each.token) for each in drawn).decode()


def last_of(served: Served) -> Member:
    (member,) = [each for each in served.members if served.peer(each) == served.path()[-1]]
    return member


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"frequency": 0.3, "num_likeliest": 2}])
def test_an_answer_of_a_form_is_that_of_one_machine(kind: str, options: dict[str, Any]) -> None:
    asked = of_form(KINDS[kind], **options)
    (expected,) = drawn_by_the_whole(again(asked), kind="exact")
    served = Served(kind="exact")

    async def play() -> None:
        text = served.entry.begin(asked)
        assert await drawn_of(text) == expected
        assert text.ended == "stop"
        await asyncio.sleep(1)
        assert [(each.num_texts, each.num_held) for each in served.members] == [(0, 0)] * 6

    served.run(play)
    said = text_of(expected)
    if kind == "schema":
        assert set(json.loads(said)) == {"name", "of", "more"}
    else:
        assert json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))["name"] == "look"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("num", [0, 9])
def test_an_answer_of_a_form_goes_on_when_a_member_dies(kind: str, stage: int, num: int) -> None:
    asked = of_form(KINDS[kind])
    (expected,) = drawn_by_the_whole(again(asked), kind="exact")
    served = Served(kind="exact")

    async def play() -> None:
        text = served.entry.begin(asked)
        found = [await anext(text) for _ in range(num)]
        while not served.entry._under_way or not served.path():
            await asyncio.sleep(0.01)
        served.kill(stage)
        assert found + await drawn_of(text) == expected
        assert text.ended == "stop"

    served.run(play)


def test_an_answer_that_is_cut_off_within_its_form_ends_as_on_one_machine() -> None:
    (whole,) = drawn_by_the_whole(of_form(KINDS["schema"]))
    for num in (20, len(whole)):
        served = Served((1, 1))

        async def play(served: Served = served, num: int = num) -> None:
            text = served.entry.begin(of_form(KINDS["schema"], num))
            assert len(await drawn_of(text)) == num
            assert text.ended == "length"

        served.run(play)


@pytest.mark.parametrize("ends", [(), (END,)])
def test_a_form_that_may_end_or_go_on_ends_as_on_one_machine(ends: tuple[int, ...]) -> None:
    form = FormWanted(schema={"type": "integer", "minimum": 0}, ends=ends)
    for seed in range(4):
        asked = of_form(form, 12)
        asked = replace(asked, drawing=replace(asked.drawing, seed=bytes([seed]) * 32))
        (expected,) = drawn_by_the_whole(again(asked), kind="exact")
        served = Served((1, 1), kind="exact")

        async def play(served: Served = served, asked: Wanted = asked, expected: list[Drawn] = expected) -> None:
            text = served.entry.begin(asked)
            assert await drawn_of(text) == expected
            assert text.ended == ("length" if len(expected) == 12 else "stop")

        served.run(play)


def test_guesses_of_an_answer_of_a_form_change_nothing_and_make_it_come_sooner() -> None:
    items = {"type": "array", "items": {"const": {"colour": "green", "size": "small"}}, "minItems": 6, "maxItems": 6}
    asked = of_form(FormWanted(schema=items, ends=(END,)), 400, 0.5)
    (expected,) = drawn_by_the_whole(again(asked), kind="exact")
    took_s = {}
    for has_guesses in (True, False):
        served = Served(has_guesses=has_guesses, kind="exact")

        async def play(served: Served = served, has_guesses: bool = has_guesses) -> None:
            began = served.clock.now()
            assert await drawn_of(served.entry.begin(again(asked))) == expected
            took_s[has_guesses] = served.clock.now() - began

        served.run(play)
    assert took_s[True] < took_s[False] / 1.5
