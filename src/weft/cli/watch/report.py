"""`weft report` and `weft compare`: what a run came to, or several, in one file that can be sent around."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.clock import SystemClock
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.dashboard.report import Section

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The file: .html or .md. Default: report.html here.", show_default=False),
]


def report(
    run: Annotated[
        Path, typer.Argument(help="Log file, or folder of a run: runs/RUN in the home.", show_default=False)
    ],
    out: Out = None,
) -> None:
    """Write a report of a run: curves, what each peer contributed, bytes, faults, configuration."""
    from weft.dashboard.report import told_of
    from weft.dashboard.run import Run

    told = Run.load(run, is_public=True)
    _write(out or Path("report.html"), f"Run {told.title}", told_of(told))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Log files or folders of runs, two or more.", show_default=False)],
    out: Out = None,
) -> None:
    """Compare several runs side by side, with their curves in one chart."""
    from weft.dashboard.report import compared
    from weft.dashboard.run import Run

    if len(runs) < 2:
        raise ConfigError("one run cannot be compared. Name two or more, or make a report: weft report RUN")
    _write(out or Path("compare.html"), "Runs side by side", compared([Run.load(run, is_public=True) for run in runs]))


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
