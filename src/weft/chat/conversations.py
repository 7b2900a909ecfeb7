"""Conversations out of the files that people have, one after another, in the form that templates know.

    messages            role, content, tool_calls as the OpenAI API has them; `tools` beside it
    conversations       ShareGPT: from, value
    prompt, completion  texts, or messages
    instruction, output Alpaca; `input` beside the instruction

Each is known by its fields, in JSON lines, in one JSON array, in Parquet and Arrow. A fault names file, line and what
to do; nothing is left out in silence.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.documents import LINES, json_objects
from weft.data.files import find, has_ending
from weft.data.tables import TABLES, table_rows
from weft.errors import DataError

Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "function_call": "function_call",
}
"""Whose turn it is, by what files call it; `function_call` is the assistant's."""
_FORMS = (("messages",), ("conversations",), ("conversation",), ("prompt", "completion"), ("instruction", "output"))
_KNOWN = "messages; conversations; prompt and completion; instruction and output"


@dataclass(frozen=True)
class Conversation:
    """
    Args:
        name: decides whether it is held out: its file's, relative to where it was found, and its place there.
        place: file and line, for people.
        messages: as templates know them, each with a role and, but for a call, content.
        tools: what the assistant may call.
    """

    name: str
    place: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def conversations(paths: Sequence[str], base: Path, field: str | None = None) -> Iterator[Conversation]:
    """Yield all conversations in an order that depends on names only.

    Args:
        paths: files, folders or globs, relative to `base` or absolute.
        field: that holds the messages; None: known by its name.

    Raises:
        DataError: nothing is there, or something is no conversation: names the file, the place and what to do.
    """
    for file in find(paths, base, (*LINES, *TABLES)):
        rows = table_rows if has_ending(file.path.name, TABLES) else json_objects
        for number, place, row in rows(file.path):
            yield conversation_of(row, f"{file.name}:{number}", place, field)


def conversation_of(row: Mapping[str, Any], name: str, place: str, field: str | None = None) -> Conversation:
    """Return what a row of a file says.

    Raises:
        DataError: it is no conversation.
    """
    given, where = _messages(row, place, field)
    messages = tuple(_message(each, f"{place}, {where} {number}") for number, each in enumerate(given, start=1))
    _check(messages, place)
    return Conversation(name, place, messages, tuple(_tools(row.get("tools"), place)))


def _messages(row: Mapping[str, Any], place: str, field: str | None) -> tuple[list[Any], str]:
    """Return a row's messages as they are written, and what one is called."""
    if field is not None:
        if field not in row:
            raise DataError(f"{place}: no field {field!r}; it has {', '.join(sorted(row)) or 'none'}.")
        return _list(row[field], field, place), field
    form = next((form for form in _FORMS if all(row.get(each) is not None for each in form)), None)
    match form:
        case ("prompt", "completion"):
            return [*_side(row["prompt"], "user", place), *_side(row["completion"], "assistant", place)], "message"
        case ("instruction", "output"):
            asked = _text(row["instruction"], f"{place}: instruction")
            more = _text(row.get("input") or "", f"{place}: input")
            turns = {"system": row.get("system"), "user": f"{asked}\n\n{more}" if more else asked}
            turns = {role: text for role, text in turns.items() if text} | {"assistant": row["output"]}
            return [{"role": role, "content": text} for role, text in turns.items()], "message"
        case (name,):
            found = _list(row[name], name, place)
            system = row.get("system")
            if isinstance(system, str) and system and not _is_system(found):
                found = [{"role": "system", "content": system}, *found]
            return found, name
    raise DataError(
        f"{place}: no conversation: it has {', '.join(sorted(row)) or 'no fields'}, and weft knows {_KNOWN}. Rename "
        "its fields, or name the one that holds the messages: --set data.source.field=NAME."
    )


def _is_system(messages: Sequence[Any]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, Mapping) and ROLES.get(str(first.get("role", first.get("from")))) == "system"


def _list(value: Any, name: str, place: str) -> list[Any]:
    if isinstance(value, str):
        value = _json(value, f"{place}: field {name!r}")
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] or value is None else "no list"
        raise DataError(f"{place}: field {name!r} is {kind}; it must be a list of messages.")
    return value


def _side(value: Any, role: str, place: str) -> list[Any]:
    """Return one side of a prompt and its completion: a text, or messages."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _list(value, role, place)


def _message(given: Any, place: str) -> Message:
    """Return a message as templates know it."""
    if not isinstance(given, Mapping):
        raise DataError(f"{place}: no message: it must be an object with role and content.")
    named = given.get("role", given.get("from"))
    if named is None:
        raise DataError(f"{place}: nobody's turn: it has {', '.join(sorted(given)) or 'no fields'}, and needs a role.")
    role = ROLES.get(named.casefold()) if isinstance(named, str) else None
    if role is None:
        raise DataError(
            f"{place}: unknown role {str(named)[:40]!r}. Known are system, user, assistant and tool (and developer, "
            "human, gpt, function, observation, function_call of other forms). Rename it."
        )
    content = given.get("content", given.get("value"))
    if role == "function_call":
        calls = _json(content, place) if isinstance(content, str) else content
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": _calls(calls if isinstance(calls, list) else [calls], place),
        }
    message: Message = {"role": role, "content": _content(content, place)}
    if given.get("tool_calls"):
        message["tool_calls"] = _calls(_list(given["tool_calls"], "tool_calls", place), place)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if given.get(name) is not None:
            message[name] = _text(given[name], f"{place}: {name}")
    return message


def _content(value: Any, place: str) -> str | None:
    """Return the text of a message: as it is, or that of its parts."""
    if value is None or isinstance(value, str):
        return None if value is None else _text(value, f"{place}: content")
    if not isinstance(value, list):
        raise DataError(f"{place}: its content is neither text nor parts of text.")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in (None, "text") or not isinstance(text, str):
            raise DataError(
                f"{place}: its content has a part of type {str(kind)[:40]!r}: only text is trained on. Leave it out."
            )
        texts.append(_text(text, f"{place}: content"))
    return "".join(texts)


def _calls(given: Sequence[Any], place: str) -> list[Message]:
    """Return what the assistant calls; its arguments as values, where they are written as JSON."""
    calls = []
    for number, each in enumerate(given):
        function = each.get("function", each) if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{place}: its tool call {number + 1} names no function.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}", f"{place}: arguments of tool call {number + 1}")
        calls.append(
            {
                "id": str(each.get("id") or f"call_{number:04d}"),
                "type": "function",
                "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
            }
        )
    return calls


def _tools(given: Any, place: str) -> list[Mapping[str, Any]]:
    tools = _json(given, f"{place}: tools") if isinstance(given, str) and given else given
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise DataError(f"{place}: tools is no list of objects.")
    return [each if "function" in each else {"type": "function", "function": each} for each in tools]


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: no JSON: {str(error)[:100]}.") from None


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{what} is no text.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{what} holds half a surrogate pair, which is not a letter.") from None
    return value


def _check(messages: Sequence[Message], place: str) -> None:
    """Refuse a conversation of which nothing can be learnt."""
    answers = [number for number, each in enumerate(messages, start=1) if each["role"] == "assistant"]
    if not answers:
        raise DataError(
            f"{place}: nobody answers: it has no assistant's turn, so nothing of it is trained on. Remove it."
        )
    for number, each in enumerate(messages, start=1):
        has_more = each.get("tool_calls") or each.get("reasoning_content")
        if each["role"] == "assistant" and not (each["content"] or "").strip() and not has_more:
            raise DataError(f"{place}: the assistant's turn {number} is empty. Write the answer, or remove it.")
