"""From what a person calls a run, or a checkpoint, to its folder.

    "last"                                      the run that was trained last on this machine
    a run's name, or four digits of its digest  that run of this home
    a folder with checkpoint.json               itself
    a run's folder, or a peer's inside it       the newest checkpoint below
    a Hugging Face folder                       itself
    a run, as above                             its newest checkpoint in this home

A file or folder comes before a run that is called as it is, if it holds what is looked for. Where it does not, the run
is taken, and that is said. The newest checkpoint is the one that was trained last on this machine. A run that was only
joined again, or has just begun, comes after those, whenever it was saved. A damaged checkpoint does not say when it was
trained: it counts as trained when it was saved, and is refused where it is the newest, since the next one is another
model.

In a run with stages each peer keeps sections, which are no model: none of these chooses them, and an error says how
a model is made of them (`weft gather`). Of checkpoints it reads only when they were trained.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer

from weft.cli.terminal import tell
from weft.errors import CheckpointError, NoSuchRun
from weft.ids import short
from weft.library.home import default_home
from weft.wire import printable

CHECKPOINT_FILE = "checkpoint.json"
TRAINED_AT_MS = "trained_at_ms"  # a counter in it
LAST = "last"
WHOLE = f"*/checkpoint/{CHECKPOINT_FILE}"  # in a run's folder
_VECTORS = "*.safetensors"  # beside it
_SECTIONS = f"stage-*/checkpoint/{CHECKPOINT_FILE}"  # in a peer's folder of a run with stages
SECTIONS = f"*/{_SECTIONS}"
_RUN = re.compile(r"[0-9a-f]{64}")
_MIN_PREFIX = 4  # fewer digits would hit a run by accident
_MAX_LISTED = 8


def find_checkpoint(given: str, home: Path) -> Path:
    """Return the folder of the checkpoint, or of the Hugging Face model, that `given` means: a run's or a member's.

    Raises:
        NoSuchRun: neither a folder nor a run of this home; says which runs there are.
        CheckpointError: what is meant holds no whole model.
    """
    path = Path(given)
    if path.is_dir():
        if (path / CHECKPOINT_FILE).exists() or (path / "config.json").exists():
            return path
        below = path.glob(f"*/checkpoint/{CHECKPOINT_FILE}")
        whole = (each for each in below if not each.parts[-3].startswith("stage-"))
        found = _newest(path.glob(f"checkpoint/{CHECKPOINT_FILE}"), whole)
        if found is not None:
            return found
        _require_no_sections(_newest(path.glob(_SECTIONS), path.glob(f"*/{_SECTIONS}")))
        run = run_instead(given, home, "checkpoint", having=(WHOLE, SECTIONS))
        if run is None:
            raise CheckpointError(
                f"{path} holds no checkpoint: there is no {CHECKPOINT_FILE} in it. It is half-written, or the wrong "
                f"folder. {listing(home)}"
            )
    else:
        run = find_run(given, home, having=(WHOLE, SECTIONS))
    if run is None and path.is_file():
        raise CheckpointError(
            f"{path} is a file, and weft reads a model from a folder: a checkpoint, or config.json and safetensors. If "
            "it is a GGUF file, transformers reads it and can save it as such a folder."
        )
    if run is None and (found := _member(given, home)) is not None:
        return found
    if run is None:
        raise no_such_run(given, home, "a folder with a model")
    found = _newest(run.glob(WHOLE))
    if found is None:
        _require_no_sections(_newest(run.glob(SECTIONS)))
        raise CheckpointError(f"run {called(run)} has saved no checkpoint yet. {listing(home)}")
    if _read(found / CHECKPOINT_FILE)[1] is None:
        raise CheckpointError(_damaged(found, run, home, is_last=given == LAST))
    return found


def _member(given: str, home: Path) -> Path | None:
    """Return the folder of the member of that name (`weft compose member`); None: there is none."""
    folder = home / "members" / given
    return folder if Path(given).name == given and (folder / "member.json").exists() else None


def find_sections(given: str, home: Path) -> Path:
    """Return the folder of the run, with stages, that `given` means, as `find_run`.

    Raises:
        NoSuchRun: no run of this home, or of several none has sections.
        CheckpointError: this home has no sections of that run.
    """
    run = find_run(given, home, having=(SECTIONS,))
    if run is None:
        raise no_such_run(given, home, "a ticket", kind="run with stages" if given == LAST else "run")
    if not any(True for _ in run.glob(SECTIONS)):
        raise CheckpointError(
            f"this home holds no section of run {called(run)}. Only a run with stages has sections: its model is cut, "
            "and each peer holds a part. Give a ticket of such a run, or its name."
        )
    return run


def find_tickets(given: str | None, home: Path) -> list[Path]:
    """Return the tickets in this home, or in the run that `given` means, the newest first."""
    if given is None:
        return sorted((home / "runs").glob("*/*/ticket"), key=_age, reverse=True)
    run = find_run(given, home, having=("*/ticket",))
    return [] if run is None else sorted(run.glob("*/ticket"), key=_age, reverse=True)


# --- which run ---


def find_run(given: str, home: Path, *, having: Sequence[str] = ()) -> Path | None:
    """Return the folder of the run of this home that `given` means; None: there is none.

    Args:
        having: "last" is the last of the runs in whose folders something matches one of these.

    Raises:
        NoSuchRun: several runs are called so.
    """
    runs = runs_of(home)
    if given == LAST and having:
        runs = [run for run in runs if any(True for pattern in having for _ in run.glob(pattern))]
    found = meant(given, runs)
    if len(found) > 1:
        raise several_runs(given, found)
    return found[0] if found else None


def no_such_run(given: str, home: Path, *others: str, kind: str = "run") -> NoSuchRun:
    """Return what a verb raises that was given what means no run of this home.

    Args:
        others: what else it could have been.
        kind: of the runs that the verb takes.
    """
    if given == LAST:
        return NoSuchRun(f'"{LAST}" means nothing yet: no {kind} was trained in this home. {listing(home)}')
    return NoSuchRun(
        f"{given[:200]!r} is not {''.join(f'{each}, ' for each in others)}{'or ' * bool(others)}a {kind} "
        f"of this home. {listing(home)}"
    )


def several_runs(given: str, found: Sequence[Path]) -> NoSuchRun:
    shown = ", ".join(map(called, found[:_MAX_LISTED]))
    return NoSuchRun(f"{len(found)} runs match {given[:64]}: {shown}. Give more digits of the one you mean.")


def run_instead(given: str, home: Path, wanted: str, *, having: Sequence[str] = ()) -> Path | None:
    """Return the run of this home that is called as a file or folder which holds nothing of what is looked for, and
    say so; None: there is none.

    Args:
        wanted: what it does not hold, in a word or two.
        having: as of `find_run`.

    Raises:
        NoSuchRun: several runs are called so.
    """
    run = find_run(given, home, having=having)
    if run is not None:
        kind = "folder" if Path(given).is_dir() else "file"
        tell(f"the {kind} {given} holds no {wanted}, so run {called(run)} of this home is taken")
    return run


def meant(given: str, runs: Sequence[Path]) -> list[Path]:
    """Return those of `runs` that a person means: the one trained last, or by name, or by four digits and more."""
    if given == LAST:
        return [max(runs, key=last_trained)] if runs else []
    is_digits = re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", given) is not None
    return [
        run
        for run in runs
        if (is_digits and run.name.startswith(given)) or (own_name(run) or "").casefold() == given.casefold()
    ]


def runs_of(home: Path) -> list[Path]:
    """Return the folders of the runs of this home, by their digests."""
    folder = home / "runs"
    return sorted(path for path in folder.iterdir() if _RUN.fullmatch(path.name)) if folder.is_dir() else []


def _require_no_sections(folder: Path | None) -> None:
    """
    Args:
        folder: of the newest section's checkpoint.
    """
    if folder is not None:
        run = folder.parents[2]
        raise CheckpointError(
            f"run {called(run)} has stages, and {folder.parents[1]} holds only sections of its model. Put them "
            f"together with `weft gather {short(run.name)}`. If other peers hold the rest, use `weft gather -` while "
            "they run."
        )


def _damaged(checkpoint: Path, run: Path, home: Path, *, is_last: bool) -> str:
    """Return that the newest checkpoint of a run cannot be read, and what to do."""
    weft, which = command_for(home), ", which was trained last," if is_last else ""
    others = [called(each) for each in runs_of(home) if each != run and on_disk(each).standing is not None]
    instead = f"To use another run, name it by its digits: {', '.join(others[:_MAX_LISTED])}. " if others else ""
    return (
        f"the checkpoint of run {called(run)}{which} is damaged: {checkpoint / CHECKPOINT_FILE} is cut short or "
        f"altered. {instead}To remove this one: {weft} runs delete {short(run.name)}. If other peers hold it, join it "
        f"again then: {weft} join -"
    )


def _newest(*found: Iterable[Path]) -> Path | None:
    files = [path for group in found for path in group]
    return max(files, key=lambda path: trained_at(path.parent)).parent if files else None


def _age(path: Path) -> float:
    return path.stat().st_mtime


def listing(home: Path) -> str:
    """Return which runs a home has something of, the one trained last before the others, and what to type."""
    found = sorted(((last_trained(run), run) for run in runs_of(home)), reverse=True)
    names = [called(run) for (has_checkpoint, *_), run in found if has_checkpoint]
    if not found:
        return no_run_yet(home)
    if not names:
        others = ", ".join(called(run) for _, run in found[:_MAX_LISTED])
        return (
            f"The home {home} has come to run {others}, and has no checkpoint of it yet. `{command_for(home)} runs` "
            "says how it goes on."
        )
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (
        f"The home {home} holds runs {', '.join(names[:_MAX_LISTED])}{more}. Type the name of one, its first digits, "
        f'or "{LAST}" for the one trained last.'
    )


def no_run_yet(home: Path) -> str:
    """Return that a home holds no run, how to begin one, and how to join one."""
    weft = command_for(home)
    return (
        f"There is no run in {home} yet. To begin one: {weft} train FILE. To join one: {weft} join - with a ticket, "
        "which a member of that run gives you. If your runs are in another home: weft --home FOLDER."
    )


def called(run: Path) -> str:
    """Return a run's first digits, and the name it was given where its config is in this home."""
    name = own_name(run)
    return short(run.name) if name is None else f"{short(run.name)} ({name})"


def own_name(run: Path) -> str | None:
    """Return the name that a run was given; None where its config is not in this home."""
    for path in (run.parents[1] / "blobs" / run.name, *run.glob("*/checkpoint/run-*.bin")):
        with suppress(OSError, msgspec.DecodeError):
            return printable(msgspec.msgpack.decode(path.read_bytes(), type=_Named).name)
    return None


class _Named(msgspec.Struct):
    """As much of a RunConfig as a listing shows; it is not checked."""

    name: Annotated[str, msgspec.Meta(max_length=64)]


class _Head(msgspec.Struct):
    round: int
    committed_tokens: int
    members: list[str] = []


class _Successor(msgspec.Struct):
    run: Annotated[str, msgspec.Meta(max_length=64)]
    is_at_once: bool = False


class _Settings(msgspec.Struct):
    tokens: int


class _Charter(msgspec.Struct):
    settings: _Settings | None = None
    successor: _Successor | None = None


class _Contents(msgspec.Struct):
    head: _Head | None
    counters: dict[str, int]
    charter: _Charter | None = None


class _Saved(msgspec.Struct):
    """As much of a checkpoint as tells when it was trained, and how far it is; it is not checked."""

    contents: _Contents


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come, as a checkpoint says."""

    round: int = 0
    committed_tokens: int = 0
    num_members: int = 1
    total_tokens: int | None = None  # as amended; None: as it began
    successor: str | None = None  # the run that goes on in its place


@dataclass(frozen=True)
class OnDisk:
    """What of a run is kept here."""

    trained: tuple[bool, float, float]  # what orders runs by that: whether anything is kept, then as `trained_at`
    standing: Standing | None  # by the checkpoint that was trained last; None: none that can be read is kept

    @property
    def is_damaged(self) -> bool:
        """Return whether checkpoints are kept, and none that can be read."""
        return self.trained[0] and self.standing is None


def on_disk(run: Path) -> OnDisk:
    """Return what of a run is kept here; each checkpoint is read once."""
    found = [_read(path) for pattern in (WHOLE, SECTIONS) for path in run.glob(pattern)]
    if not found:
        return OnDisk((False, 0.0, max((_age(path) for path in run.glob("*/log.jsonl")), default=0.0)), None)
    readable = [(at, saved) for at, saved in found if saved is not None]
    newest = max(readable, key=lambda each: each[0])[1] if readable else None
    return OnDisk((True, *max(at for at, _ in found)), None if newest is None else _standing(newest))


def last_trained(run: Path) -> tuple[bool, float, float]:
    """Return what orders runs by when they were trained here (`OnDisk.trained`)."""
    return on_disk(run).trained


def trained_at(checkpoint: Path) -> tuple[float, float]:
    """Return when what is in this folder was trained here (0.0: it was not) and when it was saved: wall seconds.

    Of a damaged one both are when its vectors were written, for nobody knows more.
    """
    return _read(checkpoint / CHECKPOINT_FILE)[0]


def _read(path: Path) -> "tuple[tuple[float, float], _Contents | None]":
    """Return when a checkpoint was trained here and saved, as `trained_at`, and what it says; None: unreadable."""
    saved_at = _age(path)
    with suppress(OSError, msgspec.DecodeError):
        contents = msgspec.json.decode(path.read_bytes(), type=_Saved).contents
        if contents.head is None or not contents.head.round:
            return (0.0, saved_at), contents
        at_ms = contents.counters.get(TRAINED_AT_MS)
        return (saved_at if at_ms is None else at_ms / 1000, saved_at), contents
    written_at = max(map(_age, path.parent.glob(_VECTORS)), default=saved_at)
    return (written_at, written_at), None


def _standing(contents: "_Contents") -> Standing:
    head, charter = contents.head or _Head(0, 0), contents.charter or _Charter()
    is_over = charter.successor is not None and charter.successor.is_at_once
    return Standing(
        round=head.round,
        committed_tokens=head.committed_tokens,
        num_members=max(1, len(head.members)),
        total_tokens=None if charter.settings is None else charter.settings.tokens,
        successor=charter.successor.run if charter.successor is not None and is_over else None,
    )


class Place:
    """The home of one command; the default until the command line has said otherwise."""

    def __init__(self) -> None:
        self.home = default_home()
        self.is_idle = False  # whether --home was typed, and nobody has asked for the home yet


def home_of(context: typer.Context) -> Path:
    """Return the home that --home, WEFT_HOME or the platform chose."""
    place = cast(Place, context.obj)
    place.is_idle = False
    return place.home


def say_no_home(context: typer.Context, reason: str) -> None:
    """Say that this command has no use for a home, where --home was typed."""
    place = cast(Place, context.obj)
    if place.is_idle:
        place.is_idle = False
        tell(f"--home has no effect here, since {reason}")


def command_for(home: Path) -> str:
    """Return what a person types before a verb to work in `home`."""
    return "weft" if home == default_home() else f"weft --home {shlex.quote(str(home))}"
