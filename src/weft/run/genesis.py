"""From a run file to what all peers share, and back out of what a peer received.

    RunFile --seal--> RunConfig + shards, tokenizer, initial vector in the maker's home
    bytes --read_run--> RunConfig that this machine accepts

The maker packs its corpus, resolves every default, and puts the canonical RunConfig with all that it names into its
home, whence peers fetch it by digest (`outline.public` says what they may request).

A private run's RunConfig names tokenizer and model but no shard, not even held-out ones: every peer packs its own
files into a store that is never served, and evaluates on what it holds out of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import msgspec
import numpy as np
import torch
from jaxtyping import Float32
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from torch import Tensor

from weft import wire
from weft.chat.packing import pack_conversations
from weft.chat.task_rows import Judged, pack_tasks
from weft.chat.template import TemplateFault, template_of
from weft.clock import SystemClock
from weft.codec.codec import Codec
from weft.codec.dense import Bf16, Fp32
from weft.compose.member import MEMBER, read_member, require_weights
from weft.compose.registry import Registry
from weft.compose.space import Space, numbers_digest, read_space
from weft.config import alike
from weft.data import tokenizer as tokenizers
from weft.data.batch import check_windows
from weft.data.corpus import (
    ConversationsSource,
    CorpusConfig,
    JsonlSource,
    ParquetSource,
    PreferencesSource,
    SourceConfig,
    TasksSource,
    text_nbytes,
)
from weft.data.packing import JsonConfig, make_tokenizer, pack
from weft.data.store import DataIndex, Rows, ShardStore
from weft.data.tokenizer import Tokenizer, check_vocabulary
from weft.errors import ConfigError, DataError, GenesisMismatch, TokenizerMismatch, TooLarge, WireError
from weft.events import Emit, Notice
from weft.ids import Digest, several, short
from weft.model.came_with import decode, read, tokenizer_folder, with_template
from weft.model.config import AdapterConfig, ModelConfig, check_size, has_base, named
from weft.model.flat import base_layout, cut, ends_within, layers_within
from weft.model.initial import initial_vector
from weft.model.peft import check_base, read_adapter, read_adapter_config
from weft.model.sections import num_section_base, num_section_parameters, pieces, sections, whole
from weft.model.weights import read_config, read_folder
from weft.pipeline.codec.activations import SubspaceConfig
from weft.pipeline.config import PipelineConfig
from weft.progress import Meter
from weft.run.config import (
    FolderAdapter,
    FolderModel,
    Genesis,
    LoopConfig,
    NewAdapter,
    RunConfig,
    RunFile,
    ShapedModel,
    SizedModel,
    SpaceModel,
)
from weft.run.host import check_host
from weft.run.idle import without_effect
from weft.run.machine import PeerConfig
from weft.run.outline import data_ready
from weft.run.reward import ExtensionReward, MatchReward, RewardConfig, with_judge
from weft.run.staged import StagedConfig, by_section, seeded, staged
from weft.run.trust import of_run as trust_of_run
from weft.store.chunks import raw
from weft.store.home import Home
from weft.sync.merge.reduce import require
from weft.sync.method.presets import spell_out
from weft.sync.method.schedule import missed
from weft.sync.records.acts import MAX_TOKENS
from weft.sync.records.charter import MAX_TOKENS_PER_STEP

MAX_RUN_NBYTES = wire.MAX_RECORD_NBYTES  # a RunConfig: its shards' names are most of it
MAX_TOKENIZER_NBYTES = tokenizers.MAX_BLOB_NBYTES


@dataclass(frozen=True)
class Sealed:
    """A run, and what its maker need not read again."""

    config: RunConfig
    tokenizer: Tokenizer
    store: ShardStore  # where this machine's training and held-out shards lie
    index: DataIndex  # those shards; `config.data` unless the run is private
    came_with: bytes = b""  # the blob of what came with the model; empty: nothing did


def seal(run_file: RunFile, base: Path, home: Home, emit: Emit, *, max_parameters: int | None = None) -> Sealed:
    """Turn a run file into a run: pack, resolve, and put all that peers may fetch into `home`.

    Args:
        base: the folder that relative paths start from: the run file's.
        emit: takes `DataReady`, and how far packing has come.
        max_parameters: what this machine is willing to hold; None: as `PeerConfig` has it.

    Raises:
        ConfigError: a model that does not exist or does not go with the rest, or numbers no peer would accept.
        TooLarge: more parameters than this machine takes, or a batch out of all proportion.
        DataError: a corpus that is missing, empty, malformed or too small.
        TokenizerMismatch: the tokenizer is not the model's.
        DiskFull: no room for shards or blobs.
    """
    limit = PeerConfig().max_parameters if max_parameters is None else max_parameters
    tokenizer = make_tokenizer(run_file.tokenizer, run_file.data, base)
    model = resolve(run_file, tokenizer, base, home.root)
    check_size(_num_held(model, run_file.stages), limit)
    check_host(_num_held(model, run_file.stages))
    store = home.private if run_file.is_private else home.shards
    came_with = _came_with(run_file, tokenizer, model, base, home, emit)
    learnt = _learnt(run_file, model, base, home, emit)  # what is refused is refused before text is packed
    index = _pack(store, run_file, tokenizer, came_with, base, emit)
    initials = tuple(_put_initials(run_file, model, learnt, home))
    resolved: dict[str, Any] = {
        "model": model,
        "initial": initials[0],
        "is_seeded": learnt is None,
        "data": _without_shards(index) if run_file.is_private else index,
        "method": spell_out(run_file.method, run_file.peers),
        "stewards": tuple(sorted(set(run_file.stewards))),
        "reward": UNSET if run_file.reward is None else with_judge(run_file.reward),
        "trust": UNSET if run_file.stages > 1 else trust_of_run(run_file.trust),
        **({"came_with": home.blobs.put(came_with)} if came_with else {}),
    }
    bases: tuple[Digest, ...] = ()
    if has_base(model):
        frozen = learnt.model if learnt is not None and not model.has_frozen_ends else ends_of(run_file, model, base)
        bases, nbytes = _put_bases(model, frozen, run_file.stages, home)
        resolved |= {"base": bases[0], "base_nbytes": nbytes}
    config = RunConfig(**alike(RunConfig, run_file) | resolved)
    if run_file.stages > 1:
        if isinstance(run_file.model, FolderModel) and isinstance(run_file.pipeline.activations, SubspaceConfig):
            raise ConfigError(
                "pipeline.activations: subspace: it would lose weights from a folder, which lie in no subspace. "
                "Choose another type, or a model that weft makes from the seed."
            )
        config = staged(config, initials, run_file.pipeline, bases, trust_of_run(run_file.trust))
    data = wire.encode(config)
    require(config.method)
    read_run(data, limit)  # what others would refuse is refused here, where it can still be changed
    home.blobs.put(tokenizer.to_bytes())
    home.blobs.put(data)
    emit(data_ready(index, fetched_nbytes=0))
    first = config.tokens_per_step * run_file.peers
    words = missed(config.train.schedule, config.train.tokens, first)
    if words is not None and "train.schedule" not in without_effect(run_file):
        emit(Notice(text=f"train.tokens is {config.train.tokens:,}: {words}; change train.schedule, too"))
    return Sealed(config, tokenizer, store, index, came_with)


class _Kind(msgspec.Struct):
    """Which of the two the bytes are of; what else is in them is not looked at."""

    type: str = ""


def read_run(data: wire.Buffer, max_parameters: int) -> Genesis:
    """Return the run whose canonical bytes are `data`, which anybody may have written.

    Args:
        max_parameters: what this machine is willing to hold.

    Raises:
        ConfigError: no RunConfig, of another version, or one that contradicts itself.
        DataError: its corpus holds not one window.
        TooLarge: more parameters than this machine takes, or a batch out of all proportion.
    """
    try:
        config: Genesis = wire.decode(data, _kind(data), max_nbytes=MAX_RUN_NBYTES)
    except WireError as error:
        raise ConfigError(f"this run cannot be read: {error}. Ask its maker for another ticket.") from None
    for place, number in _floats(msgspec.to_builtins(config), ""):
        if not math.isfinite(number) and place != "train.clip":  # an infinite clip does not clip
            raise ConfigError(f"this run has {place} = {number}, which is not a usable number. Do not join it.")
    if isinstance(config, LoopConfig):
        check_size(config.num_parameters, max_parameters)
        return config
    check_size(_num_held(config.model, config.stages if isinstance(config, StagedConfig) else 1), max_parameters)
    _check_train(config, max_parameters)
    if isinstance(config, StagedConfig) and config.data.has_rows and config.pipeline.split is not None:
        raise ConfigError(
            "pipeline.split: members that compute a section together know running text only, and this run trains on "
            "conversations. Leave it out."
        )
    if config.is_private:
        if config.data.train or config.data.heldout:
            raise ConfigError("this run says that it is private, but names shards of its maker. Do not join it.")
    else:
        check_windows(config.data, "train", config.train.seq_len, at_least=1)
        check_windows(config.data, "heldout", config.train.seq_len, at_least=1)
    return config


def _kind(data: wire.Buffer) -> type[RunConfig] | type[LoopConfig]:
    try:
        kind = msgspec.msgpack.decode(data, type=_Kind).type
    except msgspec.DecodeError:
        return RunConfig  # whoever reads it as one says what is wrong
    return LoopConfig if kind == "loop" else StagedConfig if kind == "staged" else RunConfig


def _num_held(model: ModelConfig, stages: int) -> int:
    """Return how many parameters a peer holds at most, which holds one section at least; a base counts, too."""
    cuts = sections(model, stages)
    return max(num_section_parameters(model, cut) + num_section_base(model, cut) for cut in cuts)


def on_corpus(run: Genesis) -> RunConfig:
    """Return `run`, which has to be one of a transformer on a corpus.

    Raises:
        ConfigError: its members train in loops of their own.
    """
    if isinstance(run, LoopConfig):
        raise ConfigError(
            f"members of run {run.name!r} train in scripts of their own: take part from such a script, with "
            'weft.Sync(model, ticket="..."). weft does not know the model, so it cannot evaluate it, generate with it '
            "or export it."
        )
    return run


def pack_private(
    config: RunConfig, tokenizer: Tokenizer, came_with: bytes, corpus: CorpusConfig, base: Path, home: Home, emit: Emit
) -> DataIndex:
    """Pack this machine's own files for a private run into `home.private`, and return their index, to be told nobody.

    Args:
        tokenizer: the run's.
        came_with: the blob of what came with its model.
        base: the folder that relative paths start from.
        emit: takes how far packing has come.

    Raises:
        DataError: files missing, malformed, too few, or with text that the tokenizer does not know; or text where the
            run's is conversations, or the other way round.
        DiskFull: no room for the shards.
    """
    corpus = msgspec.structs.replace(corpus, source=_as_the_runs(corpus.source, config))
    packing = _Packing(home.private, tokenizer, came_with, config.train.seq_len, config.reward, base, emit)
    index = _packed(corpus, packing)
    _check_size(index, config.train.seq_len, config.train.batch_size)
    return index


def _as_the_runs(source: SourceConfig, config: RunConfig) -> SourceConfig:
    """Return `source`; where the run is of conversations, files of JSON lines or tables are such.

    Raises:
        DataError: it is of the other kind.
    """
    rows = config.data.rows
    if rows is UNSET:
        if isinstance(source, ConversationsSource):
            raise DataError(f"run {config.name!r} trains on running text, not on conversations. Name files of text.")
        return source
    if not isinstance(source, ConversationsSource | JsonlSource | ParquetSource):
        raise DataError(
            f"run {config.name!r} trains on {rows.what}, and these files are text. Name JSON lines or tables of "
            f"{rows.what}: `weft inspect FILE --model MODEL` shows how weft reads them."
        )
    return kind_of(rows)(paths=source.paths, too_long=rows.too_long, date=rows.date)


def kind_of(rows: Rows) -> type[ConversationsSource]:
    """Return the source that makes such rows."""
    if rows.are_tasks is True:
        return TasksSource
    return PreferencesSource if rows.is_paired is True else ConversationsSource


def initial(config: Genesis, home: Home) -> Float32[Tensor, " num"] | None:
    """Return the vector the run starts from, or None when its blob, `config.initial`, has yet to be fetched.

    Raises:
        GenesisMismatch: the seed gives another vector than the run's maker got.
        ConfigError: the blob is of another size than the model.
        DataError: the blob is corrupt (removed, so that it can be fetched again).
    """
    if isinstance(config, RunConfig) and config.is_seeded:
        section, pipeline = whole(config.model), PipelineConfig()
        if isinstance(config, StagedConfig):
            section, pipeline = config.section or section, config.pipeline
        vector = seeded(config.model, config.seed, section, pipeline)
        if (found := wire.digest(raw(vector))) != config.initial:
            raise GenesisMismatch(
                f"seed {config.seed} gives the initial weights {short(found)} here, but {short(config.initial)} at the "
                f"run's maker. One of the two runs another version of weft; install the maker's."
            )
        return vector
    blob = home.blobs.open(config.initial)
    if blob is None:
        return drawn_adapter(config)
    if len(blob) != 4 * config.num_parameters:
        raise ConfigError(
            f"the run's initial weights have {len(blob):,} bytes, its model {4 * config.num_parameters:,}. "
            f"The run cannot be trained; tell its maker."
        )
    return torch.from_numpy(np.frombuffer(blob, dtype="<f4").astype(np.float32))


def drawn_adapter(config: Genesis) -> Float32[Tensor, " num"] | None:
    """Return the first weights of an adapter that begins as nothing: they follow from the seed. None: it is no such."""
    if not isinstance(config, RunConfig) or config.model.adapter is UNSET:
        return None
    if isinstance(config, StagedConfig) and config.stage is None:
        has_learnt = any(drawn_adapter(each) is None for each in by_section(config))
        return None if has_learnt else initial_vector(config.model, config.seed)
    vector = initial_vector(config.model, config.seed, config.section if isinstance(config, StagedConfig) else None)
    return vector if wire.digest(raw(vector)) == config.initial else None


# --- sealing ---


def resolve(run_file: RunFile, tokenizer: Tokenizer, base: Path, home: Path | None = None) -> ModelConfig:
    """Return the model that `run_file` describes, for that tokenizer.

    Args:
        base: the folder that relative paths start from.
        home: where members lie by name; None: none do, and of one that is no folder the shape has to be said.

    Raises:
        ConfigError: no such model, or one that contradicts itself.
        TokenizerMismatch: the tokenizer is not the folder's.
    """
    match run_file.model:
        case SizedModel(size=size, is_tied=is_tied):
            config = named(size, tokenizer.vocab_size, run_file.train.seq_len)
            if is_tied is None:
                is_tied = config.is_tied and run_file.stages == 1
            return msgspec.structs.replace(config, is_tied=is_tied)
        case ShapedModel() as shaped:
            return of_shape(shaped, tokenizer.vocab_size, run_file.train.seq_len)
        case FolderModel(path=path):
            config = _with_adapter(run_file, read_config(base / path), base)
            try:
                check_vocabulary(tokenizer, config.vocab_size)
            except TokenizerMismatch as error:
                has_own = isinstance(run_file.tokenizer, JsonConfig)
                hint = "" if has_own else f' Set tokenizer = {{type = "json", path = "{path}"}}.'
                raise TokenizerMismatch(f"model {path}: {error}{hint}") from None
            return config
        case SpaceModel(path=path) as shaped:
            space = read_space(base / path)
            if space.tokenizer != tokenizer.digest:
                raise TokenizerMismatch(
                    f"model {path}: the space has another tokenizer than this run. Set "
                    f'tokenizer = {{type = "json", path = "{path}"}}, or leave the tokenizer out where the space has '
                    "bytes."
                )
            if shaped.member is not None and (folder := backbone(shaped, base, home)) is not None:
                return _as_the_members(shaped, folder)
            return of_space(shaped, space.vocab_size, space.width, space.norm_eps, run_file.train.seq_len)
        case _:
            assert_never(run_file.model)


def _with_adapter(run_file: RunFile, model: ModelConfig, base: Path) -> ModelConfig:
    match run_file.adapter:
        case None:
            return model
        case FolderAdapter(path=path):
            found = read_adapter_config(base / path, model)
            if run_file.reward is None and run_file.train.loss is UNSET:
                return found
            # Answers are compared with all of the model, whatever it was trained with before.
            return replace(found, adapter=replace(found.adapter or AdapterConfig(), dropout=UNSET))
        case NewAdapter() as new:
            return replace(model, adapter=AdapterConfig(**alike(AdapterConfig, new)))
        case _:
            assert_never(run_file.adapter)


def _came_with(
    run_file: RunFile, tokenizer: Tokenizer, model: ModelConfig, base: Path, home: Home, emit: Emit
) -> bytes:
    folder = _begins_as(run_file, base, home)
    own = base / run_file.tokenizer.path if isinstance(run_file.tokenizer, JsonConfig) else None
    settings = tokenizer_folder(own, folder, tokenizer.to_json()) if own or folder else None
    found = read(folder, settings, model.vocab_size, lambda text: emit(Notice(text=text)))
    source = run_file.data.source
    if isinstance(source, ConversationsSource) and source.template is not None:
        found = with_template(found, base / source.template)
    return b"" if found.is_empty else wire.encode(found)


def of_shape(shaped: ShapedModel, vocab_size: int, seq_len: int) -> ModelConfig:
    """Return the model of a shape: vocabulary, context and the base of rotary wavelengths follow as for named sizes.

    Raises:
        ConfigError: it contradicts itself.
    """
    fields = msgspec.to_builtins(named("nano", vocab_size, seq_len))
    shape = alike(ShapedModel, shaped) | {"num_kv_heads": shaped.num_kv_heads or shaped.num_heads}
    try:
        return msgspec.convert(fields | shape, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {error}.") from None


def of_space(shaped: SpaceModel, vocab_size: int, width: int, norm_eps: float, seq_len: int) -> ModelConfig:
    """Return the model of a shape between the ends of a space.

    Raises:
        ConfigError: it contradicts itself.
    """
    said = {name: each for name, each in alike(ShapedModel, shaped).items() if each is not None}
    shape = ShapedModel(**said | {"width": width, "is_tied": False})
    return replace(of_shape(shape, vocab_size, seq_len), norm_eps=norm_eps, has_frozen_ends=True)


def backbone(shaped: SpaceModel, base: Path, home: Path | None) -> Path | None:
    """Return the folder of the member that layers begin as; None: it is not here, and its shape is said.

    Args:
        base, home: as of `resolve`.

    Raises:
        NoSuchRun: it is neither a folder nor a member of the home.
        ConfigError: nobody said where members lie, and its shape is not said.
    """
    assert shaped.member is not None
    if (base / shaped.member / "config.json").exists():
        return base / shaped.member
    if home is not None:
        return Registry(home).find(shaped.member, base)
    if shaped.unsaid:
        raise ConfigError(
            f"model.member: {base / shaped.member} is no folder, and here members are not found by name. Name the "
            f"member's folder, or say its shape: {', '.join(shaped.unsaid)}."
        )
    return None


def _as_the_members(shaped: SpaceModel, folder: Path) -> ModelConfig:
    """Return the model whose layers begin as those of a member.

    Raises:
        ConfigError: what is said of its shape is not the member's.
    """
    found = read_config(folder)
    for name in ("num_layers", "num_heads", "num_kv_heads", "ffn_width", "has_qk_norm", "has_qkv_bias"):
        said, has = getattr(shaped, name), getattr(found, name)
        if said is not None and said != has:
            raise ConfigError(
                f"model.{name} is {said}, and the member {shaped.member} has {has}. Layers begin as the member's are: "
                "leave it out, or leave member out."
            )
    return replace(found, has_frozen_ends=True)


def _pack(
    store: ShardStore, run_file: RunFile, tokenizer: Tokenizer, came_with: bytes, base: Path, emit: Emit
) -> DataIndex:
    train, reward = run_file.train, run_file.reward or UNSET
    index = _packed(run_file.data, _Packing(store, tokenizer, came_with, train.seq_len, reward, base, emit))
    num_peers = 1 if run_file.is_private else run_file.peers
    samples = several(train.batch_size, "sample")
    why = f": {num_peers} peers make training steps of {samples} each" if num_peers > 1 else ""
    _check_size(index, train.seq_len, num_peers * train.batch_size, why)
    return index


@dataclass(frozen=True)
class _Packing:
    """How text becomes shards.

    Args:
        reward: how answers to tasks are judged.
        base: the folder that relative paths start from.
    """

    store: ShardStore
    tokenizer: Tokenizer
    came_with: bytes
    seq_len: int
    reward: RewardConfig | UnsetType
    base: Path
    emit: Emit


def _packed(data: CorpusConfig, by: _Packing) -> DataIndex:
    if isinstance(data.source, ConversationsSource):
        return _packed_by_template(data, data.source, by)
    num_empty = 0

    def count() -> None:
        nonlocal num_empty
        num_empty += 1

    with Meter("tokenizing", "B", by.emit, SystemClock(), text_nbytes(data.source, by.base)) as meter:
        index = pack(by.store, data, by.tokenizer, by.base, on_packed=meter.add, on_empty=count)
    if num_empty:
        by.emit(Notice(text=f"left out, because without any text: {several(num_empty, 'document')}"))
    return index


def _packed_by_template(data: CorpusConfig, source: ConversationsSource, by: _Packing) -> DataIndex:
    try:
        template = template_of(decode(by.came_with))
    except TemplateFault as error:
        raise error if source.template is None else TemplateFault(f"{source.template}: {error}") from None
    are_tasks = isinstance(source, TasksSource)
    if template is None:
        raise DataError(
            f"the model has no chat template, so nobody knows how {'tasks' if are_tasks else 'conversations'} are "
            "written for it. Begin from a chat model's folder, or name a file of Jinja: data.source.template."
        )
    how = data.heldout_fraction, template, by.tokenizer, by.seq_len
    told: object
    with Meter(f"reading {'tasks' if are_tasks else 'conversations'}", "B", by.emit, SystemClock(), None) as meter:
        if isinstance(source, TasksSource):
            reward = by.reward or MatchReward()
            judged = Judged(
                reward.max_tokens,
                needs_answers=isinstance(reward, MatchReward),
                runs_code=isinstance(reward, ExtensionReward) or reward.runs_code,
            )
            index, told = pack_tasks(by.store, source, *how, judged, by.base, on_packed=meter.add)
        else:
            index, told = pack_conversations(by.store, source, *how, by.base, on_packed=meter.add)
    if words := str(told):
        by.emit(Notice(text=words))
    return index


def _check_size(index: DataIndex, seq_len: int, num_samples: int, why: str = "") -> None:
    """Accept data that fill one inner step of everybody who trains on them without a repetition."""
    check_windows(index, "train", seq_len, num_samples, why)
    check_windows(index, "heldout", seq_len, at_least=1)


def _without_shards(index: DataIndex) -> DataIndex:
    """Return what a private run says of data: which tokens there are, and nothing of anybody's files."""
    rows = index.rows if index.rows is UNSET else replace(index.rows, train_trained=0, heldout_trained=0)
    return replace(index, train=(), heldout=(), train_text_nbytes=0, heldout_text_nbytes=0, rows=rows)


@dataclass(frozen=True)
class _Learnt:
    """What a run begins with of folders."""

    model: Float32[Tensor, " all"]  # between the ends of a space: the layers
    adapter: Float32[Tensor, " num"] | None  # None: it begins as nothing, or there is none


def _begins_as(run_file: RunFile, base: Path, home: Home) -> Path | None:
    """Return the folder of the model that a run begins with; None: it is made from the seed."""
    match run_file.model:
        case FolderModel(path=path):
            return base / path
        case SpaceModel(member=str()) as shaped:
            return backbone(shaped, base, home.root)
        case _:
            return None


def _learnt(run_file: RunFile, model: ModelConfig, base: Path, home: Home, emit: Emit) -> _Learnt | None:
    if (begins_as := _begins_as(run_file, base, home)) is None:
        return None
    if isinstance(run_file.model, SpaceModel):
        return _Learnt(_layers_of(run_file.model, model, begins_as, base), None)
    model, vector = read_folder(begins_as)
    if not isinstance(run_file.adapter, FolderAdapter):
        return _Learnt(vector, None)
    folder = base / run_file.adapter.path
    adapter = read_adapter(folder, model)[1]
    if text := check_base(folder, begins_as, digest_of_base(vector)):
        emit(Notice(text=text))
    return _Learnt(vector, adapter)


def _layers_of(shaped: SpaceModel, config: ModelConfig, folder: Path, base: Path) -> Float32[Tensor, " num"]:
    """Return the layers that a run begins with, of a member's folder.

    Raises:
        ConfigError: it is of another space, or its weights are not those that it tells of.
    """
    vector, space = read_folder(folder)[1], read_space(base / shaped.path)
    if (folder / MEMBER).exists():
        require_weights(read_member(folder), numbers_digest(vector), folder)
    if config.norm_eps != space.norm_eps or not _has_ends(config, vector, space):
        raise ConfigError(
            f"model.member: {shaped.member} is of another space than {shaped.path}: its embedding, norm or head is "
            "another. Name a member of this space, or the space of that member."
        )
    return layers_within(config, vector)


def _has_ends(config: ModelConfig, vector: Float32[Tensor, " all"], space: Space) -> bool:
    fits = (config.vocab_size, config.width) == (space.vocab_size, space.width)
    return fits and torch.equal(ends_within(config, vector), space.ends(config))


def _codec_for(vector: Float32[Tensor, " all"]) -> Codec:
    """Return what encodes a model that an adapter goes beside: where nothing is lost, in two bytes a number."""
    return Bf16() if torch.equal(Bf16().decode(Bf16().encode(vector), vector.numel()), vector) else Fp32()


def digest_of_base(vector: Float32[Tensor, " all"]) -> Digest:
    """Return what names the whole vector that an adapter goes beside: the digest of its blob."""
    return wire.digest(_codec_for(vector).encode(vector))


def ends_of(run_file: RunFile, model: ModelConfig, base: Path) -> Float32[Tensor, " ends"]:
    """Return the vector of what is frozen of a model between the ends of a space."""
    assert isinstance(run_file.model, SpaceModel)
    return read_space(base / run_file.model.path).ends(model)


def _put_bases(
    model: ModelConfig, vector: Float32[Tensor, " all"], stages: int, home: Home
) -> tuple[tuple[Digest, ...], int]:
    """Return the digest of what is frozen of each section, now in `home`, and the bytes of all of that."""
    codec = _codec_for(vector)
    parts = (cut(model, vector, section, base_layout) for section in sections(model, stages))
    return tuple(home.blobs.put(codec.encode(part)) for part in parts), codec.nbytes(vector.numel())


def _put_initials(run_file: RunFile, model: ModelConfig, learnt: _Learnt | None, home: Home) -> Iterator[Digest]:
    """Return the digest of each piece's first weights, which are in `home` where they do not follow from the seed."""
    cuts = pieces(model, run_file.stages)
    if learnt is not None and model.adapter is not UNSET:
        vector = initial_vector(model, run_file.seed) if learnt.adapter is None else learnt.adapter
        yield from (home.blobs.put(raw(cut(model, vector, section))) for section in cuts)
    elif learnt is not None:
        yield from (home.blobs.put(raw(cut(model, learnt.model, section))) for section in cuts)
    else:
        yield from (wire.digest(raw(seeded(model, run_file.seed, each, run_file.pipeline))) for each in cuts)


# --- reading what others sealed ---


def _check_train(config: RunConfig, max_parameters: int) -> None:
    train, vocab_size = config.train, config.model.vocab_size
    if train.tokens > MAX_TOKENS:
        raise ConfigError(f"train.tokens is {train.tokens}. Allowed: at most {MAX_TOKENS}.")
    if config.tokens_per_step > MAX_TOKENS_PER_STEP:
        raise TooLarge(
            f"one training step takes {several(train.batch_size, 'sample')} of {train.seq_len} tokens, "
            f"{config.tokens_per_step:,} in all; at most {MAX_TOKENS_PER_STEP:,} are accepted. Lower train.batch_size "
            "or train.seq_len."
        )
    if train.seq_len * vocab_size > max_parameters:
        raise TooLarge(
            f"one sample of {train.seq_len} tokens has {train.seq_len * vocab_size:,} logits; this machine takes at "
            f"most {max_parameters:,} numbers of one kind. Lower train.seq_len, or raise the machine's limit."
        )


def _floats(tree: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _floats(inner, f"{place}.{name}" if place else name)
    elif isinstance(tree, list | tuple):
        for inner in tree:
            yield from _floats(inner, place)
    elif isinstance(tree, float):
        yield place, tree
