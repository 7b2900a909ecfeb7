"""What is drawn as a form allows is of that form, whatever the model likes."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from unit.chat.test_vocabulary import KINDS
from weft import rng
from weft.chat.grammar import MAX_SCHEMA_NBYTES, Calls, Form, FormRefused, Forms, FormWanted, GrammarFault, wanted_of
from weft.chat.vocabulary import Vocabulary
from weft.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe


def forms(tokenizer: Tokenizer) -> Forms:
    return Forms(Vocabulary(tokenizer), tokenizer.vocab_size + 7)


def wanted(tokenizer: Tokenizer, schema: dict[str, Any], *, is_strict: bool = True) -> FormWanted:
    end = tokenizer.end_of_text
    return FormWanted(schema=schema, is_strict=is_strict, ends=() if end is None else (end,))


def form_of(tokenizer: Tokenizer, schema: dict[str, Any], *, is_strict: bool = True) -> Form:
    return forms(tokenizer).made(wanted(tokenizer, schema, is_strict=is_strict))


def written(form: Form, tokenizer: Tokenizer, seed: int) -> str:
    """Write tokens of `form` at random, shorter ways out preferred, until it is complete."""
    draws, vocabulary, tokens = rng.stream(seed, "form"), Vocabulary(tokenizer), list[int]()
    closing = {token for token, piece in enumerate(vocabulary.pieces) if piece in (b'"', b"}", b"]", b",")}
    for _ in range(3000):
        allowed = np.flatnonzero(form.allowed())
        if not len(allowed) or (tokenizer.end_of_text in allowed and draws.random() < 0.5):
            return b"".join(map(vocabulary.piece, tokens)).decode()
        ways = [token for token in allowed.tolist() if token in closing]
        choice = (
            ways
            if ways and draws.random() < 0.3
            else [each for each in allowed.tolist() if each != tokenizer.end_of_text]
        )
        tokens.append(int(draws.choice(choice)))
        form.take(tokens[-1])
    raise AssertionError("no end")


LEAVES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "maximum": 50},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2,4}$"},
    {"enum": ["red", "green", 3]},
    {"const": {"x": [1]}},
    {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": 3}]},
    {"type": "string", "format": "date"},
]


def schemas() -> list[dict[str, Any]]:
    """Return fifty schemas: objects of leaves, closed, nested, some fields left out, lists of them, references."""
    found = []
    for number in range(50):
        one, other = LEAVES[number % 10], LEAVES[(number * 3 + 1) % 10]
        tree: dict[str, Any] = {"type": "object", "properties": {"a": one, "b": other}, "additionalProperties": False}
        tree["required"] = ["a", "b"] if number % 3 else ["a"]
        if number >= 20:
            tree = {"type": "object", "properties": {"in": tree}, "required": ["in"], "additionalProperties": False}
        if number >= 30:
            tree = {"type": "array", "items": tree, "minItems": 1, "maxItems": 2}
        if number >= 40:
            tree = {"$ref": "#/$defs/it", "$defs": {"it": tree}}
        found.append(tree)
    return found


def test_fifty_schemas_are_held_to() -> None:
    tokenizer = ByteTokenizer()
    made = forms(tokenizer)
    for number, schema in enumerate(schemas()):
        text = written(made.made(wanted(tokenizer, schema)), tokenizer, number)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", ["trained", "words"])
def test_a_schema_is_held_to_with_every_kind_of_tokenizer(kind: str) -> None:
    tokenizer = KINDS[kind] if kind == "words" else train_bpe(['{"a": 12, "b": "red"}'] * 5, 262)
    schema = schemas()[1]
    for seed in range(5):
        jsonschema.validate(json.loads(written(form_of(tokenizer, schema), tokenizer, seed)), schema)


def test_any_object_is_an_object() -> None:
    tokenizer = ByteTokenizer()
    made = form_of(tokenizer, {"type": "object"}, is_strict=False)
    assert isinstance(json.loads(written(made, tokenizer, 3)), dict)
    assert made.allowed().shape == (tokenizer.vocab_size + 7,)


def test_a_copy_begins_where_the_form_did() -> None:
    form = form_of(ByteTokenizer(), {"type": "boolean"})
    copy = form.copy()
    form.take(ord("t"))
    assert copy.allowed()[ord("f")]
    assert not form.allowed()[ord("f")]


def test_calls_are_of_tools_that_there_are() -> None:
    tokenizer = ByteTokenizer()
    tools = {
        "look": {"type": "object", "properties": {"n": LEAVES[0]}, "required": ["n"], "additionalProperties": False}
    }
    calls = Calls(tools, (), "arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", True)
    text = written(forms(tokenizer).made(FormWanted(calls=calls)), tokenizer, 1)
    for call in (
        text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>").split("\n</tool_call>\n<tool_call>\n")
    ):
        tree = json.loads(call)
        assert tree["name"] == "look"
        jsonschema.validate(tree["arguments"], tools["look"])


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strange"}, "strange"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look"),
        ({"description": "x" * MAX_SCHEMA_NBYTES}, "64 KiB"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "no token"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(FormRefused, match=said) as refused:
        form_of(ByteTokenizer(), schema)
    assert len(str(refused.value)) < 500


def test_keywords_that_are_not_known_are_passed_over_where_it_is_not_strict() -> None:
    form_of(ByteTokenizer(), {"type": "integer", "not": {"const": 3}}, is_strict=False)


@pytest.mark.parametrize("ends", [(), (256,), (7, 256)])
def test_a_form_is_complete_where_nothing_may_follow_and_ends_are_drawn_where_it_may_end(ends: tuple[int, ...]) -> None:
    tokenizer = ByteTokenizer()
    schema = {"type": "integer", "minimum": 0, "maximum": 99}
    form = forms(tokenizer).made(FormWanted(schema=schema, ends=ends))
    assert not form.allowed()[list(ends)].any()
    assert not any(map(form.may_take, (*ends, ord("a"))))
    form.take(ord("4"))
    assert form.allowed()[list(ends)].all()
    assert np.flatnonzero(form.allowed()).tolist() == sorted([*ends, *range(ord("0"), ord("9") + 1)])
    assert all(map(form.may_take, (*ends, ord("0"))))
    other = form.copy()
    form.take(ord("2"))
    assert form.is_complete
    assert not form.allowed().any()
    assert not any(map(form.may_take, (*ends, ord("0"))))
    for end in ends[:1]:
        other.take(end)
        assert other.is_complete
    with pytest.raises(GrammarFault):
        form_of(tokenizer, schema).take(ord("x"))


def test_what_is_written_of_a_form_makes_the_same_grammar() -> None:
    tokenizer, made = ByteTokenizer(), forms(ByteTokenizer())
    calls = Calls({"look": LEAVES[0], "see": {"type": "object"}}, ("look",), "arguments", "<a>", ";", "</a>", True)
    for schema in (None, *schemas()[::7]):
        form = FormWanted(schema=schema, is_strict=True, calls=calls if schema is None else None, ends=(256,))
        again = wanted_of(form.to_json())
        assert again == form
        assert written(made.made(again), tokenizer, 5) == written(made.made(form), tokenizer, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"schema": 3}',
        b'{"grammar": "start: /a/"}',
        b'{"schema": ' + b'{"a":' * 20_000,
        b"[" * 60_000,
        b'{"calls": {"tools": {}}}',
        b'{"schema": {"type": "array", "items": ' * 300 + b"{}" + b"}" * 300,
        b'{"schema": {"type": "string", "pattern": "' + b"(" * 30_000 + b")" * 30_000 + b'"}}',
    ],
)
def test_what_strangers_send_in_place_of_a_form_is_refused(data: bytes) -> None:
    with pytest.raises(FormRefused) as refused:
        forms(ByteTokenizer()).made(wanted_of(data))
    assert len(str(refused.value)) < 500


def test_ends_that_are_no_tokens_end_nothing() -> None:
    form = forms(ByteTokenizer()).made(
        wanted_of(b'{"schema": {"type": "boolean"}, "ends": [-1, 99999999999999999999]}')
    )
    assert np.flatnonzero(form.allowed()).tolist() == [ord("f"), ord("t")]
