"""From a run's genesis to what holds of it now, and back: the first charter, and the config that a charter amounts to.

    RunConfig ──first_charter──► Charter ──acts──► Charter ──amended──► RunConfig to train by

    --set of a person, settings ──amendment──► Amend
    RunConfig ──run_file_of──► RunFile, which makes the same run anew ──text_of──► TOML

The config to train by is the genesis with other settings. Its own digest names nothing: the run keeps the name of its
genesis. Paths are not among what peers share: who made the run keeps its run file, for others they are to be named.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import PureWindowsPath
from typing import Any

import msgspec
import tomli_w

from weft import reading
from weft.codec.config import CodecConfig
from weft.config import Config, alike, dump, from_tree, is_in, leave_out, replace_field
from weft.data.corpus import CorpusConfig
from weft.data.packing import BytesConfig, JsonConfig
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError
from weft.model.config import AdapterConfig
from weft.run.config import FolderAdapter, FolderModel, Genesis, NewAdapter, RunConfig, RunFile, ShapedModel, SpaceModel
from weft.run.genesis import drawn_adapter, kind_of, of_shape, of_space
from weft.run.idle import without_effect
from weft.run.staged import StagedConfig
from weft.run.trust import FEWEST, AuditedTrust, MembersTrust
from weft.sync.method.choices import ApplyConfig, Choices, InnerConfig, MuonConfig
from weft.sync.method.presets import spell_out
from weft.sync.method.schedule import ScheduleConfig
from weft.sync.records.acts import Amend, BatchSize, Every, SeqLen, TotalTokens
from weft.sync.records.charter import AuditTerms, Charter, ExactTerms, GradientTerms, PassageTerms, Settings
from weft.sync.records.messages import MAX_GROUP
from weft.wire import digest_of


def first_charter(run: Genesis) -> Charter:
    """Return the charter that a run begins with."""
    return Charter(
        stewards=run.stewards,
        serials=(0,) * len(run.stewards),
        settings=run.settings,
        max_seq_len=run.longest,
        min_seq_len=run.train.seq_len if isinstance(run, RunConfig) and run.data.has_rows else msgspec.UNSET,
        has_even_leases=run.has_even_leases,
        is_routed=isinstance(run, StagedConfig),
        electors=run.electors,
        is_recorded=msgspec.UNSET if run.trust is msgspec.UNSET else True,
        audits=_audits(run),
        passages=_passages(run),
    )


def _audits(run: Genesis) -> AuditTerms | msgspec.UnsetType:
    trust = run.trust
    if not isinstance(trust, AuditedTrust) or isinstance(run, StagedConfig):
        return msgspec.UNSET
    return AuditTerms(
        rate=trust.audit_rate,
        trace_every=trust.trace_every,
        quarantine=trust.quarantine or msgspec.UNSET,
        exact=_exact(run, trust),
    )


def _passages(run: Genesis) -> PassageTerms | msgspec.UnsetType:
    """Return how members of a stage look at each other; of a tied matrix they do not: nothing passes through it."""
    if not isinstance(run, StagedConfig) or not isinstance(run.trust, AuditedTrust) or run.stage in (None, run.tied):
        return msgspec.UNSET
    return PassageTerms(rate=run.trust.audit_rate)


def _exact(run: Genesis, trust: AuditedTrust) -> ExactTerms | msgspec.UnsetType:
    if not trust.is_exact or not isinstance(run, RunConfig):
        return msgspec.UNSET
    optimizer = run.train.optimizer
    assert not isinstance(optimizer, MuonConfig), "it is refused with exact numbers"
    return ExactTerms(
        optimizer=optimizer,
        clip=run.train.clip,
        num_decayed=run.vector.num_decayed,
        gradient=_gradient(run, trust.micro_batch),
    )


def _gradient(run: RunConfig, micro_batch: int) -> GradientTerms | msgspec.UnsetType:
    if run.data.has_rows or run.method.proximal:
        return msgspec.UNSET  # tokens that see their own text alone, or a pull to what the parameters were
    return GradientTerms(
        model=run.model,
        micro_batch=min(micro_batch or run.train.batch_size, run.train.batch_size),
        seed=run.seed,
        data=digest_of(run.data),
    )


@lru_cache(maxsize=64)
def amended(run: Genesis, charter: Charter) -> Genesis:
    """Return the config to train by where `charter` holds; `run` itself where nothing was amended."""
    return run if run.settings == charter.settings else run.with_settings(charter.settings)


# --- as a person writes it ---


class TrainAmended(Config, frozen=True, kw_only=True):
    tokens: TotalTokens
    seq_len: SeqLen
    batch_size: BatchSize
    schedule: ScheduleConfig


class MethodAmended(Config, frozen=True, kw_only=True):
    every: Every
    codec: CodecConfig
    reply_codec: CodecConfig | None = None
    apply: ApplyConfig


class RunAmended(Config, frozen=True, kw_only=True):
    """What can be amended, in the sections of a run file."""

    train: TrainAmended
    method: MethodAmended


def as_run_file(settings: Settings) -> RunAmended:
    """Return settings as a run file has them."""
    train, method = alike(TrainAmended, settings), alike(MethodAmended, settings.method)
    return RunAmended(train=TrainAmended(**train), method=MethodAmended(**method))


def where_unsaid(said: Settings, before: Settings, now: Settings, named: Sequence[str]) -> tuple[Settings, Settings]:
    """Return what a run is to be trained by: what a person has changed of its file, or named beside it, and of all else
    what holds now; and what the file says without what was named.

    Args:
        said: by the file, with what was named.
        before: by the file, when the run was gone on with last.
        now: as amended since.
        named: dotted fields of a run file.
    """

    def merged(said: Any, before: Any, now: Any, place: str) -> tuple[Any, Any]:
        if any(is_in(place, field) for field in named):
            return said, before
        kinds = {each.get("type") if isinstance(each, dict) else "value" for each in (said, before, now)}
        if isinstance(said, dict) and len(kinds) == 1:
            both = {name: merged(said[name], before[name], now[name], f"{place}.{name}".strip(".")) for name in said}
            return {name: one for name, (one, _) in both.items()}, {name: other for name, (_, other) in both.items()}
        return now if said == before else said, said

    trees = [msgspec.to_builtins(as_run_file(each)) for each in (said, before, now)]
    asked, written = (_settings(tree, said) for tree in merged(trees[0], trees[1], trees[2], ""))
    return asked, written


def _settings(tree: dict[str, Any], like: Settings) -> Settings:
    """Return settings from what a run file has of them; `like` has the rest."""
    found: RunAmended = from_tree(tree, RunAmended, where="run file")
    method = msgspec.structs.replace(like.method, **alike(Choices, found.method))
    return Settings(**alike(Settings, found.train), method=method)


def amendment(settings: Settings, changes: Mapping[str, Any], reason: str) -> Amend:
    """Return the deed that makes `changes`, by dotted field of a run file, to `settings`.

    Raises:
        ConfigError: no such field, or not what it may hold, or nothing would change.
    """
    before = as_run_file(settings)
    tree: dict[str, Any] = msgspec.to_builtins(before)
    for dotted, value in changes.items():
        replace_field(tree, dotted, value)
    after: RunAmended = from_tree(tree, RunAmended, where="--set")
    pairs = [(before.train, after.train), (before.method, after.method)]
    changed = {
        name: getattr(new, name)
        for old, new in pairs
        for name in new.__struct_fields__
        if getattr(old, name) != getattr(new, name)
    }
    if not changed:
        raise ConfigError("--set: the run has these settings already.")
    if changed.get("apply") == InnerConfig():
        raise ConfigError('--set: method.apply: it cannot become "inner": that takes another run.')
    return Amend(reason=reason, **changed)


# Beside the run file, where it cannot say them itself: of an export.
MODEL, TOKENIZER, ADAPTER, SPACE = "model", "tokenizer.json", "adapter", "space"
CHATS, PAIRS, TASKS = "chats.jsonl", "pairs.jsonl", "tasks.jsonl"


def run_file_of(run: RunConfig, num_peers: int) -> RunFile:
    """Return the run file, which says that it makes this run; its corpus is `corpus_like` the run's.

    Args:
        num_peers: to expect, as far as there is room for so many, and where members audit, as many as that takes.
    """
    is_audited = isinstance(run.trust, AuditedTrust)
    is_alone = is_audited or spell_out(run.method, num_peers).graph is not None  # nobody without a vote
    is_bytes = run.data.tokenizer == ByteTokenizer().digest
    written_otherwise = {
        "peers": min(max(num_peers, FEWEST if is_audited else 1), run.electors * (1 if is_alone else MAX_GROUP)),
        "model": _model_of(run),
        "data": corpus_like(run),
        "tokenizer": BytesConfig() if is_bytes else JsonConfig(path=TOKENIZER),
        "adapter": _adapter_of(run),
        "reward": None if run.reward is msgspec.UNSET else run.reward,
        "trust": MembersTrust() if run.trust is msgspec.UNSET else run.trust,
    }
    return RunFile(**alike(RunFile, run) | written_otherwise)


def corpus_like(run: RunConfig) -> CorpusConfig:
    """Return a corpus of the run's kind, as far as the run tells of it: of conversations and pairs it knows no file."""
    rows = run.data.rows
    if rows is msgspec.UNSET:
        return CorpusConfig()
    file = {"tasks": TASKS, "pairs of answers": PAIRS}.get(rows.what, CHATS)
    return CorpusConfig(source=kind_of(rows)(paths=(file,), too_long=rows.too_long, date=rows.date))


def _model_of(run: RunConfig) -> ShapedModel | SpaceModel | FolderModel:
    model, num_tokens, seq_len = run.model, run.data.vocab_size, run.train.seq_len
    if model.has_frozen_ends and not run.is_seeded:
        return SpaceModel(path=SPACE, member=MODEL)
    if not run.is_seeded:
        return FolderModel(path=MODEL)
    if model.has_frozen_ends:
        space = SpaceModel(path=SPACE, **alike(SpaceModel, model))
        is_all = of_space(space, model.vocab_size, model.width, model.norm_eps, seq_len) == model
        return space if is_all else FolderModel(path=MODEL)
    shape = ShapedModel(**alike(ShapedModel, model))
    return shape if of_shape(shape, num_tokens, seq_len) == model else FolderModel(path=MODEL)


def _adapter_of(run: RunConfig) -> NewAdapter | FolderAdapter | None:
    adapter = run.model.adapter
    if adapter is msgspec.UNSET:
        return None
    if drawn_adapter(run) is None:  # it had learnt already
        return FolderAdapter(path=ADAPTER)
    return NewAdapter(**alike(AdapterConfig, adapter))


def text_of(file: RunFile) -> str:
    """Return a run file as TOML that reads back equal, without fields that have no effect beside the others.

    One that differs from its default stays: the run is named by that, too.
    """
    tree = reading.toml_of(dump(file))
    for field in without_effect(file):
        shorter = leave_out(tree, field)
        with suppress(ConfigError):  # a field that a run file must have
            if from_tree(shorter, RunFile, where="run file") == file:
                tree = shorter
    return tomli_w.dumps(tree)


def without_places(file: RunFile) -> tuple[RunFile, tuple[str, ...]]:
    """Return a run file whose paths tell nothing of a machine, and those paths that were others.

    A path that leads out of the file's folder is named by its last part alone, to be put beside the file.
    """
    tree: dict[str, Any] = msgspec.to_builtins(file)
    moved: list[str] = []

    def named(path: str) -> str:
        parts = PureWindowsPath(path).parts  # which takes both slashes for what they are
        is_inside = parts and not path.startswith(("/", "\\", "~")) and ".." not in parts and ":" not in parts[0]
        if is_inside:
            return path
        name = parts[-1] if len(parts) > 1 and parts[-1] != ".." else "here"
        moved.append(name)
        return name

    for section in (tree["data"]["source"], tree["model"], tree["tokenizer"], tree["adapter"] or {}):
        for field in ("path", "member", "heldout_path", "template"):
            if section.get(field):
                section[field] = named(section[field])
        if "paths" in section:
            section["paths"] = [named(path) for path in section["paths"]]
    return msgspec.convert(tree, RunFile), tuple(moved)
