"""Answers of a form: JSON of a schema, any JSON object, calls of tools. A grammar says which tokens may come next.

    FormWanted ──Forms.made──► Form ──allowed, take, allowed, ...──► complete

llguidance does it, with the bytes of each token, so a form holds whatever the tokenizer's kind. What it cannot hold
is refused before anything is drawn. All is bounded: a schema's size, the fuel to read it, and that of each step. So who
draws for strangers may read their forms, too: they come as schemas, and the grammar is written here.
"""

import json
import re
import threading
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from msgspec import Meta
from numpy.typing import NDArray

from weft.chat.vocabulary import Vocabulary
from weft.errors import DataError, WeftError

# Whitespace as people and programs write JSON; without a bound a model may write it for ever.
_WHITESPACE = r"\x20|\n\x20{0,24}"
_LIMITS = LLParserLimits(verbose_errors=False)  # 20 ms to read a grammar, 15 ms for a step: llguidance's own bounds
MAX_SCHEMA_NBYTES = 64 << 10  # of all schemas of a form: what APIs take, and what is read within a moment
MAX_CALLS = 16  # of tools, in one answer
MAX_TOOLS, MAX_ENDS = 64, 64  # that a form has


class FormRefused(WeftError, ValueError):
    """A form that no answer can be held to."""


class GrammarFault(WeftError):
    """A grammar that fails while a text is drawn: too large a step, or a fault of its own. `why`: in few words."""

    def __init__(self, why: str) -> None:
        super().__init__(f"The answer's form could not be held to: {why}.")
        self.why = why


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How calls of tools are written.

    Args:
        tools: the schema of each one's arguments, by name.
        strict: those of which keywords that cannot be held are refused.
        arguments: what a call has its arguments under.
        begin, between, end: what stands before the first, between two, and after the last.
        are_many: there may be more than one.
    """

    tools: Annotated[dict[str, dict[str, Any]], Meta(max_length=MAX_TOOLS)]
    strict: tuple[str, ...]
    arguments: str
    begin: str
    between: str
    end: str
    are_many: bool


class FormWanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must look like: JSON of a schema, calls of tools, or one of both.

    Args:
        is_strict: refuse keywords of the schema that cannot be held, rather than pass over them.
        ends: tokens that end a text.
    """

    schema: dict[str, Any] | None = None
    is_strict: bool = False
    calls: Calls | None = None
    ends: Annotated[tuple[int, ...], Meta(max_length=MAX_ENDS)] = ()

    def to_json(self) -> bytes:
        return json.dumps(msgspec.to_builtins(self)).encode()


def wanted_of(data: bytes) -> FormWanted:
    """Return what `FormWanted.to_json` has written.

    Raises:
        FormRefused: it is none.
    """
    try:
        return msgspec.convert(json.loads(data), FormWanted)
    except (ValueError, RecursionError) as error:
        raise FormRefused(f"this is no form: {str(error)[:200]}") from None


class Forms:
    """Makes grammars for one model.

    Args:
        vocab_size: of the model, which may have more tokens than its tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._made: LLTokenizer | None = None
        self._lock = threading.Lock()

    def made(self, wanted: FormWanted) -> "Form":
        """Return the grammar of a form. It may take a while: call it from a thread of its own.

        Raises:
            FormRefused: a schema is too large, or none; there is neither a schema nor a tool.
        """
        calls = wanted.calls
        schemas = [
            *(() if calls is None else calls.tools.values()),
            *(() if wanted.schema is None else [wanted.schema]),
        ]
        if not schemas:
            raise FormRefused("a form has a schema, or a tool that is called")
        try:
            text = wanted.to_json()
            if sum(len(json.dumps(each)) for each in schemas) > MAX_SCHEMA_NBYTES:
                raise FormRefused(f"schemas have at most {MAX_SCHEMA_NBYTES >> 10} KiB together")
            grammar = LLMatcher.grammar_from_lark(self._lark(wanted))
        except RecursionError:
            raise FormRefused("schemas are nested too deeply") from None
        matcher = LLMatcher(self._tokenizer(), grammar, limits=_LIMITS, log_level=0)
        if matcher.is_error():
            raise FormRefused(f"this schema cannot be held to: {_said(matcher.get_error())}")
        form = Form(matcher, wanted.ends, len(self._vocabulary), self._vocab_size, text)
        try:
            form.allowed()
        except GrammarFault as fault:
            raise FormRefused(f"this schema cannot be held to: {fault.why}") from None
        return form

    def warm(self) -> None:
        """Make ready what all grammars need: it takes a while where there are many tokens."""
        self._tokenizer()

    def _lark(self, wanted: FormWanted) -> str:
        schema, calls = wanted.schema, wanted.calls
        json_rule = "" if schema is None else _rule("json", schema, is_strict=wanted.is_strict)
        if calls is None:
            return f"start: json\n{json_rule}"
        texts = []
        for number, (name, parameters) in enumerate(calls.tools.items()):
            call = {
                "type": "object",
                "properties": {"name": {"const": name}, calls.arguments: parameters},
                "required": ["name", calls.arguments],
                "additionalProperties": False,
            }
            texts.append(_rule(f"call_{number}", call, is_strict=name in calls.strict))
        one = " | ".join(f"call_{number}" for number in range(len(calls.tools)))
        begin, between, end = (self._literal(each) for each in (calls.begin, calls.between, calls.end))
        most = MAX_CALLS - 1 if calls.are_many else 0
        more = f" ({between} call){{0,{most}}}" if most else ""
        start = f"start: calls{'' if schema is None else ' | json'}\ncalls: {begin} call{more} {end}\ncall: {one}\n"
        return "".join([start, *texts, json_rule])

    def _literal(self, text: str) -> str:
        """Return what stands for `text` in a grammar: a control token at its begin is that token."""
        parts = list[str]()
        while text:
            name = next((name for name in self._vocabulary.control if name and text.startswith(name)), None)
            if name is None:
                return " ".join([*parts, json.dumps(text)])
            parts.append(f"<[{self._vocabulary.control[name]}]>")
            text = text[len(name) :]
        return " ".join(parts)

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                table = _Table(self._vocabulary)
                self._made = LLTokenizer(TokenizerWrapper(table), eos_token=[table.eos_token_id])
            return self._made


class _Table:
    """A vocabulary as llguidance asks for it. One token more, which is never drawn, stands for those that end a text:
    which these are a form says."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        control = {token: name for name, token in vocabulary.control.items()}
        # A byte that is in no text marks what is no text.
        self.tokens = [
            piece or b"\xff<" + control.get(token, f"none {token}").encode() + b">"
            for token, piece in enumerate(vocabulary.pieces)
        ]
        self.tokens.append(b"\xff<end>")
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if piece[:2] == b"\xff<"]
        self.eos_token_id = len(vocabulary)
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        given = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        try:
            return [int(each) for each in self._vocabulary.tokenizer.encode(given)]
        except DataError:  # it has no token for some of it, and llguidance none that goes on
            return []


class Form:
    """A grammar that a text follows: the engine's constraint. Not safe to use from two threads at a time.

    Args:
        ends: tokens that end a text.
        end: what stands for them in the grammar; tokens of the model from there on have no text.
        text: says which form it is (`FormWanted.to_json`).
    """

    def __init__(self, matcher: LLMatcher, ends: Collection[int], end: int, vocab_size: int, text: bytes) -> None:
        self.text = text
        self._matcher, self._end, self._vocab_size = matcher, end, vocab_size
        self._ends = [each for each in ends if 0 <= each < vocab_size]

    def copy(self) -> "Form":
        """Return the same grammar for another text, as far as this one is."""
        return Form(self._matcher.deep_copy(), self._ends, self._end, self._vocab_size, self.text)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if self.is_complete:
            return mask
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise GrammarFault(_said(self._matcher.get_error()))
        num = min(self._end, self._vocab_size)
        mask[:num] = bits[:num]
        mask[self._ends] = bool(bits[self._end])
        return mask

    def may_take(self, token: int) -> bool:
        """Return whether a token may follow."""
        return not self._matcher.is_error() and self._matcher.validate_tokens([self._as_written(token)]) == 1

    def take(self, token: int) -> None:
        if not self._matcher.consume_token(self._as_written(token)):
            raise GrammarFault(_said(self._matcher.get_error()))

    def go_back(self, num: int) -> None:
        """Be as before the last `num` tokens that were taken.

        Raises:
            GrammarFault: there were not so many.
        """
        if not self._matcher.rollback(num):
            raise GrammarFault(_said(self._matcher.get_error()))

    def _as_written(self, token: int) -> int:
        return self._end if token in self._ends else token


def _rule(name: str, schema: dict[str, Any], *, is_strict: bool) -> str:
    settings = {"whitespace_pattern": _WHITESPACE, "lenient": not is_strict}
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': settings})}\n"


def _said(error: str) -> str:
    """Return a fault in one line, without llguidance's picture of the grammar."""
    if error.startswith("NoExtensionBias"):
        return "no token of the model goes on with it"
    line = re.split(r"\s+\d+ \| ", " ".join(error.split()))[0]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)[:300].rstrip(".")
