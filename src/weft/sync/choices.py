"""What a run file, a genesis and a charter say of a method: the rows, the choices behind them, the outer step.

They are settings alone: `method` and `outer` compute by them. It needs no torch: an anchor reads charters.
"""

from typing import Annotated, Literal, assert_never

import msgspec

from weft.codec import LOSSY, Bf16Config, CodecConfig, E3m0Config, Int8Config, RandomKConfig, TopKConfig
from weft.codec.config import MAX_BLOCK
from weft.config import Config
from weft.errors import ConfigError

_Rate = Annotated[float, msgspec.Meta(gt=0, le=10, description="outer learning rate, held constant")]
_Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class SgdConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="sgd"):
    lr: _Rate = 1.0


class NesterovConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="nesterov"):
    lr: _Rate = 0.6
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9


class AdamWConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="adamw"):
    """The learning rate comes from the run's schedule, step by step."""

    beta1: _Beta = 0.9
    beta2: _Beta = 0.95
    eps: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=10, description="applied to matrices, not to gains")] = 0.1


class SignSgdConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="sign_sgd"):
    """Each parameter by the learning rate of the run's schedule, against the sign of what was merged."""

    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=10, description="applied to matrices, not to gains")] = 0.0


class DelayedNesterovConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="delayed_nesterov"):
    """Nesterov whose momentum takes up what was merged every `delay` steps; in between it acts by a share alone."""

    lr: _Rate = 0.6
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    delay: Annotated[int, msgspec.Meta(ge=1, le=100_000, description="outer steps: as many as there are peers")] = 4
    activation: Annotated[float, msgspec.Meta(ge=0, le=1, description="share of the momentum in every step")] = 0.0

    def __post_init__(self) -> None:
        if self.activation * self.delay > 1:
            raise ConfigError(
                f"apply: activation: {self.activation:g} in each of {self.delay} steps is more than the momentum; "
                f"set it to {1 / self.delay:g} at most."
            )


class InnerSgdConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="sgd"):
    """The learning rate comes from the run's schedule, step by step."""

    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1, description="0: plain SGD")] = 0.0


class MuonConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="muon"):
    """Matrices of the layers by orthogonalized momentum; embedding, head, gains and biases by AdamW, at the same rate.

    An update is as long as AdamW's would be, so what fits AdamW's learning rate fits here (2502.16982, section 2.2).
    """

    momentum: _Beta = 0.95
    beta1: _Beta = 0.9
    beta2: _Beta = 0.95
    eps: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=10, description="applied to matrices, not to gains")] = 0.1


OuterConfig = SgdConfig | NesterovConfig | DelayedNesterovConfig | SignSgdConfig | AdamWConfig | InnerSgdConfig
OptimizerConfig = AdamWConfig | MuonConfig | InnerSgdConfig


_Every = Annotated[int, msgspec.Meta(ge=1, le=100_000, description="inner steps between synchronisations")]
_Lr = Annotated[float, msgspec.Meta(gt=0, le=10, description="outer learning rate")]
_Momentum = Annotated[float, msgspec.Meta(ge=0, lt=1, description="outer momentum")]


class InnerConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="inner"):
    """Apply what was merged with the run's inner optimizer, whose moments are then replicated."""


ApplyConfig = SgdConfig | NesterovConfig | DelayedNesterovConfig | SignSgdConfig | InnerConfig

BasisName = Literal["flat", "tiles", "dct"]


class LowRankConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="low_rank"):
    """Of each matrix a few directions, which follow the largest ones of what is sent; the rest is kept as feedback."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=1024, description="directions of each matrix that are sent")] = 4


_Basis = Annotated[
    BasisName | LowRankConfig,
    msgspec.Meta(description="of 64 x 64 tiles of matrices, in cosines or as they are; or of the vector"),
]
Rule = Literal["peers_mean", "senders_mean"]
_Rule = Annotated[Rule, msgspec.Meta(description="the mean over all contributors, or over those that sent an element")]
_Decay = Annotated[
    float, msgspec.Meta(ge=0, le=1, description="what of a payload's error is added to the next; left out: nothing")
]
_Error = Annotated[
    Literal["apart", "local"],
    msgspec.Meta(description="what a codec leaves is kept beside the parameters, or stays in the local ones"),
]
_ReplyDecay = Annotated[
    float, msgspec.Meta(ge=0, le=1, description="the same of a merged part, by its owner; left out: nothing")
]


class SampleConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="sample"):
    """In each round, members drawn at random; the others follow. McMahan et al., 1602.05629, algorithm 1."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1, description="of the members, rounded up: one at least")]


_Wait = Annotated[
    Literal["all", "ready"],
    msgspec.Meta(description="a round waits for all members, until its deadline; or for one, and others train on"),
]
AmongConfig = Literal["all"] | SampleConfig

_Proximal = Annotated[
    float, msgspec.Meta(ge=0, le=100, description="pull of inner steps towards the outer parameters; 0: none")
]


_Fragments = Annotated[
    int, msgspec.Meta(ge=1, le=1024, description="pieces of the model, of which each round synchronises the next one")
]
_Overlap = Annotated[int, msgspec.Meta(ge=0, le=100_000, description="inner steps made while a round is decided: tau")]
_Mix = Annotated[
    float, msgspec.Meta(ge=0, lt=1, description="share of its own parameters that a member keeps after a round: alpha")
]


class Choices(Config, frozen=True, kw_only=True, tag_field="type", tag="custom", omit_defaults=True):
    """The five choices spelled out, and who is waited for.

    What has its default is left out of a run's bytes: a choice that a later version adds changes no run's name.
    """

    every: _Every
    send: Literal["gradient", "delta"]
    apply: ApplyConfig
    codec: CodecConfig = Bf16Config()
    reply_codec: CodecConfig | None = None  # of the merged parts; None: the same as `codec`
    basis: _Basis = "flat"
    feedback: _Decay | None = None
    reply_feedback: _ReplyDecay | None = None
    error: _Error = "apart"
    merge: _Rule = "peers_mean"
    among: AmongConfig = "all"
    proximal: _Proximal = 0.0
    fragments: _Fragments = 1
    overlap: _Overlap = 0
    mix: _Mix = 0.0
    wait: _Wait = "all"

    @property
    def is_streaming(self) -> bool:
        """Whether rounds are of fragments, or inner steps go on while they are decided."""
        return self.fragments > 1 or self.overlap > 0 or self.mix > 0 or self.error == "local"

    @property
    def num_errors(self) -> int:
        """Vectors of what codecs leave that a member holds: its own, the one under way, and that of merged parts."""
        return 2 * (self.feedback is not None) + (self.reply_feedback is not None)

    def __post_init__(self) -> None:
        if self.send == "gradient" and self.every != 1:
            raise ConfigError(
                f"method: every: {self.every} inner steps leave no single gradient to send; "
                'set every = 1, or send = "delta".'
            )
        if self.wait == "ready" and (self.send == "gradient" or self.among != "all"):
            raise ConfigError(
                'method: wait: "ready" lets each member bring its delta when that is done; set wait = "all", or '
                'send = "delta" and among = "all".'
            )
        if self.send == "delta" and isinstance(self.apply, InnerConfig):
            raise ConfigError(
                'method: apply: "inner" steps along gradients, a delta already holds inner steps; '
                'set apply to "sgd" or "nesterov", or send = "gradient".'
            )
        if self.is_streaming and (self.send == "gradient" or self.basis != "flat"):
            raise ConfigError(
                "method: fragments, overlap, mix: they are of the parameters themselves; leave them out, or "
                'set send = "delta" and basis = "flat".'
            )
        if self.overlap > self.every:
            raise ConfigError(
                f"method: overlap: {self.overlap} inner steps are more than the {self.every} of a round; what is made "
                "meanwhile is part of the next."
            )
        if self.send == "gradient" and self.proximal:
            raise ConfigError(
                "method: proximal: a gradient is taken at the outer parameters, where nothing pulls; "
                'set proximal = 0, or send = "delta".'
            )
        if self.error == "local" and (self.send == "gradient" or self.feedback != 1.0 or self.fragments > 1):
            raise ConfigError(
                'method: error: what stays in the local parameters stays whole; set send = "delta", feedback = 1.0 and '
                'fragments = 1, or error = "apart".'
            )
        if isinstance(self.basis, LowRankConfig) and self.feedback is None:
            raise ConfigError(
                "method: feedback: a few directions leave most of a matrix out, and without feedback it is lost; set "
                "feedback = 1.0."
            )
        for name, codec, decay in (
            ("feedback", self.codec, self.feedback),
            ("reply_feedback", self.reply_codec or self.codec, self.reply_feedback),
        ):
            if isinstance(codec, LOSSY) and decay is None:
                kind = codec.__struct_config__.tag
                raise ConfigError(
                    f"method: {name}: codec {kind!r} leaves most of a vector out, and without feedback it is lost; "
                    f"set {name} = 0.95, or choose a dense codec."
                )


class DdpConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="ddp"):
    """Every step, the mean gradient, applied by the inner optimizer on every member alike."""

    codec: CodecConfig = Bf16Config()
    reply_codec: CodecConfig | None = None


class FedAvgConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="fedavg"):
    """Every H steps, the mean of the members' weights."""

    every: _Every = 30
    codec: CodecConfig = Bf16Config()
    reply_codec: CodecConfig | None = None
    among: AmongConfig = "all"
    proximal: _Proximal = 0.0


class DiLoCoConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="diloco"):
    """Every H steps, the mean delta, applied with Nesterov momentum."""

    every: _Every = 30
    lr: _Lr | None = None  # None: by number of peers, `diloco_defaults`
    momentum: _Momentum | None = None
    codec: CodecConfig = Int8Config()
    reply_codec: CodecConfig | None = None


class StreamingConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="streaming"):
    """Every H / fragments inner steps, the next fragment's mean delta, while inner steps go on; Nesterov, mixed in."""

    every: _Every = 100  # inner steps between two rounds of one fragment
    fragments: _Fragments = 4
    overlap: _Overlap = 5
    mix: _Mix = 0.5
    lr: _Lr = 0.4
    momentum: _Momentum = 0.9
    codec: CodecConfig = E3m0Config()
    reply_codec: CodecConfig | None = None

    def __post_init__(self) -> None:
        if self.every % self.fragments:
            raise ConfigError(
                f"method: every: {self.every} inner steps are not cut into {self.fragments} equal pieces; set a "
                f"multiple of {self.fragments}."
            )


class AsyncDiLoCoConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="async-diloco"):
    """Each member brings its delta when it has made its own inner steps, and waits for nobody; delayed Nesterov."""

    every: _Every = 30
    lr: _Lr | None = None  # None: by number of peers, `diloco_defaults`
    momentum: _Momentum | None = None
    delay: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None  # None: as many steps as there are peers
    codec: CodecConfig = Int8Config()
    reply_codec: CodecConfig | None = None


class SparseLoCoConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="sparseloco"):
    """Every H steps, the largest elements of the members' deltas, with feedback; averaged over who sends an element."""

    every: _Every = 30
    lr: _Lr = 1.0
    codec: CodecConfig = TopKConfig()
    reply_codec: CodecConfig | None = None
    basis: _Basis = "tiles"
    feedback: _Decay = 0.95
    reply_feedback: _ReplyDecay | None = 1.0
    merge: _Rule = "senders_mean"


class PowerSgdConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="powersgd"):
    """Every step, a few directions of the mean gradient's matrices, applied by the inner optimizer on every member."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=1024, description="directions of each matrix that are sent")] = 4
    codec: CodecConfig = Bf16Config()
    reply_codec: CodecConfig | None = None
    feedback: _Decay = 1.0


class CocktailConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="cocktail"):
    """Every step, of elements drawn alike by all the largest, in four bits; what was not sent stays where it is."""

    every: _Every = 1
    lr: _Lr = 1.0
    codec: CodecConfig = RandomKConfig(kept=410, largest=82, values="int4")
    reply_codec: CodecConfig | None = None
    overlap: _Overlap = 1
    reply_feedback: _ReplyDecay | None = 1.0


class DeMoConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="demo"):
    """Every step, the largest frequencies of the members' momenta, which then lack them; by the sign of their mean."""

    codec: CodecConfig = TopKConfig(kept=32, values="bf16")
    reply_codec: CodecConfig | None = None  # None: top-k with room for all that was sent
    basis: _Basis = "dct"
    momentum: _Decay = 0.999
    reply_feedback: _ReplyDecay | None = 1.0
    merge: _Rule = "senders_mean"
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=10, description="applied to matrices, not to gains")] = 0.0


MethodConfig = (
    DdpConfig
    | PowerSgdConfig
    | FedAvgConfig
    | DiLoCoConfig
    | StreamingConfig
    | AsyncDiLoCoConfig
    | SparseLoCoConfig
    | DeMoConfig
    | CocktailConfig
    | Choices
)


def check(choices: Choices, optimizer: OptimizerConfig) -> None:
    """Refuse what cannot be computed to the same bits by all.

    Raises:
        ConfigError: the inner optimizer is to step on every member alike, and is none whose bits are.
    """
    if isinstance(choices.apply, InnerConfig) and isinstance(optimizer, MuonConfig):
        raise ConfigError(
            'train.optimizer: "muon" multiplies matrices, and machines round that differently, but a method that sends '
            'gradients steps on every member alike; set type = "adamw" or "sgd", or choose a method that sends deltas.'
        )


def spell_out(config: MethodConfig, num_peers: int) -> Choices:
    """Return the five choices that `config` names in a run of about `num_peers` (>= 1) peers."""
    match config:
        case Choices():
            return config
        case DdpConfig():
            return Choices(
                every=1, send="gradient", apply=InnerConfig(), codec=config.codec, reply_codec=config.reply_codec
            )
        case PowerSgdConfig():
            return Choices(
                every=1,
                send="gradient",
                apply=InnerConfig(),
                codec=config.codec,
                reply_codec=config.reply_codec,
                basis=LowRankConfig(rank=config.rank),
                feedback=config.feedback,
            )
        case FedAvgConfig():
            return Choices(
                every=config.every,
                send="delta",
                apply=SgdConfig(lr=1.0),
                codec=config.codec,
                reply_codec=config.reply_codec,
                among=config.among,
                proximal=config.proximal,
            )
        case DiLoCoConfig():
            lr, momentum = _rates(config, num_peers)
            return Choices(
                every=config.every,
                send="delta",
                apply=NesterovConfig(lr=lr, momentum=momentum),
                codec=config.codec,
                reply_codec=config.reply_codec,
            )
        case StreamingConfig():
            return Choices(
                every=config.every // config.fragments,
                send="delta",
                apply=NesterovConfig(lr=config.lr, momentum=config.momentum),
                codec=config.codec,
                reply_codec=config.reply_codec,
                fragments=config.fragments,
                overlap=config.overlap,
                mix=config.mix,
            )
        case AsyncDiLoCoConfig():
            lr, momentum = _rates(config, num_peers)
            delay = max(1, num_peers) if config.delay is None else config.delay
            return Choices(
                every=config.every,
                send="delta",
                apply=DelayedNesterovConfig(lr=lr, momentum=momentum, delay=delay),
                codec=config.codec,
                reply_codec=config.reply_codec,
                wait="ready",
            )
        case SparseLoCoConfig():
            return Choices(
                every=config.every,
                send="delta",
                apply=SgdConfig(lr=config.lr),
                codec=config.codec,
                reply_codec=config.reply_codec,
                basis=config.basis,
                feedback=config.feedback,
                reply_feedback=config.reply_feedback,
                merge=config.merge,
            )
        case CocktailConfig():
            return Choices(
                every=config.every,
                send="delta",
                apply=SgdConfig(lr=config.lr),
                codec=config.codec,
                reply_codec=config.reply_codec,
                overlap=config.overlap,
                feedback=1.0,
                reply_feedback=config.reply_feedback,
                error="local",
            )
        case DeMoConfig():
            return Choices(
                every=1,
                send="gradient",
                apply=SignSgdConfig(weight_decay=config.weight_decay),
                codec=config.codec,
                reply_codec=config.reply_codec or _with_room(config.codec, num_peers),
                basis=config.basis,
                feedback=config.momentum,
                reply_feedback=config.reply_feedback,
                merge=config.merge,
            )
    assert_never(config)


def _with_room(codec: CodecConfig, num_peers: int) -> CodecConfig:
    """Return a codec in which all that so many peers send by `codec` has room."""
    return (
        TopKConfig(kept=min(codec.kept * num_peers, MAX_BLOCK), values=codec.values)
        if isinstance(codec, TopKConfig)
        else codec
    )


def _rates(config: DiLoCoConfig | AsyncDiLoCoConfig, num_peers: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum that `config` asks for, or else the defaults."""
    lr, momentum = diloco_defaults(num_peers)
    return (
        lr if config.lr is None else config.lr,
        momentum if config.momentum is None else config.momentum,
    )


def diloco_defaults(num_peers: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum for `num_peers` replicas.

    Best constant rates of "Scaling Laws for DiLoCo" (2503.09799; H = 30, momentum 0.9, 35M to 10B parameters): one
    replica 0.4, two and four 0.6, eight 0.8 to 1.0; they depend on the replicas, hardly on the model's size. They rise
    with H by an amount the paper plots but does not print, so H is not an argument. All are tuned on runs of thousands
    of rounds: where a run has only tens, momentum 0.9 has no time to settle and less is better. Of more than eight
    replicas it prints nothing; they get what eight do.
    """
    if num_peers <= 1:
        return 0.4, 0.9
    return (0.6 if num_peers < 6 else 0.8), 0.9  # 6 is nearer to 8 than to 4, by ratio
