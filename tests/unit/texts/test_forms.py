"""Answers of a form are those of one machine, whoever draws them, and whoever dies meanwhile."""

import asyncio
import json
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import msgspec
import pytest

from unit.engine.test_step import CONFIG, CPU, vector_of
from unit.texts.stages import FORMS, TOKENIZER, Served, drawn_by_the_whole, drawn_of, tokens_of, wanted
from unit.texts.test_strangers import PROMPT as TOLD
from unit.texts.test_strangers import heard, named, opening, word
from weft.chat.grammar import Calls, Form, FormRefused, FormWanted, GrammarFault
from weft.chat.vocabulary import Vocabulary
from weft.engine.draw import Drawing, Drawn
from weft.engine.step import KeysAndValues
from weft.engine.text import Wanted
from weft.errors import ConfigError, WireError
from weft.ids import PeerId
from weft.texts import forms as reading
from weft.texts import member as members
from weft.texts.asking.no_path import NoPath
from weft.texts.asking.under_way import TextOfMembers
from weft.texts.held import HeldText
from weft.texts.messages import MAX_FORM_NBYTES, OpenSequence, ResumeSequence, RowsOfText, TextRows, drawn_how
from weft.texts.outbox import Outbox
from weft.texts.receipts.audit import Told, audit, tokens_told, verdict
from weft.texts.section import packed
from weft.wire import decode, encode

END = TOKENIZER.end_of_text
PROMPT = [int(each) for each in TOKENIZER.encode("what is it? ")]
NAMES = {"enum": ["red", "green", "blue"]}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": NAMES,
        "of": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 2,
            "maxItems": 4,
        },
        "more": {"type": "string", "minLength": 6, "maxLength": 12, "pattern": "^[a-f ]*$"},
    },
    "required": ["name", "of", "more"],
    "additionalProperties": False,
}
TOOL = {"type": "object", "properties": {"n": NAMES}, "required": ["n"], "additionalProperties": False}
CALLS = Calls({"look": TOOL}, ("look",), "arguments", "<tool_call>\n", "\n", "\n</tool_call>", False)
KINDS = {"schema": FormWanted(schema=SCHEMA, ends=(END,)), "tool": FormWanted(calls=CALLS, ends=(END,))}


QUICK = ((0, 0, "schema"), (9, 2, "schema"), (9, 2, "tool"))  # deaths: tokens, stage and form


def of_form(form: FormWanted, num: int = 200, temperature: float = 0.8, **options: object) -> Wanted:
    asked = wanted(PROMPT, num, temperature, **options)
    return replace(asked, stop_ids=form.ends, constraint=FORMS.made(form))


def again(asked: Wanted) -> Wanted:
    """Return the same text for another engine: a form goes on with its text."""
    assert isinstance(asked.constraint, Form)
    return replace(asked, constraint=asked.constraint.copy())


@cache
def of_one_machine(kind: str, **options: Any) -> list[Drawn]:
    """Return what one machine draws of a form, in exact numbers."""
    (drawn,) = drawn_by_the_whole(of_form(KINDS[kind], **options), kind="exact")
    return drawn


def text_of(drawn: list[Drawn]) -> str:
    return b"".join(Vocabulary(TOKENIZER).piece(each.token) for each in drawn).decode()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"temperature": 0.0}, marks=pytest.mark.slow), {"frequency": 0.3, "num_likeliest": 2}]
)
def test_an_answer_of_a_form_is_that_of_one_machine(kind: str, options: dict[str, Any]) -> None:
    asked, expected = of_form(KINDS[kind], **options), of_one_machine(kind, **options)
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


@pytest.mark.parametrize(
    ("num", "stage", "kind"),
    [
        pytest.param(num, stage, kind, marks=() if (num, stage, kind) in QUICK else pytest.mark.slow)
        for num, stage, kind in product((0, 9), (0, 2), KINDS)
    ],
)
def test_an_answer_of_a_form_goes_on_when_a_member_dies(kind: str, stage: int, num: int) -> None:
    asked, expected = of_form(KINDS[kind]), of_one_machine(kind)
    served = Served(kind="exact")

    async def play() -> None:
        text = served.entry.begin(asked)
        found = [await anext(text) for _ in range(num)]
        await asyncio.sleep(0.05)  # it has a path, at least
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


@pytest.mark.slow
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


# --- who holds answers to forms ---


@pytest.mark.full
def test_members_that_hold_answers_to_no_form_are_not_asked_for_one() -> None:
    asked, expected = of_form(KINDS["tool"]), of_one_machine("tool")
    served = Served((1, 3), kind="exact", older=(1, 3))

    async def play() -> None:
        for _ in range(3):
            text = served.entry.begin(again(asked))
            assert await drawn_of(text) == expected
            assert isinstance(text, TextOfMembers)
            assert text.course.peers[1] == served.peer(served.members[2])
        text = served.entry.begin(again(asked))
        await anext(text)
        served.kill(1)
        with pytest.raises(NoPath, match=r"holds answers to a form .* older weft. Leave the form out"):
            await drawn_of(text)

    served.run(play)


def test_where_no_member_holds_answers_to_forms_they_are_refused_at_once_and_others_are_drawn() -> None:
    served = Served((1, 1), older=(1,))

    async def play() -> None:
        with pytest.raises(ConfigError, match=r"\(response_format, .*older weft. Leave the form out, or serve a check"):
            served.entry.begin(of_form(KINDS["schema"]))
        assert len(await tokens_of(served.entry.begin(wanted(PROMPT, 5)))) == 5

    served.run(play)


def test_what_no_member_can_be_told_of_is_refused_at_once() -> None:
    served = Served((1, 1))
    calls = msgspec.structs.replace(CALLS, tools={"x" * MAX_FORM_NBYTES: TOOL})

    async def play() -> None:
        with pytest.raises(ConfigError, match=r"at most 80 KiB, .* this one has 81. Shorten"):
            served.entry.begin(of_form(FormWanted(calls=calls)))
        with pytest.raises(ConfigError, match="forms that can be sent"):
            served.entry.begin(Wanted("key", (1,), 3, constraint=object()))  # type: ignore[arg-type]

    served.run(play)


@pytest.mark.parametrize("token", [TOKENIZER.encode("!")[0], END])
def test_who_draws_a_token_that_the_form_forbids_is_passed_over(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, expected = of_form(KINDS["schema"]), of_one_machine("schema")
    served = Served((1, 2), kind="exact")
    lies, tell = set[int](), Outbox.tell

    def lie(self: Outbox, text: HeldText, place: int, drawn: Drawn) -> None:
        if place == len(PROMPT) + 8 and not lies:
            lies.add(place)
            drawn = Drawn(int(token))
        tell(self, text, place, drawn)

    monkeypatch.setattr(Outbox, "tell", lie)

    async def play() -> None:
        text = served.entry.begin(asked)
        assert await drawn_of(text) == expected
        assert isinstance(text, TextOfMembers)
        (mend,) = text.course.mends
        assert (mend.stage, mend.num_drawn, mend.why) == (1, 8, "no form")
        assert lies

    served.run(play)


def test_a_form_that_a_member_alone_cannot_follow_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, expected = of_form(KINDS["schema"]), of_one_machine("schema")
    served = Served((1, 2), kind="exact")
    failed = list[int]()
    allowed_after = reading.Followed.allowed_after

    def fails(self: reading.Followed, tokens: Any) -> Any:
        if len(tokens) == 6 and not failed:
            failed.append(6)
            raise GrammarFault("too large a step")
        return allowed_after(self, tokens)

    monkeypatch.setattr(reading.Followed, "allowed_after", fails)

    async def play() -> None:
        assert await drawn_of(served.entry.begin(asked)) == expected
        assert failed

    served.run(play)


def test_a_form_that_no_token_of_the_model_goes_on_with_ends_the_answer_as_on_one_machine() -> None:
    """Its tokenizer has no @, and the form has nothing else there."""
    asked = of_form(FormWanted(schema={"type": "string", "pattern": "^[ab]{2}([@]|[$])$"}))
    with pytest.raises(GrammarFault, match="no token of the model goes on with it") as expected:
        drawn_by_the_whole(again(asked))
    served = Served((1, 1))

    async def play() -> None:
        text = served.entry.begin(asked)
        assert text_of([await anext(text) for _ in range(3)])[0] == '"'
        with pytest.raises(GrammarFault) as found:
            await drawn_of(text)
        assert str(found.value) == str(expected.value)

    served.run(play)


# --- forms of strangers ---


def formed(form: bytes, **changed: Any) -> dict[str, Any]:
    return {"form": form, "drawing": drawn_how(Drawing()), "tokens": packed(TOLD), **changed}


def test_a_form_that_is_none_is_refused_and_one_of_too_many_that_wait_later(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served((1, 1), num_strangers=1)
    monkeypatch.setattr(reading, "MAX_READING", 0)
    good = KINDS["schema"].to_json()

    async def play() -> None:
        (stranger,), (first, last) = served.strangers, served.members
        assert await word(served, stranger, last, opening(stranger, last, **formed(good))) == "busy"
        monkeypatch.setattr(reading, "MAX_READING", 16)
        monkeypatch.setattr(reading, "MAX_OF_ONE", 0)
        assert await word(served, stranger, last, opening(stranger, last, **formed(good))) == "busy"
        monkeypatch.setattr(reading, "MAX_OF_ONE", 4)
        for number, bad in enumerate((b"", b"start: /a*/", b'{"schema": {"type": "strange"}}', b"[" * 50_000)):
            call = opening(stranger, last, **formed(bad), **named(stranger, number))
            assert await word(served, stranger, last, call) == "no form"
        assert last.num_texts == 0
        assert await word(served, stranger, last, opening(stranger, last, **formed(good))) == "held"
        assert await word(served, stranger, first, opening(stranger, first, **formed(good))) == "no form"

    served.run(play)


def test_a_form_is_told_to_who_draws_with_the_text_so_far_and_has_a_bound() -> None:
    served = Served((1,), num_strangers=1)
    good = KINDS["schema"].to_json()

    async def play() -> None:
        (stranger,), (member,) = served.strangers, served.members
        call = opening(stranger, member, **formed(good))
        assert decode(encode(call), OpenSequence) == call
        assert b"form" not in encode(opening(stranger, member))  # bytes of those without are as they were
        for changed in ({"tokens": b""}, {"drawing": None, "tokens": b""}, {"form": b" " * (MAX_FORM_NBYTES + 1)}):
            broken = opening(stranger, member, **formed(good))
            for name, value in changed.items():
                msgspec.structs.force_setattr(broken, name, value)
            with pytest.raises(WireError):
                decode(encode(broken), OpenSequence)

    served.run(play)


def test_tokens_that_are_not_of_the_form_that_a_stranger_tells_lose_that_text_alone() -> None:
    served = Served((1,), num_strangers=1)
    asked = of_form(KINDS["tool"])
    (expected,) = drawn_by_the_whole(again(asked))

    async def play() -> None:
        (stranger,), (member,) = served.strangers, served.members
        lost = heard(stranger)
        call = opening(stranger, member, **formed(KINDS["schema"].to_json(), num_prompt=5))
        assert await word(served, stranger, member, call) == "held"
        peer, at = served.peer(member), {"sequence": call.sequence, "attempt": 0}
        await stranger.post(peer, ResumeSequence(**at, stage=0, keep=0, send_from=len(TOLD) - 1))
        rows = RowsOfText(**at, start=0, chain=call.chain[:16], data=packed(TOLD))
        await stranger.post(peer, TextRows(stage=0, rows=(rows,)))
        assert [each.token for each in await drawn_of(served.entry.begin(asked))] == [each.token for each in expected]
        assert [each.why for each in lost] == ["no form"]
        await asyncio.sleep(0.1)  # it is closed
        assert member.num_texts == 0

    served.run(play)


def test_texts_with_forms_have_a_bound_of_their_own_and_who_has_most_gives_one_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "MAX_FORMED", 4)
    served = Served((1,), num_strangers=1)
    asked = of_form(KINDS["tool"])
    (expected,) = drawn_by_the_whole(again(asked))

    async def play() -> None:
        (stranger,), (member,) = served.strangers, served.members
        for number in range(6):
            call = opening(stranger, member, **formed(KINDS["schema"].to_json()), **named(stranger, number))
            assert await word(served, stranger, member, call) == ("held" if number < 4 else "busy")
        free = opening(stranger, member, **named(stranger, 9))
        assert await word(served, stranger, member, free) == "held"
        later = opening(stranger, member, **formed(KINDS["schema"].to_json()), **named(stranger, 9), attempt=1)
        assert await word(served, stranger, member, later) == "busy"
        assert [each.token for each in await drawn_of(served.entry.begin(asked))] == [each.token for each in expected]

    served.run(play)


async def test_who_gives_up_waiting_for_a_form_to_be_read_frees_no_place() -> None:
    begun, go_on = asyncio.Queue[None](), asyncio.Event()
    num_at_once = 0

    async def run(work: Any) -> Any:
        nonlocal num_at_once
        num_at_once += 1
        assert num_at_once == 1
        begun.put_nowait(None)
        await go_on.wait()
        num_at_once -= 1
        return work()

    reader, form, one, other = reading.FormReader(FORMS, run), KINDS["schema"].to_json(), PeerId("a"), PeerId("b")
    waiting = [asyncio.create_task(reader.read(one, form)) for _ in range(reading.MAX_OF_ONE)]
    await begun.get()
    for task in waiting:
        task.cancel()
    await asyncio.sleep(0)
    assert await reader.read(one, form) is None
    others = asyncio.create_task(reader.read(other, form))
    go_on.set()
    assert isinstance(await others, Form)
    assert isinstance(await reader.read(one, form), Form)


def test_after_a_wrong_guess_a_form_is_as_if_it_had_not_been() -> None:
    (right,) = drawn_by_the_whole(again(of_form(KINDS["schema"])))
    tokens = [each.token for each in right]
    form = FORMS.made(KINDS["schema"])
    followed = reading.Followed(form, 0, ())
    for at in range(1, len(tokens)):
        guess = next(int(each) for each in followed.allowed_after(tokens[:at]).nonzero()[0] if each != END)
        followed.allowed_after([*tokens[:at], guess])
        anew = form.copy()
        for token in tokens[: at + 1]:
            anew.take(token)
        assert (followed.allowed_after(tokens[: at + 1]) == anew.allowed()).all()
        assert followed.is_complete_after(tokens[: at + 1]) == anew.is_complete


def test_a_form_that_every_member_refuses_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: Any) -> Form:
        raise FormRefused("it is none")

    monkeypatch.setattr(reading.FormReader, "read", refuses)
    served = Served((1, 1))

    async def play() -> None:
        with pytest.raises(NoPath, match="cannot hold answers to this form"):
            await drawn_of(served.entry.begin(of_form(KINDS["tool"])))

    served.run(play)


# --- audits ---


def test_an_audit_draws_again_with_the_form_and_holds_no_honest_member_for_a_liar() -> None:
    asked = of_form(KINDS["schema"])
    form = again(asked).constraint
    assert isinstance(form, Form)
    served = Served((1,), kind="exact")

    async def play() -> None:
        tokens = [*PROMPT, *await tokens_of(served.entry.begin(asked))]
        await asyncio.sleep(3)
        (kept,) = served.entry.receipts.values()
        assert kept[-1].receipt.stop == len(tokens) - 1
        assert all(each.receipt.fingerprint for each in kept)
        again_here = served.section(0, vector_of(CONFIG), KeysAndValues(CONFIG, 48, CPU, "exact"))
        told = Told(packed(tokens), tokens_told(tokens, len(PROMPT)), asked.drawing, form, len(PROMPT))
        for changed, expected in (
            ({}, "honest"),
            ({"form": None}, "cheating"),  # without the mask other tokens are drawn
            ({"form": FORMS.made(KINDS["tool"])}, "cheating"),
        ):
            receipts = [each.receipt for each in kept]
            found = audit(again_here, kept[0].header, receipts, replace(told, **changed))
            assert verdict(found, None) == expected

    served.run(play)
