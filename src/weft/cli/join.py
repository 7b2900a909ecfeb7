"""`weft join`: contribute to a run that somebody holds a ticket for."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import figures, settings
from weft.cli.place import home_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from weft.cli.running import Ask, OnStarted
    from weft.peer.launch import Options
    from weft.peer.peer import Outcome
    from weft.peer.terms import Terms


def join(
    context: typer.Context,
    ticket: Annotated[str, typer.Argument(help='The ticket; "-" reads it from standard input.', show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data: Annotated[
        list[str] | None, typer.Option(help="Own text files, folders or globs, for a private run; again for more.")
    ] = None,
    name: settings.Name = "",
    key: settings.Key = None,
    host: settings.Host = None,
    port: settings.Port = None,
    device: settings.Device = None,
    threads: settings.Threads = None,
    transports: settings.Transports = None,
    machine: settings.Machine = None,
    quiet: settings.Quiet = False,
    report: settings.Report = None,
    parent: settings.Parent = 0,
) -> None:
    """Show what a run will cost this machine, ask, and take part."""
    from weft.errors import ConfigError
    from weft.net.ticket import MAX_CHARS, read

    text = sys.stdin.readline(MAX_CHARS + 1) if ticket == "-" else ticket
    read(text)  # a bad ticket is refused before anything heavy is loaded
    if not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask whether to join. Add --yes, or join from a terminal.")
    chosen = settings.machine_settings(
        machine,
        {
            "name": name or None,
            "tls.host": host,
            "tls.port": port,
            "device": device,
            "threads": threads,
            "transports": settings.check_transports(transports),
        },
    )
    from weft.cli.running import Manner, run
    from weft.data import CorpusConfig, TextSource
    from weft.peer.home import Home
    from weft.peer.launch import Options
    from weft.peer.launch import join as join_run

    own = (CorpusConfig(source=TextSource(paths=tuple(data))), Path.cwd()) if data else None

    def start(options: "Options", on_started: "OnStarted", ask: "Ask") -> "Awaitable[Outcome | None]":
        def agree(terms: "Terms") -> bool:
            typer.echo(describe(terms), err=True)
            return yes or ask("join?")

        return join_run(text, options, agree=agree, on_started=on_started, own_data=own)

    options = Options(home=Home(home_of(context)), key=key, settings=chosen)
    run(start, options, Manner(is_quiet=quiet, prints_ticket=False, report=report, parent=parent))


def describe(terms: "Terms") -> str:
    """Return what joining means, line by line."""
    run = terms.run
    issuer = next((contact.name for contact in terms.contacts if contact.peer == terms.issuer), "")
    where = "your own files, which stay here" if run.is_private else "the run's, fetched from members"
    return "\n".join(
        (
            f"run       {run.name}  {run.run[:16]}",
            f"issued by {issuer}  {terms.issuer[:16]}",
            f"model     {figures.amount(terms.num_parameters)} parameters",
            f"data      {where}",
            f"to fetch  {figures.nbytes(terms.fetch_nbytes)}",
            f"disk      {figures.nbytes(terms.disk_nbytes)}",
            f"memory    {figures.nbytes(terms.memory_nbytes)}",
            f"network   {figures.nbytes(terms.round_nbytes)} a round among {terms.num_peers} peers, "
            f"at most {figures.nbytes(1e9 * terms.gigabytes_per_day)} a day",
            f"          (a round takes at least {terms.round_s:.2g} s: {run.method.every} inner steps at "
            f"{terms.flops_per_s / 1e9:.3g} GFLOP/s, as fast as this machine multiplies)",
        )
    )
