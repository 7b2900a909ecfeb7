"""Answers of a form: JSON of a schema, any JSON object, calls of tools. A grammar says which tokens may come next.

llguidance does it, with the bytes of each token, so a form holds whatever the tokenizer's kind. What it cannot hold
is refused before anything is drawn. All is bounded: a schema's size, the fuel to read it, and that of each step.
"""

import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from weft.chat.vocabulary import Vocabulary
from weft.errors import WeftError
from weft.serve.failures import wrong
from weft.serve.schemas import MAX_SCHEMA_NBYTES

# Whitespace as people and programs write JSON; without a bound a model may write it for ever.
_WHITESPACE = r"\x20|\n\x20{0,24}"
_LIMITS = LLParserLimits(verbose_errors=False)  # 20 ms to read a grammar, 15 ms for a step: llguidance's own bounds
MAX_CALLS = 16  # of tools, in one answer


class GrammarFault(WeftError):
    """A grammar that fails while a text is drawn: too large a step, or a fault of its own."""


class Forms:
    """Makes grammars for one model.

    Args:
        ends: tokens that end a text.
        vocab_size: of the model, which may have more tokens than its tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary, ends: Collection[int], vocab_size: int) -> None:
        self._vocabulary, self._ends, self._vocab_size = vocabulary, sorted(ends), vocab_size
        self._made: LLTokenizer | None = None
        self._lock = threading.Lock()

    def of_schema(self, schema: Mapping[str, Any], param: str, *, is_strict: bool) -> "Form":
        """Return the grammar of a JSON schema. It may take a while: call it from a thread of its own.

        Args:
            is_strict: refuse keywords that cannot be held, rather than pass over them.

        Raises:
            Fault: the schema is too large, or none.
        """
        return self._checked("start: json\n" + _rule("json", schema, is_strict=is_strict), param, [schema])

    def of_calls(
        self, calls: "Calls", param: str, schema: Mapping[str, Any] | None = None, *, is_strict: bool = False
    ) -> "Form":
        """Return the grammar of one call of a tool, or several.

        Args:
            schema: of JSON that may be written instead; None: nothing else may.
            is_strict: of that schema, as `of_schema`.

        Raises:
            Fault: a tool's parameters are no schema, or that schema is none.
        """
        texts = []
        for number, (name, parameters) in enumerate(calls.tools.items()):
            call = {
                "type": "object",
                "properties": {"name": {"const": name}, calls.arguments: dict(parameters)},
                "required": ["name", calls.arguments],
                "additionalProperties": False,
            }
            texts.append(_rule(f"call_{number}", call, is_strict=name in calls.strict))
        one = " | ".join(f"call_{number}" for number in range(len(calls.tools)))
        begin, between, end = (self._literal(each) for each in (calls.begin, calls.between, calls.end))
        most = MAX_CALLS - 1 if calls.are_many else 0
        more = f" ({between} call){{0,{most}}}" if most else ""
        start = f"start: calls{'' if schema is None else ' | json'}\ncalls: {begin} call{more} {end}\ncall: {one}\n"
        if schema is not None:
            texts.append(_rule("json", schema, is_strict=is_strict))
        return self._checked(start + "".join(texts), param, [*calls.tools.values(), schema])

    def _literal(self, text: str) -> str:
        """Return what stands for `text` in a grammar: a control token at its begin is that token."""
        if not text:
            return ""
        for name, token in self._vocabulary.control.items():
            if text.startswith(name):
                return f"<[{token}]> {self._literal(text[len(name) :])}"
        return json.dumps(text)

    def _checked(self, lark: str, param: str, schemas: Sequence[Any]) -> "Form":
        if sum(len(json.dumps(each)) for each in schemas) > MAX_SCHEMA_NBYTES:
            raise wrong(f"{param}: schemas have at most {MAX_SCHEMA_NBYTES >> 10} KiB together.", param)
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._tokenizer(), grammar, limits=_LIMITS, log_level=0)
        if matcher.is_error():
            raise wrong(f"{param}: this schema cannot be held to: {_said(matcher.get_error())}.", param)
        return Form(matcher, self._vocab_size)

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                self._made = LLTokenizer(TokenizerWrapper(_Table(self._vocabulary, self._ends)), eos_token=self._eos)
            return self._made

    @property
    def _eos(self) -> list[int]:
        return self._ends or [len(self._vocabulary)]


class _Table:
    """A vocabulary as llguidance asks for it. Where no token ends a text, one that is never drawn stands for it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        control = {token: name for name, token in vocabulary.control.items()}
        # A byte that is in no text marks what is no text.
        self.tokens = [
            piece or b"\xff<" + control.get(token, f"none {token}").encode() + b">"
            for token, piece in enumerate(vocabulary.pieces)
        ]
        self.tokens.append(b"\xff<end>")
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if piece[:2] == b"\xff<"]
        self.eos_token_id = ends[0] if ends else len(vocabulary)
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        given = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return [int(each) for each in self._vocabulary.tokenizer.encode(given)]


class Form:
    """A grammar that a text follows: the engine's constraint."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> "Form":
        """Return the same grammar for another text, as it is at its begin."""
        return Form(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return mask
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise GrammarFault(f"The answer's form could not be held to: {_said(self._matcher.get_error())}.")
        num = min(len(bits), self._vocab_size)
        mask[:num] = bits[:num]
        return mask

    def take(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise GrammarFault(f"The answer's form could not be held to: {_said(self._matcher.get_error())}.")


@dataclass(frozen=True)
class Calls:
    """How calls of tools are written.

    Args:
        tools: the schema of each one's arguments, by name.
        strict: those of which keywords that cannot be held are refused.
        arguments: what a call has its arguments under.
        begin, between, end: what stands before the first, between two, and after the last.
        are_many: there may be more than one.
    """

    tools: Mapping[str, Mapping[str, Any]]
    strict: Collection[str]
    arguments: str
    begin: str
    between: str
    end: str
    are_many: bool


def _rule(name: str, schema: Mapping[str, Any], *, is_strict: bool) -> str:
    settings = {"whitespace_pattern": _WHITESPACE, "lenient": not is_strict}
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': settings})}\n"


def _said(error: str) -> str:
    """Return a fault in one line, without llguidance's picture of the grammar."""
    line = re.split(r"\s+\d+ \| ", " ".join(error.split()))[0]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)[:300].rstrip(".")
