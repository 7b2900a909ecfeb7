"""Where events of a run come from: its members, over the network, or logs on this machine.

a ticket, "-" or @FILE where one is           what its members tell (`observe.observer`)
nothing                                       the same, of the run that a member here takes part in
a log file, a peer's folder, a run's folder   what peers of this machine have logged
"last", a run's name, or its first digits     what its members tell, where one is here, else what peers here have logged
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.home import called, find_run, home_of, no_such_run, run_instead
from weft.cli.options import NOT_SEEN, ticket_or_none, ticket_text
from weft.cli.run.ticket import is_kept, read_kept, ticket_here
from weft.cli.settings import check_transports, machine_settings, refuse_idle
from weft.clock import SystemClock
from weft.dashboard.logs import find_logs, holds_logs, in_order, is_there, older
from weft.dashboard.view import About
from weft.errors import WeftError
from weft.events import Entry
from weft.ids import Digest, short
from weft.log import LogTail, read_jsonl
from weft.wire import MAX_RECORD_NBYTES

if TYPE_CHECKING:
    from weft.net.node import Node
    from weft.net.ticket import Ticket
    from weft.observe.observer import Observer
    from weft.run.config import Genesis

LOOK_S = 0.5  # how often logs are looked at that may grow
TOGETHER = 1000  # entries that are taken in one go
LOGS = ("*/log.jsonl", "*/stage-*/log.jsonl")  # in a run's folder

Given = Annotated[
    str | None,
    typer.Argument(
        help='Log file or folder of a run; a run of this home: "last", its name, its digits; '
        f"or a ticket; {NOT_SEEN} Default: the run of a member here.",
        show_default=False,
    ),
]


def find(given: str | None, context: typer.Context) -> "tuple[Path, ...] | Ticket":
    """Return what is meant: logs, or the ticket that leads to members. Of a run of this home, say which it is.

    Raises:
        NoSuchRun: nothing, or several; says what there is to give.
        ConfigError: an option that logs have no use for; TicketError: a bad ticket.
    """
    from weft.net.ticket import read

    home = home_of(context)
    if given is None:
        return read(ticket_or_none(None) or ticket_here(None, home, str(context.info_name)))
    unused = "logs are read from this machine's disk", "transports"
    if given != "-" and not given.startswith("@") and (run := _run_meant(given, home)) is not None:
        kept = next((each for each in sorted(run.glob("*/ticket")) if is_kept(each, home)), None)
        how = "as peers here have logged it; none of them runs now" if kept is None else "as its members tell"
        typer.echo(f"this is run {called(run)}, {how}", err=True)
        if kept is not None:
            return read(read_kept(kept))
        refuse_idle(context, *unused)
        return find_logs(run)
    if given == "-" or given.startswith("@") or (given.lstrip().startswith("weft") and not is_there(Path(given))):
        return read(ticket_text(given))
    refuse_idle(context, *unused)
    return find_logs(logs_of(given, home))


def logs_of(given: str | Path, home: Path) -> Path:
    """Return the log or the folder that is meant: itself, or that of a run of this home; say then which it is.

    Raises:
        NoSuchRun: neither, or several runs; says which there are.
    """
    run = _run_meant(str(given), home)
    if run is None and is_there(path := Path(given)):
        return path
    if run is None:
        raise no_such_run(str(given), home, "a ticket", "a log file (log.jsonl)", "a folder of a run")
    typer.echo(f"this is run {called(run)}", err=True)
    return run


def _run_meant(given: str, home: Path) -> Path | None:
    """Return the run of this home that is called so; None: there is none, or a log or a folder of logs is."""
    path = Path(given)
    if not is_there(path):
        return find_run(given, home, having=LOGS)
    return None if holds_logs(path) else run_instead(given, home, "log of events", having=LOGS)


async def follow_logs(
    paths: Sequence[Path], on_entry: "Callable[[Entry], None]", is_finished: Callable[[], bool] | None = None
) -> None:
    """Give all that is in logs, and what they grow by, until this is cancelled.

    Args:
        is_finished: asked once, when all that is there is read; True: nothing more will come, so return.

    Raises:
        ConfigError: a line is no event, or a file cannot be read.
    """
    tails = [LogTail(path) for path in paths]
    earlier = [part for path in paths for part in older(path)]
    reads: Sequence[Callable[[], list[Entry]]]
    reads = [*(partial(read_jsonl, part) for part in earlier), *(tail.read for tail in tails)]
    while True:
        for number, entry in enumerate(in_order([*earlier, *paths], reads)):
            on_entry(entry)
            if number % TOGETHER == 0:
                await asyncio.sleep(0)  # others have their turn before a long log is read
        if is_finished is not None and is_finished():
            return
        is_finished, earlier, reads = None, [], [tail.read for tail in tails]
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def observe(
    ticket: "Ticket", transports: str | None, on_entry: "Callable[[Entry], None]"
) -> "AsyncIterator[tuple[Observer, About]]":
    """Link to members of a run; yield who hears them, and what is known of it now."""
    from weft.dashboard.run import about, about_of
    from weft.keys import Identity
    from weft.launch.visit import ask_charter, visit
    from weft.observe.observer import Observer
    from weft.run.staged import StagedConfig

    chosen = machine_settings(None, {"transports": check_transports(transports)}, use="visit")
    async with visit(ticket, Identity.generate(), chosen) as node:
        name, shared = await _known_of(node)
        if isinstance(shared, StagedConfig):  # nobody amends it, and its stages have charters of their own
            stages = [shared.of_stage(stage).run for stage in range(shared.stages)]
            yield Observer(node, ticket.run, SystemClock(), on_entry, stages), about_of(shared)
            return
        charter = (await ask_charter(node, SystemClock())).charter
        known = about(name, ticket.run, charter.settings) if shared is None else about_of(shared, charter.settings)
        if charter.audits:
            known = replace(known, audit_rate=charter.audits.rate)
        yield Observer(node, ticket.run, SystemClock(), on_entry), known


async def _known_of(node: "Node") -> "tuple[str, Genesis | None]":
    """Return what its maker calls the run of a node, and what its peers share.

    The name is the first digits of the run's digest where nobody tells.
    """
    from weft.net.multi_source import small_from
    from weft.run.genesis import read_run
    from weft.run.outline import read_outline

    name = short(node.run)
    with suppress(WeftError):
        data = await small_from(node, sorted(node.peers), Digest(node.run), MAX_RECORD_NBYTES)
        name = read_outline(data, node.run).name
        return name, read_run(data, sys.maxsize)  # whoever looks holds none of it
    return name, None
