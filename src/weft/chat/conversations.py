"""Conversations out of the files that people have, one after another, in the form that templates know.

    messages            role, content, tool_calls as the OpenAI API has them
    conversations       ShareGPT: from, value
    prompt, completion  texts, or messages; the completion alone is trained on
    instruction, output Alpaca: with input and history
    beside each         system, tools
    chosen, rejected    two that begin alike, or the two answers to a prompt of one of the forms above

Each is known by its fields, in JSON lines, in one JSON array, in Parquet and Arrow. A fault names file, line and what
to do. Fields that say nothing of a conversation, such as numbers and sources, are passed over.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from weft.chat.template import Message
from weft.data.documents import LINES, json_objects, letters
from weft.data.files import Found, find, has_ending
from weft.data.tables import TABLES, column_names, table_rows
from weft.errors import DataError

T = TypeVar("T")

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "function_call": "function_call",
}
"""Whose turn it is, by what files call it; `function_call` is the assistant's."""
_FORMS = (("messages",), ("conversations",), ("conversation",), ("prompt", "completion"), ("instruction", "output"))
_ASKED = ("prompt", "question", "instruction", "messages", "conversations", "conversation")
_BESIDE = ("input", "history", "system", "tools", "functions")
_PAIR = ("chosen", "rejected")
_FIELDS = {*_BESIDE, *_PAIR, *_ASKED, *(name for form in _FORMS for name in form)}
_MAX_DEPTH = 100  # of what is called, and of tools: Python's own reader takes ten times as much
_KNOWN = "messages; conversations; prompt and completion; instruction and output"


@dataclass(frozen=True)
class Conversation:
    """
    Args:
        name: decides whether it is held out: its file's, relative to where it was found, and its place there.
        place: file and line, for people.
        messages: as templates know them, each with a role and content.
        tools: what the assistant may call.
        passed_over: which of its answers are not trained on, from 0.
    """

    name: str
    place: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    passed_over: frozenset[int] = frozenset()

    @property
    def texts(self) -> tuple["Conversation", ...]:
        """Itself: a pair has two."""
        return (self,)


def conversations(paths: Sequence[str], base: Path) -> Iterator[Conversation]:
    """Return all conversations in an order that depends on names only.

    Args:
        paths: files, folders or globs, relative to `base` or absolute.

    Raises:
        DataError: nothing is there; or, once that is read, something is no conversation: names the file, the place and
            what to do.
    """
    return _read(paths, base, conversation_of)


@dataclass(frozen=True)
class Pair:
    """Two conversations that begin alike and are answered in two ways.

    Args:
        name, place: as of a conversation.
        chosen, rejected: of each only what follows the shared beginning is learnt from.
    """

    name: str
    place: str
    chosen: Conversation
    rejected: Conversation

    @property
    def texts(self) -> tuple[Conversation, ...]:
        return self.chosen, self.rejected


def pairs(paths: Sequence[str], base: Path) -> Iterator[Pair]:
    """Return all pairs of answers in an order that depends on names only.

    Args:
        paths: as of `conversations`.

    Raises:
        DataError: as `conversations`.
    """
    return _read(paths, base, pair_of)


def are_pairs(paths: Sequence[str], base: Path) -> bool:
    """Return whether the first row of files is a pair of answers.

    Raises:
        DataError: nothing is there, or that row cannot be read.
    """
    return _is_pair(first_row(paths, base))


def kind_of_rows(paths: Sequence[str], base: Path, *, has_text: bool) -> Literal["conversations", "preferences"] | None:
    """Return whether the first row of files is a conversation or a pair of answers; None: it is text, or neither.

    Args:
        has_text: a row that could be either, with a text beside, is text.

    Raises:
        DataError: as `are_pairs`.
    """
    first = first_row(paths, base, ("text",))
    if _is_pair(first):
        return "preferences"
    is_chat = any(all(first.get(each) is not None for each in form) for form in _FORMS)
    return "conversations" if is_chat and not (has_text and isinstance(first.get("text"), str)) else None


def first_row(paths: Sequence[str], base: Path, names: Collection[str] = ()) -> Mapping[str, Any]:
    """Return the first row of files; empty: there is none. A table's columns that are not read are null.

    Args:
        names: as of `rows_of`.

    Raises:
        DataError: nothing is there, or that row cannot be read.
    """
    files = find(paths, base, (*LINES, *TABLES))
    for file in files:
        for row, _name, _place in _rows([file], {*_FIELDS, *names}):
            columns = column_names(file.path) if has_ending(file.path.name, TABLES) else ()
            return {**dict.fromkeys(columns), **row}
    return {}


def _is_pair(row: Mapping[str, Any]) -> bool:
    return all(row.get(each) is not None for each in _PAIR)


def _read(paths: Sequence[str], base: Path, made: Callable[[Mapping[str, Any], str, str], T]) -> Iterator[T]:
    rows = rows_of(paths, base)
    return (made(row, name, place) for row, name, place in rows)


def rows_of(
    paths: Sequence[str], base: Path, names: Collection[str] = ()
) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Return the rows of files, each with its name and, for people, its place.

    Args:
        paths: as of `conversations`.
        names: fields that are read of tables, beside those of conversations.

    Raises:
        DataError: as `conversations`.
    """
    return _rows(find(paths, base, (*LINES, *TABLES)), {*_FIELDS, *names})


def _rows(files: Sequence[Found], names: Collection[str]) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    for file in files:
        is_table = has_ending(file.path.name, TABLES)
        for number, place, row in table_rows(file.path, names) if is_table else json_objects(file.path):
            # A table has all fields in all its rows; those that a row lacks are null.
            yield _without_nulls(row) if is_table else row, f"{file.name}:{number}", place


def conversation_of(row: Mapping[str, Any], name: str, place: str) -> Conversation:
    """Return what a row of a file says.

    Raises:
        DataError: it is no conversation.
    """
    form = next((form for form in _FORMS if all(row.get(each) is not None for each in form)), None)
    num_asked = 0  # messages of a prompt
    match form:
        case None:
            advice = "Rename its fields."
            if all(each in row for each in _PAIR):
                advice = 'Pairs of answers are read by [data.source] type = "preferences".'
            raise DataError(
                f"{place}: no conversation: it has {', '.join(sorted(row)) or 'no fields'}, and weft knows {_KNOWN}. "
                f"{advice}"
            )
        case ("prompt", "completion"):
            asked = _side(row["prompt"], "user", "prompt", place)
            num_asked, messages = len(asked), asked + _side(row["completion"], "assistant", "completion", place)
        case ("instruction", "output"):
            messages = _alpaca(row, place)
        case (field,):
            messages = _messages(row[field], field, place)
    return _whole(row, messages, num_asked, name, place)


def _whole(
    row: Mapping[str, Any], messages: Sequence[dict[str, Any]], num_asked: int, name: str, place: str
) -> Conversation:
    """Return the conversation of a row's messages, of which the first are not trained on."""
    skipped = frozenset(_skipped(messages, num_asked))
    messages = [{name: value for name, value in each.items() if name != "weight"} for each in messages]
    messages = with_system(row, messages, place)
    _check(messages, place)
    return Conversation(name, place, tuple(messages), tuple(_tools(row, place)), skipped)


def pair_of(row: Mapping[str, Any], name: str, place: str) -> Pair:
    """Return the pair that a row of a file holds.

    Raises:
        DataError: it is no pair.
    """
    missing = [each for each in _PAIR if row.get(each) is None]
    if missing:
        raise DataError(
            f"{place}: no pair of answers: it has {', '.join(sorted(row)) or 'no fields'}, and lacks "
            f"{' and '.join(missing)}. Rename its fields, or remove it."
        )
    sides = [
        _side([row[each]] if isinstance(row[each], Mapping) else row[each], "assistant", each, place) for each in _PAIR
    ]
    if any(side[0]["role"] == "assistant" for side in sides):  # else each is a whole conversation
        asked = asked_of(row, place)
        if asked[-1]["role"] == "assistant":
            raise DataError(
                f"{place}: what was asked ends with an answer. Leave that out, or name it chosen or rejected."
            )
        sides = [[*asked, *side] for side in sides]
    num_asked = next(
        (number for number, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), len(min(sides, key=len))
    )
    chosen, rejected = (_whole(row, side, num_asked, name, place) for side in sides)
    for side, each in zip((chosen, rejected), _PAIR, strict=True):
        if side.messages[-1]["role"] != "assistant":
            raise DataError(f"{place}: {each} does not end with the assistant's turn. Write its answer, or remove it.")
    return Pair(name, place, chosen, rejected)


def asked_of(row: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return the messages that an answer is to follow.

    Raises:
        DataError: there are none.
    """
    form = next((field for field in _ASKED if row.get(field) is not None), None)
    match form:
        case None:
            raise DataError(
                f"{place}: it has {', '.join(sorted(row)) or 'no fields'}, and nothing that is asked. Name that "
                "prompt; of pairs, chosen and rejected may be lists of messages that begin with it."
            )
        case "instruction":
            return _alpaca({**row, "output": ""}, place)[:-1]
        case "prompt" | "question":
            return _side(row[form], "user", form, place)
        case _:
            return _messages(row[form], form, place)


def with_system(row: Mapping[str, Any], messages: Sequence[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Return messages behind the system's text of their row, unless they begin with one.

    Raises:
        DataError: it is no text.
    """
    system = row.get("system")
    text = "" if system is None else text_of(system, f"{place}: system")
    is_first = bool(text) and messages[0]["role"] != "system"
    return [*([{"role": "system", "content": text}] if is_first else []), *messages]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


# --- forms ---


def _messages(value: Any, field: str, place: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = _json(value, f"{place}: field {field!r}")
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] else "no list"
        raise DataError(f"{place}: field {field!r} is {kind}; it must be a list of messages.")
    return [_message(each, f"{place}, {field} {number}") for number, each in enumerate(value, start=1)]


def _side(value: Any, role: str, field: str, place: str) -> list[dict[str, Any]]:
    """Return one side of a prompt and its completion: a text, or messages."""
    if isinstance(value, str):
        return [{"role": role, "content": text_of(value, f"{place}: {field}")}]
    return _messages(value, field, place)


def _alpaca(row: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    history, more = (row.get(name) for name in ("history", "input"))
    history = [] if history in (None, "") else history
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError(
            f"{place}: history is no list of pairs, each a question and its answer. Write it so, or remove it."
        )
    turns = [(f"history {number}", pair) for number, pair in enumerate(history, start=1)]
    asked = text_of(row["instruction"], f"{place}: instruction")
    more = "" if more is None else text_of(more, f"{place}: input")
    turns.append(("output", ["\n\n".join(each for each in (asked, more) if each), row["output"]]))
    return [
        {"role": role, "content": text_of(text, f"{place}: {what}")}
        for what, pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _message(given: Any, place: str) -> dict[str, Any]:
    """Return a message as templates know it, and its weight where it has one."""
    if not isinstance(given, Mapping):
        raise DataError(f"{place}: no message: it must be an object with role and content.")
    role, content = _role(given, place), _first(given, "content", "value")
    message: dict[str, Any] = {"role": role, "content": _content(content, place)}
    calls = given.get("tool_calls")
    if role == "function_call":
        called = _json(content, place) if isinstance(content, str) else content
        message = {"role": "assistant", "content": None}
        calls = called if isinstance(called, list) else [called]
    elif given.get("function_call") not in _NOTHING:
        calls = [given["function_call"]]
    if isinstance(calls, str) and calls:
        calls = _json(calls, f"{place}: tool_calls")
    if calls not in _NOTHING:
        message["content"] = message["content"] or None  # as the API has it
        message["tool_calls"] = _calls(calls, place)
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = text_of(given[name], f"{place}: {name}")
    if (reasoning := _first(given, "reasoning_content", "reasoning", "thinking")) is not None:
        message["reasoning_content"] = text_of(reasoning, f"{place}: reasoning")
    if given.get("weight") is not None:
        if given["weight"] not in (0, 1):
            raise DataError(f"{place}: weight is {given['weight']!r}: it may be 0, not trained on, or 1.")
        message["weight"] = given["weight"]
    return message


def _role(given: Mapping[str, Any], place: str) -> str:
    named = _first(given, "role", "from")
    if named is None:
        raise DataError(f"{place}: nobody's turn: it has {', '.join(sorted(given)) or 'no fields'}, and needs a role.")
    role = ROLES.get(named.casefold()) if isinstance(named, str) else None
    if role is None:
        raise DataError(
            f"{place}: unknown role {str(named)[:40]!r}. Known are system, user, assistant and tool (and developer, "
            "human, gpt, function, observation, function_call of other forms). Rename it."
        )
    return role


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _content(value: Any, place: str) -> str:
    """Return the text of a message: as it is, or that of its parts."""
    if value is None or isinstance(value, str):
        return text_of(value or "", f"{place}: content")
    if not isinstance(value, list):
        raise DataError(f"{place}: its content is neither text nor parts of text. Write it as text.")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in (None, "text") or not isinstance(text, str):
            raise DataError(
                f"{place}: its content has a part of type {str(kind)[:40]!r}: only text is trained on. Leave it out."
            )
        texts.append(text_of(text, f"{place}: content"))
    return "".join(texts)


def _calls(given: Any, place: str) -> list[dict[str, Any]]:
    """Return what the assistant calls; its arguments as values, where they are written as JSON."""
    if not isinstance(given, list):
        raise DataError(f"{place}: tool_calls is no list. Write a list of calls, or remove it.")
    calls = []
    for number, each in enumerate(given):
        function = _first(each, "function") or each if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}: its tool call {number + 1} names no function. Give name and arguments.")
        arguments, what = function.get("arguments"), f"{place}: arguments of tool call {number + 1}"
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}", what)
        calls.append(
            {
                "id": label_of(each.get("id") or f"call_{number:04d}", f"{place}: id of tool call {number + 1}"),
                "type": "function",
                "function": {
                    "name": text_of(function["name"], what),
                    "arguments": {} if arguments is None else json_value(arguments, what),
                },
            }
        )
    return calls


def _tools(row: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    given = _first(row, "tools", "functions")
    tools = _json(given, f"{place}: tools") if isinstance(given, str) and given else given
    if tools in _NOTHING:
        return []
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise DataError(f"{place}: tools is no list of objects. Write a list of functions, or remove it.")
    known: list[Mapping[str, Any]] = json_value(tools, f"{place}: tools")
    found = [each if _first(each, "function") else {"type": "function", "function": each} for each in known]
    for number, each in enumerate(found, start=1):
        function = each["function"]
        if not isinstance(function, Mapping) or not isinstance(function.get("name", ""), str):
            raise DataError(f"{place}: tool {number} is no function with a name. Give it one, or remove it.")
    return found


# --- values ---


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: no JSON: {str(error)[:100]}. Write it as JSON.") from None


_NOTHING: tuple[Any, ...] = (None, "", [], {})  # says that there is none; False and 0 are mistakes


def text_of(value: Any, what: str) -> str:
    """Return a text.

    Raises:
        DataError: it is none; says of `what`.
    """
    if not isinstance(value, str):
        raise DataError(f"{what} is no text. Write it as text, or remove it.")
    return letters(value, what)


def label_of(value: Any, what: str) -> str:
    """Return a text, or a number as text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else text_of(value, what)


def json_value(value: Any, what: str, depth: int = 0) -> Any:
    """Return a value as JSON has it; a table may hold others, such as times.

    Raises:
        DataError: it holds what JSON has not, or is nested too deep; says of `what`.
    """
    if depth > _MAX_DEPTH:
        raise DataError(f"{what} is nested deeper than {_MAX_DEPTH}. Make it flatter, or remove it.")
    match value:
        case str():
            return text_of(value, what)
        case dict():
            return {text_of(name, what): json_value(each, what, depth + 1) for name, each in value.items()}
        case list():
            return [json_value(each, what, depth + 1) for each in value]
        case None | bool() | int() | float():
            return value
    raise DataError(f"{what} holds a {type(value).__name__}, which JSON has not. Write it as text.")


# --- all of it ---


def _skipped(messages: Sequence[Mapping[str, Any]], num_asked: int) -> Iterator[int]:
    """Yield which answers are not trained on: those of a prompt, and those of weight 0."""
    answers = [(place, each) for place, each in enumerate(messages) if each["role"] == "assistant"]
    for number, (place, each) in enumerate(answers):
        if place < num_asked or each.get("weight") == 0:
            yield number


def _check(messages: Sequence[Message], place: str) -> None:
    """Refuse a conversation of which nothing can be learnt, and turns without content."""
    if all(each["role"] != "assistant" for each in messages):
        raise DataError(
            f"{place}: nobody answers: it has no assistant's turn, so nothing of it is trained on. Remove it."
        )
    for number, each in enumerate(messages, start=1):
        if (each["content"] or "").strip() or each.get("tool_calls"):
            continue
        if each["role"] == "assistant" and not each.get("reasoning_content"):
            raise DataError(f"{place}: the assistant's turn {number} is empty. Write the answer, or remove it.")
        if each["role"] in ("user", "system"):
            raise DataError(f"{place}: the {each['role']}'s turn {number} is empty. Write it, or remove it.")
