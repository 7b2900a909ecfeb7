"""Where a command works: the home folder that holds identities, data and runs.

It does not know what lies in a home (`weft.store.home` does).
"""

import shlex
from pathlib import Path
from typing import cast

import typer

from weft.library.home import default_home


class Place:
    """The home of one command; the default until the command line has said otherwise."""

    def __init__(self) -> None:
        self.home = default_home()


def home_of(context: typer.Context) -> Path:
    """Return the home that --home, WEFT_HOME or the platform chose."""
    return cast(Place, context.obj).home


def command_for(home: Path) -> str:
    """Return what a person types before a verb to work in `home`."""
    return "weft" if home == default_home() else f"weft --home {shlex.quote(str(home))}"
