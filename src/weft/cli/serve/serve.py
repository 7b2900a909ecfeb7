"""`weft serve`: trained models answer over the API that most programs know, with a chat page.

    MODELS ──load──► engines on this machine ───┐
    TICKET ───────► members of a run ───────────┤
    --backend ────► another server of the API ──┴─► application ──uvicorn──► a port, until Ctrl-C or SIGTERM

What is refused is refused before a model is loaded.
"""

import asyncio
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.home import find_checkpoint, home_of
from weft.cli.listener import LOCAL, address, listen
from weft.cli.options import spread, ticket_or_none, ticket_text
from weft.cli.process import run_loop
from weft.cli.serve.composed import composed_at, open_composed
from weft.cli.serve.loading import Here, How, Loaded, Opened, load, named, open_model, prepared, require_apart
from weft.cli.settings import Machine, Transports, check_transports, machine_settings, refuse_idle
from weft.cli.terminal import tell
from weft.dashboard import figures
from weft.dashboard.logs import is_there
from weft.dashboard.words import notable
from weft.errors import ConfigError
from weft.events import Entry, Notice, ReceiptFailed, ReceiptsDiffer, TextChanged, TextMoved
from weft.ids import RunId, short

if TYPE_CHECKING:
    import socket
    from contextlib import AbstractAsyncContextManager

    from starlette.applications import Starlette

    from weft.launch.session import Options
    from weft.serve.generation import Model
    from weft.serve.keys import KeysOfFile
    from weft.stages.asking import Asked

PORT = 8000
USUAL = {"vllm": "http://127.0.0.1:8000/v1", "llama.cpp": "http://127.0.0.1:8080/v1"}
GIVEN_UP = (
    "given up for it: one text for a seed whatever else is asked, turns between keys, and prompts' pages that keys do "
    "not share; what that server logs of questions and answers is not known here"
)
ENDS_S = 3
SWITCH_S = 1e-3  # after which the thread that draws lets requests be read, and refused; Python's own 5 ms add to each
MOVES_S = 10.0
WITHOUT_PATHS = "this model has no paths of which one is chosen"


@dataclass(frozen=True)
class Where:
    """Where it listens, and who may ask."""

    host: Annotated[str, typer.Option(help="Address to listen on; another machine's requests need --keys.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="Port; 0 lets the system choose.", min=0, max=65535)] = PORT
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys: who may ask, and how much; see weft serve key --help.")
    ] = None


@dataclass(frozen=True)
class Asking:
    """How this machine asks the members of a run that a ticket names."""

    transports: Transports = None
    machine: Machine = None


@dataclass(frozen=True)
class Behind:
    """Another server that computes."""

    backend: Annotated[
        str | None,
        typer.Option(
            help="Let another server that runs already compute: its address (http://127.0.0.1:8080/v1), or vllm or "
            "llama.cpp at their usual ones. Keys, limits, page and figures are weft's.",
            metavar="ADDRESS",
        ),
    ] = None
    backend_key: Annotated[
        Path | None, typer.Option(help="File whose first line is the API key that the other server wants.")
    ] = None


@dataclass(frozen=True)
class Given:
    """A model as it was asked for.

    Args:
        composed: the folder of what was composed; None: it is a single model.
        name: that it is to have; "": its own.
    """

    typed: str
    composed: Path | None
    name: str


@spread
def serve(
    context: typer.Context,
    where: Where,
    how: How,
    asks: Asking,
    behind: Behind,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help='A folder; a run: its name, its digits, or "last"; a member, or what was composed. Several are served '
            "together, and a request names one. Or a ticket of a run, whose members then "
            'compute: "-" reads it from standard input, @FILE from a file. With --backend: some of its models; '
            "default: all.",
            metavar="[MODEL]...",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="What requests call the model. Default: as the run or the folder is called. Of several models: once "
            "for each, in their order.",
            show_default=False,
        ),
    ] = None,
    route_every: Annotated[
        int | None,
        typer.Option(
            help="Of paths that were trained together: choose a text's path again after so many tokens, by the newest. "
            "A new path reads the text so far. Default: once, by the first tokens.",
            min=2,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer over the OpenAI API, and show a page to chat with the model. Ctrl-C ends it."""
    keys, given, names = keys_of(where), models or [], name or []
    if behind.backend is not None:
        refuse_idle(context, "the server of --backend computes", *names_of(How), *names_of(Asking), "route_every")
        serve_backend(behind, given, names, where, keys)
        return
    refuse_idle(context, "it is of --backend", "backend_key")
    if (ticket := ticket_in(given)) is not None:
        mine = [each for each in (*names_of(How), "route_every") if each != "max_context"]
        refuse_idle(context, "the run's members compute, and this machine asks them", *mine)
        (called,) = named(1, names)
        serve_members(ticket, called, where, options_of(asks, home_of(context)), how.max_context, keys)
        return
    refuse_idle(context, "this machine computes, and asks nobody", *names_of(Asking))
    home = home_of(context)
    composed = [composed_at(each, home) for each in given]
    if not any(_has_paths(each) for each in composed):
        refuse_idle(context, WITHOUT_PATHS, "route_every")
    if not given:
        raise ConfigError(
            'which model? Give a folder, or a run by its name or digits; "last" is the one trained last. Or a ticket '
            "of a run, whose members then compute."
        )
    if len(given) > 1:
        refuse_idle(context, "it guesses for one model, and here are several", "draft")
    elif composed[0] is not None:
        refuse_idle(context, "no draft model guesses for what was composed", "draft")
    wanted = [Given(*each) for each in zip(given, composed, named(len(given), names), strict=True)]
    serve_here(wanted, where, how, home, keys, route_every)


def names_of(group: type[Any]) -> list[str]:
    return [each.name for each in fields(group)]


def ticket_in(given: Sequence[str]) -> str | None:
    """Return the ticket that is given, or is in the environment where nothing is; None: it is folders or runs.

    Raises:
        TicketError: standard input or a file holds none.
        ConfigError: something else is given, too.
    """
    if not given:
        return ticket_or_none(None)
    tickets = [each for each in given if not is_there(Path(each)) and (each == "-" or re.match(r"@|\s*weft\d", each))]
    if not tickets:
        return None
    if len(given) > 1:
        raise ConfigError(
            "the run of a ticket is served alone, since its members compute it. Serve the other models by another "
            "command, at a --port of their own."
        )
    return ticket_text(tickets[0])


def serve_here(
    given: Sequence[Given], where: Where, how: How, home: Path, keys: "KeysOfFile | None", route_every: int | None
) -> None:
    """Answer by what this machine computes.

    Args:
        route_every: of those that have paths.

    Raises:
        HomeError, CheckpointError: there is no such model.
        ConfigError, TooLarge: as `load`, and of what opens each.
    """
    # what is not there is said before what another program holds
    places = [each.composed or find_checkpoint(each.typed, home) for each in given]

    def opened(here: Here) -> Iterator[Opened]:
        from weft.cli.model.trained import open_trained, say_which

        for each, place in zip(given, places, strict=True):
            if each.composed is not None:
                every = route_every if _has_paths(each.composed) else None
                yield open_composed(each.composed, each.name, here, home, every)
                continue
            trained = open_trained(str(place), home)
            say_which(trained, each.typed)
            draft = None if how.draft is None else open_trained(how.draft, home)
            yield open_model(trained, each.name or trained.called, here, draft)

    def loaded() -> Loaded:
        here = prepared(how)
        return load(list(opened(here)), here)

    serve_loaded(loaded, where, keys)


def _has_paths(folder: Path | None) -> bool:
    from weft.compose.paths.folder import has_paths

    return folder is not None and has_paths(folder)


def serve_loaded(loading: "Callable[[], Loaded]", where: Where, keys: "KeysOfFile | None") -> None:
    """Answer by what `loading` puts on this machine, once the port is there."""
    listener = listen(where.host, where.port)
    try:
        loaded = loading()
        try:
            for model, planned, beside in zip(loaded.models.values(), loaded.plans, loaded.beside, strict=True):
                held = f"room for {planned.num_tokens:,} tokens of all conversations together"
                weights = f"{planned.kind} weights, {figures.nbytes(planned.weights_nbytes)}{beside}"
                _tell(model, f"{weights}; {held}, {figures.nbytes(planned.kv_nbytes)}")
            tell_address(address(listener), where.host, keys)
            run_until_told(loaded.app(keys), listener, loaded.close)
        finally:
            loaded.close()
    finally:
        listener.close()


def options_of(asks: Asking, home: Path) -> "Options":
    """Return what this machine brings to a run that it asks.

    Raises:
        ConfigError: names the option, or the field of its file.
    """
    from weft.launch.session import Options
    from weft.store.home import Home

    settings = machine_settings(asks.machine, {"transports": check_transports(asks.transports)}, use="visit")
    return Options(home=Home(home), key=None, settings=settings, sinks=(Moves(),))


_SAID = (Notice, TextMoved, TextChanged, ReceiptsDiffer, ReceiptFailed)


class Moves:
    """Says where answers go on with another member or other weights, where receipts are wrong, and what of this machine
    has to be known: once within `MOVES_S`."""

    def __init__(self) -> None:
        self._told_at: dict[str, float] = {}

    def write(self, entry: Entry) -> None:
        text = notable(entry, short) if isinstance(entry.event, _SAID) else None
        if text is not None and entry.at - self._told_at.get(text, -MOVES_S) >= MOVES_S:
            self._told_at[text] = entry.at
            print(text, file=sys.stderr, flush=True)  # noqa: T201

    def close(self) -> None:
        """Nothing is held."""


def serve_members(
    ticket: str, name: str, where: Where, options: "Options", max_context: int, keys: "KeysOfFile | None"
) -> None:
    """Answer by what the members of a run compute.

    Raises:
        TicketError, TicketMismatch, Unreachable, Refused: as `asking`.
        ConfigError: its members train in loops of their own, or its model reads less.
    """
    from weft.net.ticket import read

    run = read(ticket).run  # a bad one is refused before anything heavy is loaded
    from weft.stages.asking import asking

    listener = listen(where.host, where.port)
    try:
        _run(_ask_members(asking(ticket, options, max_context), run, name, listener, where.host, keys))
    finally:
        listener.close()


async def _ask_members(
    members: "AbstractAsyncContextManager[Asked]",
    run: RunId,
    name: str,
    listener: "socket.socket",
    host: str,
    keys: "KeysOfFile | None",
) -> None:
    from weft.clock import SystemClock
    from weft.serve.app import app
    from weft.serve.generation import model_of
    from weft.serve.metrics import Metrics
    from weft.web.web import page_routes

    loop = asyncio.get_running_loop()
    async with members as asked:
        name = name or asked.run.name
        created = int(SystemClock().wall())
        model = model_of(name, created, asked.entry, asked.tokenizer, asked.came_with, short(run))
        models = {name: model}
        _tell(model, told_of(asked.entry.num_stages))
        tell_address(address(listener), host, keys)
        application = app(models, keys, metrics=Metrics(models), page=page_routes("serve"))
        await answering(application, listener, lambda: loop.call_soon_threadsafe(asked.entry.close), asked.ended)
        if asked.ended.done():
            tell(asked.ended.result())
        with suppress(asyncio.CancelledError):  # what ended the server is told once more, and cancels this task
            await asyncio.sleep(0)


def told_of(num_stages: int) -> str:
    """Return who computes a model that this machine asks for."""
    if num_stages == 1:
        return "computed by members of the run, those whose machine file says serve_nbytes"
    return f"{num_stages} stages, computed by the run's members"


def serve_backend(
    behind: Behind, given: Sequence[str], names: Sequence[str], where: Where, keys: "KeysOfFile | None"
) -> None:
    """Answer by what another server answers.

    Args:
        given: models of it; none: all.
        names: of each.

    Raises:
        ConfigError: no address, no such model there, or names that tell them not apart.
        Unreachable, Refused, CallFailed, PeerError: that server does not tell its models.
    """
    from weft.serve.backend.backend import app, models_of
    from weft.serve.backend.client import site_of
    from weft.web.web import page_routes

    site = site_of(USUAL.get(str(behind.backend), str(behind.backend)), key_in(behind.backend_key))
    found = {each.id: each for each in run_loop(models_of(site))}
    if not found:
        raise ConfigError(f"{site.address} lists no models. Load one there, then start this server again.")
    if (missing := next((each for each in given if each not in found), None)) is not None:
        raise ConfigError(f"{site.address} has no model {missing[:80]!r}, but {', '.join(found)}.")
    chosen = [found[each] for each in given or found]
    served = [replace(each, id=name or each.id) for each, name in zip(chosen, named(len(chosen), names), strict=True)]
    require_apart([each.id for each in served])
    listener = listen(where.host, where.port)
    try:
        page = page_routes("serve")
        application, backend = app(site, {each.id: each for each in served}, keys, page=page)
        told = f"{', '.join(each.id for each in served)}: computed by {site.address}\n{GIVEN_UP}"
        print(told, file=sys.stderr)  # noqa: T201
        tell_address(address(listener), where.host, keys)
        run_until_told(application, listener, backend.close)
    finally:
        listener.close()


def key_in(file: Path | None) -> str | None:
    """Return the first line of a file.

    Raises:
        ConfigError: it cannot be read, or holds no key.
    """
    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--backend-key {file}: it cannot be read: {error}.") from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"--backend-key {file}: its first line is no API key.")
    return key


def keys_of(where: Where) -> "KeysOfFile | None":
    """Return who may ask; None: this machine alone.

    Raises:
        ConfigError: other machines could ask without keys; or the file of keys cannot be used.
    """
    from weft.serve.keys import KeysOfFile

    if where.keys is not None:
        return KeysOfFile(where.keys)
    if where.host not in LOCAL:
        raise ConfigError(
            f"--host {where.host}: other machines could ask, and nobody would be refused. Make a key with `weft serve "
            "key add NAME` and give its file with --keys, or leave --host out to answer this machine alone."
        )
    return None


def run_until_told(app: "Starlette", listener: "socket.socket", on_told: Callable[[], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which end it alike; arguments as of `answering`."""
    _run(answering(app, listener, on_told))


def _run(main: Coroutine[Any, Any, None]) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_loop(main)
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    tell("stopped")


async def answering(
    app: "Starlette",
    listener: "socket.socket",
    on_told: Callable[[], object],
    ended: "asyncio.Future[str] | None" = None,
) -> None:
    """Answer requests until a signal comes, which is then told once more, or `ended` is.

    Args:
        on_told: ends the answers that are under way, from any thread; they have `ENDS_S` for their last words.
    """
    import uvicorn

    from weft.serve.stream import Connection

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self._tell()
            super().handle_exit(sig, frame)

        def end(self) -> None:
            self._tell()
            self.should_exit = True

        def _tell(self) -> None:
            if not self.should_exit:
                threading.Thread(target=on_told, daemon=True, name="ending").start()

    server = Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=ENDS_S,
            lifespan="off",
        )
    )
    if ended is not None:
        ended.add_done_callback(lambda _ended: server.end())
    sys.setswitchinterval(SWITCH_S)
    await server.serve(sockets=[listener])


def _tell(model: "Model", how: str) -> None:
    """Say what is served."""
    said = f"{model.id}: {how}; a conversation has at most {model.context:,} tokens"
    print(said, file=sys.stderr)  # noqa: T201
    if model.template is None:
        text = "the model has no chat template: in chats it is given plain turns (User: ...), and goes on with that"
        print(f"{text} text rather than holds a conversation", file=sys.stderr)  # noqa: T201


def tell_address(address: str, host: str, keys: "KeysOfFile | None") -> None:
    if host not in LOCAL:
        text = (
            "keys and what is said go over plain HTTP, which others on the way can read: put a proxy with TLS before it"
        )
        print(text, file=sys.stderr)  # noqa: T201
    key = "" if keys is None else " --key-file FILE"
    print(f"programs: {address}v1 (OpenAI API); terminal: weft chat {address}v1{key}", file=sys.stderr)  # noqa: T201
    print(address, flush=True)  # noqa: T201  # what was asked for
