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
    from weft.peer.config import RunFile
    from weft.peer.machine import PeerConfig

Name = Annotated[str, typer.Option(help="How others see this peer. Default: the machine's name and a part of its key.")]
Key = Annotated[Path | None, typer.Option(help="Key file (made if missing). Default: a free one of the home.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on. Default: all of this machine.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 lets the system choose.", min=0, max=65535)]
Device = Annotated[str | None, typer.Option(help="Where torch runs: auto, cpu, cuda, cuda:1, mps.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch on the CPU; 0: its own choice.", min=0, max=1024)]
Up = Annotated[str | None, typer.Option(help="Upload at most so fast: 20mbit.", metavar="RATE")]
Down = Annotated[str | None, typer.Option(help="Download at most so fast: 100mbit.", metavar="RATE")]
PerDay = Annotated[str | None, typer.Option(help="Move at most so much from midnight to midnight.", metavar="BYTES")]
Memory = Annotated[str | None, typer.Option(help="Take at most so much main memory: 8GB.", metavar="BYTES")]
Vram = Annotated[str | None, typer.Option(help="Take at most so much of the GPU's memory.", metavar="BYTES")]
Cores = Annotated[int | None, typer.Option(help="Run on at most so many CPUs.", min=1, max=1024)]
Hours = Annotated[
    list[str] | None,
    typer.Option(help="Train at these local times only: 22:00-07:00; again for more.", metavar="RANGE"),
]
Until = Annotated[
    str | None,
    typer.Option(help="Leave at a time (07:00, 2h, 2026-12-01) or after a share (20rounds, 5Mtokens).", metavar="WHEN"),
]
Transports = Annotated[str | None, typer.Option(help="Ways to reach others, best first. Default: tls,iroh,via.")]
Machine = Annotated[Path | None, typer.Option(help="TOML file with this machine's settings (PeerConfig).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Report = Annotated[Path | None, typer.Option(help="Write how it ended to this file, as JSON.")]
Parent = Annotated[int, typer.Option(hidden=True, help="Stop when this process is gone.")]

# What an option may hold, in words: a field's own range may be a pattern that nobody wants to read.
_ALLOWED = {
    "name": ("--name", "at most 64 letters, digits, spaces and _.@()+-"),
    "tls.host": ("--host", "an address or a name of this machine"),
    "tls.port": ("--port", "a whole number from 0 to 65535; 0 lets the system choose"),
    "device": ("--device", "auto, cpu, mps, cuda, or one of several GPUs such as cuda:1"),
    "threads": ("--threads", "a whole number from 0 to 1024; 0 is torch's own choice"),
    "transports": ("--transports", "some of tls, iroh and via, at least one of the first two"),
    "caps.upload_bps": ("--up", "at least 1mbit: rounds give up on less"),
    "caps.download_bps": ("--down", "at least 1mbit: what is slower never catches up"),
    "caps.day_nbytes": ("--per-day", "at least 10MB"),
    "caps.memory_nbytes": ("--memory", "at least 1 byte"),
    "caps.vram_nbytes": ("--vram", "at least 1 byte"),
    "caps.cores": ("--cores", "a whole number from 1 to 1024"),
    "caps.hours": ("--hours", "ranges of the day such as 22:00-07:00"),
}


def machine_settings(file: Path | None, options: dict[str, Any]) -> "PeerConfig":
    """Return this machine's settings.

    Args:
        file: TOML, or None.
        options: dotted field to value; None leaves the field as it is.

    Raises:
        ConfigError: names the option or the file's field.
    """
    from weft.peer.machine import PeerConfig

    tree = {} if file is None else load_tree(file)
    if file is not None:
        from_tree(tree, PeerConfig, where=str(file))
    for dotted, value in options.items():
        if value is not None:
            check_option(dotted, value)
            replace_field(tree, dotted, value)
    settings: PeerConfig = from_tree(tree, PeerConfig, where="command line")
    return settings


def check_option(dotted: str, value: Any) -> None:
    """Hold the value of an option against its field of `PeerConfig`.

    Raises:
        ConfigError: names the option, and what it may hold.
    """
    from weft.peer.machine import PeerConfig

    tree: dict[str, Any] = {}
    replace_field(tree, dotted, value)
    option, allowed = _ALLOWED[dotted]
    try:
        from_tree(tree, PeerConfig, where=option)
    except ConfigError:
        shown = ",".join(value) if isinstance(value, list) else str(value)
        raise ConfigError(f"{option} {shown[:80]}: there is no such value. Allowed: {allowed}.") from None


def check_transports(given: str | None) -> list[str] | None:
    """Split the value of --transports; what it may hold is for `PeerConfig` to say."""
    return None if given is None else [word.strip() for word in given.split(",")]


def run_file(path: Path, changes: Sequence[str]) -> "RunFile":
    """Return the run file at `path` with every `--set section.field=value` in it.

    Raises:
        ConfigError: names the file or the option, and the field.
    """
    from weft.peer.config import RunFile

    tree = load_tree(path)
    for dotted, changed in changes_of(changes).items():
        replace_field(tree, dotted, changed)
    try:
        found: RunFile = from_tree(tree, RunFile, where=str(path))
    except ConfigError as error:
        from_tree(load_tree(path), RunFile, where=str(path))  # the file's own fault is said as such
        raise ConfigError(f"{_blamed(changes, str(error))}{str(error).removeprefix(str(path))}") from None
    return found


def changes_of(changes: Sequence[str]) -> dict[str, Any]:
    """Return what every `--set section.field=value` says, by field, in order.

    Raises:
        ConfigError: one of them reads otherwise.
    """
    found = {}
    for change in changes:
        dotted, separator, value = change.partition("=")
        if not separator or not dotted.strip():
            raise ConfigError(f"--set {change}: it should read --set section.field=value.")
        found[dotted.strip()] = toml_value(value.strip())
    return found


def _blamed(changes: Sequence[str], fault: str) -> str:
    """Return the --set that a fault is about: the one whose field is in its words, or all."""
    named = [change for change in changes if change.partition("=")[0].strip() in fault]
    return " ".join(f"--set {change[:80]}" for change in named or changes)


def toml_value(text: str) -> Any:
    """Return what `text` means in TOML; what is no TOML value is itself: --set model.size=tiny needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
