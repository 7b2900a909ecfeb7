"""`weft demo`: four peers on this machine train one model over real, encrypted connections, shown live.

weft-demo/ demo.toml          the run, as it was started
           home/              identities, data, logs and checkpoints of all four
           peer-1.log ...     what each process said
           peer-1.json ...    how each ended
           export/            the model as a Hugging Face folder
"""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.home import say_no_home
from weft.errors import ConfigError


def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder that keeps everything.")] = Path("weft-demo"),
    peers: Annotated[
        int | None, typer.Option(help="Number of peers, one process each. Default: 4.", min=1, max=16)
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Train for about this long; weft times this machine first. Default: as --tokens says.", min=0.1
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Train on this many tokens. Default: 4.5 million.", min=1)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove what an earlier demo left in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train one model on four peers here, let it write, and export it."""
    say_no_home(context, f"the demo keeps everything in {folder}")
    if minutes is not None and tokens is not None:
        raise ConfigError("--minutes and --tokens exclude each other. Give one.")
    from weft.cli.demo.run import Wishes, run_demo

    code = run_demo(folder.absolute(), Wishes(peers, minutes, tokens, is_fresh=fresh, is_quiet=quiet))
    if code:
        raise typer.Exit(code)
