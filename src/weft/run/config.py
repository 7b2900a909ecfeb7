"""What a run is: `RunFile`, `RunConfig`. What a machine gives to it, `PeerConfig`, is in `machine`.

    run.toml --load--> RunFile --seal (needs the corpus)--> RunConfig --digest--> RunId, the genesis

A run file is its maker's: it may name paths. A `RunConfig` is what all peers share: it names data, tokenizer and
initial weights by digest, and no path, URL or command, so a stranger's config can make a peer read or contact nothing.
A `PeerConfig` never leaves its machine and changes no numerics that others would see.

There are two kinds of run. A `RunConfig` is of a transformer, on a corpus that members lease. A `LoopConfig` is of
tensors that members train in loops of their own (`weft.Sync`), which a `SyncConfig` describes. `Genesis` is either.

A run with stages is a RunConfig, too (`staged`).
"""

from dataclasses import dataclass
from math import inf, prod
from typing import Annotated, Literal, get_args

import msgspec

from weft.config import UNBOUNDED, Config, alike
from weft.data.corpus import CorpusConfig, PreferencesSource, TasksSource
from weft.data.packing import BytesConfig, TokenizerConfig
from weft.data.store import DataIndex
from weft.errors import ConfigError
from weft.ids import RunId
from weft.model.config import AdapterConfig, ModelConfig, Size, has_base, num_base_parameters, num_parameters
from weft.model.flat import layout
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import HexDigest, HexPeer, HexRun
from weft.pipeline.codec.activations import SubspaceConfig
from weft.pipeline.config import PipelineConfig
from weft.pipeline.messages import MAX_STAGES
from weft.run import trust as trusts
from weft.run.outline import AdmissionConfig, TicketAdmission
from weft.run.reward import RewardConfig
from weft.run.reward import check as check_reward
from weft.run.trust import MembersTrust, TrustConfig
from weft.sync.method import choices
from weft.sync.method.presets import DiLoCoConfig, MethodConfig, spell_out
from weft.sync.method.schedule import ConstantConfig, ScheduleConfig
from weft.sync.records.acts import BatchSize, TotalTokens
from weft.sync.records.charter import MAX_STEWARDS, Electors, Settings
from weft.sync.records.messages import MAX_GROUP
from weft.wire import digest_of

MAX_PEERS = 1024  # as many as have been played together (benchmarks/reports/thousand.md)
FORMAT = 1  # of a RunConfig; raised when equal fields would mean another computation

_Stewards = Annotated[
    tuple[HexPeer, ...],
    msgspec.Meta(max_length=MAX_STEWARDS, description="public keys whose holders may remove, ban and amend"),
]
_Predecessor = Annotated[HexRun, msgspec.Meta(description="the run that this one goes on with, 64 hex digits")]
_Made = Annotated[
    HexRun, msgspec.Meta(description="the run that this file makes; weft begins nothing if it would make another")
]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w .-]+\Z")]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Prompt = Annotated[str, msgspec.Meta(max_length=1000)]


class DpoConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="dpo"):
    """Direct preference optimization, away from the model that the run began with (arXiv:2305.18290)."""

    beta: Annotated[float, msgspec.Meta(gt=0, le=100, description="what a divergence from that model weighs")] = 0.1


class OrpoConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="orpo"):
    """Odds ratio preference optimization: the chosen answer's loss, and the odds of both (arXiv:2403.07691)."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=100, description="of the odds' part: lambda")] = 0.1


PreferenceConfig = DpoConfig | OrpoConfig


class TrainConfig(Config, frozen=True, kw_only=True):
    """The inner loop, equal on all peers."""

    seq_len: Annotated[int, msgspec.Meta(ge=8, le=1 << 20, description="tokens per sample")] = 256
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16, description="samples per training step and peer")] = 8
    tokens: Annotated[int, msgspec.Meta(ge=1, description="committed tokens at which the run is complete")]
    schedule: ScheduleConfig
    optimizer: choices.OptimizerConfig = choices.AdamWConfig()
    clip: Annotated[
        float, msgspec.Meta(gt=0, description="largest gradient norm; inf does not clip", extra=UNBOUNDED)
    ] = 1.0
    evaluate_every: Annotated[int, msgspec.Meta(ge=0, description="rounds between evaluations; 0: at the end only")] = 5
    evaluate_windows: Annotated[int, msgspec.Meta(ge=1, description="held-out samples per evaluation")] = 128
    sample_every: Annotated[int, msgspec.Meta(ge=0, description="rounds between samples; 0: at the end only")] = 0
    sample_prompt: _Prompt = ""
    loss: PreferenceConfig | msgspec.UnsetType = msgspec.UNSET
    """Of pairs of answers; unset: cross entropy."""


class SizedModel(Config, frozen=True, kw_only=True, tag_field="type", tag="size"):
    """A named size; vocabulary and context follow from tokenizer and seq_len."""

    size: Size = "nano"
    is_tied: bool | None = None  # whether embedding and head are one matrix; None: as the size has it, apart in stages


class FolderModel(Config, frozen=True, kw_only=True, tag_field="type", tag="folder"):
    """Shape and initial weights of a Hugging Face folder, relative to the run file."""

    path: str


class NewAdapter(AdapterConfig, frozen=True, kw_only=True, tag_field="type", tag="lora"):
    """Small matrices beside those of the model, which begin as nothing and alone are trained."""


class FolderAdapter(Config, frozen=True, kw_only=True, tag_field="type", tag="folder"):
    """An adapter that PEFT or weft made, to be trained further: its folder, relative to the run file."""

    path: str


class ShapedModel(Config, frozen=True, kw_only=True, tag_field="type", tag="shape"):
    """Every number spelled out; `vocab_size` and `max_seq_len` follow from tokenizer and seq_len."""

    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    width: int
    ffn_width: int
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    is_tied: bool = True


class SpaceModel(Config, frozen=True, kw_only=True, tag_field="type", tag="space"):
    """Layers between the ends of a space, which stay as they are: `weft compose space` makes one.

    They are made from the seed, or begin as those of a member are, which says their shape, too.
    """

    path: str  # of the space's folder, relative to the run file
    member: str | None = None  # of this space: its name in the maker's home, or its folder, relative to the run file
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    ffn_width: int | None = None
    has_qk_norm: bool | None = None
    has_qkv_bias: bool | None = None

    def __post_init__(self) -> None:
        if self.member is None and (lacking := self.unsaid):
            raise ConfigError(
                f"model: {', '.join(lacking)}: required where layers are made from the seed. Give them, or member, "
                "whose layers they begin as."
            )

    @property
    def unsaid(self) -> list[str]:
        """Return what is not said of the shape and does not follow from the rest."""
        return [name for name in ("num_layers", "num_heads", "ffn_width") if getattr(self, name) is None]


class RunFile(Config, frozen=True, kw_only=True):
    """One TOML file: a run as its maker writes it."""

    name: _Name
    seed: _Seed = 0
    peers: Annotated[
        int, msgspec.Meta(ge=1, le=MAX_PEERS, description="about how many peers are expected; defaults depend on it")
    ] = 4
    model: SizedModel | FolderModel | ShapedModel | SpaceModel = SizedModel()
    adapter: NewAdapter | FolderAdapter | None = None
    """What is trained of it; None: all."""
    data: CorpusConfig = CorpusConfig()
    is_private: bool = False  # every peer trains on its own files, which nobody can request
    reward: RewardConfig | None = None
    """How answers to tasks are judged; None: there are none."""
    tokenizer: TokenizerConfig = BytesConfig()
    train: TrainConfig
    method: MethodConfig = DiLoCoConfig()
    stages: Annotated[
        int,
        msgspec.Meta(
            ge=1, le=MAX_STAGES, description="sections that the model is cut into; 1: each peer holds the whole model"
        ),
    ] = 1
    pipeline: PipelineConfig = PipelineConfig()
    admission: AdmissionConfig = TicketAdmission()
    orphan_after_s: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Seconds without a majority after which a minority opens a branch of its own. None: 60, between two peers 15."""
    is_strict: bool = False
    """One history only: a minority never goes on alone."""
    has_even_leases: bool = False
    """All train on the same amount of data per round, and wait for the slowest. Else slower members are leased less."""
    electors: Electors = MAX_MEMBERS
    stewards: _Stewards = ()
    predecessor: _Predecessor | None = None
    run: _Made | None = None
    trust: TrustConfig = MembersTrust()

    def __post_init__(self) -> None:
        schedule, tokens = self.train.schedule, self.train.tokens
        if not isinstance(schedule, ConstantConfig) and not schedule.floor and tokens > schedule.total_tokens:
            raise ValueError(
                f"train.tokens is {tokens:,}, and from {schedule.total_tokens:,} on, train.schedule.total_tokens, the "
                "learning rate is 0: the rest would teach nothing. Raise that as well, or set train.schedule.floor."
            )
        if self.peers > (room := self.electors * MAX_GROUP):
            raise ValueError(
                f"peers is {self.peers}, but {self.electors} with a vote have room for {room}: each brings the work of "
                f"at most {MAX_GROUP}, itself included. Raise electors, or expect fewer peers."
            )
        method = spell_out(self.method, self.peers)
        method.check_peers(self.peers)
        choices.check(method, self.train.optimizer)
        if self.stages > 1:
            trusts.check_staged(self.trust, method, self.pipeline)
        else:
            trusts.check(self.trust, method)
        trusts.check_of_model(
            self.trust,
            is_private=self.is_private,
            has_reward=self.reward is not None,
            is_crowded=self.peers > self.electors,
            is_lonely=self.peers < trusts.FEWEST and self.stages == 1,
        )
        trusts.check_exact(
            self.trust,
            optimizer=self.train.optimizer,
            has_base=self.adapter is not None or isinstance(self.model, SpaceModel),
            has_loss=self.train.loss is not msgspec.UNSET,
        )
        if method.graph is not None:
            choices.check_graph(method.graph, self.peers, self.electors)
        if self.adapter is not None and not isinstance(self.model, FolderModel):
            raise ConfigError(
                "adapter: it goes beside a model that has learnt and lies in a folder of its own. Name that: "
                'model = {type = "folder", path = "MODEL"}, or leave it out.'
            )
        is_paired = isinstance(self.data.source, PreferencesSource)
        if is_paired and self.train.loss is msgspec.UNSET:
            raise ConfigError(
                "train.loss: pairs of answers are learnt from by a loss of their own. Add [train.loss] with "
                'type = "dpo" or "orpo".'
            )
        if not is_paired and self.train.loss is not msgspec.UNSET:
            raise ConfigError(
                'train.loss: it is of pairs of answers. Read some: [data.source] type = "preferences", or leave it out.'
            )
        if is_paired and isinstance(self.adapter, NewAdapter) and self.adapter.dropout:
            raise ConfigError("adapter.dropout: pairs of answers are compared with all of the model. Leave it out.")
        is_of_tasks = isinstance(self.data.source, TasksSource)
        if is_of_tasks != (self.reward is not None):
            raise ConfigError(
                'reward: tasks are learnt from by rewards, and by nothing else. Add [reward] with type = "match".'
                if is_of_tasks
                else 'reward: it is of answers to tasks. Read some: [data.source] type = "tasks", or leave it out.'
            )
        if self.reward is not None:
            check_reward(self.reward, self.train.seq_len)
            if not isinstance(self.model, FolderModel):
                raise ConfigError(
                    "reward: it improves a model that answers already and lies in a folder of its own. Name that: "
                    'model = {type = "folder", path = "MODEL"}.'
                )
            if isinstance(self.adapter, NewAdapter) and self.adapter.dropout:
                raise ConfigError(
                    "adapter.dropout: answers are compared as the model draws them, with all of it. Leave it out."
                )
            if self.stages > 1:
                raise ConfigError("reward: stages draw no answers to learn from. Leave stages out.")
            if method.graph is not None or method.sends_gradient or method.among != "all":
                raise ConfigError(
                    "reward: answers are drawn from the parameters that all members have after a round, and learnt "
                    "from in steps of their own: no neighbours, no gradients, no sample of members. Choose diloco, "
                    "pulse or fedavg."
                )
        if is_paired and self.stages > 1:
            raise ConfigError("train.loss: stages know no pairs of answers. Leave stages out.")
        if self.stages > 1:
            choices.check_staged(method)
            if self.stewards or self.is_private:
                raise ConfigError("stages: such a run has no stewards and no private data. Leave them out.")
            if self.adapter is not None:
                has_dropout = isinstance(self.adapter, NewAdapter) and self.adapter.dropout
                check_adapter_in_stages(self.pipeline, has_dropout=bool(has_dropout))
            if isinstance(self.model, SpaceModel):
                check_space_in_stages(self.pipeline)
        elif self.pipeline != PipelineConfig():
            raise ConfigError("pipeline: it has no effect in a run without stages. Leave it out, or set stages to 2.")


def check_adapter_in_stages(pipeline: PipelineConfig, *, has_dropout: bool) -> None:
    """
    Raises:
        ConfigError: stages compute no such adapter.
    """
    if has_dropout:
        raise ConfigError(
            "adapter.dropout: stages compute with all of what an adapter reads. Leave it out; of a folder's adapter, "
            "set lora_dropout to 0 in adapter_config.json."
        )
    if pipeline.split is not None:
        raise ConfigError("pipeline.split: members of a team hold whole matrices, and no adapters. Leave it out.")
    if isinstance(pipeline.activations, SubspaceConfig):
        raise ConfigError(
            "pipeline.activations: subspace: what an adapter goes beside lies in no subspace. Choose another type."
        )


def check_space_in_stages(pipeline: PipelineConfig) -> None:
    """
    Raises:
        ConfigError: stages compute no layers between the ends of a space so.
    """
    if pipeline.split is not None:
        raise ConfigError("pipeline.split: members of a team train whole models, and no space's layers. Leave it out.")
    if isinstance(pipeline.activations, SubspaceConfig):
        raise ConfigError(
            "pipeline.activations: subspace: the ends of the model's space lie in no subspace. Choose another type."
        )


@dataclass(frozen=True)
class VectorShape:
    """What the flat vector of a run's parameters holds."""

    num: int  # numbers
    num_decayed: int  # the first so many take weight decay
    tensors: tuple[tuple[int, ...], ...]  # their shapes, in order


class _Shared(Config, frozen=True, kw_only=True):
    """What any run has. Its digest is the run's name."""

    format: Annotated[int, msgspec.Meta(ge=1)] = FORMAT
    name: _Name
    seed: _Seed
    initial: HexDigest  # of the flat fp32 vector the run starts from
    method: choices.Choices
    admission: AdmissionConfig
    orphan_after_s: Annotated[float, msgspec.Meta(ge=1)] | None
    is_strict: bool
    has_even_leases: bool = False
    electors: Electors = MAX_MEMBERS
    stewards: _Stewards = ()
    predecessor: HexRun | None = None
    trust: trusts.Recorded | msgspec.UnsetType = msgspec.UNSET  # unset: members believe each other

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(
                f"this run has format {self.format}, this weft reads {FORMAT}. "
                "Install the version that made the run, or ask its maker for a new one."
            )
        if self.stewards != tuple(sorted(set(self.stewards))):
            raise ConfigError("stewards: each key is named once, in ascending order.")
        self._check_trust()

    def _check_trust(self) -> None:
        trusts.check(self.trust, self.method)

    @property
    def run(self) -> RunId:
        return RunId(digest_of(self))


class RunConfig(_Shared, frozen=True, kw_only=True):
    """What all peers of a run share, which trains a transformer on data that are leased."""

    model: ModelConfig
    is_seeded: bool  # the initial vector follows from the seed; else it is fetched
    data: DataIndex
    is_private: bool
    train: TrainConfig
    came_with: HexDigest | msgspec.UnsetType = msgspec.UNSET  # of what an export hands on; unset: nothing came
    reward: RewardConfig | msgspec.UnsetType = msgspec.UNSET  # of the answers that are drawn; unset: none are
    base: HexDigest | msgspec.UnsetType = msgspec.UNSET  # of the flat vector of what is frozen (`flat.base_layout`)
    base_nbytes: int | msgspec.UnsetType = (
        msgspec.UNSET
    )  # of that: two a number where its weights came in bf16, else four

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.base is msgspec.UNSET) == has_base(self.model):
            raise ConfigError("base: a run has one where a part of its model is frozen, and only there.")
        num = num_base_parameters(self.model)
        if self.base_nbytes not in ((2 * num, 4 * num) if num else (msgspec.UNSET,)):
            raise ConfigError("base_nbytes: it is two or four bytes for each number of the run's base.")
        if self.data.is_paired != (self.train.loss is not msgspec.UNSET):
            raise ConfigError("train.loss: a run has one where its data are pairs of answers, and only there.")
        if self.data.has_tasks != (self.reward is not msgspec.UNSET):
            raise ConfigError("reward: a run has one where its data are tasks, and only there.")
        trusts.check_of_model(self.trust, is_private=self.is_private, has_reward=self.reward is not msgspec.UNSET)
        trusts.check_exact(
            self.trust,
            optimizer=self.train.optimizer,
            has_base=has_base(self.model),
            has_loss=self.train.loss is not msgspec.UNSET,
        )
        if self.data.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.data.vocab_size} tokens, the model {self.model.vocab_size}. "
                "Choose a tokenizer made for the model, or another model."
            )
        if self.train.seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"train.seq_len is {self.train.seq_len}, the model's longest context {self.model.max_seq_len}."
            )
        choices.check(self.method, self.train.optimizer)

    @property
    def quota(self) -> int:
        """Samples that one member trains on in one round, at most."""
        return self.method.every * self.train.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.seq_len

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.model)

    @property
    def num_base(self) -> int:
        """Return how many numbers of what a member holds are frozen."""
        return num_base_parameters(self.model)

    @property
    def held_base_nbytes(self) -> int:
        """Return the bytes of the blob of those."""
        whole = num_base_parameters(self.model)
        return self.base_nbytes // whole * self.num_base if self.base_nbytes else 0

    @property
    def optimizer(self) -> choices.OptimizerConfig:
        return self.train.optimizer

    @property
    def clip(self) -> float:
        return self.train.clip

    @property
    def vector(self) -> VectorShape:
        """Return what the vector of the parameters holds."""
        spans = layout(self.model)
        return VectorShape(spans.num_parameters, spans.num_decayed, tuple(span.shape for span in spans))

    @property
    def settings(self) -> Settings:
        """Return what amendments may change."""
        return Settings(**alike(Settings, self.train), method=self.method)

    @property
    def longest(self) -> int:
        """Return the tokens that a sample may have at most, whatever is amended."""
        if self.is_private or self.data.has_rows:
            return self.train.seq_len  # what others' own files hold is not known, and rows have the length they have
        data = self.data
        return min(self.model.max_seq_len, data.num_tokens("train") - 1, data.num_tokens("heldout") - 1)

    def with_settings(self, settings: Settings) -> "RunConfig":
        """Return the same run with other settings."""
        train = msgspec.structs.replace(self.train, **alike(TrainConfig, settings))
        return msgspec.structs.replace(self, train=train, method=settings.method)


# --- runs of loops of their members' own ---

MAX_TENSORS = 1 << 14  # of one run: their names and shapes fit a record
MAX_DIMS = 16
MAX_TENSOR_NAME = 200
_TensorName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TENSOR_NAME)]
_Dims = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...], msgspec.Meta(max_length=MAX_DIMS)]


class TensorConfig(Config, frozen=True, kw_only=True, array_like=True):
    """A tensor that members train. It is exchanged in fp32, whatever it is trained in."""

    name: _TensorName
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    shape: _Dims

    @property
    def num(self) -> int:
        return prod(self.shape)


class FrozenConfig(Config, frozen=True, kw_only=True, array_like=True):
    """A tensor that nobody trains, and nobody sends: all must have the same values."""

    name: _TensorName
    dtype: Annotated[str, msgspec.Meta(max_length=32, pattern=r"^[a-z0-9_]+\Z")]
    shape: _Dims
    digest: HexDigest  # of its values, in row-major order


class SyncConfig(Config, frozen=True, kw_only=True):
    """A run whose members train in loops of their own, as its maker writes it: `weft.SyncConfig`, or a TOML file."""

    name: _Name = "loop"
    seed: _Seed = 0
    peers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PEERS, description="about how many are expected")] = 2
    samples: Annotated[TotalTokens, msgspec.Meta(description="committed samples at which the run is complete")]
    batch_size: Annotated[BatchSize, msgspec.Meta(description="samples of one training step and peer, at most")] = 1
    method: MethodConfig = DiLoCoConfig()
    admission: AdmissionConfig = TicketAdmission()
    orphan_after_s: Annotated[float, msgspec.Meta(ge=1)] | None = None
    is_strict: bool = False
    has_even_leases: bool = False
    electors: Electors = MAX_MEMBERS
    stewards: _Stewards = ()
    predecessor: _Predecessor | None = None
    trust: TrustConfig = MembersTrust()

    def __post_init__(self) -> None:
        # A program wrote it: files are checked as they are read.
        if not isinstance(self.method, get_args(MethodConfig)):
            raise ConfigError(
                f"method is {self.method!r:.80}, of type {type(self.method).__name__}. Allowed: a row of "
                "weft.sync.method.presets, such as DiLoCoConfig(every=30) or FedAvgConfig(), or a "
                "weft.sync.method.choices.Choices."
            )
        if not isinstance(self.peers, int) or not 1 <= self.peers <= MAX_PEERS:
            raise ConfigError(f"peers is {self.peers!r:.80}. Allowed: a whole number from 1 to {MAX_PEERS}.")
        method = spell_out(self.method, self.peers)
        method.check_peers(self.peers)
        check_loop(method)
        trusts.check(self.trust, method)
        trusts.check_loop(self.trust)


class LoopConfig(_Shared, frozen=True, kw_only=True, tag_field="type", tag="loop"):
    """What all peers of a run share whose members train in loops of their own. A sample counts as one token."""

    tensors: Annotated[tuple[TensorConfig, ...], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    frozen: Annotated[tuple[FrozenConfig, ...], msgspec.Meta(max_length=MAX_TENSORS)] = ()
    samples: TotalTokens
    batch_size: BatchSize

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [tensor.name for tensor in self.tensors] + [tensor.name for tensor in self.frozen]
        if len(set(names)) != len(names):
            raise ConfigError("tensors: each name is used once.")
        check_loop(self.method)
        trusts.check_loop(self.trust)

    @property
    def is_seeded(self) -> bool:
        return False

    @property
    def data(self) -> None:
        return None

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num for tensor in self.tensors)

    @property
    def optimizer(self) -> choices.OptimizerConfig:
        return choices.InnerSgdConfig()  # nobody's: each loop has its own

    @property
    def clip(self) -> float:
        return inf

    @property
    def vector(self) -> VectorShape:
        """Return what the vector of the parameters holds."""
        return VectorShape(self.num_parameters, 0, tuple(tensor.shape for tensor in self.tensors))

    @property
    def settings(self) -> Settings:
        """Return what amendments may change. The schedule is nobody's: each loop has its own."""
        return Settings(
            tokens=self.samples, seq_len=1, batch_size=self.batch_size, schedule=ConstantConfig(), method=self.method
        )

    @property
    def longest(self) -> int:
        return 1

    def with_settings(self, settings: Settings) -> "LoopConfig":
        """Return the same run with other settings."""
        return msgspec.structs.replace(
            self, samples=settings.tokens, batch_size=settings.batch_size, method=settings.method
        )


Genesis = RunConfig | LoopConfig


def check_loop(method: choices.Choices) -> None:
    """Refuse methods that need more of a loop than the parameters it arrives at.

    Raises:
        ConfigError: says which, and what to choose instead.
    """
    if method.sends_gradient:
        raise ConfigError(
            "method: it sends gradients to one optimizer that all members share, and your own loop has its own. "
            "Choose one that sends deltas, such as fedavg or diloco: with every = 1, it also synchronises at each "
            "step."
        )
    if method.proximal:
        raise ConfigError(
            "method: proximal: it changes the gradients of training steps, and your own loop makes those; set "
            "proximal = 0."
        )
