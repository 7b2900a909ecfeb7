"""Messages of a chat as the text that a model was trained on: its own template (Jinja), or plain turns.

A stranger may have written a template, so it runs in minijinja, which reaches no file, no attribute and no Python, and
has fuel: one that does not end is refused, as are those that make too much text. A folder says it in
tokenizer_config.json (one template, or several by name), chat_template.jinja or chat_template.json.

Where there is none, turns are written as

    System: ...            Assistant: ...
    User: ...              Tool: ...

each with an empty line after it, and the answer ends where the next turn would begin.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import minijinja

from weft import reading
from weft.chat.vocabulary import BEGIN, END
from weft.errors import DataError
from weft.model.came_with import GENERATION_CONFIG, TOKENIZER_CONFIG, CameWith

FUEL = 1_000_000  # instructions, and bytes put together; 2,048 messages take a tenth
MAX_SOURCE_NBYTES = 256 << 10  # the largest published template has 20 KiB
MAX_TEXT_NBYTES = 1 << 20
_GENERATION = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")  # marks what loss is taken of
_TURNS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nTool:")

Message = Mapping[str, Any]


class TemplateFault(DataError):
    """A template that does not run, or refuses these messages."""


class Template:
    """A chat template.

    Args:
        source: Jinja.
        tokens: what it may call control tokens by: `bos_token` and others.
        with_tools: another source for chats with tools; None: the same.

    Raises:
        TemplateFault: it is too long, or no Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, with_tools: str | None = None) -> None:
        self._sources = {"default": source, "tools": source if with_tools is None else with_tools}
        self.has_marks = all(map(_has_marks, self._sources.values()))
        self._tokens = dict(tokens or {})
        self._env = _environment()
        for name, text in self._sources.items():
            if len(text.encode()) > MAX_SOURCE_NBYTES:
                raise TemplateFault(f"the chat template has more than {MAX_SOURCE_NBYTES >> 10} KiB.")
            try:
                self._env.add_template(name, _GENERATION.sub(_mark("", ""), text))
                self._env.add_template(f"{name}, marked", _GENERATION.sub(_mark(BEGIN, END), text))
            except minijinja.TemplateError as error:
                raise TemplateFault(f"the chat template cannot be read: {error.message}.") from None

    @property
    def source(self) -> str:
        """The text by which its way of calling tools is known."""
        return self._sources["tools"]

    @property
    def takes_tools(self) -> bool:
        return re.search(r"\btools\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        wall_s: float,
        settings: Mapping[str, Any] | None = None,
        is_continued: bool = False,
        is_marked: bool = False,
    ) -> str:
        """Return the text after which the answer comes.

        Args:
            wall_s: seconds since 1970, for templates that say the date.
            settings: other variables of the template.
            is_continued: the last message is the answer's begin, or the answer.
            is_marked: `BEGIN` and `END` stand around what the template says is generated.

        Raises:
            TemplateFault: it takes too long, makes too much, or refuses.
        """

        def strftime_now(form: str) -> str:
            return datetime.datetime.fromtimestamp(wall_s).strftime(form)

        context: dict[str, Any] = {
            **self._tokens,
            **(settings or {}),
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": not is_continued,
            "strftime_now": strftime_now,
        }
        try:
            name = "tools" if tools else "default"
            text = self._env.render_template(f"{name}, marked" if is_marked else name, **context)
        except minijinja.TemplateError as error:
            raise TemplateFault(f"the model's chat template refuses these messages: {_said(error)}.") from None
        if len(text.encode()) > MAX_TEXT_NBYTES:
            raise TemplateFault(
                f"the model's chat template makes more than {MAX_TEXT_NBYTES >> 20} MiB of these messages."
            )
        return text


def _has_marks(source: str) -> bool:
    """Return whether a template says what is generated.

    Raises:
        TemplateFault: a mark has no other end.
    """
    is_end = [bool(found[2]) for found in _GENERATION.finditer(source)]
    if is_end != [False, True] * (len(is_end) // 2):
        raise TemplateFault(
            "the chat template has {% generation %} without {% endgeneration %}, or the other way round."
        )
    return bool(is_end)


def _mark(begin: str, end: str) -> Callable[[re.Match[str]], str]:
    """Return what writes a mark's text for it: blocks at both ends, so that white space around it is left out as around
    the mark."""

    def written(found: re.Match[str]) -> str:
        before, is_end, after = found.groups()
        mark = end if is_end else begin
        return f'{{%{before} if true %}}{{{{ "{mark}" }}}}{{% if true %}}{{% endif %}}{{% endif {after}%}}'

    return written


def plain(messages: Sequence[Message]) -> str:
    """Return messages as plain turns, with the begin of the answer's."""
    turns = [f"{_TURNS[each['role']]}: {each.get('content') or ''}\n\n" for each in messages]
    return "".join(turns) + "Assistant:"


def _said(error: minijinja.TemplateError) -> str:
    message = error.detail if isinstance(error.detail, str) and error.detail else error.message
    if "out of fuel" in message:
        return "it does not come to an end, or takes very long. Use another model, or change the template"
    return re.sub(r"\s+", " ", message)[:300].rstrip(".")


def _environment() -> minijinja.Environment:
    def raise_exception(message: str) -> None:
        raise minijinja.TemplateError(str(message))

    def to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
        given = {"ensure_ascii": False, **settings}
        known = {
            name: given[name] for name in ("ensure_ascii", "separators", "sort_keys") if given.get(name) is not None
        }
        if isinstance(known.get("separators"), list):
            known["separators"] = tuple(known["separators"])
        return json.dumps(value, indent=indent, **known)

    return minijinja.Environment(
        fuel=FUEL,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda _name: False,
        filters={"tojson": to_json},
        globals={"raise_exception": raise_exception},
        debug=False,
    )


# --- from what came with a model ---


def template_of(came_with: CameWith) -> Template | None:
    """Return a model's template; None: it has none.

    Raises:
        TemplateFault: it has one that cannot be read.
    """
    first, with_tools = sources_of(came_with)
    return None if first is None else Template(first, _named_tokens(came_with), with_tools)


def sources_of(came_with: CameWith) -> tuple[str | None, str | None]:
    """Return the text of a model's template, and of another one for chats with tools, as far as there are any."""
    given: Any = _object(came_with, TOKENIZER_CONFIG).get("chat_template")
    if (of_json := _object(came_with, "chat_template.json").get("chat_template")) is not None:
        given = of_json
    if (jinja := came_with.files.get("chat_template.jinja")) is not None:
        given = reading.text_of(jinja)
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        first, with_tools = named.get("default"), named.get("tool_use")
    else:
        first, with_tools = given, None
    return (first if isinstance(first, str) else None), (with_tools if isinstance(with_tools, str) else None)


def _named_tokens(came_with: CameWith) -> dict[str, str]:
    tokens = {}
    for tree in (_object(came_with, "special_tokens_map.json"), _object(came_with, TOKENIZER_CONFIG)):
        for name, value in tree.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens


def ends_of(came_with: CameWith, token_of: Callable[[str], int | None]) -> set[int]:
    """Return the tokens that end an answer, as the model's folder names them.

    Args:
        token_of: gives the id of a control token.
    """
    found: list[Any] = [came_with.ids.eos_token_id, _object(came_with, GENERATION_CONFIG).get("eos_token_id")]
    if (name := _named_tokens(came_with).get("eos_token")) is not None:
        found.append(token_of(name))
    flat = [each for one in found for each in (one if isinstance(one, list | tuple) else [one])]
    return {each for each in flat if isinstance(each, int) and not isinstance(each, bool) and each >= 0}


def defaults_of(came_with: CameWith) -> dict[str, float]:
    """Return how the model's folder says that its tokens should be drawn."""
    tree = _object(came_with, GENERATION_CONFIG)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    known = {name: tree.get(name) for name in names}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float) and value >= 0}


def _object(came_with: CameWith, name: str) -> dict[str, Any]:
    data = came_with.files.get(name)
    tree = {} if data is None else reading.json_of(data)
    return tree if isinstance(tree, dict) else {}
