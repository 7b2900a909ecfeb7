"""`weft train`: make the run a file describes, or go on with it, and print a ticket for others."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import settings
from weft.cli.place import home_of
from weft.cli.quantity import nbytes, rate_bps
from weft.cli.until import until as read_until
from weft.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from weft.cli.running import Ask, OnStarted
    from weft.peer.footing import Options
    from weft.peer.peer import Outcome

EXAMPLE = """A run file may be as short as this, saved as first.toml:

\b
  name = "first"
  [train]
  tokens = 1_000_000
  [train.schedule]
  type = "constant"

It trains a small model on Python's own library. More to start from: the folder recipes/ of weft's sources, and the
demo.toml that `weft demo` leaves in its folder."""


def train(
    context: typer.Context,
    run_file: Annotated[Path, typer.Argument(help="TOML file that describes the run: see below.", show_default=False)],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the file: --set train.tokens=1e6.")
    ] = None,
    wait_for: Annotated[int, typer.Option(help="Begin once so many peers are here, this one included.", min=1)] = 1,
    name: settings.Name = "",
    key: settings.Key = None,
    host: settings.Host = None,
    port: settings.Port = None,
    device: settings.Device = None,
    threads: settings.Threads = None,
    transports: settings.Transports = None,
    up: settings.Up = None,
    down: settings.Down = None,
    per_day: settings.PerDay = None,
    memory: settings.Memory = None,
    vram: settings.Vram = None,
    cores: settings.Cores = None,
    hours: settings.Hours = None,
    until: settings.Until = None,
    machine: settings.Machine = None,
    quiet: settings.Quiet = False,
    report: settings.Report = None,
    parent: settings.Parent = 0,
) -> None:
    """Start a run and print its ticket on standard output; progress goes to standard error."""
    described = settings.run_file(run_file, changes or ())
    stays = read_until(until, SystemClock().wall())
    chosen = settings.machine_settings(
        machine,
        {
            "name": name or None,
            "tls.host": host,
            "tls.port": port,
            "device": device,
            "threads": threads,
            "transports": settings.check_transports(transports),
            "caps.upload_bps": rate_bps("--up", up),
            "caps.download_bps": rate_bps("--down", down),
            "caps.day_nbytes": nbytes("--per-day", per_day),
            "caps.memory_nbytes": nbytes("--memory", memory),
            "caps.vram_nbytes": nbytes("--vram", vram),
            "caps.cores": cores,
            "caps.hours": hours,
        },
    )
    from weft.cli.running import Manner, run
    from weft.peer.footing import Options
    from weft.peer.home import Home
    from weft.peer.launch import found

    def start(options: "Options", on_started: "OnStarted", _ask: "Ask") -> "Awaitable[Outcome]":
        return found(described, run_file.absolute().parent, options, wait_for=wait_for, on_started=on_started)

    options = Options(home=Home(home_of(context)), key=key, settings=chosen)
    run(
        start,
        options,
        Manner(is_quiet=quiet, prints_ticket=True, until=stays, report=report, parent=parent, wait_for=wait_for),
    )
