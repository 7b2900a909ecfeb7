"""`weft status`: how a run stands, in the terminal, once or as it goes on; it disturbs nobody."""

import asyncio
import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from weft.cli import settings
from weft.cli.process import run_loop
from weft.cli.screen.draw import draw
from weft.cli.screen.screen import Screen, make_screen
from weft.cli.watch.sources import Given, find, follow_logs, observe
from weft.clock import SystemClock
from weft.dashboard import figures
from weft.dashboard.history import finite
from weft.dashboard.logs import logged
from weft.dashboard.run import about_logged
from weft.dashboard.view import View, ended
from weft.events import Entry

if TYPE_CHECKING:
    from weft.net.ticket import Ticket

STILL_S = 60.0  # without a line in a log: a step or a round may take so long


def status(
    context: typer.Context,
    run: Given = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing it until you stop it.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object; with --follow one line for each event.")
    ] = False,
    transports: settings.Transports = None,
) -> None:
    """Show how a run is doing: its members, its loss, its bytes, what went wrong. This trains nothing."""
    source = find(run, context)
    screen = make_screen(is_quiet=False) if follow and not as_json else Screen()

    def take(entry: Entry) -> None:
        if follow and as_json:
            _print_line(entry)
        else:
            screen.write(entry)

    async def members(ticket: "Ticket") -> None:
        async with observe(ticket, transports, take) as (observer, known):
            screen.start(known)
            await (observer.watch() if follow else observer.once())

    if isinstance(source, tuple):
        screen.start(about_logged(source))
    try:
        if not isinstance(source, tuple):
            run_loop(members(source))
        elif follow:
            run_loop(follow_logs(source, take))
        else:
            for entry in logged(source):
                take(entry)
    except (asyncio.CancelledError, KeyboardInterrupt, BrokenPipeError):
        return  # whoever follows has seen enough
    finally:
        screen.close()
    if not follow:
        view, said = _aged(screen.view, SystemClock().wall()) if isinstance(source, tuple) else (screen.view, "")
        _show(screen.view if as_json else view, as_json)
        if not as_json:
            typer.echo(said, nl=False)


def _print_line(entry: Entry) -> None:
    sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
    sys.stdout.flush()


def _show(view: View, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(as_tree(view), ensure_ascii=False))
        return
    console = Console()
    console.print(draw(view, console.size.width))


def _aged(view: View, now: float) -> tuple[View, str]:
    """Return what logs show, and a line that says how old the newest word is, where nobody that is heard goes on."""
    is_over = not any(view.is_here(peer) for peer, line in view.peers.items() if line.is_heard)
    if not view.peers or (not is_over and now - view.now < STILL_S):
        return view, ""
    at = datetime.fromtimestamp(view.now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    ago = f"{figures.duration(now - view.now)} ago"
    if is_over:
        return view, f"the last word of it here is of {at}, {ago}\n"
    return ended(view), f"nothing was logged since {at}, {ago}: its peer was killed, or is stuck\n"


def as_tree(view: View) -> dict[str, Any]:
    """Return a view for programs: numbers are as in the events, times in seconds since 1970."""
    stages, told = view.cut, view.evaluated
    tree: dict[str, Any] = {
        "run": view.run.name,
        "round": view.round,
        "committed_tokens": view.committed_tokens,
        "total_tokens": view.run.total_tokens,
        "time_left_s": view.time_left_s,
        "loss": finite(view.losses.points[-1][1]) if view.losses.points else None,
        "heldout": None
        if told is None
        else {
            "round": told.round,
            "loss": finite(told.loss),
            f"{view.loss_of}s": told.num_tokens,
            **({"preferred": msgspec.to_builtins(told.preferred)} if told.preferred else {}),
            **({"reward": told.reward} if told.reward is not msgspec.UNSET else {}),
        },
        "nats_per_byte": None if told is None else finite(told.nats_per_byte),
        "sent_nbytes": view.sent_nbytes,
        "received_nbytes": view.received_nbytes,
        "ring_nbytes": view.ring_nbytes,
        "at": view.now,
        "peers": [
            {
                "peer": peer,
                "name": line.name,
                "state": line.state,
                "work": line.work or None,
                "round": line.round,
                "loss": finite(line.loss),
                "tokens_per_s": line.tokens_per_s,
                "link": line.link,
                "speaks_for_itself": line.is_heard,
                **({"stages": [stage + 1 for stage in stages.of(peer)]} if stages.num else {}),
            }
            for peer, line in sorted(view.lines.items())
        ],
        "watching": view.num_watching,
        "news": [{"at": told.at, "by": told.by, "text": told.text} for told in view.notables],
    }
    if stages.num:
        tree["stages"] = [
            {
                "stage": number,
                "layers": stage.layers or None,
                "num_parameters": stage.num_parameters,
                "peers": list(stage.members),
                "samples_per_s": stage.rate,
                "waiting": stage.waiting,
            }
            for number, stage in enumerate(stages.now, 1)
        ]
    return tree
