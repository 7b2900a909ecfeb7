"""`weft serve`: a trained model answers over the API that most programs know, with a chat page."""

import asyncio
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.home import home_of
from weft.cli.listener import LOCAL, address, listen
from weft.cli.options import nbytes, ticket_of
from weft.cli.process import run_loop
from weft.cli.settings import refuse_idle
from weft.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine

    from weft.cli.model.trained import Trained
    from weft.engine.load import Plan
    from weft.engine.numbers import Kind
    from weft.serve.generation import Model
    from weft.serve.keys import Key
    from weft.serve.metrics import Metrics
    from weft.store.home import Home

PORT = 8000
_TICKET = re.compile(r"\s*weft\d")
_OF_DEVICE = ("device", "threads", "numbers", "cache")


class Numbers(StrEnum):
    auto = "auto"
    int8 = "int8"
    bf16 = "bf16"
    fp32 = "fp32"


KINDS: "dict[Numbers, Kind]" = {Numbers.int8: "int8", Numbers.bf16: "bf16", Numbers.fp32: "fp32"}


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help='Folder, or a run: its name, its digits, or "last". Or a ticket of a run with stages, whose members '
            'then compute: "-" reads it from standard input, @FILE from a file.',
            show_default=False,
        ),
    ],
    name: Annotated[str, typer.Option(help="What requests call the model. Default: the run's or the folder's.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on; another machine's requests need --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port; 0 lets the system choose.", min=0, max=65535)] = PORT,
    keys: Annotated[Path | None, typer.Option(help="File of API keys: who may ask, and how much.")] = None,
    device: Annotated[str, typer.Option(help="Where torch runs: auto, cpu, cuda, cuda:1.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads of torch on the CPU; 0: its own choice.", min=0, max=1024)] = 0,
    numbers: Annotated[
        Numbers, typer.Option(help="How weights are held: int8 is the fastest on CPUs, fp32 is as trained.")
    ] = Numbers.auto,
    max_context: Annotated[
        int, typer.Option(help="Tokens of question and answer together; 0: as many as the model reads.", min=0)
    ] = 0,
    cache: Annotated[
        str | None, typer.Option(help="Memory for keys and values: 2GB. Default: a quarter of what is free.")
    ] = None,
) -> None:
    """Answer over the OpenAI API, and show a page to chat with the model. Ctrl-C ends it."""
    from weft.cli.model.trained import open_trained, say_which
    from weft.serve.keys import load_keys

    if keys is None and host not in LOCAL:
        raise ConfigError(
            f"--host {host}: other machines could ask, and nobody would be refused. Make a file of API keys and give "
            "it with --keys (docs/serving.md), or leave --host out to answer this machine alone."
        )
    known = None if keys is None else load_keys(keys)
    cache_nbytes = nbytes("--cache", cache)
    if (ticket := _ticket_in(model)) is not None:
        from weft.store.home import Home

        refuse_idle(context, "the run's members compute; this machine asks them", *_OF_DEVICE)
        listener = listen(host, port)
        _run(_serve_stages(ticket, name, listener, known, Home(home_of(context)), max_context), listener)
        return
    trained = open_trained(model, home_of(context))
    say_which(trained, model)
    listener = listen(host, port)
    serving = _serve(
        trained,
        name or trained.called,
        listener,
        known,
        device=device,
        threads=threads,
        numbers=numbers,
        max_context=max_context,
        cache_nbytes=cache_nbytes,
    )
    _run(serving, listener)


def _ticket_in(given: str) -> str | None:
    """Return the ticket that is given; None: it is a folder or a run."""
    if given == "-" or (given.startswith("@") and not Path(given).exists()):
        return ticket_of(given)
    return given if _TICKET.match(given) and not Path(given).exists() else None


def _run(serving: "Coroutine[Any, Any, None]", listener: "socket.socket") -> None:
    try:
        run_loop(serving)
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        listener.close()


async def _serve_stages(
    ticket: str, name: str, listener: "socket.socket", keys: "tuple[Key, ...] | None", home: "Home", max_context: int
) -> None:
    from weft.clock import SystemClock
    from weft.launch.session import Options
    from weft.run.machine import PeerConfig
    from weft.serve.generation import model_of
    from weft.serve.metrics import Metrics
    from weft.stages.asking import asking

    options = Options(home=home, key=None, settings=PeerConfig())
    async with asking(ticket, options, max_context) as asked:
        name = name or asked.run.name
        models: dict[str, Model] = {}
        model = model_of(name, int(SystemClock().wall()), asked.entry, asked.tokenizer, asked.came_with)
        models[name] = model
        said = f"{name}: {asked.run.stages} stages, held by members; a conversation has at most {model.context:,}"
        print(f"{said} tokens", file=sys.stderr)  # noqa: T201
        await _answer(models, keys, Metrics(models), listener)


async def _serve(
    trained: "Trained",
    name: str,
    listener: "socket.socket",
    keys: "tuple[Key, ...] | None",
    *,
    device: str,
    threads: int,
    numbers: Numbers,
    max_context: int,
    cache_nbytes: int | None,
) -> None:
    import torch

    from weft.cli.model.trained import place
    from weft.engine.load import engine_of, free_nbytes, kind_for, plan
    from weft.serve.generation import model_of
    from weft.serve.metrics import Metrics

    if threads:
        torch.set_num_threads(threads)
    here = place(device)
    kind = kind_for(here) if numbers is Numbers.auto else KINDS[numbers]
    most = trained.config.max_seq_len
    if max_context > most:
        raise ConfigError(f"--max-context {max_context}: the model reads {most} tokens at most.")
    planned = plan(trained.config, here, kind, max_context or most, cache_nbytes, free_nbytes(here))
    models: dict[str, Model] = {}
    metrics = Metrics(models)
    engine = engine_of(trained.config, trained.vector, here, planned, max_context or most, metrics.step(name))
    models[name] = model_of(
        name, int(trained.made_at), engine, trained.tokenizer, trained.came_with, trained.fingerprint(kind)
    )
    _tell(models[name], planned)
    try:
        await _answer(models, keys, metrics, listener)
    finally:
        engine.close()


async def _answer(
    models: "dict[str, Model]", keys: "tuple[Key, ...] | None", metrics: "Metrics", listener: "socket.socket"
) -> None:
    """Say how to ask, and answer until the process is to end."""
    import uvicorn

    from weft.serve.app import app
    from weft.web.web import page_routes

    where = address(listener)
    if any(model.template is None for model in models.values()):
        text = "the model has no chat template: in chats it is given plain turns (User: ...) and goes on from them"
        print(text, file=sys.stderr)  # noqa: T201
    print(f"programs: {where}v1 (OpenAI API); terminal: weft chat {where}v1", file=sys.stderr)  # noqa: T201
    print(where, flush=True)  # noqa: T201  # what was asked for
    config = uvicorn.Config(
        app(models, keys, metrics=metrics, page=page_routes("serve")),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def _tell(model: "Model", planned: "Plan") -> None:
    """Say what is served."""
    said = (
        f"{model.id}: {planned.kind} weights, {planned.weights_nbytes / 1e9:.2f} GB; room for {planned.num_tokens:,} "
        f"tokens of all conversations together, {planned.kv_nbytes / 1e9:.2f} GB; a conversation has at most "
        f"{model.context:,}"
    )
    print(said, file=sys.stderr)  # noqa: T201
