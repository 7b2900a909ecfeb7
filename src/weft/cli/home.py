"""From what a person calls a checkpoint to its folder.

    a folder with checkpoint.json           itself
    a run's folder, or a peer's inside it   the newest checkpoint below
    a Hugging Face folder                   itself
    "last"                                  the newest checkpoint of this home
    four or more digits of a run's name     the newest checkpoint of that run in this home

The newest is the one that was trained last on this machine. A run that was only joined again, or has just begun, comes
after those, whenever it was saved.

In a run with stages each peer keeps sections, which are no model: none of these chooses them, and an error says how
a model is made of them (`weft gather`). Of checkpoints it reads only when they were trained.
"""

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer

from weft.errors import CheckpointError
from weft.ids import short
from weft.library.home import default_home
from weft.wire import printable

CHECKPOINT_FILE = "checkpoint.json"
TRAINED_AT_MS = "trained_at_ms"  # a counter in it
_SECTIONS = f"stage-*/checkpoint/{CHECKPOINT_FILE}"  # in a peer's folder of a run with stages
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
        below = path.glob(f"*/checkpoint/{CHECKPOINT_FILE}")
        whole = (each for each in below if not each.parts[-3].startswith("stage-"))
        found = _newest(path.glob(f"checkpoint/{CHECKPOINT_FILE}"), whole)
        if found is None:
            _require_no_sections(_newest(path.glob(_SECTIONS), path.glob(f"*/{_SECTIONS}")))
            raise CheckpointError(
                f"{path} holds no checkpoint: there is no {CHECKPOINT_FILE} in it. It is half-written, or the wrong "
                f"folder. {_listing(home)}"
            )
        return found
    which = _named(given, home)
    found = None if which is None else _newest(which.parent.glob(f"{which.name}/*/checkpoint/{CHECKPOINT_FILE}"))
    sections = None if which is None else _newest(which.parent.glob(f"{which.name}/*/{_SECTIONS}"))
    if sections is not None and (found is None or trained_at(sections) > trained_at(found)):
        found = _newest(sections.parents[2].glob(f"*/checkpoint/{CHECKPOINT_FILE}"))
        if found is None:
            _require_no_sections(sections)
    if found is None:
        why = "there is none yet" if given == "last" else "no such folder, and no such run"
        raise CheckpointError(f"{given[:200]!r} names no checkpoint: {why}. {_listing(home)}")
    return found


def find_sections(given: str, home: Path) -> Path:
    """Return the folder of the run, with stages, that `given` means: digits of its name, or "last".

    Raises:
        CheckpointError: this home has no sections of such a run.
    """
    which = _named(given, home)
    found = None if which is None else _newest(which.parent.glob(f"{which.name}/*/{_SECTIONS}"))
    if found is None:
        raise CheckpointError(
            f"{given[:200]!r} is not a ticket, and not a run with sections in {home}. Only runs with stages have "
            "sections: give a ticket of one, the first digits of its name, or last."
        )
    return found.parents[2]


def find_tickets(given: str | None, home: Path) -> list[Path]:
    """Return the tickets in this home, or in the run whose name begins with `given`, the newest first."""
    name = f"{given}*" if given is not None and re.fullmatch(r"[0-9a-f]{1,64}", given) else "*"
    if given is not None and name == "*":
        return []
    return sorted((home / "runs").glob(f"{name}/*/ticket"), key=_age, reverse=True)


def _named(given: str, home: Path) -> Path | None:
    """Return what matches the folders of the runs that are meant; None: no name of a run."""
    if given == "last":
        return home / "runs" / "*"
    if re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", given):
        names = sorted(path.name for path in (home / "runs").glob(f"{given}*"))
        if len(names) > 1:
            raise CheckpointError(
                f"{len(names)} runs have names that begin with {given}: {', '.join(names[:3])}. Give more digits."
            )
        return home / "runs" / f"{given}*"
    return None


def _require_no_sections(folder: Path | None) -> None:
    """
    Args:
        folder: of the newest section's checkpoint.
    """
    if folder is not None:
        run = folder.parents[2]
        raise CheckpointError(
            f"run {called(run)} has stages, and {folder.parents[1]} holds only sections of its model. Put them "
            f"together with `weft gather {short(run.name)}`. If other peers hold the rest, use `weft gather TICKET` "
            "while they run."
        )


def _newest(*found: Iterable[Path]) -> Path | None:
    files = [path for group in found for path in group]
    return max(files, key=lambda path: trained_at(path.parent)).parent if files else None


def trained_at(checkpoint: Path) -> tuple[float, float]:
    """Return when what is in this folder was trained here (0.0: it was not) and when it was saved: wall seconds."""
    path = checkpoint / CHECKPOINT_FILE
    saved_at = _age(path)
    with suppress(OSError, msgspec.DecodeError):
        contents = msgspec.json.decode(path.read_bytes(), type=_Saved).contents
        if contents.head is None or not contents.head.round:
            return 0.0, saved_at
        at_ms = contents.counters.get(TRAINED_AT_MS)
        return (saved_at if at_ms is None else at_ms / 1000), saved_at
    return 0.0, saved_at


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _listing(home: Path) -> str:
    checkpoints = (path.parent for path in (home / "runs").glob(f"*/*/checkpoint/{CHECKPOINT_FILE}"))
    found = sorted(checkpoints, key=trained_at, reverse=True)
    names = [called(run) for run in dict.fromkeys(path.parents[1] for path in found)]
    if not names:
        return f"There is none in {home}; name another home with --home."
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f'The home {home} holds runs {", ".join(names[:_MAX_LISTED])}{more}; "last" is the one trained last.'


def called(run: Path) -> str:
    """Return a run's first digits, and the name it was given where its config is in this home."""
    for path in (run.parents[1] / "blobs" / run.name, *run.glob("*/checkpoint/run-*.bin")):
        with suppress(OSError, msgspec.DecodeError):
            name = msgspec.msgpack.decode(path.read_bytes(), type=_Named).name
            return f"{short(run.name)} ({printable(name)})"
    return short(run.name)


class _Named(msgspec.Struct):
    """As much of a RunConfig as a listing shows; it is not checked."""

    name: Annotated[str, msgspec.Meta(max_length=64)]


class _Head(msgspec.Struct):
    round: int


class _Contents(msgspec.Struct):
    head: _Head | None
    counters: dict[str, int]


class _Saved(msgspec.Struct):
    """As much of a checkpoint as tells when it was trained; it is not checked."""

    contents: _Contents


class Place:
    """The home of one command; the default until the command line has said otherwise."""

    def __init__(self) -> None:
        self.home = default_home()


def home_of(context: typer.Context) -> Path:
    """Return the home that --home, WEFT_HOME or the platform chose."""
    return cast(Place, context.obj).home


def command_for(home: Path) -> str:
    """Return what a person types before a verb to work in `home`."""
    return "weft" if home == default_home() else f"weft --home {shlex.quote(str(home))}"
