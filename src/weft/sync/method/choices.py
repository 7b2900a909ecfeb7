"""What a run file, a genesis and a charter say of a method: presets, the choices behind them, the outer step.

They are settings alone: `weft.sync.merge` computes by them. It needs no torch: an anchor reads charters.
"""

from typing import Annotated, Literal

import msgspec

from weft.codec.config import LOSSY, Bf16Config, CodecConfig, Fp32Config, NonzeroConfig, TopKConfig
from weft.config import Config
from weft.errors import ConfigError
from weft.extension import ExtensionConfig
from weft.sync.method.graph import GraphName, is_static, spectral_gap

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
    delay: Annotated[int, msgspec.Meta(ge=1, le=100_000, description="rounds: as many as there are peers")] = 4
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


Step = Annotated[float, msgspec.Meta(gt=0, le=1, description="share of the way to the neighbours: gamma")]
Pull = Annotated[float, msgspec.Meta(gt=0, lt=2, description="towards the mean of a member and its partner: gamma")]
Degree = Annotated[int, msgspec.Meta(ge=1, le=64, description="neighbours of each in a random graph")]
MeanEvery = Annotated[
    int, msgspec.Meta(ge=1, le=100_000, description="rounds from one mean over all members to the next")
]


class MixConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="mix"):
    """Each member's parameters move towards its neighbours'."""

    step: Step = 1.0


class PairNesterovConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="pair_nesterov"):
    """Momentum along the mean delta of a member and its partner, and towards the mean of their slow parameters."""

    lr: Annotated[float, msgspec.Meta(gt=0, le=10, description="outer learning rate: beta")] = 0.7
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1, description="outer momentum: alpha")] = 0.5
    pull: Pull = 1.0


class ExtensionOuterConfig(ExtensionConfig, frozen=True, kw_only=True, tag="extension"):
    """An outer step from outside of weft (`weft.extend`), which every member has to have."""


OuterConfig = (
    SgdConfig
    | NesterovConfig
    | DelayedNesterovConfig
    | SignSgdConfig
    | AdamWConfig
    | InnerSgdConfig
    | ExtensionOuterConfig
)
OptimizerConfig = AdamWConfig | MuonConfig | InnerSgdConfig


Send = Literal["gradient", "delta", "weights", "difference", "delta+weights"]
MIN_GAP = 1e-3  # after a thousand rounds a third of a difference would be left
GOSSIPED: tuple[Send, ...] = ("weights", "difference", "delta+weights")
Every = Annotated[int, msgspec.Meta(ge=1, le=100_000, description="training steps between synchronisations")]
Lr = Annotated[float, msgspec.Meta(gt=0, le=10, description="outer learning rate")]
Momentum = Annotated[float, msgspec.Meta(ge=0, lt=1, description="outer momentum")]


class InnerConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="inner"):
    """Apply what was merged with the run's inner optimizer, whose moments are then replicated."""


ApplyConfig = (
    SgdConfig
    | NesterovConfig
    | DelayedNesterovConfig
    | SignSgdConfig
    | InnerConfig
    | MixConfig
    | PairNesterovConfig
    | ExtensionOuterConfig
)

BasisName = Literal["flat", "tiles", "dct", "visible"]


Rank = Annotated[int, msgspec.Meta(ge=1, le=1024, description="directions of each matrix that are sent")]
Factors = Annotated[
    Literal["both", "by_turns"],
    msgspec.Meta(description="which of a matrix's two factors a round sends: both, or one by turns, in half the bytes"),
]


class LowRankConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="low_rank"):
    """Of each matrix a few directions, which follow the largest ones of what is sent; the rest is kept as feedback."""

    rank: Rank = 4
    factors: Factors = "both"


Basis = Annotated[
    BasisName | LowRankConfig,
    msgspec.Meta(
        description="of 64 x 64 tiles of matrices, in cosines or as they are; or of the vector, all of it or what "
        "changes parameters in bf16"
    ),
]
LeftOut = Annotated[int, msgspec.Meta(ge=1, le=32)]


class TrimmedMeanConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="trimmed_mean"):
    """Of each element, the mean without so many of the largest and as many of the smallest."""

    left_out: Annotated[LeftOut, msgspec.Meta(description="contributors on either side, for each element")] = 1


class MultiKrumConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="multi_krum"):
    """The mean without so many contributors, those furthest from the others."""

    left_out: Annotated[LeftOut, msgspec.Meta(description="contributors, with all that they bring")] = 1


RobustRule = Literal["clipped_mean", "centered_clip", "median"] | TrimmedMeanConfig | MultiKrumConfig
Rule = Literal["peers_mean", "senders_mean"] | RobustRule
MergeRule = Annotated[
    Rule,
    msgspec.Meta(
        description="the mean over all contributors, or over those that sent an element; or a rule by which a few "
        "contributors cannot move it far"
    ),
]
Decay = Annotated[
    float,
    msgspec.Meta(
        ge=0, le=1, description="share of a payload's error that is added to the next; left out, or with fp32: none"
    ),
]
Error = Annotated[
    Literal["apart", "local"],
    msgspec.Meta(description="what a codec leaves out is kept beside the parameters, or in the local ones"),
]
ReplyDecay = Annotated[
    float,
    msgspec.Meta(ge=0, le=1, description="the same for a merged part, at its owner; left out, or with fp32: none"),
]


class SampleConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="sample"):
    """In each round, members drawn at random; the others follow. McMahan et al., 1602.05629, algorithm 1."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1, description="share of the members, rounded up; at least one")]


Wait = Annotated[
    Literal["all", "ready"],
    msgspec.Meta(description="a round waits for all members, until its deadline; or for one, and others keep training"),
]


class GraphConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="graph"):
    """Each with its neighbours in a graph; every so many rounds, all with all."""

    graph: GraphName = "ring"
    degree: Degree = 4
    mean_every: MeanEvery = 20


AmongConfig = Literal["all"] | SampleConfig | GraphConfig

Proximal = Annotated[
    float, msgspec.Meta(ge=0, le=100, description="pull of training steps towards the last round's parameters; 0: none")
]


MergedBy = Annotated[
    Literal["owners", "all"],
    msgspec.Meta(description="who merges what peers bring: the owner of each part, for all; or each member for itself"),
]
Tune = Annotated[
    float,
    msgspec.Meta(
        ge=0, le=0.5, description="share of the time that members may wait for rounds; every and codec follow"
    ),
]
Fragments = Annotated[
    int, msgspec.Meta(ge=1, le=1024, description="pieces of the model; each round synchronises the next one")
]
Overlap = Annotated[
    int, msgspec.Meta(ge=0, le=100_000, description="training steps made while a round is decided: tau")
]
Mix = Annotated[
    float, msgspec.Meta(ge=0, lt=1, description="share of its own parameters that a member keeps after a round: alpha")
]


class Choices(Config, frozen=True, kw_only=True, tag_field="type", tag="custom", omit_defaults=True):
    """The five choices spelled out, and who is waited for.

    What has its default is left out of a run's bytes: a choice that a later version adds changes no run's name.
    """

    every: Every
    send: Send
    apply: ApplyConfig
    codec: CodecConfig = Bf16Config()
    reply_codec: CodecConfig | None = None  # of the merged parts; None: as `reply` says
    basis: Basis = "flat"
    feedback: Decay | None = None
    reply_feedback: ReplyDecay | None = None
    error: Error = "apart"
    merge: MergeRule = "peers_mean"
    among: AmongConfig = "all"
    proximal: Proximal = 0.0
    fragments: Fragments = 1
    overlap: Overlap = 0
    mix: Mix = 0.0
    wait: Wait = "all"
    tune: Tune = 0.0
    merged_by: MergedBy = "owners"

    def choices(self, num_peers: int) -> "Choices":  # noqa: ARG002
        """Return itself: it names no method."""
        return self

    @property
    def reply(self) -> CodecConfig:
        """How merged parts are encoded: whole where they do not travel, unless another codec is asked for."""
        return self.reply_codec or (Fp32Config() if self.is_merged_by_all else self.codec)

    @property
    def is_merged_by_all(self) -> bool:
        """Whether members exchange whole payloads, and each merges them for itself."""
        return self.merged_by == "all"

    @property
    def is_streaming(self) -> bool:
        """Whether rounds are of fragments, or inner steps go on while they are decided."""
        return self.fragments > 1 or self.overlap > 0 or self.mix > 0 or self.error == "local"

    @property
    def is_projected(self) -> bool:
        """Whether the basis lets a part of what was trained through, and the rest is kept for later."""
        return self.basis == "visible" or isinstance(self.basis, LowRankConfig)

    @property
    def sends_gradient(self) -> bool:
        """Whether peers bring gradients; otherwise it is what training steps came to, or parameters."""
        return self.send == "gradient"

    @property
    def is_robust(self) -> bool:
        """Whether merging compares contributors, and so holds what all of them bring."""
        return self.merge not in ("peers_mean", "senders_mean")

    @property
    def rule_name(self) -> str:
        return self.merge if isinstance(self.merge, str) else str(self.merge.__struct_config__.tag)

    @property
    def graph(self) -> GraphConfig | None:
        """Who exchanges with whom; None: there are replicas."""
        return self.among if isinstance(self.among, GraphConfig) else None

    def num_gossiped(self, num: int) -> int:
        """Return how many numbers a member sends in a gossip round, of `num` parameters."""
        return 2 * num if self.send == "delta+weights" else num

    def of_mean(self) -> "Choices":
        """Return the choices by which rounds with replicas are computed: where members exchange, those of the mean."""
        if self.graph is None:
            return self
        return Choices(every=self.every, send="delta", apply=SgdConfig(lr=1.0), codec=self.reply_codec or Bf16Config())

    @property
    def _is_plain(self) -> bool:
        usual = ("flat", None, None, None, "peers_mean", 0.0)
        set_otherwise = (self.basis, self.feedback, self.reply_codec, self.reply_feedback, self.merge, self.proximal)
        is_dense = set_otherwise == usual and not self.is_streaming and not self.is_merged_by_all
        return is_dense and self.send == "delta" and self.among == "all" and self.wait == "all"

    @property
    def num_errors(self) -> int:
        """Vectors of what codecs leave that a member holds: its own, the one under way, and that of merged parts."""
        return 2 * (self.feedback is not None) + (self.reply_feedback is not None)

    def __post_init__(self) -> None:
        self._check()
        for field in msgspec.structs.fields(self):  # what equals its default and is another object would be written
            if isinstance(field.default, float | int | str) and getattr(self, field.name) == field.default:
                msgspec.structs.force_setattr(self, field.name, field.default)

    def _check(self) -> None:
        if self.graph is not None or self.send in GOSSIPED or isinstance(self.apply, MixConfig | PairNesterovConfig):
            self._check_gossip(self.graph)
            return
        if self.sends_gradient and self.every != 1:
            raise ConfigError(
                f"method: every: {self.every} training steps have more than one gradient to send; "
                'set every = 1, or send = "delta".'
            )
        if self.wait == "ready" and (self.sends_gradient or self.among != "all"):
            raise ConfigError(
                'method: wait: "ready" lets each member bring its delta as soon as it has one; set wait = "all", or '
                'send = "delta" and among = "all".'
            )
        if self.wait == "ready" and self.fragments > 1:
            raise ConfigError(
                f"method: fragments: {self.fragments} follow the round's number, and if rounds wait for nobody, each "
                "counts only some members: a member could bring one fragment and lose the others; set "
                'fragments = 1, or wait = "all".'
            )
        if self.send == "delta" and isinstance(self.apply, InnerConfig):
            raise ConfigError(
                'method: apply: "inner" steps along gradients, but a delta already holds training steps; '
                'set apply to "sgd" or "nesterov", or send = "gradient".'
            )
        if self.is_streaming and (self.sends_gradient or self.basis != "flat"):
            raise ConfigError(
                "method: fragments, overlap, mix: they work on the parameters themselves; leave them out, or "
                'set send = "delta" and basis = "flat".'
            )
        if self.tune and not self._is_plain:
            raise ConfigError(
                "method: tune: weft chooses every and codec only if no other choice is set; set tune = 0, or send = "
                '"delta" and leave out all but every, codec and apply.'
            )
        if self.is_merged_by_all and self.reply_feedback is not None:
            raise ConfigError(
                "method: merged_by: reply_feedback needs one owner of each part, which keeps what it left out; leave "
                'out reply_feedback, or set merged_by = "owners".'
            )
        if self.is_merged_by_all and isinstance(self.reply, LOSSY):
            raise ConfigError(
                f"method: reply_codec: {self.reply.__struct_config__.tag!r} loses much of a vector, and if all members "
                "merge, none keeps that for later; choose a codec of 4 bits or more, or set "
                'merged_by = "owners".'
            )
        self._check_rule()
        if self.overlap > self.every:
            raise ConfigError(
                f"method: overlap: {self.overlap} training steps are more than the {self.every} of a round, and those "
                "made meanwhile belong to the next."
            )
        if self.sends_gradient and self.proximal:
            raise ConfigError(
                "method: proximal: a gradient is taken at the parameters of the last round, so nothing pulls it back; "
                'set proximal = 0, or send = "delta".'
            )
        if self.error == "local" and (self.sends_gradient or self.feedback != 1.0 or self.fragments > 1):
            raise ConfigError(
                'method: error: local parameters keep all that was not sent; set send = "delta", feedback = 1.0 and '
                'fragments = 1, or error = "apart".'
            )
        if self.error == "local" and self.mix:
            raise ConfigError(
                f"method: mix: {self.mix:g} replaces a share of a member's own parameters, and with error = "
                '"local" they keep all that was not sent; set mix = 0, or error = "apart".'
            )
        if self.basis == "visible" and (self.send != "delta" or self.feedback is None):
            raise ConfigError(
                'method: basis: "visible" sends what changes parameters in bf16, and keeps the rest for later; set '
                'send = "delta" and feedback = 1.0, or another basis.'
            )
        if isinstance(self.basis, LowRankConfig) and self.feedback is None:
            raise ConfigError(
                "method: feedback: a few directions leave most of a matrix out, and without feedback that is lost; "
                "set feedback = 1.0."
            )
        for name, codec, decay in (
            ("feedback", self.codec, self.feedback),
            ("reply_feedback", self.reply, self.reply_feedback),
        ):
            if isinstance(codec, LOSSY) and decay is None:
                kind = codec.__struct_config__.tag
                raise ConfigError(
                    f"method: {name}: codec {kind!r} loses much of a vector, and without feedback that is lost for "
                    f'good; choose a codec of 4 bits or more, or set {name} = 0.95: type = "custom" has that field, '
                    "if a row does not."
                )

    def _check_rule(self) -> None:
        if not self.is_robust:
            return
        rule = self.rule_name
        if self.wait == "ready":
            raise ConfigError(
                f"method: merge: {rule!r} compares contributors, and where rounds wait for nobody most have one; "
                'set wait = "all", or merge = "peers_mean".'
            )
        if rule != "clipped_mean" and isinstance(self.codec, TopKConfig | NonzeroConfig):
            raise ConfigError(
                f"method: merge: {rule!r} compares what peers bring, and with this codec each sends a few other "
                'numbers; choose another codec, or merge = "clipped_mean", which divides by all, as "peers_mean" does.'
            )

    def check_peers(self, num_peers: int) -> None:
        """Refuse a rule of merging that leaves out more than so many peers allow.

        Raises:
            ConfigError: says how many it takes.
        """
        match self.merge:
            case "peers_mean" | "senders_mean":
                return
            case TrimmedMeanConfig(left_out=most):
                needed = 2 * most + 1
            case MultiKrumConfig(left_out=most):
                needed = 2 * most + 3
            case _:
                needed = 3
        if num_peers < needed:
            raise ConfigError(
                f"method: merge: {self.rule_name!r} needs {needed} peers or more to tell one from the others, and "
                f'peers is {num_peers}; expect more, or set merge = "peers_mean".'
            )

    def _check_gossip(self, graph: GraphConfig | None) -> None:
        is_pair = isinstance(self.apply, PairNesterovConfig)
        is_whole = graph is not None and isinstance(self.apply, MixConfig | PairNesterovConfig)
        if not is_whole or self.send not in GOSSIPED or is_pair != (self.send == "delta+weights"):
            raise ConfigError(
                'method: among, send, apply: to exchange with neighbours, set among = {type = "graph"} with send = '
                '"weights" or "difference" and apply = {type = "mix"}, or send = "delta+weights" and apply = '
                '{type = "pair_nesterov"}.'
            )
        assert graph is not None
        if self.send == "difference" and not is_static(graph.graph):
            raise ConfigError(
                f'method: among: a difference needs neighbours that know the rest, and those of graph "{graph.graph}" '
                'change from round to round; set graph = "ring", "torus", "random", "exponential" or "complete".'
            )
        if self.send != "difference" and isinstance(self.codec, LOSSY):
            raise ConfigError(
                f"method: codec: {self.codec.__struct_config__.tag!r} leaves most of the parameters out; set send = "
                '"difference", or choose a dense codec.'
            )
        if isinstance(self.reply_codec, LOSSY):
            raise ConfigError(
                "method: reply_codec: it encodes the mean over all members, from which newcomers start; choose a "
                "dense codec."
            )
        usual = Choices(every=1, send="delta", apply=SgdConfig())
        for name in _OF_REPLICAS:
            if getattr(self, name) != getattr(usual, name):
                raise ConfigError(
                    f'method: {name}: it belongs to methods with replicas; leave it out, or set among = "all".'
                )


def check_graph(graph: GraphConfig, num_peers: int, electors: int) -> None:
    """Refuse a graph in which what one peer learns does not come to the others.

    Raises:
        ConfigError: there are more peers than members, or their parameters do not mix.
    """
    if num_peers > electors:
        raise ConfigError(
            f"method: among: of {num_peers} peers only {electors} can be members, and nobody else has neighbours; "
            "expect fewer peers, or choose a method with replicas."
        )
    # Of few members all are neighbours, whatever the degree: more may come.
    if (gap := spectral_gap(graph.graph, max(num_peers, graph.degree + 3), graph.degree)) < MIN_GAP:
        raise ConfigError(
            f'method: among: in graph "{graph.graph}" of degree {graph.degree}, {num_peers} peers do not mix: its '
            f"spectral gap is {gap:.4f}; set degree = 2 or more, or another graph."
        )


_OF_REPLICAS = (
    "basis",
    "feedback",
    "reply_feedback",
    "error",
    "merge",
    "proximal",
    "fragments",
    "overlap",
    "mix",
    "wait",
    "tune",
    "merged_by",
)


def check(choices: Choices, optimizer: OptimizerConfig) -> None:
    """Refuse what cannot be computed to the same bits by all.

    Raises:
        ConfigError: the inner optimizer is to step on every member alike, and is none whose bits are.
    """
    if isinstance(choices.apply, InnerConfig) and isinstance(optimizer, MuonConfig):
        raise ConfigError(
            'train.optimizer: "muon" multiplies matrices, and machines round that differently, but with a method that '
            'sends gradients all members make the same step; set type = "adamw" or "sgd", or choose a method that '
            "sends deltas."
        )


def check_staged(choices: Choices) -> None:
    """Refuse methods that need the members of a stage to be out of step, or to see less than their section.

    Raises:
        ConfigError: says what to choose instead.
    """
    is_apart = choices.graph is not None or choices.among != "all" or choices.wait != "all"
    if is_apart or choices.is_streaming or choices.tune:
        raise ConfigError(
            "method: all members of a stage make each round together, with their whole section: no neighbours, no "
            "sample of members, no fragments or overlap, no tuning. Choose ddp, powersgd, fedavg, diloco, sparseloco "
            "or demo, or set stages = 1."
        )
