"""From options and files to what a peer is told: `RunFile` for the run, `PeerConfig` for this machine.

Arguments beat files, files beat defaults. An error names the option, or the file and the field. The options that
train, join and anchor share are spelled out once, here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import reading
from weft.cli.options import given, nbytes, rate_bps
from weft.cli.terminal import tell
from weft.config import from_tree, idle, leaves, load_tree, replace_field, told_idle
from weft.errors import ConfigError
from weft.ids import several

if TYPE_CHECKING:
    from weft.run.config import RunFile
    from weft.run.machine import PeerConfig, Use

Transports = Annotated[str | None, typer.Option(help="Ways to reach others, best first. Default: tls,iroh,via.")]
Machine = Annotated[Path | None, typer.Option(help="TOML file with this machine's settings (PeerConfig).")]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        help="Also log to: tensorboard:FOLDER, wandb:PROJECT, json:FILE; json:- is standard error.",
        metavar="WHERE",
    ),
]
Report = Annotated[Path | None, typer.Option(help="Write how it ended to this file, as JSON.")]


@dataclass(frozen=True)
class Here:
    """Who this peer is and how others reach it."""

    name: Annotated[
        str | None, typer.Option(help="Name that others see. Default: the machine's name and a part of its key.")
    ] = None
    key: Annotated[
        Path | None,
        typer.Option(
            help="Key file (made if missing): it lets a home have a second peer in a run. Default: a free one."
        ),
    ] = None
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: all of this machine.")] = None
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on; 0: that of the last start if it is free, else any.", min=0, max=65535),
    ] = None
    transports: Transports = None
    lan: Annotated[
        bool,
        typer.Option(
            "--lan",
            help="Find members in the local network that also use --lan. weft then sends a small packet to all "
            "machines there (UDP 239.255.87.70:8770) at the start, once a minute and in answer. All of them see that "
            "weft runs here; only machines with a ticket of the run see where it listens.",
        ),
    ] = False
    up: Annotated[str | None, typer.Option(help="Upload at most this fast: 20mbit.", metavar="RATE")] = None
    down: Annotated[str | None, typer.Option(help="Download at most this fast: 100mbit.", metavar="RATE")] = None
    per_day: Annotated[
        str | None, typer.Option(help="Send and receive at most this much in a day.", metavar="BYTES")
    ] = None
    machine: Machine = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of `PeerConfig`, dotted; None: not given.

        Raises:
            ConfigError: names the option that cannot be read.
        """
        if self.name is not None and not self.name.strip():
            allowed = _ALLOWED["name"][1]
            raise ConfigError(
                f"--name is empty. Give the name that others should see ({allowed}): --name anna. Or leave it out."
            )
        return {
            "name": self.name,
            "tls.host": self.host,
            "tls.port": self.port,
            "transports": check_transports(self.transports),
            "has_lan": self.lan or None,
            "caps.upload_bps": rate_bps("--up", self.up),
            "caps.download_bps": rate_bps("--down", self.down),
            "caps.day_nbytes": nbytes("--per-day", self.per_day),
        }


@dataclass(frozen=True)
class Hardware:
    """What of this machine trains, and when."""

    device: Annotated[str | None, typer.Option(help="Where torch runs: auto, cpu, cuda, cuda:1, mps.")] = None
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch on the CPU; 0: its own choice.", min=0, max=1024)
    ] = None
    memory: Annotated[str | None, typer.Option(help="Use at most this much main memory: 8GB.", metavar="BYTES")] = None
    vram: Annotated[str | None, typer.Option(help="Use at most this much of the GPU's memory.", metavar="BYTES")] = None
    cores: Annotated[int | None, typer.Option(help="Run on at most this many CPUs.", min=1, max=1024)] = None
    hours: Annotated[
        list[str] | None,
        typer.Option(
            help="Train only between these times of day, by this machine's clock: --hours 22:00-07:00 trains at night. "
            "May be repeated. For how long to train: --until 2h.",
            metavar="FROM-TO",
        ),
    ] = None
    check: Annotated[
        int | None,
        typer.Option(
            help="Of a run whose members audit each other: make so many leases of others again before the first "
            "contribution; 0: none. Default: 3.",
            min=0,
            max=64,
        ),
    ] = None
    code: Annotated[
        list[str] | None,
        typer.Option(
            help="Run this file of Python, which calls weft.extend: what a run names of it is known here then. It may "
            "do whatever you may do, so read it first. May be repeated.",
            metavar="FILE",
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """Return more fields of `PeerConfig`, as `Here.fields` does."""
        return {
            "device": self.device,
            "threads": self.threads,
            "caps.memory_nbytes": nbytes("--memory", self.memory),
            "caps.vram_nbytes": nbytes("--vram", self.vram),
            "caps.cores": self.cores,
            "caps.hours": self.hours,
            "check": self.check,
            "code": None if self.code is None else [str(Path(file).resolve()) for file in self.code],
        }


@dataclass(frozen=True)
class Stay:
    """How long the process lives, and what it shows."""

    until: Annotated[
        str | None,
        typer.Option(
            help="Leave at a time (07:00, 2h, 2026-12-01) or after a share (20rounds, 5Mtokens).", metavar="WHEN"
        ),
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False
    parent: Annotated[int, typer.Option(hidden=True, help="Stop when the process with this id has ended.")] = 0


@dataclass(frozen=True)
class Keep(Stay):
    """The same of a process that contributes nothing."""

    until: Annotated[
        str | None,
        typer.Option(help="Leave at a time (07:00), after a while (2h) or on a date (2026-12-01).", metavar="WHEN"),
    ] = None


# What an option may hold, in words: a field's own range may be a pattern that nobody wants to read.
_ALLOWED = {
    "name": ("--name", "at most 64 letters, digits, spaces and _.@()+-"),
    "tls.host": ("--host", "an address or a name of this machine"),
    "tls.port": ("--port", "a whole number from 0 to 65535; 0: that of the last start if it is free, else any"),
    "device": ("--device", "auto, cpu, mps, cuda, or one of several GPUs such as cuda:1"),
    "threads": ("--threads", "a whole number from 0 to 1024; 0 is torch's own choice"),
    "transports": ("--transports", "some of tls, iroh and via, at least one of the first two"),
    "is_blocking": ("--blocking", "no value"),
    "is_drawing_only": ("--draw-only", "no value"),
    "code": ("--code", "files of Python that call weft.extend, 16 at most"),
    "has_lan": ("--lan", "no value"),
    "keep": ("--keep", "newest or all"),
    "check": ("--check", "a whole number from 0 to 64; 0: none"),
    "caps.upload_bps": ("--up", "at least 1mbit: rounds do not wait for slower peers"),
    "caps.download_bps": ("--down", "at least 1mbit: a slower peer never catches up"),
    "caps.day_nbytes": ("--per-day", "at least 10MB"),
    "caps.memory_nbytes": ("--memory", "at least 1 byte"),
    "caps.vram_nbytes": ("--vram", "at least 1 byte"),
    "caps.cores": ("--cores", "a whole number from 1 to 1024"),
    "caps.hours": ("--hours", "times of day, from and to, such as 22:00-07:00; for how long to train: --until 2h"),
}


def machine_settings(file: Path | None, options: dict[str, Any], *, use: "Use" = "training") -> "PeerConfig":
    """Return this machine's settings. What stands in the file and has no effect here is named in one line.

    Args:
        file: TOML, or None.
        options: dotted field to value; None leaves the field as it is.
        use: what the process does.

    Raises:
        ConfigError: names the option or the file's field; an option has no effect.
    """
    from weft.run.host import num_cores
    from weft.run.machine import PeerConfig, without_effect

    tree = {} if file is None else load_tree(file)
    in_file = {name for name, _ in leaves(tree)}
    if file is not None:
        read: PeerConfig = from_tree(tree, PeerConfig, where=str(file))
        if read.code:  # from the file's folder on, as paths in a run file
            tree["code"] = [str(file.absolute().parent / name) for name in read.code]
    for dotted, value in options.items():
        if value is not None:
            check_option(dotted, value)
            replace_field(tree, dotted, value)
    settings: PeerConfig = from_tree(tree, PeerConfig, where="command line")
    unheard = without_effect(settings, use)
    for reason, names in idle((name for name, value in options.items() if value is not None), unheard).items():
        _refuse([_ALLOWED[name][0] for name in names], reason)
    for line in told_idle(str(file), in_file, unheard):
        tell(line)
    for name, num, so in (
        ("caps.cores", settings.caps.cores or 0, "and uses all of them"),
        ("threads", settings.num_threads, "and more threads than that wait for one another"),
    ):
        if num > num_cores() and not (name == "threads" and num == settings.caps.cores):  # that is said of the cap
            given = f"{_ALLOWED[name][0]} {num}" if options.get(name) is not None else f"{name} is {num}"
            tell(f"{given}: this process may use {several(num_cores(), 'core')} here, {so}")
    return settings


def refuse_idle(context: typer.Context, reason: str, *names: str) -> None:
    """Refuse those of a command's options, by the names of its parameters, that were given and would change nothing.

    Raises:
        ConfigError: with the reason, where one was given.
    """
    if found := [option for name, option in given(context).items() if name in names]:
        _refuse(found, reason)


def _refuse(options: Sequence[str], reason: str) -> None:
    have, them = ("has", "it") if len(options) == 1 else ("have", "them")
    raise ConfigError(f"{', '.join(options)} {have} no effect: {reason}. Leave {them} out.")


def check_option(dotted: str, value: Any) -> None:
    """Hold the value of an option against its field of `PeerConfig`.

    Raises:
        ConfigError: names the option, and what it may hold.
    """
    from weft.run.machine import PeerConfig

    tree: dict[str, Any] = {}
    replace_field(tree, dotted, value)
    option, allowed = _ALLOWED[dotted]
    try:
        from_tree(tree, PeerConfig, where=option)
    except ConfigError:
        shown = ",".join(value) if isinstance(value, list) else str(value)
        raise ConfigError(f"{option} {shown[:80]}: weft cannot take that. Allowed: {allowed}.") from None


def check_transports(given: str | None) -> list[str] | None:
    """Split the value of --transports; what it may hold is for `PeerConfig` to say."""
    return None if given is None else [word.strip() for word in given.split(",")]


def run_file(path: Path, changes: Sequence[str], *, is_final: bool = True) -> "RunFile":
    """Return the run file at `path` with every `--set section.field=value` in it.

    What stands in the file and has no effect beside the rest is named in one line.

    Args:
        is_final: whether nothing else takes the place of fields before it is run.

    Raises:
        ConfigError: names the file or the option, and the field; an option has no effect.
    """
    from weft.run.config import RunFile
    from weft.run.idle import without_effect

    tree, wanted = load_tree(path), changes_of(changes)
    in_file = {name for name, _ in leaves(tree)}
    for dotted, changed in wanted.items():
        replace_field(tree, dotted, changed)
    try:
        found: RunFile = from_tree(tree, RunFile, where=str(path))
    except ConfigError as error:
        from_tree(load_tree(path), RunFile, where=str(path))  # the file's own fault is said as such
        raise ConfigError(f"{_blamed(changes, str(error))}{str(error).removeprefix(str(path))}") from None
    unheard = without_effect(found) if is_final else {}
    for reason, fields in idle((name for name, _ in leaves(wanted)), unheard).items():
        _refuse([f"--set {name}" for name in fields], reason)
    for line in told_idle(str(path), in_file - set(wanted), unheard):
        tell(line)
    return found


def changes_of(changes: Sequence[str]) -> dict[str, Any]:
    """Return what every `--set section.field=value` says, by field, in order.

    Raises:
        ConfigError: one of them reads otherwise, or two are of one field.
    """
    found: dict[str, Any] = {}
    for change in changes:
        dotted, separator, value = change.partition("=")
        if not separator or not dotted.strip():
            raise ConfigError(f"--set {change}: it should read --set section.field=value.")
        if dotted.strip() in found:
            raise ConfigError(f"--set {dotted.strip()} is given twice. Give it once.")
        found[dotted.strip()] = toml_value(value.strip())
    return found


def _blamed(changes: Sequence[str], fault: str) -> str:
    """Return the --set that a fault is about: the one whose field is in its words, or all."""
    named = [change for change in changes if change.partition("=")[0].strip() in fault]
    return " ".join(f"--set {change[:80]}" for change in named or changes)


def toml_value(text: str) -> Any:
    """Return what `text` means in TOML; what is no TOML value is itself: --set model.size=tiny needs no quotes."""
    try:
        return reading.toml_of(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text
