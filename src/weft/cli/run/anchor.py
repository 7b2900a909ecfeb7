"""`weft anchor`: keep addresses and the newest state of a run, so that it outlives all who train. Needs no torch."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

import weft
from weft.cli import settings
from weft.cli.home import home_of
from weft.cli.options import ASKED, spread, ticket_of, until
from weft.cli.process import Stopper, run_loop, stop_with_parent
from weft.cli.screen.screen import make_screen
from weft.cli.signals import NOTHING_TO_SAVE
from weft.clock import SystemClock
from weft.dashboard.view import About

if TYPE_CHECKING:
    from weft.anchor.anchor import Anchor
    from weft.launch.session import Options
    from weft.run.outline import Outline
    from weft.sync.records.charter import Charter


@spread
def anchor(
    context: typer.Context,
    ticket: Annotated[str | None, typer.Argument(help=f"The ticket; {ASKED}", show_default=False)] = None,
    *,
    here: settings.Here,
    keep: Annotated[
        str | None,
        typer.Option(
            help="newest: the newest state. all: where members audit each other, also what it takes to do any training "
            "step of the run again (weft ledger check), for ever. Default: newest.",
            metavar="WHAT",
        ),
    ] = None,
    stay: settings.Keep,
) -> None:
    """Keep a run's newest state and its members' addresses for machines that join; it does not train or vote."""
    from weft.net.ticket import read

    text = ticket_of(ticket)
    read(text)
    stays = until(stay.until, SystemClock().wall(), contributes=False)
    chosen = settings.machine_settings(here.machine, here.fields() | {"keep": keep}, use="anchor")
    from weft.launch.session import Options
    from weft.store.home import Home

    options = Options(home=Home(home_of(context)), key=here.key, settings=chosen, until=stays.wall)
    _run(text, options, stay)


def _run(text: str, options: "Options", stay: settings.Keep) -> None:
    from weft.launch.anchor import anchor as keep

    screen = make_screen(is_quiet=stay.quiet)
    stopper = Stopper(screen)
    if stay.parent:
        stop_with_parent(stay.parent)
    options = replace(options, sinks=(*options.sinks, screen))

    def on_started(anchor: "Anchor", outline: "Outline", _ticket: str) -> None:
        stopper.started(anchor.stop, lambda: anchor.has_left)
        screen.start(known(outline, anchor.charter))
        typer.echo(f"anchor of {outline.name}; others join with the ticket that `weft ticket` prints here", err=True)

    async def main() -> str:
        stopper.install(asyncio.get_running_loop())
        return await keep(text, options, software=f"weft {weft.__version__}", on_started=on_started)

    try:
        reason = run_loop(main())
    except asyncio.CancelledError:
        typer.echo(NOTHING_TO_SAVE, err=True)
        return
    finally:
        stopper.remove()
        screen.close()
    typer.echo(f"anchor ended: {reason}; what it kept is in {options.home.root}")


def known(outline: "Outline", charter: "Charter | None") -> About:
    """Return what is known of the run: as it was amended, where something of it is kept here."""
    total, of_step = outline.total_tokens, outline.tokens_per_step
    if charter is not None:
        total, of_step = charter.settings.tokens, charter.settings.tokens_per_step
    return About(name=outline.name, total_tokens=total, tokens_per_step=of_step)
