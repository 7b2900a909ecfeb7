"""The runs of a home: what each takes of its disk, what no other run needs, and how one is removed.

    runs/RUN         its alone: checkpoints, journals, logs
    blobs/ shards/   what its config names; not removed where the config of another run of this home names it, too
    private/         nobody keeps which files are of which private run: removed with the last of them

Failure:
- the config of a run here cannot be read: nobody knows what it names, so that nothing is removed but folders.
- it breaks off: a run's config goes last, so that the same again removes the rest.
"""

import re
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weft.errors import DataError, KeyLocked, WeftError
from weft.ids import PeerId, RunId, short
from weft.launch.session import Options, at_work, opening
from weft.run.outline import Outline, named_by, read_outline
from weft.store.home import Home
from weft.wire import MAX_RECORD_NBYTES

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a home holds of a run.

    Args:
        outline: None: its config is not here, or is of another version.
        alone: files outside of its folder that no other run here needs, its config last.
        shared_nbytes: of files that others need, too.
    """

    run: RunId
    folder: Path
    outline: Outline | None
    own_nbytes: int  # in its folder
    alone: tuple[Path, ...]
    alone_nbytes: int
    shared_nbytes: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that come free when it is removed."""
        return self.own_nbytes + self.alone_nbytes


def held_by(home: Home) -> list[Held]:
    """Return what a home holds of each of its runs, also of those of which nobody here has taken part."""
    outlines = dict(_outlines(home))
    folder = home.root / "runs"
    begun = {RunId(path.name) for path in folder.iterdir() if _HEX.fullmatch(path.name)} if folder.is_dir() else set()
    # Of these nobody knows what they name; of what has no config here at all nothing else is here.
    are_all_read = not any((home.blobs.folder / run).exists() for run in begun - set(outlines))
    files = {run: set(_files(home, run, outline)) for run, outline in outlines.items()}
    found = []
    for run in sorted(begun | set(outlines)):
        outline, config = outlines.get(run), home.blobs.folder / run
        others = set().union(*(files[other] for other in outlines if other != run))
        own = files.get(run, set())
        if outline is not None and _is_private(outline) and not any(map(_is_private, _but(outlines, run))):
            own |= set(_below(home.private.folder))
        alone = (own - others if are_all_read else set()) - {config}
        found.append(
            Held(
                run=run,
                folder=folder / run,
                outline=outline,
                own_nbytes=_nbytes(_below(folder / run)),
                alone=(*sorted(alone), config),
                alone_nbytes=_nbytes([*alone, config]),
                shared_nbytes=_nbytes(own - alone - {config}),
            )
        )
    return found


def delete(held: Held, home: Home) -> int:
    """Remove a run from a home, with what no other run there needs, and return how many bytes came free.

    Raises:
        KeyLocked: a peer of it runs here.
        DataError: something cannot be removed.
    """
    with opening(home):  # nobody begins with it meanwhile
        _require_idle(held, home)
        *files, config = held.alone
        try:
            freed = sum(map(_remove, (*files, *_below(held.folder))))
            if held.folder.is_dir():
                folders = [path for path in held.folder.rglob("*") if path.is_dir()]
                for path in (*sorted(folders, reverse=True), held.folder):
                    path.rmdir()
            return freed + _remove(config)
        except OSError as error:
            raise DataError(
                f"cannot remove {error.filename}: {error.strerror or error}. Mend that; then the same command "
                "removes the rest."
            ) from error


def require_idle(held: Held, home: Home) -> None:
    """
    Raises:
        KeyLocked: a peer of the run runs here.
    """
    with opening(home):
        _require_idle(held, home)


def _require_idle(held: Held, home: Home) -> None:
    if (peer := at_work(home, held.run)) is not None:
        raise KeyLocked(
            f"run {short(held.run)} is being trained from {home.root}, by peer {short(peer)}. Stop it first, with "
            "Ctrl-C in its window; then delete the run."
        )


def names_in(home: Home) -> set[str]:
    """Return the names of all runs that a home holds anything of, and of other blobs."""
    folders = (home.root / "runs", home.blobs.folder)
    return {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}


def drop_unbegun(run: RunId, home: Home, before: Container[str]) -> None:
    """Remove what was put into a home for a run that does not begin after all.

    Args:
        before: as `names_in` told before it was put there; a run that is among them stays.
    """
    if run in before:
        return
    home.blobs.close()  # of what is removed nothing is kept open, or taken to be there
    home.shards.close()
    with suppress(KeyLocked, DataError):  # somebody has begun it meanwhile; or it cannot be removed: then it is listed
        for held in held_by(home):
            if held.run == run:
                delete(held, home)


@contextmanager
def unless_begun(run: RunId, options: Options, before: Container[str]) -> Iterator[Callable[[], None]]:
    """Yield what is to be called once a peer begins with a run, or has agreed to join it; where this ends before, leave
    nothing of the run in the home.

    A key that was made for it stays, since it may be what others are to let in; an error says so.

    Args:
        before: as of `drop_unbegun`.
    """
    makes_key, has_begun = options.key is not None and not options.key.exists(), False

    def begun() -> None:
        nonlocal has_begun
        has_begun = True

    try:
        yield begun
    except WeftError as error:
        if makes_key and not has_begun and options.key is not None and options.key.exists():
            text = str(error).rstrip(". ")
            error.args = (f"{text}. The key {options.key} was made for this, and stays: the same command takes it.",)
        raise
    finally:
        if not has_begun:
            drop_unbegun(run, options.home, before)


def _remove(path: Path) -> int:
    try:
        nbytes = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return nbytes


def at_work_here(home: Home, run: RunId) -> PeerId | None:
    """Return a peer of this home that trains `run` now; None: there is none."""
    with opening(home):
        return at_work(home, run)


def _outlines(home: Home) -> Iterator[tuple[RunId, Outline]]:
    """Yield what can be read of the runs whose configs are here, or in a checkpoint."""
    inside = (home.root / "runs").glob("*/*/checkpoint/run-*.bin")
    there = [path for path in sorted(home.blobs.folder.glob("*")) if _HEX.fullmatch(path.name)]
    for path, name in [*((each, each.parents[2].name) for each in inside), *((each, each.name) for each in there)]:
        with suppress(OSError, WeftError):  # no config, or of another version
            if path.stat().st_size <= MAX_RECORD_NBYTES:
                yield RunId(name), read_outline(path.read_bytes(), RunId(name))


def _files(home: Home, run: RunId, outline: Outline) -> Iterator[Path]:
    blobs, shards = named_by(outline, run)
    yield from (home.blobs.folder / each for each in blobs)
    yield from (home.shards.folder / each for each in shards)


def _is_private(outline: Outline) -> bool:
    return outline.data is not None and outline.is_private


def _but(outlines: dict[RunId, Outline], run: RunId) -> list[Outline]:
    return [outline for other, outline in outlines.items() if other != run]


def missing_shards(home: Home, outline: Outline) -> int:
    """Return how many of a run's shards are not here."""
    return 0 if outline.data is None else len(home.shards.missing(outline.data))


def _below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()] if folder.is_dir() else []


def _nbytes(paths: "list[Path] | set[Path]") -> int:
    total = 0
    for path in paths:
        with suppress(OSError):  # gone meanwhile, or never here
            total += path.lstat().st_size
    return total
