"""What a run is: `RunFile`, `RunConfig`. What a machine gives to it, `PeerConfig`, is in `machine`.

    run.toml --load--> RunFile --seal (needs the corpus)--> RunConfig --digest--> RunId, the genesis

A run file is its maker's: it may name paths. A `RunConfig` is what all peers share: it names data, tokenizer and
initial weights by digest, and no path, URL or command, so a stranger's config can make a peer read or contact nothing.
A `PeerConfig` never leaves its machine and changes no numerics that others would see.
"""

from typing import Annotated

import msgspec

from weft.config import UNBOUNDED, Config
from weft.data import CorpusConfig, DataIndex, TokenizerConfig
from weft.data.packing import BytesConfig
from weft.errors import ConfigError
from weft.ids import RunId
from weft.model.config import ModelConfig, Size
from weft.net.membership import MAX_MEMBERS
from weft.net.messages import HexDigest, HexPeer, HexRun
from weft.peer.outline import AdmissionConfig, TicketAdmission
from weft.sync.charter import MAX_STEWARDS, Electors
from weft.sync.choices import AdamWConfig, Choices, OptimizerConfig, check
from weft.sync.messages import MAX_GROUP
from weft.sync.rows import DiLoCoConfig, MethodConfig, spell_out
from weft.sync.schedule import ScheduleConfig
from weft.wire import digest_of

MAX_PEERS = 1024  # as many as have been played together (benchmarks/reports/thousand.md)
FORMAT = 1  # of a RunConfig; raised when equal fields would mean another computation

_Stewards = Annotated[
    tuple[HexPeer, ...],
    msgspec.Meta(max_length=MAX_STEWARDS, description="public keys whose holders may remove, ban and amend"),
]
_Predecessor = Annotated[HexRun, msgspec.Meta(description="the run that this one goes on with, 64 hex digits")]
_Prompt = Annotated[str, msgspec.Meta(max_length=1000)]


class TrainConfig(Config, frozen=True, kw_only=True):
    """The inner loop, equal on all peers."""

    seq_len: Annotated[int, msgspec.Meta(ge=8, le=1 << 20, description="tokens per sample")] = 256
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16, description="samples per inner step and peer")] = 8
    tokens: Annotated[int, msgspec.Meta(ge=1, description="committed tokens at which the run is complete")]
    schedule: ScheduleConfig
    optimizer: OptimizerConfig = AdamWConfig()
    clip: Annotated[
        float, msgspec.Meta(gt=0, description="largest gradient norm; inf does not clip", extra=UNBOUNDED)
    ] = 1.0
    evaluate_every: Annotated[int, msgspec.Meta(ge=0, description="rounds between evaluations; 0: at the end only")] = 5
    evaluate_windows: Annotated[int, msgspec.Meta(ge=1, description="held-out samples per evaluation")] = 128
    sample_every: Annotated[int, msgspec.Meta(ge=0, description="rounds between samples; 0: at the end only")] = 0
    sample_prompt: _Prompt = ""


class SizedModel(Config, frozen=True, kw_only=True, tag_field="type", tag="size"):
    """A named size; vocabulary and context follow from tokenizer and seq_len."""

    size: Size = "nano"


class FolderModel(Config, frozen=True, kw_only=True, tag_field="type", tag="folder"):
    """Shape and initial weights of a Hugging Face folder, relative to the run file."""

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


class RunFile(Config, frozen=True, kw_only=True):
    """One TOML file: a run as its maker writes it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w .-]+\Z")]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    peers: Annotated[
        int, msgspec.Meta(ge=1, le=MAX_PEERS, description="about how many are expected: chooses defaults")
    ] = 4
    model: SizedModel | FolderModel | ShapedModel = SizedModel()
    data: CorpusConfig = CorpusConfig()
    is_private: bool = False  # every peer trains on its own files, which nobody can request
    tokenizer: TokenizerConfig = BytesConfig()
    train: TrainConfig
    method: MethodConfig = DiLoCoConfig()
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

    def __post_init__(self) -> None:
        if self.peers > (room := self.electors * MAX_GROUP):
            raise ValueError(
                f"peers is {self.peers}, and {self.electors} electors find room for {room}: {MAX_GROUP} contribute "
                "through each at most, itself included. Raise electors, or expect fewer peers."
            )
        check(spell_out(self.method, self.peers), self.train.optimizer)


class RunConfig(Config, frozen=True, kw_only=True):
    """What all peers of a run share. Its digest is the run's name."""

    format: Annotated[int, msgspec.Meta(ge=1)] = FORMAT
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w .-]+\Z")]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    model: ModelConfig
    initial: HexDigest  # of the flat fp32 vector the run starts from
    is_seeded: bool  # the initial vector follows from the seed; else it is fetched
    data: DataIndex
    is_private: bool
    train: TrainConfig
    method: Choices
    admission: AdmissionConfig
    orphan_after_s: Annotated[float, msgspec.Meta(ge=1)] | None
    is_strict: bool
    has_even_leases: bool = False
    electors: Electors = MAX_MEMBERS
    stewards: _Stewards = ()
    predecessor: HexRun | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(
                f"this run has format {self.format}, this weft reads {FORMAT}. "
                "Install the version that made the run, or ask its maker for a new one."
            )
        if self.stewards != tuple(sorted(set(self.stewards))):
            raise ConfigError("stewards: each key is named once, in ascending order.")
        if self.data.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.data.vocab_size} tokens, the model {self.model.vocab_size}. "
                "Choose a tokenizer made for the model, or another model."
            )
        if self.train.seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"train.seq_len is {self.train.seq_len}, the model's longest context {self.model.max_seq_len}."
            )
        check(self.method, self.train.optimizer)

    @property
    def run(self) -> RunId:
        return RunId(digest_of(self))

    @property
    def quota(self) -> int:
        """Samples that one member trains on in one round, at most."""
        return self.method.every * self.train.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.train.seq_len
