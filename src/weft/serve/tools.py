"""Calls of tools, as models write them into their text, told apart from the rest of it as it comes.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number        (Hermes, Qwen, SmolLM)
    llama3    {"name": "f", "parameters": {...}}, the whole text, after <|python_tag|> or not, `;` between
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]

A model's template tells which it was trained on. A call's name is told once it is whole, its arguments as they come,
letter by letter. What begins like a call and is none is text: nothing that a model writes is lost.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.chat.template import Template
from weft.rng import fresh_secret


@dataclass(frozen=True)
class Style:
    """How a model writes calls.

    Args:
        mark: what comes before; where it is none, a call is only what the text begins with.
        arguments: what a call has its arguments under.
        begin, between, end: around calls, for the grammar that makes a model write some.
    """

    name: Literal["hermes", "llama3", "mistral"]
    mark: str
    arguments: str
    begin: str
    between: str
    end: str

    def new_id(self) -> str:
        """Return an id for a call: nine letters for Mistral's templates, which refuse others."""
        return fresh_secret(5).hex()[:9] if self.name == "mistral" else f"call_{fresh_secret(12).hex()}"


HERMES = Style("hermes", "<tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LLAMA3 = Style("llama3", "<|python_tag|>", "parameters", "", "; ", "")
MISTRAL = Style("mistral", "[TOOL_CALLS]", "arguments", "[TOOL_CALLS][", ", ", "]")


def style_of(template: Template | None) -> Style:
    """Return how a model of this template writes calls; hermes', where it does not tell."""
    source = "" if template is None else template.source
    if MISTRAL.mark in source:
        return MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if LLAMA3.mark in source or ('"parameters"' in source and "ipython" in source):
        return LLAMA3
    return HERMES


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a system turn about tools, for a model whose template takes none."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call functions. They are, one a line:\n<tools>\n{listed}\n</tools>\nTo call one, write:\n"
        '<tool_call>\n{"name": "its name", "arguments": {...}}\n</tool_call>'
    )


# --- what a model wrote ---


@dataclass(frozen=True)
class Said:
    text: str


@dataclass(frozen=True)
class CallBegun:
    number: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More letters of a call's arguments."""

    number: int
    text: str


Told = Said | CallBegun | Arguments

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_CLOSING = "</tool_call>"


class Reader:
    """Takes a text apart as it comes.

    Args:
        names: of the tools there are; a call of another is text.
    """

    def __init__(self, style: Style, names: Sequence[str]) -> None:
        self._style, self._names = style, frozenset(names)
        self._state: Literal["text", "head", "arguments", "tail"] = "text"
        self._held = ""
        self._is_fresh = True  # nothing but space since the begin, or since the last call
        self._has_said = False
        self._scan = _Scan()
        self.num_calls = 0

    def feed(self, text: str) -> list[Told]:
        self._held += text
        return self._told(is_last=False)

    def finish(self) -> list[Told]:
        """Nothing more comes: what was held back is text."""
        return self._told(is_last=True)

    def _told(self, *, is_last: bool) -> list[Told]:
        told: list[Told] = []
        steps = {"text": self._text, "head": self._head, "arguments": self._arguments, "tail": self._tail}
        while steps[self._state](told, is_last):
            pass
        return told

    # Each goes on as far as one thing, and returns whether there may be more in what is held.

    def _text(self, told: list[Told], is_last: bool) -> bool:
        held, mark = self._held, self._style.mark
        at = held.find(mark)
        if at >= 0:
            self._say(told, held[:at])
            return self._turn("head", held[at:])
        if self._style.name == "llama3" and not self._has_said and held.lstrip()[:1] == "{":
            return self._turn("head", held)
        if is_last:
            if not self.num_calls or held.strip():
                self._is_fresh = False
                self._say(told, held)
            self._held = ""
            return False
        if self._is_fresh and not held.strip():
            return False  # space before what may be a call
        num_kept = next((num for num in range(min(len(mark) - 1, len(held)), 0, -1) if held.endswith(mark[:num])), 0)
        self._say(told, held[: len(held) - num_kept])
        self._held = held[len(held) - num_kept :]
        return False

    def _head(self, told: list[Told], is_last: bool) -> bool:
        """A call begins: its mark, if it has one, then an object."""
        body = self._held.removeprefix(self._style.mark).lstrip()
        if self._style.name == "mistral":
            body = body.removeprefix("[").lstrip()
        if not body and not is_last:
            return False
        if body[:1] != "{":
            return self._no_call(told)
        if (head := _HEAD.match(body)) is not None:
            if (name := _name(head[1])) not in self._names:
                return self._no_call(told)
            told.append(CallBegun(self.num_calls, self._style.new_id(), name))
            return self._turn("arguments", body[head.end() :])
        end = self._scan.end_of(body)
        if end is None:
            return self._no_call(told) if is_last else False
        if (found := _call_of(body[:end])) is None or found[0] not in self._names:
            return self._no_call(told)
        told += [CallBegun(self.num_calls, self._style.new_id(), found[0]), Arguments(self.num_calls, found[1])]
        self.num_calls += 1
        return self._turn("tail", body[end - 1 :])

    def _arguments(self, told: list[Told], _is_last: bool) -> bool:
        end = self._scan.end_of(self._held)
        if text := self._held[:end]:
            told.append(Arguments(self.num_calls, text))
        if end is None:
            self._held = ""
            self._scan.begin_anew_at(0)
            return False
        self.num_calls += 1
        return self._turn("tail", self._held[end:])

    def _tail(self, _told: list[Told], is_last: bool) -> bool:
        """The call's own bracket closes, then what is written after a call, or between two."""
        rest = self._held.lstrip()
        inner = rest.removeprefix("}").lstrip()
        if rest[:1] == "}" and (closes := self._closes(inner)) is None and not is_last:
            return False
        if not rest:
            return False
        if rest[:1] != "}":
            return self._turn("text", rest)
        return self._turn(*(closes or ("text", inner)))

    def _closes(self, rest: str) -> "tuple[Literal['text', 'head'], str] | None":
        """Return what comes next, and what is left for it; None: that cannot be said yet."""
        if self._style.name == "hermes":
            return (
                None
                if len(rest) < len(_CLOSING) and _CLOSING.startswith(rest)
                else ("text", rest.removeprefix(_CLOSING))
            )
        if not rest:
            return None
        if rest[0] in ",;":
            return "head", rest[1:]
        return ("head", rest) if rest[0] == "{" else ("text", rest.removeprefix("]"))

    def _turn(self, state: Literal["text", "head", "arguments", "tail"], held: str) -> bool:
        self._state, self._held = state, held
        self._scan = _Scan()
        self._is_fresh = self._is_fresh or state == "tail"
        return True

    def _no_call(self, told: list[Told]) -> bool:
        """What began like a call is none: it is text."""
        num = len(self._style.mark) if self._held.startswith(self._style.mark) else 1
        first, rest = self._held[:num], self._held[num:]
        self._is_fresh = False
        self._say(told, first)
        return self._turn("text", rest)

    def _say(self, told: list[Told], text: str) -> None:
        if text.strip() or (text and not self._is_fresh):
            told.append(Said(text))
            self._is_fresh, self._has_said = False, True


class _Scan:
    """Finds where a JSON object ends, in a text that grows."""

    def __init__(self) -> None:
        self._place = self._depth = 0
        self._in_string = self._is_escaped = False

    def begin_anew_at(self, place: int) -> None:
        """What was looked at is gone: the text goes on at `place`."""
        self._place = place

    def end_of(self, text: str) -> int | None:
        """Return the place after the object's last bracket; None: it has not ended."""
        for place in range(self._place, len(text)):
            letter = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._place = place + 1
                    return place + 1
        self._place = len(text)
        return None


def _name(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""


def _call_of(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call that is whole; None: it is none."""
    try:
        tree = json.loads(text)
    except ValueError:
        return None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return None
    arguments = tree.get("arguments", tree.get("parameters", {}))
    return tree["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
