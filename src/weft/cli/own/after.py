"""`weft train FILE --after RUN`: a new run that begins with what a run of this home has learnt.

    notes.toml        how the run before was made; it stays as it is
    notes-2.toml      the new run: [model] and [tokenizer] of the folder beside it, and `predecessor`; in a space the
                      layers alone begin as that
    notes-2-model/    what the run before had learnt

The same again finds the run file that it wrote. What breaks off before that is written leaves no folder behind.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from weft.cli.home import CHECKPOINT_FILE, LAST, find_checkpoint, own_name, runs_of
from weft.cli.settings import changes_of
from weft.cli.terminal import WorkLine, tell
from weft.clock import SystemClock
from weft.config import from_tree, is_in, load_tree, replace_field
from weft.errors import ConfigError
from weft.ids import RunId, short
from weft.progress import Meter

if TYPE_CHECKING:
    from weft.cli.model.trained import Trained
    from weft.model.config import ModelConfig


@dataclass(frozen=True)
class Learnt:
    """What a run of this home has learnt."""

    trained: "Trained"
    run: RunId
    name: str
    round: int
    is_last: bool = False  # it was meant as "last"

    @property
    def model(self) -> "ModelConfig":
        return self.trained.config

    @property
    def is_of_space(self) -> bool:
        """Return whether it has trained layers between the ends of a space."""
        return self.trained.run is not None and bool(self.trained.run.model.has_frozen_ends)

    @property
    def num_parameters(self) -> int:
        return self.trained.vector.numel()

    @property
    def tokens_per_byte(self) -> float:
        """Return how its tokenizer has written the run's own text."""
        data = None if self.trained.run is None else self.trained.run.data
        return (
            data.num_predicted("train") / data.train_text_nbytes if data is not None and data.train_text_nbytes else 1.0
        )

    def begins(self, path: Path) -> bool:
        """Return whether a run file begins with it. What was the last run when the file was written is so no more: by
        now that is the run that the file makes."""
        try:
            tree = load_tree(path)
        except ConfigError:
            return False
        before, own = tree.get("predecessor"), None if self.trained.run is None else self.trained.run.predecessor
        is_made = self.is_last and before is not None and before == own and tree.get("name") == self.name
        return bool(before == self.run or is_made)

    def __str__(self) -> str:
        return f"run {short(self.run)} ({self.name}) has learnt by round {self.round}"

    @property
    def has_dropout(self) -> bool:
        """Return whether its adapter left out some of what it read in training steps."""
        adapter = None if self.trained.adapter is None else self.trained.adapter.config.adapter
        return bool(adapter and adapter.dropout)

    def fields(
        self, folder: str, given: Mapping[str, Any] | None = None, *, is_compared: bool = False
    ) -> dict[str, Any]:
        """Return those of a run file that begins with it.

        Args:
            folder: holds the model, seen from the run file.
            given: the run file that is as it but for these, which says itself what is trained; None: there is none.
            is_compared: it learns from answers that are compared with all of the model, so there is no dropout.
        """
        import msgspec

        from weft.data.tokenizer import ByteTokenizer

        is_bytes = isinstance(self.trained.tokenizer, ByteTokenizer)
        adapter = None if self.trained.adapter is None else self.trained.adapter.config.adapter
        if given is not None and (given.get("adapter") or {}).get("type") != "folder":
            adapter = None
        elif adapter and is_compared:
            adapter = msgspec.structs.replace(adapter, dropout=msgspec.UNSET)
        if given is not None and given.get("model", {}).get("type") == "space":  # whose ends and tokenizer stay
            return {
                "model": {"type": "space", "path": given["model"]["path"], "member": folder},
                "predecessor": self.run,
            }
        return {
            "model": {"type": "folder", "path": folder},
            "tokenizer": {"type": "bytes"} if is_bytes else {"type": "json", "path": folder},
            "predecessor": self.run,
            # What it has learnt is in the model: the next adapter begins as nothing, beside that.
            **({"adapter": {"type": "lora", **msgspec.to_builtins(adapter)}} if adapter else {}),
        }

    @contextmanager
    def placed(self, paths: Iterable[Path]) -> Iterator[Path]:
        """Write the model beside the first of `paths`, for run files, that is free, and yield that; where the caller
        fails, remove the model again.

        Raises:
            ConfigError: the folder cannot be written; DiskFull: no room.
        """
        path = next(each for each in paths if not each.exists() and not model_beside(each).exists())
        with Meter("writing the model", "B", WorkLine(), SystemClock(), 4 * self.trained.vector.numel()) as meter:
            self.trained.export(model_beside(path), on_written=meter.add)
        try:
            yield path
        except BaseException:
            shutil.rmtree(model_beside(path), ignore_errors=True)
            raise


def learnt(given: str, home: Path) -> Learnt:
    """Return what the run that a person means (`home.find_checkpoint`) has learnt.

    Raises:
        NoSuchRun: none is called so; CheckpointError: what is saved of it is no whole model.
        ConfigError: a folder of another program's, or nothing is learnt yet.
    """
    from weft.cli.model.trained import open_trained

    folder = find_checkpoint(given, home)
    if not (folder / CHECKPOINT_FILE).exists():
        raise ConfigError(
            f"--after {given[:200]}: that is a model folder, not a run. To begin with it, name it in a run file "
            "(docs/your_files.md)."
        )
    trained = open_trained(str(folder), home)
    assert trained.run is not None
    if not trained.round:
        raise ConfigError(
            f"--after {given[:200]}: run {short(trained.run.run)} ({trained.run.name}) is at round 0 and has learnt "
            "nothing yet. Leave out --after."
        )
    return Learnt(trained, trained.run.run, trained.run.name, trained.round, is_last=given == LAST)


def model_beside(run_file: Path) -> Path:
    """Return the folder for the model that a run begins with."""
    return run_file.with_name(f"{run_file.stem}-model")


def is_held(run_file: Path, home: Path) -> bool:
    """Return whether a home holds a run of the name that a run file gives: nobody reads a text anew to ask this."""
    try:
        name = load_tree(run_file).get("name")
    except ConfigError:
        return False
    return any(own_name(run) == name for run in runs_of(home))


def say_found(path: Path) -> None:
    before = str(load_tree(path).get("predecessor"))
    tell(f"{path} begins with what run {before[:8]} had learnt; weft uses that. Another: --new")


def say_made(path: Path, name: str, before: Learnt) -> None:
    tell(f"run file: {path}")
    tell(f"the new run {name} begins with what {before}; that run stays as it is")
    if before.is_of_space and load_tree(path)["model"]["type"] != "space":
        tell(
            "it has trained between the ends of a space; the new run trains these, too, so its model is of no space. "
            "To stay in it, name a run file of that space: weft train FILE.TOML --after RUN"
        )
    tell(_said_of_rate(path))


def _said_of_rate(path: Path) -> str:
    """Return what a run that begins with a trained model does to it at first."""
    from weft.config import load
    from weft.run.config import RunFile

    schedule = load(path, RunFile).train.schedule
    rises = f"after {schedule.warmup_tokens:,} tokens of warm-up" if schedule.warmup_tokens else "at once"
    return (
        f"learning rate: {schedule.lr:g} {rises}, and the optimizer begins anew, so the loss may rise before it falls; "
        f"a lower rate forgets less: train.schedule.lr in {path}"
    )


def numbered(folder: Path, stem: str) -> Iterator[Path]:
    """Yield the run files of a name that may be in a folder: notes.toml, notes-2.toml, ..."""
    yield folder / f"{stem}.toml"
    yield from (folder / f"{stem}-{number}.toml" for number in count(2))


def run_file_after(
    given: Path, changes: Sequence[str], before: Learnt, *, is_new: bool
) -> tuple[Path, list[str], bool]:
    """Return a run file that is as `given` but begins with what another run has learnt, what is still to be changed of
    it, and whether it was made now.

    Args:
        changes: of `--set`: written into a file that is made now.
        is_new: make another, though there is one.

    Raises:
        ConfigError: it cannot be read or written, or a change makes no sense.
    """
    from weft.run.config import RunFile

    others = partial(numbered, given.parent, given.stem)
    there = [each for each in takewhile(Path.exists, others()) if before.begins(each)]
    if there and not is_new:
        say_found(there[-1])
        return there[-1], list(changes), False
    tree, changed = load_tree(given), changes_of(changes)
    tree.pop("run", None)  # it names the run that the old file makes
    with before.placed(others()) as path:
        tree["name"] = f"{str(tree.get('name', path.stem))[:60]}-{path.stem.rpartition('-')[2]}"
        told = {*tree, *(f"train.{name}" for name in tree.get("train", {})), *changed}
        is_compared = any(is_in(name, field) for name in told for field in ("reward", "train.loss"))
        tree |= before.fields(model_beside(path).name, tree, is_compared=is_compared)
        for dotted, value in changed.items():
            replace_field(tree, dotted, value)
        from_tree(tree, RunFile, where=str(given))
        head = f"# Made by `weft train {given.name} --after {short(before.run)}`, from that file.\n"
        write_new(path, (head + tomli_w.dumps(tree)).encode())
    say_made(path, str(tree["name"]), before)
    return path, [], True


def write_new(path: Path, data: bytes) -> None:
    """
    Raises:
        ConfigError: it is there already, or cannot be written.
    """
    try:
        with path.open("xb") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"weft cannot write the run file {path}: {error.strerror or error}.") from None
