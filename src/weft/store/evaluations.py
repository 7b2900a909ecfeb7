"""How models of a run did on tasks, kept beside its peers' folders: `weft eval --tasks` writes it, `weft report` reads.

runs/<run>/tasks.json
"""

from pathlib import Path

import msgspec

from weft.data.store import write_atomically
from weft.errors import DataError, DiskFull

MAX_KEPT = 256
_FILE = "tasks.json"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        kind: a group of tasks; empty: all of them.
        num, right: tasks, and how many were answered rightly.
        right_by_length: where choices are compared by their likelihood per byte; None: none of them has choices.
    """

    kind: str
    num: int
    right: int
    right_by_length: int | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        tasks: what their file is called.
        digest: of the tasks, and of how they were put.
        round: of the model; None: of what the run began with.
        results: of each kind, then of all.
    """

    tasks: str
    digest: str
    round: int | None
    results: tuple[Result, ...]


def read_evaluations(run: Path) -> list[Evaluation]:
    """Return what is kept of a run; nothing where that cannot be read."""
    return _read(run) or []


def keep_evaluation(run: Path, found: Evaluation) -> bool:
    """Keep one in the place of that of the same tasks and round; return whether it could be written.

    What cannot be read is not written over.
    """
    there = _read(run)
    if there is None:
        return False
    others = [each for each in there if (each.digest, each.round) != (found.digest, found.round)]
    try:
        write_atomically(run / _FILE, [msgspec.json.encode([*others, found][-MAX_KEPT:])])
    except (DiskFull, DataError):
        return False
    return True


def _read(run: Path) -> list[Evaluation] | None:
    """Return what is kept; None: it cannot be read."""
    try:
        return msgspec.json.decode((run / _FILE).read_bytes(), type=list[Evaluation])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError):
        return None
