"""`weft gather`: the whole model of a run with stages, whose peers hold a section each."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.cli.home import called, command_for, find_sections, home_of
from weft.cli.options import ASKED, spread, ticket_of
from weft.cli.process import run_loop
from weft.cli.terminal import WorkLine
from weft.dashboard import figures
from weft.events import Entry, Event, Notice
from weft.ids import RunId, short

if TYPE_CHECKING:
    from weft.stages.gather.gather import Gathered


@spread
def gather(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            help=f'A ticket; {ASKED} Or a run whose sections are here: its name, its digits, or "last".',
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="Folder for the checkpoint. Default: the run's, in the home.")
    ] = None,
    *,
    here: settings.Here,
) -> None:
    """Put the sections of a run with stages together: fetch them from its members, or use those that are here."""
    from weft.cli.run.summary import beside, try_next
    from weft.launch.session import Options
    from weft.net.ticket import read
    from weft.store.home import Home

    home = Home(home_of(context))
    told = _Told()
    text = ticket_of(run)
    if text.lstrip().startswith("weft"):
        name = read(text).run  # a bad ticket is refused before anything heavy is loaded
        chosen = settings.machine_settings(here.machine, here.fields(), use="visit")
        from weft.stages.gather.visit import visit

        options = Options(home=home, key=here.key, settings=chosen, sinks=(told,), aside=told.take)
        found = run_loop(visit(text, options, into))
    else:
        settings.refuse_idle(context, "sections that are here need no network", *vars(here))
        from weft.stages.gather.visit import from_here

        folder = find_sections(text, home.root)
        name = RunId(folder.name)
        typer.echo(f"putting run {called(folder)} together", err=True)
        found = run_loop(from_here(name, home, into, told.take))
    told.close()
    typer.echo(_told_of(found))
    typer.echo(beside("checkpoint", found.checkpoint))
    typer.echo(try_next(command_for(home.root), short(name) if into is None else str(into)))


def _told_of(found: "Gathered") -> str:
    stages = f"{len(found.rounds)} sections"
    rounds = (
        f"round {found.rounds[0]}"
        if len(set(found.rounds)) == 1
        else f"rounds {min(found.rounds)} to {max(found.rounds)}"
    )
    fetched = f"{figures.nbytes(found.fetched_nbytes)} fetched" if found.fetched_nbytes else "all of them here"
    return f"{stages} put together, of {rounds}; {fetched}"


class _Told:
    def __init__(self) -> None:
        self._line = WorkLine()

    def write(self, entry: Entry) -> None:
        self.take(entry.event)

    def take(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._line.close()
            typer.echo(event.text, err=True)
        else:
            self._line(event)

    def close(self) -> None:
        self._line.close()
