"""From options and files to what a peer is told: `RunFile` for the run, `PeerConfig` for this machine.

Arguments beat files, files beat defaults. An error names the option, or the file and the field. The options that
train and join share are spelled out once, here.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.config import from_tree, load_tree, replace_field
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.peer.config import PeerConfig, RunFile

Name = Annotated[str, typer.Option(help="How others see this peer. Default: the machine's name and a part of its key.")]
Key = Annotated[Path | None, typer.Option(help="Key file (made if missing). Default: a free one of the home.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on. Default: all of this machine.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 lets the system choose.")]
Device = Annotated[str | None, typer.Option(help="Where torch runs: auto, cpu, cuda, cuda:1, mps.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch on the CPU; 0: its own choice.")]
Transports = Annotated[str | None, typer.Option(help="tls, iroh or tls,iroh.")]
Machine = Annotated[Path | None, typer.Option(help="TOML file with this machine's settings (PeerConfig).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Report = Annotated[Path | None, typer.Option(help="Write how it ended to this file, as JSON.")]
Parent = Annotated[int, typer.Option(hidden=True, help="Stop when this process is gone.")]


def machine_settings(file: Path | None, options: dict[str, Any]) -> "PeerConfig":
    """Return this machine's settings.

    Args:
        file: TOML, or None.
        options: dotted field to value; None leaves the field as it is.

    Raises:
        ConfigError: names the option or the file's field.
    """
    from weft.peer.config import PeerConfig

    tree = {} if file is None else load_tree(file)
    if file is not None:
        from_tree(tree, PeerConfig, where=str(file))
    for dotted, value in options.items():
        if value is not None:
            replace_field(tree, dotted, value)
    settings: PeerConfig = from_tree(tree, PeerConfig, where="command line")
    return settings


def check_transports(given: str | None) -> list[str] | None:
    """Split the value of --transports; what it may hold is for `PeerConfig` to say."""
    return None if given is None else [word.strip() for word in given.split(",")]


def run_file(path: Path, changes: Sequence[str]) -> "RunFile":
    """Return the run file at `path` with every `--set section.field=value` in it.

    Raises:
        ConfigError: names the file or the option, and the field.
    """
    tree = load_tree(path)
    for change in changes:
        dotted, separator, value = change.partition("=")
        if not separator or not dotted.strip():
            raise ConfigError(f"--set {change}: it should read --set section.field=value.")
        replace_field(tree, dotted.strip(), toml_value(value.strip()))
    from weft.peer.config import RunFile

    found: RunFile = from_tree(tree, RunFile, where=str(path))
    return found


def toml_value(text: str) -> Any:
    """Return what `text` means in TOML; what is no TOML value is itself: --set model.size=tiny needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
