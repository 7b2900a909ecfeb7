"""From what a person calls a checkpoint to its folder.

    a folder with checkpoint.json           itself
    a run's folder, or a peer's inside it   the newest checkpoint below
    a Hugging Face folder                   itself
    "last"                                  the newest checkpoint of this home
    four or more digits of a run's name     the newest checkpoint of that run in this home

It reads no checkpoint.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from weft.errors import CheckpointError
from weft.ids import short

CHECKPOINT_FILE = "checkpoint.json"
_MIN_PREFIX = 4  # fewer digits would hit a run by accident
_MAX_LISTED = 8


def find_checkpoint(given: str, home: Path) -> Path:
    """Return the folder of the checkpoint, or of the Hugging Face model, that `given` means.

    Raises:
        CheckpointError: there is none; says which runs this home holds.
    """
    path = Path(given)
    if path.is_dir():
        if (path / CHECKPOINT_FILE).exists() or (path / "config.json").exists():
            return path
        found = _newest(path.glob(f"checkpoint/{CHECKPOINT_FILE}"), path.glob(f"*/checkpoint/{CHECKPOINT_FILE}"))
        if found is None:
            raise CheckpointError(
                f"{path} holds no checkpoint: there is no {CHECKPOINT_FILE} in it. It is half-written, or another "
                f"folder was meant. {_listing(home)}"
            )
        return found
    runs = home / "runs"
    if given == "last":
        found = _newest(runs.glob(f"*/*/checkpoint/{CHECKPOINT_FILE}"))
    elif re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", given):
        _require_one(given, runs)
        found = _newest(runs.glob(f"{given}*/*/checkpoint/{CHECKPOINT_FILE}"))
    else:
        found = None
    if found is None:
        raise CheckpointError(f"{given[:200]!r} names no checkpoint: no such folder, and no such run. {_listing(home)}")
    return found


def find_ticket(given: str | None, home: Path) -> Path | None:
    """Return the file with the newest ticket in this home, or in the run whose name begins with `given`."""
    name = f"{given}*" if given is not None and re.fullmatch(r"[0-9a-f]{1,64}", given) else "*"
    if given is not None and name == "*":
        return None
    return max((home / "runs").glob(f"{name}/*/ticket"), key=_age, default=None)


def _newest(*found: Iterable[Path]) -> Path | None:
    files = [path for group in found for path in group]
    return max(files, key=_age).parent if files else None


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _require_one(prefix: str, runs: Path) -> None:
    names = sorted(path.name for path in runs.glob(f"{prefix}*"))
    if len(names) > 1:
        raise CheckpointError(
            f"{prefix} begins the names of {len(names)} runs: {', '.join(names[:3])}. Give more digits."
        )


def _listing(home: Path) -> str:
    found = sorted((home / "runs").glob(f"*/*/checkpoint/{CHECKPOINT_FILE}"), key=_age, reverse=True)
    names = list(dict.fromkeys(short(path.parents[2].name) for path in found))
    if not names:
        return f"There is none in {home}; another home is named with --home."
    return f'{home} holds runs {", ".join(names[:_MAX_LISTED])}; "last" is the newest.'
