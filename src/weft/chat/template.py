"""Messages of a chat as the text that a model was trained on: its own template (Jinja), or plain turns.

A stranger may have written a template, so minijinja runs it, which reaches no file, no attribute and no Python, in a
process of its own (`jinja`) with bounds of fuel, memory and time: one that does not end is refused, and so is one that
breaks its process. Messages that are too many for a template which ends are too long. A folder says its template in
tokenizer_config.json (one, or several by name), chat_template.jinja or chat_template.json.

Where there is none, turns are written as

    System: ...            Assistant: ...
    User: ...              Tool: ...

each with an empty line after it, and the answer ends where the next turn would begin.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock, Timer
from typing import Any
from weakref import finalize

from weft import reading
from weft.chat.vocabulary import BEGIN, END
from weft.errors import ConfigError, DataError
from weft.model.came_with import GENERATION_CONFIG, TOKENIZER_CONFIG, CameWith

FUEL = 1_000_000  # instructions, and bytes put together; 2,048 messages take a tenth
FUEL_A_BYTE = 16  # more for each byte of messages: public templates take one
MAX_SOURCE_NBYTES = 256 << 10  # the largest published template has 20 KiB
MAX_TEXT_NBYTES = 1 << 20
MAX_GIVEN_NBYTES = 16 << 20  # of messages, as JSON
MEMORY_NBYTES = 512 << 20
SECONDS = 10.0
_MANY_NBYTES = 64 << 10  # messages that may be too many for a template that ends
_FEW = 16  # messages, and letters of each text: a template that does not come to an end of so few comes to none
_GENERATION = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")  # marks what loss is taken of
_JINJA, _JSON = "chat_template.jinja", "chat_template.json"
_TURNS = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nTool:")

Message = Mapping[str, Any]


class TemplateFault(DataError):
    """A template that does not run, or refuses these messages."""


class TextTooLong(TemplateFault):
    """Messages that are too long for any row, with a template that ends."""


class Template:
    """A chat template, and the process that renders it.

    Args:
        source: Jinja.
        tokens: what it may call control tokens by: `bos_token` and others.
        with_tools: another source for chats with tools; None: the same.
        called: what people call it: its file.

    Raises:
        TemplateFault: it is too long, or no Jinja: names the file.
        ConfigError: this machine runs no process for it.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        with_tools: str | None = None,
        called: str = "the chat template",
    ) -> None:
        self._sources = {"default": source, "tools": source if with_tools is None else with_tools}
        has_marks = [_has_marks(text, called) for text in self._sources.values()]  # each is looked at
        self.has_marks = all(has_marks)
        self._tokens = dict(tokens or {})
        marked = dict[str, str]()
        for name, text in self._sources.items():
            if len(text.encode(errors="replace")) > MAX_SOURCE_NBYTES:
                raise TemplateFault(f"{called} has more than {MAX_SOURCE_NBYTES >> 10} KiB. {_OTHER}")
            marked[name] = _GENERATION.sub(_mark("", ""), text)
            marked[f"{name}, marked"] = _GENERATION.sub(_mark(BEGIN, END), text)
        self._process = _Process(marked, called)

    @property
    def source(self) -> str:
        """The text by which its way of calling tools is known."""
        return self._sources["tools"]

    @property
    def writes(self) -> str:
        """All that it may write of its own."""
        return "\n".join([*self._sources.values(), *self._tokens.values()])

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
            TextTooLong: it makes too much of these messages, or they are too many.
            TemplateFault: it does not end, breaks, or refuses.
            ConfigError: this machine runs no process for it.
        """
        context: dict[str, Any] = {
            **self._tokens,
            **(settings or {}),
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": not is_continued,
        }
        name = "tools" if tools else "default"
        asks = {"name": f"{name}, marked" if is_marked else name, "wall_s": wall_s}
        try:
            line = json.dumps(context)
        except RecursionError:
            raise TemplateFault("these messages are nested too deep for a chat template. Make them flatter.") from None
        num, answer = len(line), {"is_long": True}
        if num <= MAX_GIVEN_NBYTES:
            answer = self._process.ask({**asks, "fuel": FUEL + FUEL_A_BYTE * num}, line)
        if "is_spent" in answer and num > _MANY_NBYTES:
            first = json.dumps(context | {"messages": _few(messages[:_FEW])})
            few = self._process.ask({**asks, "fuel": FUEL}, first)
            answer = few if "is_spent" in few else {"is_long": True}
        match answer:
            case {"text": str(text)}:
                return text
            case {"is_long": True}:
                raise TextTooLong(
                    f"the model's chat template makes more than {MAX_TEXT_NBYTES >> 20} MiB of these messages, or they "
                    "are too many for it. Shorten them, or leave them out."
                )
            case {"is_spent": True}:
                raise TemplateFault(
                    "the model's chat template refuses these messages: it does not come to an end, or takes very long "
                    "or much memory. Use another model, or change the template."
                )
        raise TemplateFault(
            f"the model's chat template refuses these messages: {answer['why']}. Change or remove them, or use another "
            "model or template."
        )


_OTHER = "Use another model, or change the template."


class _Process:
    """Renders sources, and begins anew where they broke it; many threads may ask.

    Args:
        called: what people call the template.

    Raises:
        TemplateFault: a source is no Jinja.
        ConfigError: this machine runs no such process.
    """

    def __init__(self, sources: Mapping[str, str], called: str) -> None:
        self._sources, self._called = dict(sources), called
        self._lock = Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        with self._lock:
            self._begin()

    def ask(self, asks: Mapping[str, Any], context: str) -> dict[str, Any]:
        """Return what the program says; where it broke, that what it may take is spent.

        Args:
            context: what the template is given, as JSON.
        """
        with self._lock:
            if self._running is None:
                self._begin()
            answer = self._said(json.dumps({**asks, "seconds": SECONDS}), context)
        return {"is_spent": True} if answer is None else answer

    def _begin(self) -> None:
        with TemporaryFile() as error:
            # Without the environment's Python variables, and without what is installed beside: it starts in 40 ms.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("jinja.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=error,
            )
            self._running, self._end = process, finalize(self, _ended, process)
            spec = find_spec("minijinja")
            path = "" if spec is None or spec.origin is None else str(Path(spec.origin).parents[1])
            told = {"path": path, "memory": MEMORY_NBYTES, "max_nbytes": MAX_TEXT_NBYTES, "seconds": SECONDS}
            if self._said(json.dumps({**told, "sources": self._sources})) is None:
                error.seek(0)
                said = error.read(1 << 16).decode(errors="replace").strip()[-300:]
                raise ConfigError(f"a chat template is rendered in a process of its own, and here that fails: {said}")
        answer = self._said()
        why = "it breaks what reads it" if answer is None else answer.get("why")
        if why is not None:
            self._stop()
            raise TemplateFault(f"{self._called} cannot be read: {why}. {_OTHER}")

    def _said(self, *lines: str) -> dict[str, Any] | None:
        """Return the next that the process says; None: it is no more.

        Args:
            lines: that it is told before.
        """
        process = self._running
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        watch = Timer(SECONDS, process.kill) if sys.platform == "win32" else None  # elsewhere it ends itself
        if watch is not None:
            watch.start()
        try:
            process.stdin.write("".join(f"{each}\n" for each in lines).encode())
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            pass  # it has ended
        finally:
            if watch is not None:
                watch.cancel()
            if not line.endswith(b"\n"):
                self._stop()
        if not line.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stop(self) -> None:
        self._end()
        self._running = None


def _ended(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not written is lost
                pipe.close()


def _few(value: Any) -> Any:
    """Return messages with the begins of their texts."""
    match value:
        case str():
            return value[:_FEW]
        case Mapping():
            return {name: each if name == "role" else _few(each) for name, each in value.items()}
        case list() | tuple():
            return [_few(each) for each in value[:_FEW]]
    return value


def _has_marks(source: str, called: str) -> bool:
    """Return whether a template says what is generated.

    Args:
        called: what people call it.

    Raises:
        TemplateFault: a mark has no other end.
    """
    is_end = [bool(found[2]) for found in _GENERATION.finditer(source)]
    if is_end != [False, True] * (len(is_end) // 2):
        raise TemplateFault(
            f"{called} has {{% generation %}} without {{% endgeneration %}}, or the other way round. Write both around "
            "an answer, or neither."
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


# --- from what came with a model ---


def template_of(came_with: CameWith) -> Template | None:
    """Return a model's template; None: it has none.

    Raises:
        TemplateFault: it has one that cannot be read: names the file.
        ConfigError: this machine runs no process for it.
    """
    first, with_tools = sources_of(came_with)
    called = f"the chat template of {_file_of(came_with)}"
    return None if first is None else Template(first, _named_tokens(came_with), with_tools, called)


def sources_of(came_with: CameWith) -> tuple[str | None, str | None]:
    """Return the text of a model's template, and of another one for chats with tools, as far as there are any."""
    given: Any = _object(came_with, TOKENIZER_CONFIG).get("chat_template")
    if (of_json := _object(came_with, _JSON).get("chat_template")) is not None:
        given = of_json
    if (jinja := came_with.files.get(_JINJA)) is not None:
        given = reading.text_of(jinja)
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        first, with_tools = named.get("default"), named.get("tool_use")
    else:
        first, with_tools = given, None
    return (first if isinstance(first, str) else None), (with_tools if isinstance(with_tools, str) else None)


def _file_of(came_with: CameWith) -> str:
    """Return which file `sources_of` reads."""
    if _JINJA in came_with.files:
        return _JINJA
    is_json = _object(came_with, _JSON).get("chat_template") is not None
    return _JSON if is_json else TOKENIZER_CONFIG


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
