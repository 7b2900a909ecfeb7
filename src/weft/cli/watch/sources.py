"""Where events of a run come from: its members, over the network, or logs on this machine.

a ticket, "-" or @FILE where one is           what its members tell (`observe.observer`)
nothing                                       the same, of the run that a member here takes part in
a log file, a peer's folder, a run's folder   what peers of this machine have logged
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import NOT_SEEN, ticket_or_none, ticket_text
from weft.cli.run.ticket import ticket_here
from weft.cli.settings import check_transports, machine_settings
from weft.clock import SystemClock
from weft.dashboard.logs import find_logs, in_order, is_there, older
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
    from weft.run.staged import StagedConfig

LOOK_S = 0.5  # how often logs are looked at that may grow
TOGETHER = 1000  # entries that are taken in one go

Given = Annotated[
    str | None,
    typer.Argument(
        help=f"Log file or folder of a run, or a ticket; {NOT_SEEN} Default: the run of a member here.",
        show_default=False,
    ),
]


def find(given: str | None, home: Path) -> "tuple[Path, ...] | Ticket":
    """Return what is meant: logs, or the ticket that leads to members.

    Raises:
        ConfigError, TicketError: nothing; says what there is to give.
    """
    from weft.net.ticket import read

    if given is None:
        return read(ticket_or_none(None) or ticket_here(None, home))
    if given == "-" or given.startswith("@") or (given.lstrip().startswith("weft") and not is_there(Path(given))):
        return read(ticket_text(given))
    return find_logs(Path(given))


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

    chosen = machine_settings(None, {"transports": check_transports(transports)})
    async with visit(ticket, Identity.generate(), chosen) as node:
        name, cut = await _known_of(node)
        if cut is not None:  # nobody amends it, and its stages have charters of their own
            stages = [cut.of_stage(stage).run for stage in range(cut.stages)]
            yield Observer(node, ticket.run, SystemClock(), on_entry, stages), about_of(cut)
            return
        settings = (await ask_charter(node, SystemClock())).charter.settings
        yield Observer(node, ticket.run, SystemClock(), on_entry), about(name, ticket.run, settings)


async def _known_of(node: "Node") -> "tuple[str, StagedConfig | None]":
    """Return what its maker calls the run of a node, and what its peers share where it has stages.

    The name is the first digits of the run's digest where nobody tells.
    """
    from weft.net.multi_source import small_from
    from weft.run.genesis import read_run
    from weft.run.outline import read_outline
    from weft.run.staged import StagedConfig

    name = short(node.run)
    with suppress(WeftError):
        data = await small_from(node, sorted(node.peers), Digest(node.run), MAX_RECORD_NBYTES)
        outline = read_outline(data, node.run)
        name = outline.name
        if outline.initials:
            run = read_run(data, sys.maxsize)  # whoever looks holds none of it
            return name, run if isinstance(run, StagedConfig) else None
    return name, None
