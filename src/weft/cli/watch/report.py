"""`weft report` and `weft compare`: what a run came to, or several, in one file that can be sent around."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.cli.home import home_of
from weft.cli.process import run_loop
from weft.cli.watch.sources import find, logs_of, observe
from weft.clock import SystemClock
from weft.dashboard.logs import find_logs, require_one_run
from weft.errors import ConfigError
from weft.events import Entry

if TYPE_CHECKING:
    from weft.dashboard.report import Section
    from weft.dashboard.view import About
    from weft.net.ticket import Ticket

_OUT = "The file: .html or .md; an earlier report there is replaced. Default: {} here."


_RUN = 'Run of this home ("last", its name, its digits), log file, or folder of a run'


def report(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help=f"{_RUN}, from one home or several; or a ticket, for what members tell while the run goes on. "
            "Default: the run of a member here, with both.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help=_OUT.format("report.html"), show_default=False)
    ] = None,
    transports: settings.Transports = None,
) -> None:
    """Write a report of a run: curves, what each peer contributed, bytes, faults, configuration."""
    home = home_of(context)
    sources = [find(each, context) for each in (runs or (None,))]
    from weft.dashboard.report import told_of
    from weft.dashboard.run import Run
    from weft.store.evaluations import read_evaluations

    tickets = [source for source in sources if not isinstance(source, tuple)]
    logs = [log.absolute() for source in sources if isinstance(source, tuple) for log in source]
    for ticket in tickets:
        with suppress(ConfigError):  # whoever took part here has logged it
            logs += find_logs((home / "runs" / ticket.run).absolute())
    told: list[Entry] = []
    known = None
    for ticket in {ticket.run: ticket for ticket in tickets}.values():
        require_one_run(logs, {ticket.run})
        known = run_loop(_ask(ticket, transports, told))
    title = Path(runs[0]).absolute().name[:16] if runs and not tickets else ""
    found = Run.of(tuple(dict.fromkeys(logs)), told, known, is_public=True, title=title)
    if not found.history.now.peers:
        raise ConfigError(
            f"no peer has taken part in run {found.title} yet, as far as is known here, so there is nothing to report. "
            "To join it: weft join - with a fresh ticket. To report another run, name it: `weft runs` lists those of "
            "this home."
        )
    folders = dict.fromkeys(log.absolute().parents[1] for log in logs)
    evaluations = [each for folder in folders for each in read_evaluations(folder)]
    _write(out or Path("report.html"), f"Run {found.title}", told_of(found, evaluations))


async def _ask(ticket: "Ticket", transports: str | None, told: list[Entry]) -> "About":
    """Take what members keep of what happened; return what is known of the run."""
    async with observe(ticket, transports, told.append) as (observer, known):
        await observer.once()
        return known


def compare(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(help=f"{_RUN}; two or more.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help=_OUT.format("compare.html"), show_default=False)
    ] = None,
) -> None:
    """Compare several runs side by side, with their curves in one chart."""
    from weft.dashboard.report import compared
    from weft.dashboard.run import Run

    if len(runs) < 2:
        raise ConfigError("one run cannot be compared. Name two or more, or make a report: weft report RUN")
    home = home_of(context)
    paths = [logs_of(run, home) for run in runs]
    _require_others(runs, paths)
    told = [Run.load(path, is_public=True) for path in paths]
    _write(out or Path("compare.html"), "Runs side by side", compared(told))


def _require_others(given: Sequence[str], paths: Sequence[Path]) -> None:
    """
    Raises:
        ConfigError: two of those given mean the same logs.
    """
    found: dict[frozenset[Path], str] = {}
    for name, path in zip(given, paths, strict=True):
        logs = frozenset(log.resolve() for log in find_logs(path))
        if logs in found:
            raise ConfigError(
                f"{found[logs]} and {name} are the same run, so there is nothing to compare. Name another one (`weft "
                "runs` lists those of this home), or make a report of this one: weft report RUN"
            )
        found[logs] = name


def _write(path: Path, title: str, sections: "list[Section]") -> None:
    from weft.dashboard.report import html, is_report, markdown
    from weft.data.store import write_atomically

    if path.suffix not in (".html", ".md"):
        raise ConfigError(f"--out {path}: should end in .html or .md.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.absolute().parent}. Make it, or name another place.")
    if path.exists() and not (path.is_file() and is_report(path.read_text(errors="replace"))):
        raise ConfigError(f"--out {path}: it is there already, and is no report of weft. Choose another name.")
    text = markdown(title, sections) if path.suffix == ".md" else html(title, sections, SystemClock().wall())
    is_anew = path.exists()
    write_atomically(path, [text.encode()])
    typer.echo(f"written{', in the place of an older report' if is_anew else ''}: {path}")
