"""`weft train`: make the run a file describes, or go on with it, and print a ticket for others."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.cli.home import home_of
from weft.cli.options import spread, until
from weft.cli.run.torchrun import served
from weft.clock import SystemClock
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.launch.kept import Wish

EXAMPLE = """A run file may be as short as this, saved as first.toml:

\b
  name = "first"
  [train]
  tokens = 1_000_000
  [train.schedule]
  type = "constant"

It trains a small model on Python's own library. More to start from: the folder recipes/ of weft's sources, and the
demo.toml that `weft demo` leaves in its folder."""


@spread
def train(
    context: typer.Context,
    run_file: Annotated[Path, typer.Argument(help="TOML file that describes the run: see below.", show_default=False)],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the file: --set train.tokens=1e6.")
    ] = None,
    go_on: Annotated[
        bool,
        typer.Option("--go-on", help="If you changed the file: go on with the run kept here, with the new settings."),
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start a new run, although a different one of this name is kept here.")
    ] = False,
    wait_for: Annotated[int, typer.Option(help="Start once this many peers are here, this one included.", min=1)] = 1,
    *,
    here: settings.Here,
    hardware: settings.Hardware,
    stay: settings.Stay,
    report: settings.Report = None,
    log: settings.Log = None,
) -> None:
    """Start a run and print its ticket on standard output; progress goes to standard error."""
    chosen = settings.machine_settings(here.machine, here.fields() | hardware.fields())
    if served(chosen):
        return
    if go_on and new:
        raise ConfigError("--go-on, --new: they exclude each other. Give one.")
    wish: Wish = "go on" if go_on else "new" if new else "ask"
    described = (settings.run_file(run_file, changes or ()), run_file.absolute().parent)
    stays = until(stay.until, SystemClock().wall())
    from weft.cli.run.running import Manner, run
    from weft.launch.corpus import Corpus
    from weft.launch.session import Options
    from weft.stages.launch import prepare
    from weft.store.home import Home

    options = Options(home=Home(home_of(context)), key=here.key, settings=chosen)
    run(
        lambda _ask, trainers: Corpus(described=described, trainers=trainers, stages=prepare, wish=wish),
        options,
        Manner(
            is_quiet=stay.quiet,
            until=stays,
            report=report,
            parent=stay.parent,
            wait_for=wait_for,
            logs=tuple(log or ()),
        ),
    )
