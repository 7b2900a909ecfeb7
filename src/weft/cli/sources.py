"""Where events of a run come from: its members, over the network, or logs on this machine.

a ticket, or "-" for one on standard input    what its members tell (`peer.observer`)
nothing                                       the same, of the run that a member here takes part in
a log file, a peer's folder, a run's folder   what peers of this machine have logged
"""

import asyncio
import heapq
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.cli.view import Facts
    from weft.dashboard.history import Run
    from weft.events import Entry
    from weft.net.ticket import Ticket
    from weft.peer.observer import Observer

LOG_FILES = ("*.jsonl", "*/*.jsonl", "*/*/*.jsonl")
LOOK_S = 0.5  # how often logs are looked at that may grow
TOGETHER = 1000  # entries that are taken in one go

Given = Annotated[
    str | None,
    typer.Argument(
        help='Ticket ("-" reads it), log file, or folder of a run. Default: the run of a member here.',
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Logs:
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Members:
    ticket: "Ticket"


def find(given: str | None, home: Path) -> Logs | Members:
    """Return what is meant.

    Raises:
        ConfigError, TicketError: nothing; says what there is to give.
    """
    from weft.cli.ticket import kept_ticket, read_kept
    from weft.net.ticket import MAX_CHARS, read

    if given is None:
        return Members(read(read_kept(kept_ticket(None, home))))
    if given == "-":
        return Members(read(sys.stdin.readline(MAX_CHARS + 1)))
    if given.lstrip().startswith("weft") and not _is_there(Path(given)):
        return Members(read(given))
    return find_logs(Path(given))


def find_logs(path: Path) -> Logs:
    """Return the logs that a path means.

    Raises:
        ConfigError: there are none.
    """
    if not _is_there(path):
        raise ConfigError(
            f"{str(path)[:200]!r} is no ticket, no log file (log.jsonl) and no folder of a run: runs/RUN in the home."
        )
    return Logs(_logs_below(path) if path.is_dir() else (path,))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a name may be: a ticket
        return False


def _logs_below(folder: Path) -> tuple[Path, ...]:
    for pattern in LOG_FILES:
        if found := sorted(folder.glob(pattern)):
            return tuple(found)
    raise ConfigError(
        f"{folder} holds no log of events: there is no .jsonl file in it, nor in the folders in it. A run's folder is "
        "runs/RUN in the home."
    )


def logged(paths: Sequence[Path]) -> "Iterator[Entry]":
    """Yield the entries of several logs in the order of their times.

    Raises:
        ConfigError: a line is no event, or a file cannot be read.
    """
    from weft.log_file import read_jsonl

    return _in_order(paths, [partial(read_jsonl, path) for path in paths])


def _in_order(paths: Sequence[Path], reads: "Sequence[Callable[[], list[Entry]]]") -> "Iterator[Entry]":
    """Yield what is read of each path in the order of its times."""

    def read(path: Path, found: "Callable[[], list[Entry]]") -> "list[Entry]":
        try:
            return found()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error

    return heapq.merge(*map(read, paths, reads), key=lambda entry: entry.at)


async def follow_logs(
    paths: Sequence[Path], on_entry: "Callable[[Entry], None]", is_finished: Callable[[], bool] | None = None
) -> None:
    """Give all that is in logs, and what they grow by, until this is cancelled.

    Args:
        is_finished: asked once, when all that is there is read; True: nothing more will come, so return.

    Raises:
        ConfigError: as `logged`.
    """
    from weft.log_file import LogTail

    tails = [LogTail(path) for path in paths]
    while True:
        for number, entry in enumerate(_in_order(paths, [tail.read for tail in tails])):
            on_entry(entry)
            if number % TOGETHER == 0:
                await asyncio.sleep(0)  # others have their turn before a long log is read
        if is_finished is not None and is_finished():
            return
        is_finished = None
        await asyncio.sleep(LOOK_S)


def run_of(log: Path, known: "Run") -> "tuple[Run, str]":
    """Return what this machine's home knows of the run whose log lies in it, and what its peers share, in TOML.

    As it was, and nothing, where the log does not lie in a home.
    """
    from contextlib import suppress
    from dataclasses import replace

    from weft.config import dump
    from weft.errors import WeftError
    from weft.ids import Digest
    from weft.peer.home import BlobStore
    from weft.peer.machine import PeerConfig
    from weft.peer.seal import MAX_RUN_NBYTES, read_run

    folder = log.absolute().parent.parent  # root/runs/RUN/PEER/log.jsonl
    if folder.parent.name != "runs" or len(folder.name) != 64:
        return known, ""
    with suppress(WeftError, OSError, ValueError):
        data = BlobStore(folder.parents[1] / "blobs").read(Digest(folder.name), MAX_RUN_NBYTES)
        if data is not None:
            run = read_run(data, PeerConfig().max_parameters)
            settings = run.settings
            found = replace(
                known,
                name=run.name,
                id=folder.name,
                total_tokens=settings.tokens,
                tokens_per_step=settings.tokens_per_step,
            )
            return found, dump(run)
    return known, ""


@asynccontextmanager
async def observe(
    ticket: "Ticket", transports: str | None, on_entry: "Callable[[Entry], None]"
) -> "AsyncIterator[tuple[Observer, Facts]]":
    """Link to members of a run; yield who hears them, and what they say of the run."""
    from weft.cli.settings import check_transports, machine_settings
    from weft.cli.view import Facts
    from weft.clock import SystemClock
    from weft.ids import short
    from weft.keys import Identity
    from weft.peer.errand import ask_charter, visit
    from weft.peer.observer import Observer

    chosen = machine_settings(None, {"transports": check_transports(transports)})
    async with visit(ticket, Identity.generate(), chosen) as node:
        settings = (await ask_charter(node, SystemClock())).charter.settings
        facts = Facts(run=short(ticket.run), total_tokens=settings.tokens, tokens_per_step=settings.tokens_per_step)
        yield Observer(node, ticket.run, SystemClock(), on_entry), facts
