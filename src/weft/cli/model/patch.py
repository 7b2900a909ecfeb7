"""`weft patch`: a model's folder as what changed since another one, and that folder again."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.terminal import WorkLine
from weft.clock import SystemClock
from weft.errors import ConfigError
from weft.progress import Meter

Old = Annotated[Path, typer.Argument(help="The older model's folder.", show_default=False)]


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Send a trained model as what changed since an older one: exact, and often a hundredth of it.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("make")(make)
    app.command("apply")(apply)
    return app


def make(
    old: Old,
    new: Annotated[Path, typer.Argument(help="The newer one, such as weft export wrote it.", show_default=False)],
    file: Annotated[Path, typer.Argument(help="The patch to write.", show_default=False)],
) -> None:
    """Write what makes the newer folder of the older one. Both in bfloat16 make the smallest patches."""
    from weft.dashboard import figures
    from weft.store import patch

    nbytes = sum(path.stat().st_size for path in new.glob("*")) if new.is_dir() else None
    with Meter("comparing", "B", WorkLine(), SystemClock(), nbytes) as meter:
        told = patch.write(old, new, file, meter.add)
    size = file.stat().st_size
    share = f"{100 * size / told.new_nbytes:.3g} % of {figures.nbytes(told.new_nbytes)}"
    typer.echo(f"{file}: {figures.nbytes(size)}, {share}")
    if told.left_out:
        typer.echo(f"left out, as hidden files: {', '.join(told.left_out)}", err=True)
    if told.num_words:
        changed = f"{told.num_changed:,} of {told.num_words:,} numbers changed"
        typer.echo(f"{changed} ({100 * told.num_changed / told.num_words:.3g} %)", err=True)
    typer.echo(f"where the older folder is: weft patch apply OLD {file} NEW", err=True)


def apply(
    old: Old,
    file: Annotated[Path, typer.Argument(help="The patch.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
) -> None:
    """Write the newer folder, to the bit, of the older one and a patch."""
    from weft.store import patch

    if target.resolve() == old.resolve():
        raise ConfigError(f"{target}: it is the older folder. Name a new one; remove the older once it is written.")
    with Meter("writing", "B", WorkLine(), SystemClock(), None) as meter:
        patch.apply(old, file, target, meter.add)
    typer.echo(str(target))
