"""The logs of a run on this machine: which they are, and what is in them, in order.

A path is a log file, a peer's folder or a run's folder. What is given twice is read once.
"""

import heapq
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from weft.errors import ConfigError
from weft.events import Entry, Evaluated, RoundCommitted
from weft.log import read_jsonl, read_lines

_RUN = re.compile(r"[0-9a-f]{64}")
MAX_LINE_NBYTES = 1 << 20  # of a log's first line
LOG_FILES = ("*.jsonl", "*/*.jsonl", "*/*/*.jsonl")


def find_logs(path: Path) -> tuple[Path, ...]:
    """Return the logs that a path means.

    Raises:
        ConfigError: there are none.
    """
    if not is_there(path):
        raise ConfigError(
            f"{str(path)[:200]!r} is not a ticket, a log file (log.jsonl) or the folder of a run (runs/RUN in the "
            "home)."
        )
    if not path.is_dir():
        return (path,)
    for pattern in LOG_FILES:
        if found := sorted(path.glob(pattern)):
            require_one_run(found)
            return tuple(found)
    raise ConfigError(
        f"{path} holds no log of events: there is no .jsonl file in it, nor in the folders in it. A run's folder is "
        "runs/RUN in the home."
    )


def run_of(log: Path) -> str | None:
    """Return the run that a log is of by the folder that it lies in; None: it lies in no home."""
    folder = log.absolute().parent.parent  # root/runs/RUN/PEER/log.jsonl
    return folder.name if folder.parent.name == "runs" and _RUN.fullmatch(folder.name) else None


def require_one_run(logs: Sequence[Path], told: Collection[str] = ()) -> None:
    """
    Args:
        told: runs that the logs tell of.

    Raises:
        ConfigError: logs are of several runs; says of which.
    """
    runs = sorted({*told, *filter(None, map(run_of, logs))})
    if len(runs) > 1:
        some = ", ".join(run[:8] for run in runs[:4])
        raise ConfigError(
            f"these are logs of {len(runs)} runs: {some}{' and more' if len(runs) > 4 else ''}. Name the folder of "
            "one, runs/RUN in the home; to see several side by side: weft compare RUN RUN"
        )


def holds_logs(path: Path) -> bool:
    """Return whether a file is a log of events by its first line, or a folder has such a file in it."""
    if not path.is_dir():
        return _begins_as_log(path)
    return any(_begins_as_log(log) for pattern in LOG_FILES for log in path.glob(pattern))


def first_measured(log: Path) -> Evaluated | None:
    """Return what was measured before a run's first round; None: nothing was, or the log does not reach back so far."""
    with suppress(OSError, ConfigError), next(iter((*older(log), log))).open("rb") as file:
        for entry in read_lines(file, str(log)):
            if isinstance(entry.event, Evaluated) and not entry.event.round:
                return entry.event
            if isinstance(entry.event, RoundCommitted):
                return None
    return None


def _begins_as_log(path: Path) -> bool:
    with suppress(OSError, ConfigError), path.open("rb") as file:
        return any(True for _ in read_lines([file.readline(MAX_LINE_NBYTES)], str(path)))
    return False


def is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a name may be: a ticket
        return False


def logged(paths: Sequence[Path]) -> Iterator[Entry]:
    """Yield the entries of several logs in the order of their times.

    Raises:
        ConfigError: a line is no event, or a file cannot be read.
    """
    parts = [part for path in paths for part in (*older(path), path)]
    return once(in_order(parts, [partial(read_jsonl, part) for part in parts]))


def once(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries, in the order of their times, without those that were there before: of a copy of a log."""
    at, there = -math.inf, set[bytes]()
    for entry in entries:
        if entry.at != at:
            at, there = entry.at, set()
        if (line := msgspec.json.encode(entry)) not in there:  # by its bytes: a loss that is no number equals nothing
            there.add(line)
            yield entry


def older(path: Path) -> tuple[Path, ...]:
    """Return what a log that grew too large was renamed to, oldest first."""
    found = [each for each in path.parent.glob(f"{path.name}.*") if each.suffix[1:].isdigit()]
    return tuple(sorted(found, key=lambda each: -int(each.suffix[1:])))


def in_order(paths: Sequence[Path], reads: Sequence[Callable[[], list[Entry]]]) -> Iterator[Entry]:
    """Yield what is read of each path in the order of its times."""

    def read(path: Path, found: Callable[[], list[Entry]]) -> list[Entry]:
        try:
            return found()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error

    return heapq.merge(*map(read, paths, reads), key=lambda entry: entry.at)
