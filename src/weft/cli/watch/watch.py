"""`weft watch`: a page that shows a run as it goes on, or replays one from its logs. It disturbs nobody."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.cli.listener import LOCAL, address, listen
from weft.cli.process import run_loop
from weft.cli.terminal import tell
from weft.cli.watch.sources import Given, find, follow_logs, observe
from weft.events import Entry, LinkDown, PeerStopped, StageLeft
from weft.ids import PeerId
from weft.rng import fresh_secret

if TYPE_CHECKING:
    import socket

    from weft.dashboard.page import Feed
    from weft.net.ticket import Ticket

PORT = 8650


def watch(
    context: typer.Context,
    run: Given = None,
    public: Annotated[
        bool, typer.Option("--public", help="For strangers: no addresses, nothing to control, no token.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 lets the system choose.", min=0, max=65535)] = PORT,
    transports: settings.Transports = None,
) -> None:
    """Show a run on a page of this machine: losses, peers, rounds, bytes, what is wrong. Ctrl-C ends it."""
    source = find(run, context)
    token = None if public or host in LOCAL else fresh_secret(16).hex()
    listener = listen(host, port)
    try:
        run_loop(_serve(source, listener, token, is_public=public, transports=transports))
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass
    finally:
        listener.close()
    tell("stopped")


async def _serve(
    source: "tuple[Path, ...] | Ticket",
    listener: "socket.socket",
    token: str | None,
    *,
    is_public: bool,
    transports: str | None,
) -> None:
    import uvicorn

    from weft.dashboard.page import Feed, make_app

    feed = Feed(is_public=is_public)
    server = uvicorn.Server(
        uvicorn.Config(make_app(feed, token), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )
    feeding = asyncio.ensure_future(
        _follow(source, feed) if isinstance(source, tuple) else _observe(source, feed, transports)
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    print(address(listener) + ("" if token is None else f"?token={token}"), flush=True)  # noqa: T201  # asked for
    try:
        await asyncio.wait((feeding, serving), return_when=asyncio.FIRST_COMPLETED)
        if feeding.done():
            feeding.result()  # a log that cannot be read, a run that cannot be reached
        await serving
    finally:
        feeding.cancel()
        server.should_exit = True
        await asyncio.gather(feeding, serving, return_exceptions=True)


async def _follow(logs: "tuple[Path, ...]", feed: "Feed") -> None:
    """Show logs: those of peers that have all stopped as finished, others as they grow."""
    from weft.dashboard.run import about_logged

    feed.history.know(about_logged(logs))
    is_stopped: dict[PeerId, bool] = {}

    def take(entry: Entry) -> None:
        feed.take(entry)
        if not isinstance(entry.event, (StageLeft, LinkDown)):  # what comes after a peer's last word
            is_stopped[entry.peer] = isinstance(entry.event, PeerStopped)

    await follow_logs(logs, take, lambda: bool(is_stopped) and all(is_stopped.values()))
    feed.finish()


async def _observe(ticket: "Ticket", feed: "Feed", transports: str | None) -> None:
    async with observe(ticket, transports, feed.take) as (observer, known):
        feed.history.know(known)
        tell("members of the run answer; the page shows what they tell")
        await observer.watch()
