"""What is drawn as a form allows is of that form, whatever the model likes."""

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from unit.chat.test_vocabulary import KINDS
from weft import rng
from weft.chat.vocabulary import Vocabulary
from weft.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from weft.serve.failures import Fault
from weft.serve.grammar import Calls, Form, Forms
from weft.serve.schemas import MAX_SCHEMA_NBYTES


def forms(tokenizer: Tokenizer) -> Forms:
    end = tokenizer.end_of_text
    return Forms(Vocabulary(tokenizer), [] if end is None else [end], tokenizer.vocab_size + 7)


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
        text = written(made.of_schema(schema, "response_format", is_strict=True), tokenizer, number)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", ["trained", "words"])
def test_a_schema_is_held_to_with_every_kind_of_tokenizer(kind: str) -> None:
    tokenizer = KINDS[kind] if kind == "words" else train_bpe(['{"a": 12, "b": "red"}'] * 5, 262)
    schema = schemas()[1]
    for seed in range(5):
        jsonschema.validate(
            json.loads(written(forms(tokenizer).of_schema(schema, "x", is_strict=True), tokenizer, seed)), schema
        )


def test_any_object_is_an_object() -> None:
    tokenizer = ByteTokenizer()
    made = forms(tokenizer).of_schema({"type": "object"}, "x", is_strict=False)
    assert isinstance(json.loads(written(made, tokenizer, 3)), dict)
    assert made.allowed().shape == (tokenizer.vocab_size + 7,)


def test_a_copy_begins_where_the_form_did() -> None:
    form = forms(ByteTokenizer()).of_schema({"type": "boolean"}, "x", is_strict=True)
    copy = form.copy()
    form.take(ord("t"))
    assert copy.allowed()[ord("f")]
    assert not form.allowed()[ord("f")]


def test_calls_are_of_tools_that_there_are() -> None:
    tokenizer = ByteTokenizer()
    tools = {
        "look": {"type": "object", "properties": {"n": LEAVES[0]}, "required": ["n"], "additionalProperties": False}
    }
    calls = Calls(tools, [], "arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", True)
    text = written(forms(tokenizer).of_calls(calls, "tools"), tokenizer, 1)
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
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(Fault, match=said) as refused:
        forms(ByteTokenizer()).of_schema(schema, "response_format", is_strict=True)
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert len(str(refused.value)) < 500


def test_keywords_that_are_not_known_are_passed_over_where_it_is_not_strict() -> None:
    forms(ByteTokenizer()).of_schema({"type": "integer", "not": {"const": 3}}, "x", is_strict=False)
