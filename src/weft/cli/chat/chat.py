"""`weft chat`: questions from the terminal or a pipe, answers as they are written.

A conversation is a list of messages as the API takes them. What is typed is a question, or a command that begins
with a slash. Answers go to standard output, whatever else is said to standard error.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import reading
from weft.cli.chat.server import Piece, Server
from weft.cli.home import WHOLE, find_run, home_of
from weft.cli.model.generate import legible
from weft.cli.options import text_of_input
from weft.cli.terminal import tell
from weft.clock import Clock, SystemClock
from weft.errors import ConfigError, DataError, Refused, Unreachable, WeftError
from weft.ids import several

ADDRESS = "http://127.0.0.1:8000/v1"
MAX_QUESTION = 4_000_000  # bytes from a pipe: what servers take at most
_MAX_KEY = 4_096
_LEAST_S = 0.1  # what came within less came in one piece, which says nothing of speed
HELP = """/clear             forget what was said
/system [TEXT]     what the model is told before the conversation; without TEXT, nothing
/retry             ask the last question again
/save FILE         write the conversation as JSON
/quit              end; so do Ctrl-D, and Ctrl-C where no answer is being written
A line that ends in \\ goes on in the next. //... sends a question that begins with a slash."""


def chat(
    context: typer.Context,
    address: Annotated[str, typer.Argument(help="Of any server that speaks the OpenAI API.")] = ADDRESS,
    model: Annotated[str | None, typer.Option(help="Which of its models.", show_default="the first")] = None,
    key_file: Annotated[Path | None, typer.Option(help="Holds the API key.", show_default=False)] = None,
    system: Annotated[str, typer.Option(help="What the model is told before the conversation.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token.", min=0, show_default="the server's")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer, at most.", min=1, show_default="the server's")
    ] = None,
) -> None:
    """Talk to a model that is served. Ctrl-C stops an answer, another one ends. One question may come from a pipe."""
    server = Server(address, None if key_file is None else _key_in(key_file))
    if server.key is not None and not server.is_private:
        tell(f"the key and all that is said go to {server.address} unencrypted; use https where others share the line")
    is_piped = not sys.stdin.isatty()
    question = text_of_input("a question", MAX_QUESTION) if is_piped else ""
    names = _models(server, address, home_of(context), is_asking=not is_piped)
    if model is not None and names and model not in names:
        raise ConfigError(
            f"--model {model[:200]}: {server.address} has no model of that name. It has {', '.join(names[:20])}."
        )
    if model is None and not names:
        raise ConfigError(f"{server.address} lists no model. Name one with --model, or see what the server serves.")
    asks: dict[str, Any] = {"model": model or names[0]}
    asks |= {} if temperature is None else {"temperature": temperature}
    asks |= {} if max_tokens is None else {"max_tokens": max_tokens}
    talk = Talk(server, asks, system=system)
    if is_piped:
        came = talk.ask(question)
        if came.is_stopped:
            raise KeyboardInterrupt
        if came.lacks is not None:
            tell(came.lacks)
        return
    others = f" (of {len(names)}; --model names another)" if model is None and len(names) > 1 else ""
    tell(f"{legible(asks['model'])}{others} at {server.address}. /help says what may be typed; Ctrl-C stops an answer.")
    converse(talk, _line)


@dataclass(frozen=True, kw_only=True)
class Came:
    """How an answer came."""

    last: Piece  # with what is known of the answer
    first_s: float | None  # from the question to the first letter; None: there was none
    took_s: float
    is_stopped: bool  # by Ctrl-C
    max_tokens: int | None = None  # that it was to have at most
    context: int | None = None  # tokens of a conversation with its answer

    @property
    def lacks(self) -> str | None:
        """Return what is wrong with an answer that is no failure."""
        if self.first_s is None:
            return "the answer is empty"
        return self._cut_off() if self.last.finish == "length" else None

    def _cut_off(self) -> str:
        """Return by which of three limits an answer ended, as far as the server's figures tell, and what to do."""
        num, num_read = self.last.num_tokens or 0, self.last.num_read or 0
        if self.max_tokens is not None and num >= self.max_tokens:
            return (
                f"cut off after {several(num, 'token')}, as --max-tokens says: give a larger number for a longer answer"
            )
        if self.context is not None and num and num_read + num >= self.context:
            return (
                f"cut off: a conversation may have {self.context:,} tokens here, with its answer, and this one has "
                "them. Begin a new one (/clear), or ask in fewer words"
            )
        do = "ask for more with --max-tokens" if self.max_tokens is None else "ask it to go on"
        return f"cut off: the server allows no longer answer; {do}"

    @property
    def words(self) -> str:
        if self.is_stopped:
            return "stopped; another Ctrl-C ends"
        said, writing_s = [], self.took_s - (self.first_s or 0.0)
        if self.last.num_tokens is not None:
            said.append(several(self.last.num_tokens, "token"))
            if self.last.num_tokens > 1 and writing_s >= _LEAST_S:
                said.append(f"{(self.last.num_tokens - 1) / writing_s:.3g} tokens/s")
        said += [] if self.first_s is None else [f"first after {self.first_s:.2f} s"]
        said += [legible(self.last.version)] if self.last.version else []
        said += [self.lacks] if self.lacks else []
        return f"({', '.join(said)})"


@dataclass
class Talk:
    """A conversation with a model.

    Args:
        asks: what every request holds but the messages.
        write: takes the answer's text.
    """

    server: Server
    asks: dict[str, Any]
    system: str = ""
    write: Callable[[str], None] = lambda text: typer.echo(text, nl=False)
    clock: Clock = field(default_factory=SystemClock)
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Came:
        """Ask, write the answer as it comes until it ends or Ctrl-C stops it, and return how it came.

        What there is of an answer stays in the conversation. A question that nothing answered leaves it.

        Raises:
            WeftError: there is no answer, or only a part of it; as of `Server.answer`.
        """
        self.messages.append({"role": "user", "content": question})
        before = [{"role": "system", "content": self.system}] if self.system.strip() else []
        told: list[str] = []
        began, first_s, last, is_stopped = self.clock.now(), None, Piece(), False
        pieces = self.server.answer(self.asks | {"messages": before + self.messages})
        try:
            for last in pieces:
                if last.text:
                    first_s = self.clock.now() - began if first_s is None else first_s
                    told.append(last.text)
                    self.write(legible(last.text))
        except KeyboardInterrupt:
            is_stopped = True
        finally:
            pieces.close()  # hangs up: the server need not go on
            if told:
                self.messages.append({"role": "assistant", "content": "".join(told)})
                self.write("" if told[-1].endswith("\n") else "\n")
            else:
                self.messages.pop()
        return Came(
            last=last,
            first_s=first_s,
            took_s=self.clock.now() - began,
            is_stopped=is_stopped,
            max_tokens=self.asks.get("max_tokens"),
            context=self.server.contexts.get(self.asks.get("model", "")),
        )

    def again(self) -> str | None:
        """Return the last question, and forget it with what came after; None: there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                question = self.messages[index]["content"]
                del self.messages[index:]
                return question
        return None

    def exported(self) -> str:
        """Return the conversation as the chat page exports it."""
        before = [{"role": "system", "content": self.system}] if self.system.strip() else []
        tree = {"format": "weft-chat", "version": 1, **self.asks, "messages": before + self.messages}
        return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def converse(talk: Talk, line: Callable[[str], str]) -> None:
    """Take what is typed until nothing more comes.

    Args:
        line: reads a line behind a prompt; raises EOFError at the end, KeyboardInterrupt for Ctrl-C.
    """
    while True:
        try:
            text = line("> ")
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{line('  ')}"
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return
        try:
            question = text[1:] if text.startswith("//") else text
            if text.startswith("/") and not text.startswith("//"):
                name, _, rest = text[1:].partition(" ")
                if name == "quit":
                    return
                question = _command(talk, name, rest.strip()) or ""
            if question.strip():
                tell(talk.ask(question).words)
        except WeftError as error:  # the conversation goes on
            tell(str(error))


def _command(talk: Talk, name: str, rest: str) -> str | None:
    """Do what a command says, and return a question that it leads to."""
    match name:
        case "clear":
            talk.messages.clear()
            tell("what was said is forgotten")
        case "system":
            talk.system = rest
            tell("the model is told that from the next question on" if rest else "the model is told nothing before")
        case "retry":
            question = talk.again()
            if question is None:
                tell("/retry: nothing was asked yet")
            return question
        case "save":
            _save(talk, rest)
        case "help":
            typer.echo(HELP, err=True)
        case _:
            tell(f"/{name[:40]}: no such command; /help says which there are, and //{name[:40]} sends it as a question")
    return None


def _save(talk: Talk, name: str) -> None:
    if not name:
        raise ConfigError("/save needs the name of a file, as /save talk.json")
    path = Path(name).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(talk.exported())
    except FileExistsError:
        raise ConfigError(
            f"/save {name}: that file is there already, and stays as it is. Choose another name."
        ) from None
    except OSError as error:
        raise DataError(f"/save {name}: cannot be written: {error.strerror or error}.") from None
    tell(f"saved in {path.absolute()}")


def _line(prompt: str) -> str:
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and what was typed before; not on Windows
    return input(prompt)


def _models(server: Server, given: str, home: Path, *, is_asking: bool) -> list[str]:
    """Return the names of the models; who is at the terminal is asked for a key where one is wanted.

    Args:
        given: the server's address, as a person gave it; it may be the name of a run of `home`.
    """
    try:
        return server.models()
    except Refused:
        if not is_asking or server.key is not None:
            raise
    except Unreachable as error:
        if server.address == ADDRESS:
            raise Unreachable(f"{error} `weft serve last` serves the newest model of this machine there.") from None
        if find_run(given, home, having=(WHOLE,)) is not None:
            raise Unreachable(f"{error} To talk to a run of this home: weft serve {given}; then: weft chat") from None
        raise
    server.key = _clean(typer.prompt("API key", hide_input=True, err=True), "the API key")
    return server.models()


def _key_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = reading.text_of(file.read(_MAX_KEY))
    except OSError as error:
        raise DataError(f"--key-file {path}: cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        text = ""
    return _clean(text, f"--key-file {path}")


def _clean(text: str, where: str) -> str:
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise DataError(f"{where}: there is no API key; it is one line of letters and digits.")
    return key
