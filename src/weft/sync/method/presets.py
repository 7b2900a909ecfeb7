"""Presets: methods by name, each a few settings, and the choices that they come to.

What depends on the number of peers is decided here, once for all.
"""

import math
from typing import Annotated, Any, assert_never

import msgspec

from weft.codec import config as codecs
from weft.codec.config import MAX_BLOCK
from weft.config import Config
from weft.errors import ConfigError
from weft.ids import several
from weft.sync.method.choices import (
    AmongConfig,
    Basis,
    Choices,
    Decay,
    Degree,
    DelayedNesterovConfig,
    Every,
    Factors,
    Fragments,
    GraphConfig,
    InnerConfig,
    LowRankConfig,
    Lr,
    MeanEvery,
    MergeRule,
    Mix,
    MixConfig,
    Momentum,
    NesterovConfig,
    Overlap,
    PairNesterovConfig,
    Proximal,
    Pull,
    Rank,
    ReplyDecay,
    SgdConfig,
    SignSgdConfig,
    Step,
    Tune,
)
from weft.sync.method.graph import GraphName

# The pairs of inner steps per round and codec that `auto` moves on, from what learns most of a token on.
LADDER: tuple[tuple[int, codecs.CodecConfig], ...] = (
    (10, codecs.Bf16Config()),
    (10, codecs.Int8Config()),
    (10, codecs.E3m0Config()),
    (20, codecs.E3m0Config()),
    (30, codecs.E3m0Config()),
    (50, codecs.E3m0Config()),
    (100, codecs.E3m0Config()),
    (200, codecs.E3m0Config()),
    (500, codecs.E3m0Config()),
)
START = 4  # until something is measured


class _Preset(Config, frozen=True, kw_only=True):
    """A method by name. A setting that has the name of a choice is that choice."""

    def _with(self, **others: Any) -> Choices:
        """Return the choices that are set here, and `others`."""
        named = {name: getattr(self, name) for name in self.__struct_fields__ if name in Choices.__struct_fields__}
        return Choices(**(named | others))


class DdpConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="ddp"):
    """Every step, the mean gradient, applied by the inner optimizer on every member alike."""

    codec: codecs.CodecConfig = codecs.Bf16Config()
    reply_codec: codecs.CodecConfig | None = None
    merge: MergeRule = "peers_mean"

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        return self._with(every=1, send="gradient", apply=InnerConfig())


class FedAvgConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="fedavg"):
    """Every H steps, the mean of the members' weights."""

    every: Every = 30
    codec: codecs.CodecConfig = codecs.Bf16Config()
    reply_codec: codecs.CodecConfig | None = None
    merge: MergeRule = "peers_mean"
    among: AmongConfig = "all"
    proximal: Proximal = 0.0

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        return self._with(send="delta", apply=SgdConfig(lr=1.0))


class DiLoCoConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="diloco"):
    """Every H steps, the mean delta, applied with Nesterov momentum."""

    every: Every = 30
    lr: Lr | None = None  # None: by number of peers, `diloco_defaults`
    momentum: Momentum | None = None
    codec: codecs.CodecConfig = codecs.Int8Config()
    reply_codec: codecs.CodecConfig | None = None
    merge: MergeRule = "peers_mean"

    def choices(self, num_peers: int) -> Choices:
        lr, momentum = _rates(self, num_peers)
        return self._with(send="delta", apply=NesterovConfig(lr=lr, momentum=momentum))


class StreamingConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="streaming"):
    """Every H / fragments inner steps, the next fragment's mean delta, while inner steps go on; Nesterov, mixed in."""

    every: Every = 100  # inner steps between two rounds of one fragment
    fragments: Fragments = 4
    overlap: Overlap = 5
    mix: Mix = 0.5
    lr: Lr = 0.4
    momentum: Momentum = 0.9
    codec: codecs.CodecConfig = codecs.E3m0Config()
    reply_codec: codecs.CodecConfig | None = None
    merge: MergeRule = "peers_mean"

    def __post_init__(self) -> None:
        if self.every % self.fragments:
            raise ConfigError(
                f"method: every: {several(self.every, 'inner step')} cannot be cut into {self.fragments} equal pieces; "
                f"set a multiple of {self.fragments}."
            )

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        every, apply = self.every // self.fragments, NesterovConfig(lr=self.lr, momentum=self.momentum)
        return self._with(every=every, send="delta", apply=apply)


class AutoConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="auto"):
    """`diloco`, as seldom and in as few bytes as links ask for: both are chosen from what rounds take, as they go."""

    tune: Tune = 0.05
    lr: Lr | None = None  # None: by number of peers, `diloco_defaults`
    momentum: Momentum | None = None

    def choices(self, num_peers: int) -> Choices:
        (every, codec), (lr, momentum) = LADDER[START], _rates(self, num_peers)
        return self._with(every=every, send="delta", apply=NesterovConfig(lr=lr, momentum=momentum), codec=codec)


class AsyncDiLoCoConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="async-diloco"):
    """Each member brings its delta when it has made its own inner steps, and waits for nobody; delayed Nesterov."""

    every: Every = 30
    lr: Lr | None = None  # None: by number of peers, `diloco_defaults`
    momentum: Momentum | None = None
    delay: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None  # None: as many steps as there are peers
    codec: codecs.CodecConfig = codecs.Int8Config()
    reply_codec: codecs.CodecConfig | None = None

    def choices(self, num_peers: int) -> Choices:
        lr, momentum = _rates(self, num_peers)
        delay = max(1, num_peers) if self.delay is None else self.delay
        apply = DelayedNesterovConfig(lr=lr, momentum=momentum, delay=delay)
        return self._with(send="delta", apply=apply, wait="ready")


class SparseLoCoConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="sparseloco"):
    """Every H steps, the largest elements of the members' deltas, with feedback; averaged over who sends an element."""

    every: Every = 30
    lr: Lr = 1.0
    codec: codecs.CodecConfig = codecs.TopKConfig()
    reply_codec: codecs.CodecConfig | None = None
    basis: Basis = "tiles"
    feedback: Decay = 0.95
    reply_feedback: ReplyDecay | None = 1.0
    merge: MergeRule = "senders_mean"

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        return self._with(send="delta", apply=SgdConfig(lr=self.lr))


class PulseConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="pulse"):
    """Every H steps, of the members' deltas what changes a parameter in bf16, with feedback; Nesterov momentum."""

    every: Every = 30
    lr: Lr | None = None  # None: by number of peers, `diloco_defaults`
    momentum: Momentum | None = None
    codec: codecs.CodecConfig = codecs.NonzeroConfig()
    reply_codec: codecs.CodecConfig | None = None
    feedback: Decay = 1.0

    def choices(self, num_peers: int) -> Choices:
        lr, momentum = _rates(self, num_peers)
        return self._with(send="delta", apply=NesterovConfig(lr=lr, momentum=momentum), basis="visible")


class PowerSgdConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="powersgd"):
    """Every step, a few directions of the mean gradient's matrices, applied by the inner optimizer on every member."""

    rank: Rank = 4
    factors: Factors = "both"
    codec: codecs.CodecConfig = codecs.Bf16Config()
    reply_codec: codecs.CodecConfig | None = None
    feedback: Decay = 1.0

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        basis = LowRankConfig(rank=self.rank, factors=self.factors)
        return self._with(every=1, send="gradient", apply=InnerConfig(), basis=basis)


class CocktailConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="cocktail"):
    """Every step, of elements drawn alike by all the largest, in four bits; what was not sent stays where it is.

    What was sent leaves the local parameters as what was merged comes in; steps made meanwhile are made with it.
    """

    every: Every = 1
    lr: Lr = 1.0
    codec: codecs.CodecConfig = codecs.RandomKConfig(kept=410, largest=82, values="int4")
    reply_codec: codecs.CodecConfig | None = None
    overlap: Overlap = 1
    reply_feedback: ReplyDecay | None = 1.0

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        return self._with(send="delta", apply=SgdConfig(lr=self.lr), feedback=1.0, error="local")


class DeMoConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="demo"):
    """Every step, the largest frequencies of the members' momenta, which then lack them; by the sign of their mean."""

    codec: codecs.CodecConfig = codecs.TopKConfig(kept=32, values="bf16")
    reply_codec: codecs.CodecConfig | None = None  # None: top-k with room for all that was sent
    basis: Basis = "dct"
    momentum: Decay = 0.999
    reply_feedback: ReplyDecay | None = 1.0
    merge: MergeRule = "senders_mean"
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=10, description="applied to matrices, not to gains")] = 0.0

    def choices(self, num_peers: int) -> Choices:
        apply, reply = (
            SignSgdConfig(weight_decay=self.weight_decay),
            self.reply_codec or _with_room(self.codec, num_peers),
        )
        return self._with(every=1, send="gradient", apply=apply, reply_codec=reply, feedback=self.momentum)


class DPsgdConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="dpsgd"):
    """Every so many steps, each member's parameters become a weighted mean of its own and its neighbours'."""

    every: Every = 1
    graph: GraphName = "ring"
    degree: Degree = 4
    mean_every: MeanEvery = 20
    codec: codecs.CodecConfig = codecs.Bf16Config()
    reply_codec: codecs.CodecConfig | None = None  # of the mean over all; None: bf16

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        among = GraphConfig(graph=self.graph, degree=self.degree, mean_every=self.mean_every)
        return self._with(send="weights", apply=MixConfig(), among=among)


class ChocoConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="choco"):
    """The same with few bytes: members tell how they differ from what neighbours know, and keep what that lacks."""

    every: Every = 1
    graph: GraphName = "ring"
    degree: Degree = 4
    mean_every: MeanEvery = 100
    step: Step | None = None  # None: by codec, `choco_step`
    codec: codecs.CodecConfig = codecs.TopKConfig()
    reply_codec: codecs.CodecConfig | None = None  # of the mean over all; None: bf16

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        among = GraphConfig(graph=self.graph, degree=self.degree, mean_every=self.mean_every)
        apply = MixConfig(step=choco_step(self.codec) if self.step is None else self.step)
        return self._with(send="difference", apply=apply, among=among)


class NoLoCoConfig(_Preset, frozen=True, kw_only=True, tag_field="type", tag="noloco"):
    """Every H steps, with a partner drawn anew: momentum along both deltas, and towards the mean of both."""

    every: Every = 50
    mean_every: MeanEvery = 10
    lr: Lr = 0.7
    momentum: Momentum = 0.5
    pull: Pull = 1.0
    codec: codecs.CodecConfig = codecs.Bf16Config()
    reply_codec: codecs.CodecConfig | None = None  # of the mean over all; None: bf16

    def choices(self, num_peers: int) -> Choices:  # noqa: ARG002
        apply = PairNesterovConfig(lr=self.lr, momentum=self.momentum, pull=self.pull)
        return self._with(
            send="delta+weights", apply=apply, among=GraphConfig(graph="pairs", mean_every=self.mean_every)
        )


MethodConfig = (
    DdpConfig
    | PowerSgdConfig
    | FedAvgConfig
    | DiLoCoConfig
    | AutoConfig
    | StreamingConfig
    | AsyncDiLoCoConfig
    | SparseLoCoConfig
    | PulseConfig
    | DeMoConfig
    | CocktailConfig
    | DPsgdConfig
    | ChocoConfig
    | NoLoCoConfig
    | Choices
)


def spell_out(config: MethodConfig, num_peers: int) -> Choices:
    """Return the choices that `config` names in a run of about `num_peers` (>= 1) peers."""
    return config.choices(num_peers)


def _with_room(codec: codecs.CodecConfig, num_peers: int) -> codecs.CodecConfig:
    """Return a codec in which all that so many peers send by `codec` has room."""
    return (
        codecs.TopKConfig(kept=min(codec.kept * num_peers, MAX_BLOCK), values=codec.values)
        if isinstance(codec, codecs.TopKConfig)
        else codec
    )


def _rates(config: DiLoCoConfig | AsyncDiLoCoConfig | AutoConfig | PulseConfig, num_peers: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum that `config` asks for, or else the defaults."""
    lr, momentum = diloco_defaults(num_peers)
    return (lr if config.lr is None else config.lr, momentum if config.momentum is None else config.momentum)


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


def choco_step(codec: codecs.CodecConfig) -> float:
    """Return gamma of CHOCO-SGD: the more a codec leaves out, the less of what neighbours told is still so.

    Too large a step drives members apart. Found with rings of 5 and 8 small models, 60 rounds of one AdamW step, where
    the distance to the mean was least, or a little below, as larger models and more rounds want less:

        top_k of 4096, signs   16: 0.05    64: 0.05 to 0.1    256: 0.2    1024: 0.4 and more    about 0.8 sqrt(k / 4096)
        random_k               410, of which 82: 0.06, while 0.13 no longer mixes
        sign, 2 and 4 bits     0.7 and more; the paper's authors tune 0.4 or so
        8 bits and more        1
    """
    match codec:
        case codecs.TopKConfig():
            return round(0.5 * math.sqrt(codec.kept / MAX_BLOCK), 4)
        case codecs.RandomKConfig():
            num_sent = codec.kept if codec.largest is None else min(codec.kept, codec.largest)
            return round(0.25 * math.sqrt(num_sent / MAX_BLOCK), 4)
        case codecs.ExtensionCodecConfig():  # what it leaves out, nobody knows
            return 0.05
        case codecs.NonzeroConfig():
            return 1.0
        case codecs.SignConfig() | codecs.Int2Config() | codecs.Int4Config() | codecs.E3m0Config():
            return 0.4
        case codecs.Int8Config() | codecs.Fp8Config() | codecs.Bf16Config() | codecs.Fp32Config():
            return 1.0
    assert_never(codec)
