"""`weft report` and `weft compare`: what a run came to, or several, in one file that can be sent around."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.home import home_of
from weft.cli.watch.sources import logs_of
from weft.clock import SystemClock
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.dashboard.report import Section

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The file: .html or .md. Default: report.html here.", show_default=False),
]


_RUN = 'Run of this home ("last", its name, its digits), log file, or folder of a run'


def report(
    context: typer.Context, run: Annotated[str, typer.Argument(help=f"{_RUN}.", show_default=False)], out: Out = None
) -> None:
    """Write what a run came to: curves, peers and what each gave, bytes, faults, configuration."""
    from weft.dashboard.report import told_of
    from weft.dashboard.run import Run

    told = Run.load(logs_of(run, home_of(context)), is_public=True)
    _write(out or Path("report.html"), f"Run {told.title}", told_of(told))


def compare(
    context: typer.Context,
    runs: Annotated[list[str], typer.Argument(help=f"{_RUN}; two or more.", show_default=False)],
    out: Out = None,
) -> None:
    """Write several runs side by side, their curves over each other."""
    from weft.dashboard.report import compared
    from weft.dashboard.run import Run

    if len(runs) < 2:
        raise ConfigError("one run cannot be compared. Name two or more, or make a report: weft report RUN")
    home = home_of(context)
    told = [Run.load(logs_of(run, home), is_public=True) for run in runs]
    _write(out or Path("compare.html"), "Runs side by side", compared(told))


def _write(path: Path, title: str, sections: "list[Section]") -> None:
    from weft.dashboard.report import html, markdown
    from weft.data.store import write_atomically

    if path.suffix not in (".html", ".md"):
        raise ConfigError(f"--out {path}: should end in .html or .md.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.absolute().parent}. Make it, or name another place.")
    text = markdown(title, sections) if path.suffix == ".md" else html(title, sections, SystemClock().wall())
    write_atomically(path, [text.encode()])
    typer.echo(f"written: {path}")
