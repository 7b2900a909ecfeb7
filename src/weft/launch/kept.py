"""Which run of a home a run file means: the very one, one that was changed since, or none.

    the run of just this file is kept here          go on with it
    one of the same name is, and it differs         by amendment, anew, or not at all: the person says which
    none is                                         begin

A run that a home holds alone, and that names no stewards, may be amended by its only member (`governance`): it keeps
its name, its rounds and all optimizers' memory, and its manifests say what was changed when.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from weft.config import leaves
from weft.data.store import DataIndex
from weft.errors import CheckpointError, ConfigError, WeftError
from weft.ids import Digest, PeerId, RunId, short
from weft.launch.session import who_keep
from weft.peer.state.checkpoint import Contents, read_contents
from weft.run.amend import amended, first_charter
from weft.run.config import Genesis, RunConfig
from weft.run.genesis import MAX_RUN_NBYTES, read_run
from weft.run.staged import StagedConfig
from weft.store.home import Home
from weft.sync.governance import Void, amended_settings
from weft.sync.records.acts import Amend
from weft.sync.records.charter import Charter
from weft.wire import printable

Wish = Literal["ask", "go on", "new"]
MAX_SHOWN = 12  # fields


@dataclass(frozen=True)
class Kept:
    """A run of this home, as it stands."""

    run: RunConfig  # its genesis
    charter: Charter
    contents: Contents

    @property
    def round(self) -> int:
        return 0 if self.contents.head is None else int(self.contents.head.round)

    @property
    def members(self) -> tuple[PeerId, ...]:
        return () if self.contents.head is None else tuple(self.contents.head.members)

    @property
    def now(self) -> Genesis:
        return amended(self.run, self.charter)


def meant(wanted: RunConfig, home: Home, max_parameters: int, wish: Wish) -> tuple[RunConfig, Amend | None, str]:
    """Return the run to train, what to amend of it, and what to say.

    Raises:
        ConfigError: this home holds a run of that name which differs, and what is to be done was not said.
    """
    if who_keep(wanted.run, home):
        return wanted, None, _told_amended(wanted, home)
    candidates = (kept for kept in kept_of(wanted.name, home, max_parameters) if not begins_elsewhere(kept.run, wanted))
    found = max(candidates, key=lambda kept: kept.round, default=None)
    if found is None or wish == "new":
        return wanted, None, ""
    fields = differences(found.now, wanted)
    if not fields:
        return found.run, None, f"going on with run {short(found.run.run)}, which was amended to what this file says"
    amend = amendment_to(found, wanted)
    if wish == "go on" and amend is not None:
        return found.run, amend, f"going on with run {short(found.run.run)}, amended: {'; '.join(fields)}"
    raise ConfigError(_question(found, fields, amend, wish))


def begins_elsewhere(run: RunConfig, wanted: RunConfig) -> bool:
    """Return whether the file of `wanted` names other weights to begin with, or another run that it goes on with."""
    return (not wanted.is_seeded and wanted.initial != run.initial) or wanted.predecessor not in (None, run.predecessor)


def kept_of(name: str, home: Home, max_parameters: int) -> Iterator[Kept]:
    """Yield the runs of that name of which this home has made a round, or taken part in one."""
    folder = home.root / "runs"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(WeftError):  # another version's, or damaged: not this one
            data = home.blobs.read(Digest(path.name), MAX_RUN_NBYTES)
            run = None if data is None else read_run(data, max_parameters)
            if not isinstance(run, RunConfig) or run.name != name:
                continue
            is_staged = isinstance(run, StagedConfig)  # of which nothing is amended
            for checkpoint in sorted(path.glob("*/stage-*/checkpoint" if is_staged else "*/checkpoint")):
                with suppress(CheckpointError):
                    contents = read_contents(checkpoint)
                    charter = None if is_staged else contents.charter
                    kept = Kept(run, charter or first_charter(run), contents)
                    if kept.round and not kept.charter.has_ended:
                        yield kept


def _told_amended(wanted: RunConfig, home: Home) -> str:
    for checkpoint in sorted((home.root / "runs" / wanted.run).glob("*/checkpoint")):
        with suppress(CheckpointError):
            charter = read_contents(checkpoint).charter
            if charter is not None and (fields := differences(wanted, amended(wanted, charter))):
                return f"this run was amended since its file was written: {'; '.join(fields)}"
    return ""


# --- what differs ---


def differences(before: Genesis, after: Genesis) -> list[str]:
    """Return the fields that differ, each as "field old -> new"; of data only how much text there is."""
    old, new = dict(leaves(_fields(before))), dict(leaves(_fields(after)))
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    if names != ["initial"]:  # weights follow from the rest
        names = [name for name in names if name != "initial"]
    found = [f"{name} {_shown(old.get(name))} -> {_shown(new.get(name))}" for name in names]
    if before.data is None or after.data is None or before.data == after.data:
        return found
    if before.data.tokenizer != after.data.tokenizer:
        return [*found, f"tokenizer {short(before.data.tokenizer)} -> {short(after.data.tokenizer)}"]
    old_text, new_text = _text_of(before.data), _text_of(after.data)
    return [*found, f"data {old_text} -> {new_text if new_text != old_text else 'as much of another'}"]


def _fields(run: Genesis) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(run)
    return {name: value for name, value in tree.items() if name != "data"}


def _text_of(data: DataIndex) -> str:
    return f"{data.train_text_nbytes + data.heldout_text_nbytes:,} B of text"


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else printable(str(value))[:60]


def amendment_to(kept: Kept, wanted: RunConfig) -> Amend | None:
    """Return what makes `kept` what is wanted, where its only member may decide it; None: no amendment does."""
    if isinstance(wanted, StagedConfig) or kept.run.with_settings(wanted.settings) != wanted:
        return None
    if kept.charter.stewards or kept.charter.forks or len(kept.members) != 1:
        return None
    before, after = kept.charter.settings, wanted.settings
    pairs = [(before, after, ("tokens", "seq_len", "batch_size", "schedule"))]
    pairs += [(before.method, after.method, ("every", "codec", "reply_codec", "apply"))]  # type: ignore[list-item]
    changed = {
        name: getattr(new, name)
        for old, new, names in pairs
        for name in names
        if getattr(old, name) != getattr(new, name)
    }
    try:
        amend = Amend(reason="the run file was changed", **changed)
        is_all: bool = amended_settings(kept.charter, amend) == after
    except (Void, TypeError):
        return None
    return amend if is_all else None


def _question(found: Kept, fields: list[str], amend: Amend | None, wish: Wish) -> str:
    more = f"; and {len(fields) - MAX_SHOWN} more" if len(fields) > MAX_SHOWN else ""
    run: RunId = found.run.run
    text = (
        f"this home holds run {short(run)} ({printable(found.run.name)}) at round {found.round}, and this is a "
        f"different run with the same name: {'; '.join(fields[:MAX_SHOWN])}{more}. Nothing was started. "
    )
    if wish == "go on":
        text += f"It cannot go on with this change: {_why_not(found)}. "
    elif amend is not None:
        text += (
            'To go on with that run, with these settings from its next round on, add --go-on (in Python wish="go on"). '
        )
    if amend is None:
        text += (
            f"To start another run from what it has learnt: `weft export {short(run)} FOLDER`; then write "
            f'model = {{type = "folder", path = "FOLDER"}}, tokenizer = {{type = "json", path = "FOLDER"}} and '
            f'predecessor = "{run}" into the run file. That keeps the parameters, not the optimizer\'s '
            "memory, and counts rounds and tokens from 0. "
        )
    return (
        text + "To go on with it as it was, undo the change. For a new run beside it, add --new or give another name."
    )


def _why_not(found: Kept) -> str:
    if found.charter.stewards:
        return "it has stewards, who amend it with `weft act amend` while it runs"
    if len(found.members) != 1:
        return f"{len(found.members)} members hold it, and none of them may change it alone"
    if found.charter.forks:
        return "it has split into branches, and others may hold another one"
    return "only train.tokens, seq_len, batch_size, schedule, method.every, codecs and rates of method.apply can change"
