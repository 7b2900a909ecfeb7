"""`weft serve`: a trained model answers over the API that most programs know, with a chat page.

MODEL ──Loaded──► engine on this machine ──► application ──uvicorn──► a port, until Ctrl-C or SIGTERM
"""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.home import home_of
from weft.cli.listener import LOCAL, address, listen
from weft.cli.options import nbytes, spread
from weft.cli.process import run_loop
from weft.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette

    from weft.cli.model.trained import Trained
    from weft.engine.load import Plan
    from weft.engine.numbers import Kind
    from weft.serve.generation import Model
    from weft.serve.keys import KeysOfFile
    from weft.serve.metrics import Metrics

PORT = 8000
ENDS_S = 3


class Numbers(StrEnum):
    auto = "auto"
    int8 = "int8"
    bf16 = "bf16"
    fp32 = "fp32"


KINDS: "dict[Numbers, Kind]" = {Numbers.int8: "int8", Numbers.bf16: "bf16", Numbers.fp32: "fp32"}


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
class How:
    """How this machine computes."""

    device: Annotated[str, typer.Option(help="Where torch runs: auto, cpu, cuda, cuda:1.")] = "auto"
    threads: Annotated[int, typer.Option(help="Threads of torch on the CPU; 0: its own choice.", min=0, max=1024)] = 0
    numbers: Annotated[
        Numbers, typer.Option(help="How weights are held: int8 is the fastest on CPUs, fp32 is as trained.")
    ] = Numbers.auto
    max_context: Annotated[
        int, typer.Option(help="Tokens of question and answer together; 0: as many as the model reads.", min=0)
    ] = 0
    cache: Annotated[
        str | None, typer.Option(help="Memory for keys and values: 2GB. Default: a quarter of what is free.")
    ] = None


@spread
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help='Folder, or a run: its name, its digits, or "last".', show_default=False)
    ],
    where: Where,
    how: How,
    name: Annotated[str, typer.Option(help="What requests call the model. Default: the run's or the folder's.")] = "",
) -> None:
    """Answer over the OpenAI API, and show a page to chat with the model. Ctrl-C ends it."""
    from weft.cli.model.trained import open_trained, say_which

    keys = keys_of(where)
    cache_nbytes = nbytes("--cache", how.cache)
    listener = listen(where.host, where.port)
    try:
        trained = open_trained(model, home_of(context))
        say_which(trained, model)
        loaded = load(trained, name or trained.called, how, cache_nbytes)
        try:
            _tell(loaded, address(listener))
            run_until_told(loaded.app(keys), listener, loaded.model.engine.close)
        finally:
            loaded.model.engine.close()
    finally:
        listener.close()


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


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to be asked."""

    model: "Model"
    planned: "Plan"
    metrics: "Metrics"
    models: "Mapping[str, Model]"

    def app(self, keys: "KeysOfFile | None") -> "Starlette":
        from weft.serve.app import app
        from weft.web.web import page_routes

        return app(self.models, keys, metrics=self.metrics, page=page_routes("serve"))


def load(trained: "Trained", name: str, how: How, cache_nbytes: int | None) -> Loaded:
    """Put a model on this machine.

    Raises:
        ConfigError: no such device, or more context than the model reads.
        TooLarge: no room.
    """
    import torch

    from weft.cli.model.trained import place
    from weft.engine.load import engine_of, free_nbytes, kind_for, plan
    from weft.serve.generation import model_of
    from weft.serve.metrics import Metrics

    if how.threads:
        torch.set_num_threads(how.threads)
    here = place(how.device)
    kind = kind_for(here) if how.numbers is Numbers.auto else KINDS[how.numbers]
    most = trained.config.max_seq_len
    if how.max_context > most:
        raise ConfigError(f"--max-context {how.max_context}: the model reads {most} tokens at most.")
    context = how.max_context or most
    planned = plan(trained.config, here, kind, context, cache_nbytes, free_nbytes(here))
    models: dict[str, Model] = {}
    metrics = Metrics(models)
    engine = engine_of(trained.config, trained.vector, here, planned, context, metrics.step(name))
    try:
        models[name] = model_of(
            name, int(trained.made_at), engine, trained.tokenizer, trained.came_with, trained.fingerprint(kind)
        )
    except BaseException:
        engine.close()
        raise
    return Loaded(models[name], planned, metrics, models)


def run_until_told(app: "Starlette", listener: "socket.socket", on_told: Callable[[], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM, which end it alike.

    Args:
        on_told: ends the answers that are under way, from any thread; they have `ENDS_S` for their last words.
    """
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:
                threading.Thread(target=on_told, daemon=True, name="ending").start()
            super().handle_exit(sig, frame)

    server = Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=ENDS_S, lifespan="off")
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_loop(server.serve(sockets=[listener]))
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(loaded: Loaded, address: str) -> None:
    """Say what is served, and how to ask it."""
    model, planned = loaded.model, loaded.planned
    said = (
        f"{model.id}: {planned.kind} weights, {planned.weights_nbytes / 1e9:.2f} GB; room for {planned.num_tokens:,} "
        f"tokens of all conversations together, {planned.kv_nbytes / 1e9:.2f} GB; a conversation has at most "
        f"{model.context:,}"
    )
    print(said, file=sys.stderr)  # noqa: T201
    if model.template is None:
        text = "the model has no chat template: in chats it is given plain turns (User: ...) and goes on from them"
        print(text, file=sys.stderr)  # noqa: T201
    tell_address(address)


def tell_address(address: str) -> None:
    print(f"programs: {address}v1 (OpenAI API); terminal: weft chat {address}v1", file=sys.stderr)  # noqa: T201
    print(address, flush=True)  # noqa: T201  # what was asked for
