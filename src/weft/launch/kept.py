"""Which run of a home a run file, or a loop's config, means: the very one, one that was changed since, or none.

    just this run is kept here                      go on with it (also without its file: `kept_run`)
    one of the same name is, and it differs         by amendment, anew, or not at all: the person says which
    none is                                         begin

A run that a home holds alone, and that names no stewards, may be amended by its only member (`governance`): it keeps
its name, its rounds and all optimizers' memory, and its manifests say what was changed when.

Of a loop it does not matter with which values its model was built: those of the run are put into it.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from weft.config import leaves
from weft.data.store import PRIVATE, DataIndex, write_atomically
from weft.data.tokenizer import from_bytes
from weft.errors import CheckpointError, ConfigError, DataError, DiskFull, KeyFileError, WeftError
from weft.ids import Digest, PeerId, RunId, short
from weft.keys import read_peer
from weft.launch.code import recall
from weft.launch.fetch import read_came_with
from weft.launch.session import Names, Options, who_keep
from weft.peer.context import Data
from weft.peer.state.checkpoint import Contents, read_contents
from weft.peer.state.replica import is_complete
from weft.run.amend import amended, first_charter, where_unsaid
from weft.run.config import Genesis, LoopConfig, RunConfig, RunFile
from weft.run.genesis import MAX_RUN_NBYTES, MAX_TOKENIZER_NBYTES, on_corpus, read_run
from weft.run.staged import StagedConfig
from weft.store.home import CHECKPOINT_FILE, Home, PeerFolder
from weft.sync.amendments import amended_settings
from weft.sync.governance import Void
from weft.sync.records.acts import Amend
from weft.sync.records.charter import Charter, Settings
from weft.wire import printable

Wish = Literal["ask", "go on", "new"]
G = TypeVar("G", RunConfig, LoopConfig)
MAX_SHOWN = 12  # fields
_SINCE = "it was changed since its file was written"
_FOLLOW = ("type", "initial", "initials", "bases", "base_nbytes")  # from other fields: named where nothing else differs
_LARGE = {"initial": "the first weights", "initials": "the first weights", "tensors": "the model's parameters"}
_LARGE |= {"frozen": "the parameters that are not trained", "base": "the weights that nobody trains"}


@dataclass(frozen=True)
class Kept:
    """A run of this home, as it stands."""

    run: Genesis
    charter: Charter
    contents: Contents | None  # None: damaged, or of another version; whoever loads it says what is wrong
    peer: PeerId  # whose checkpoint it is
    saved_at: float

    @property
    def round(self) -> int:
        return 0 if self.contents is None or self.contents.head is None else int(self.contents.head.round)

    @property
    def members(self) -> tuple[PeerId, ...]:
        return () if self.contents is None or self.contents.head is None else tuple(self.contents.head.members)

    @property
    def committed_tokens(self) -> int:
        return 0 if self.contents is None or self.contents.head is None else self.contents.head.committed_tokens

    @property
    def is_complete(self) -> bool:
        return self.contents is not None and is_complete(self.contents.head, self.charter)

    @property
    def now(self) -> Genesis:
        return amended(self.run, self.charter)


class Meant(NamedTuple, Generic[G]):
    """A run to train.

    Args:
        amend: what to change of it first.
        text: what to say of it.
        said: by its file, where it is gone on with: to be kept, with `keep_said`.
    """

    run: G
    amend: Amend | None = None
    text: str = ""
    said: Settings | None = None


def meant(wanted: G, options: Options, wish: Wish, named: Sequence[str] | None = None) -> Meant[G]:
    """Return the run to train.

    Args:
        named: dotted fields that were named beside its file; of what the file says, only what was changed in it since
            the run was gone on with last is a wish. None: all that `wanted` says is.

    Raises:
        ConfigError: this home holds a run of that name which differs, or this very one by another identity, and what is
            to be done was not said; or what was said cannot be done.
    """
    kept, keys = list(kept_of(_kind(wanted), wanted.name, options)), _keys(options)
    same = [(run, each) for run, each in kept if _is_same(run, wanted)]
    mine = [(run, each) for run, each in same if each.peer in keys]
    if wish == "new":
        if alike := [each for run, each in mine if run == wanted and each.round]:
            raise ConfigError(_no_other(alike[0], options.names))
        return Meant(wanted)
    if mine:
        run, newest = max(mine, key=lambda pair: pair[1].saved_at)
        said = None if named is None else _asked(newest, wanted, named, options)[1]
        return Meant(run, None, _told(run, newest), said)
    if elsewhere := [each for _, each in same if each.round]:
        raise ConfigError(_not_mine(elsewhere[0], options))
    others = [(run, each) for run, each in kept if each.round and not each.charter.has_ended]
    others = [(run, each) for run, each in others if not begins_elsewhere(run, wanted)]
    if not others:
        if wish == "go on":
            raise ConfigError(_nothing_to_go_on_with(wanted, options))
        return Meant(wanted)
    run, found = max(others, key=lambda pair: (pair[1].peer in keys, pair[1].round))
    asked, said = (wanted, None) if named is None else _asked(found, wanted, named, options)
    since = "" if (stale := differences(wanted, asked)) == [] else f"; {_SINCE}: {'; '.join(stale)}"
    fields = differences(found.now, asked)
    amend = amendment_to(found, asked)
    if fields and (wish != "go on" or amend is None):
        raise ConfigError(_question(found, fields, amend, wish, options.names))
    if found.peer not in keys:
        raise ConfigError(_not_mine(found, options))
    if not fields:
        text = since or ", which was changed before to what this file says"
        text = f"going on with run {short(run.run)} ({printable(run.name)}) from round {found.round}{text}"
        return Meant(run, None, _told(run, found) if found.is_complete else text, said)
    if amend is not None and amend.tokens is not None and amend.tokens <= found.committed_tokens:
        raise ConfigError(
            f"train.tokens: {amend.tokens:,} in all are asked for, and run {short(run.run)} ({printable(run.name)}) "
            f"has already counted {found.committed_tokens:,}: nothing would be left to train. Nothing was started. "
            "Ask for more than that, or undo the change."
        )
    text = f"going on with run {short(run.run)}, with these changes: {'; '.join(fields)}{since}"
    return Meant(run, amend, text, said)


def _asked(found: Kept, wanted: G, named: Sequence[str], options: Options) -> tuple[G, Settings | None]:
    """Return `wanted` with what `found` was amended to where nobody asks for anything else, and what its file says."""
    if isinstance(wanted, StagedConfig):  # of which nothing is amended
        return wanted, None
    before = _read_said(options.home.folder(found.run.run, found.peer)) or found.run.settings
    settings, said = where_unsaid(wanted.settings, before, found.charter.settings, named)
    return wanted.with_settings(settings), said


def keep_said(folder: PeerFolder, said: Settings) -> None:
    """Keep what the run file says of what can be amended: what is changed in it later is what a person wishes."""
    with suppress(DiskFull, DataError):
        write_atomically(folder.said, [msgspec.json.encode(said)], mode=PRIVATE)


def _read_said(folder: PeerFolder) -> Settings | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(folder.said.read_bytes(), type=Settings)
    return None


def require_named(run_file: RunFile, made: RunConfig, home: Home) -> None:
    """
    Raises:
        ConfigError: the file says which run it makes, and it makes another.
    """
    named = run_file.run
    if named in (None, made.run):
        return
    wanted = None
    with suppress(WeftError):  # it is not here, or is another version's
        data = home.blobs.read(Digest(named), MAX_RUN_NBYTES)
        wanted = None if data is None else read_run(data, sys.maxsize)
    what = "; ".join(differences(wanted, made)[:MAX_SHOWN]) if wanted is not None else f"it reads {_text_of(made.data)}"
    raise ConfigError(
        f"run: this file should make run {short(RunId(named))}, but would make {short(made.run)}: {what}. Nothing was "
        "started. Text, tokenizer, heldout_fraction and all other fields must be those of that run. To make another "
        "run, remove the line `run`."
    )


def begins_elsewhere(run: Genesis, wanted: Genesis) -> bool:
    """Return whether `wanted` names other weights to begin with, or another run that it goes on with."""
    has_weights = isinstance(wanted, RunConfig) and not wanted.is_seeded and wanted.initial != run.initial
    if isinstance(run, RunConfig) and isinstance(wanted, RunConfig) and UNSET not in (run.base, wanted.base):
        # An adapter's first weights follow from its shape and the seed as well.
        is_told = wanted.model.has_frozen_ends or (run.model, run.seed) == (wanted.model, wanted.seed)
        has_weights = run.base != wanted.base or (is_told and has_weights)
    return has_weights or wanted.predecessor not in (None, run.predecessor)


def kept_of(kind: type[G], name: str, options: Options) -> Iterator[tuple[G, Kept]]:
    """Yield the runs of that kind and name that this home has begun, or taken part in."""
    home, limit = options.home, options.settings.max_parameters
    folder = home.root / "runs"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(WeftError):  # another version's, or damaged: not this one
            data = home.blobs.read(Digest(path.name), MAX_RUN_NBYTES)
            run = None if data is None else read_run(data, limit)
            if not isinstance(run, kind) or run.name != name:
                continue
            is_staged = isinstance(run, StagedConfig)  # of which nothing is amended
            for checkpoint in sorted(path.glob("*/stage-*/checkpoint" if is_staged else "*/checkpoint")):
                with suppress(OSError):
                    saved_at = (checkpoint / CHECKPOINT_FILE).stat().st_mtime
                    contents = _read(checkpoint)
                    charter = None if is_staged or contents is None else contents.charter
                    peer = PeerId(checkpoint.relative_to(path).parts[0])
                    yield run, Kept(run, charter or first_charter(run), contents, peer, saved_at)


def _read(checkpoint: Path) -> Contents | None:
    with suppress(CheckpointError):
        return read_contents(checkpoint)
    return None


def _is_same(run: Genesis, wanted: Genesis) -> bool:
    if isinstance(run, LoopConfig):
        run = msgspec.structs.replace(run, initial=wanted.initial)
    return run == wanted


def _kind(wanted: G) -> type[G]:
    return LoopConfig if isinstance(wanted, LoopConfig) else RunConfig  # with stages, too


def _keys(options: Options) -> set[PeerId]:
    """Return the identities that this process may take."""
    files = sorted(options.home.keys.glob("peer-*.pem")) if options.key is None else [options.key]
    found = set()
    for file in files:
        with suppress(KeyFileError):  # none yet; or whoever opens it says what is wrong
            found.add(read_peer(file))
    return found


def told_kept(run: G, options: Options) -> str:
    """Return that a run goes on from what this home has of it, and from where; or that it is complete."""
    keys = _keys(options)
    mine = [each for same, each in kept_of(_kind(run), run.name, options) if same == run and each.peer in keys]
    if not mine:
        return f"going on with run {short(run.run)} ({printable(run.name)}) from what this home has saved"
    return _told(run, max(mine, key=lambda each: each.saved_at))


def _told(run: Genesis, kept: Kept) -> str:
    """Return that a run goes on, from where, and what was amended of it since its file was written."""
    if kept.is_complete:
        return (
            f"run {short(run.run)} ({printable(run.name)}) is complete at round {kept.round}: nothing is left to train"
        )
    at = f"from round {kept.round}" if kept.round else "from what this home has saved"
    fields = differences(kept.run, kept.now)
    since = f"; {_SINCE}: {'; '.join(fields)}" if fields else ""
    return f"going on with run {short(run.run)} ({printable(run.name)}) {at}{since}"


def kept_run(run: RunId, options: Options) -> tuple[RunConfig, Data]:
    """Return a run of which this home keeps a checkpoint, and its data: to go on with it where its file is not here.

    Raises:
        ConfigError: it is private, or its members train in loops of their own; or its config is not here.
        CheckpointError: nothing is kept by the identity that would go on, which would begin anew.
        DataError: some of its data is not here.
    """
    home = options.home
    bytes_of_run = home.blobs.read(Digest(run), MAX_RUN_NBYTES)
    if bytes_of_run is None:
        raise ConfigError(f"the config of run {short(run)} is not in {home.root}. Join the run: weft join -")
    config = on_corpus(read_run(bytes_of_run, options.settings.max_parameters))
    recall(config, options.home)
    if config.is_private:
        raise ConfigError(
            f"run {short(run)} is private: its run file, or the option --data, says which files it trains on here. Go "
            "on with `weft train` and that run file, or with `weft join - --data FILES`."
        )
    key = options.key
    has_state = bool(who_keep(run, home)) if key is None else home.folder(run, read_peer(key)).has_checkpoint
    if not has_state:
        whose = "no identity of this home" if key is None else str(key)
        raise CheckpointError(
            f"{whose} has a checkpoint of run {short(run)}, so the run would begin anew. Name the key that trained it "
            "with --key, or begin with the run file."
        )
    blob = home.blobs.read(config.data.tokenizer, MAX_TOKENIZER_NBYTES)
    if blob is None or (missing := home.shards.missing(config.data)):
        num_shards = len({info.digest for info in (*config.data.train, *config.data.heldout)})
        what = "its tokenizer is" if blob is None else f"{len(missing)} of the {num_shards} pieces of its data are"
        raise DataError(f"run {short(run)}: {what} not here. Members have them: weft join - fetches them.")
    return config, Data(from_bytes(blob), home.shards, config.data, read_came_with(config, home))


# --- what differs ---


def differences(before: Genesis, after: Genesis) -> list[str]:
    """Return the fields that differ, each as "field old -> new"; of data only how much text there is."""
    old, new = dict(leaves(_fields(before))), dict(leaves(_fields(after)))
    names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    if isinstance(before, StagedConfig) != isinstance(after, StagedConfig):
        names = [name for name in names if not name.startswith("pipeline.")]  # of one of them alone
    of_model = [] if isinstance(before, LoopConfig) else [name for name in names if name == "initial"]
    names = [name for name in names if name not in _FOLLOW] or of_model
    found = [_change(name, old.get(name), new.get(name)) for name in names]
    if before.data is None or after.data is None or before.data == after.data:
        return found
    if before.data.tokenizer != after.data.tokenizer:
        return [*found, f"tokenizer {short(before.data.tokenizer)} -> {short(after.data.tokenizer)}"]
    old_text, new_text = _text_of(before.data), _text_of(after.data)
    return [*found, f"data {old_text} -> {new_text if new_text != old_text else 'as much of another'}"]


def _fields(run: Genesis) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(run)
    return {name: value for name, value in tree.items() if name != "data"}


def _change(name: str, old: Any, new: Any) -> str:
    if name in _LARGE:
        return f"{_LARGE[name]} differ"
    return f"{name} {_shown(old)} -> {_shown(new)}"


def _text_of(data: DataIndex) -> str:
    return f"{data.train_text_nbytes + data.heldout_text_nbytes:,} B of text"


def _shown(value: Any) -> str:
    if value is None:
        return "left out"
    return f"{value:,}" if type(value) is int else printable(str(value))[:60]


def amendment_to(kept: Kept, wanted: Genesis) -> Amend | None:
    """Return what makes `kept` what is wanted, where its only member may decide it; None: no amendment does."""
    if isinstance(wanted, StagedConfig):
        return None
    try:
        is_same = _is_same(kept.run.with_settings(wanted.settings), wanted)
    except ConfigError:  # its model takes no such samples
        is_same = False
    if not is_same:
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
        amend = Amend(reason="", **changed)
        is_all: bool = amended_settings(kept.charter, amend) == after
    except (Void, TypeError):
        return None
    return amend if is_all else None


# --- what to say ---


def _question(found: Kept, fields: list[str], amend: Amend | None, wish: Wish, names: Names) -> str:
    more = f"; and {len(fields) - MAX_SHOWN} more" if len(fields) > MAX_SHOWN else ""
    text = (
        f"{_holds(found)}, and this is a different run with the same name: {'; '.join(fields[:MAX_SHOWN])}{more}. "
        "Nothing was started. "
    )
    if amend is None:
        text += f"That run cannot go on with this change: {_why_not(found)}. "
        text += _from_what_it_has_learnt(found, wish, names)
    elif wish == "ask":
        text += f"To go on with that run, with these settings from its next round on, add {names.go_on}. "
    anew = f"`{names.train} {names.new}`."
    if not names.train:
        anew = f"add {names.new}{_in_place(wish, names)} or give another name."
    return f"{text}To go on with it as it was, undo the change. For a new run beside it, which begins anew: {anew}"


def _holds(found: Kept) -> str:
    called = f"run {short(found.run.run)} ({printable(found.run.name)})"
    if len(found.members) > 1:
        return f"{len(found.members)} members hold {called}, this home among them, at round {found.round}"
    return f"this home holds {called} at round {found.round}"


def _from_what_it_has_learnt(found: Kept, wish: Wish, names: Names) -> str:
    run = found.run
    if isinstance(run, LoopConfig):
        return (
            "To start another run from what it has learnt: start the loop with the config as it was, which puts its "
            'parameters into the model; then make a weft.Sync of that model with this config and wish="new". '
        )
    whole = f"`weft gather {short(run.run)}`, then " if isinstance(run, StagedConfig) else ""
    others = ", and whoever has its ticket joins it" if len(found.members) > 1 else ""
    keeps = "It has the parameters of that run, not the optimizer's memory, and counts rounds and tokens from 0"
    if names.after:
        after = f"{names.after} {short(run.run)}"
        same = f"the same command with {after}{_in_place(wish, names)}"
        command = f"`{names.train} {after}`" if names.train else same
        return f"To begin another run with what it has learnt: {whole}{command}. {keeps}{others}. "
    return (
        f"To begin another run with what it has learnt: {whole}`weft export {short(run.run)} FOLDER`; then write "
        f'predecessor = "{run.run}" above the first table of the run file, and model = {{type = "folder", path = '
        '"FOLDER"} and tokenizer = {type = "json", path = "FOLDER"} there, too, in the place of [model] and '
        f"[tokenizer]. {keeps}{others}. "
    )


def _in_place(wish: Wish, names: Names) -> str:
    """Return which option goes where one is to be added that excludes it."""
    return f" in the place of {names.go_on}" if wish == "go on" else ""


def _why_not(found: Kept) -> str:
    if isinstance(found.run, StagedConfig):
        return "each of its stages is a run of its own, and nobody can amend those"
    if found.charter.stewards:
        return "it has stewards, who amend it with `weft act amend` while it runs"
    if len(found.members) != 1:
        return f"{len(found.members)} members hold it, and none of them may change it alone (docs/stewards.md)"
    if found.charter.forks:
        return "it has split into branches, and others may hold another one"
    if isinstance(found.run, LoopConfig):
        return "only samples, batch_size, method.every, codecs and rates of method.apply can change"
    return "only train.tokens, seq_len, batch_size, schedule, method.every, codecs and rates of method.apply can change"


def _no_other(found: Kept, names: Names) -> str:
    how = "another model to begin with, another name or another seed"
    if isinstance(found.run, RunConfig):
        how = "another name or another seed (--set seed=1)"
    return (
        f"{_holds(found)}, and it is exactly this run: a run's digest follows from its settings, so there cannot be "
        f"two alike. For a new run beside it, give {how}. To go on with this one, leave out {names.new}."
    )


def _not_mine(found: Kept, options: Options) -> str:
    names, text = options.names, f"{_holds(found)}, trained by peer {short(found.peer)}, and "
    if options.key is None:
        text += f"that peer's key is not in {options.home.keys}. To go on with the run, name the key: {names.key_file}"
    else:
        text += f"{options.key} is another peer's key. To go on with the run, leave out {names.key}"
    return (
        f"{text}. Nothing was started. For a second peer on this machine: `weft join - --key FILE`. To begin the run "
        f"anew, add {names.new}."
    )


def _nothing_to_go_on_with(wanted: Genesis, options: Options) -> str:
    return (
        f"no run called {printable(wanted.name)} in {options.home.root} has made a round, so there is nothing to go on "
        "with. Nothing was started. If the run is in another home, name that: weft --home FOLDER. To begin it, leave "
        f"out {options.names.go_on}."
    )
