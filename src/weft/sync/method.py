"""A method is five choices: how often to synchronise, what to send, in which bytes, among whom, and how to apply it.

    row      every  send      codec  among  apply             replicated                     private
    ddp      1      gradient  bf16   all    inner optimizer   outer, AdamW moments           -
    fedavg   H      delta     bf16   all    SGD, rate 1       outer                          inner optimizer
    diloco   H      delta     int8   all    SGD-Nesterov      outer, momentum                inner optimizer

A run file names a row or spells the choices out (`type = "custom"`). Before a run starts, `spell_out` turns either into
`Choices`, which RunConfig holds: defaults that depend on the number of peers are decided once, for all.

`Method` is what a peer computes between rounds: tensors in, tensors out. It does not know rounds, peers or bytes sent.

FedAvg: McMahan et al., 1602.05629, algorithm 1. DiLoCo: Douillard et al., 2311.08105, algorithm 1.
"""

from typing import Annotated, Literal, assert_never, final

import msgspec
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import Bf16Config, CodecConfig, Int8Config, bounds
from weft.codec import build as build_codec
from weft.config import Config
from weft.errors import ConfigError
from weft.sync import outer as optimizers
from weft.sync.outer import AdamWConfig, NesterovConfig, SgdConfig, State, StepContext

_Every = Annotated[int, msgspec.Meta(ge=1, le=100_000, description="inner steps between synchronisations")]
_Lr = Annotated[float, msgspec.Meta(gt=0, le=10, description="outer learning rate")]
_Momentum = Annotated[float, msgspec.Meta(ge=0, lt=1, description="outer momentum")]


class InnerConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="inner"):
    """Apply what was merged with the run's inner optimizer, whose moments are then replicated."""


ApplyConfig = SgdConfig | NesterovConfig | InnerConfig


class Choices(Config, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """The five choices spelled out, and who is waited for."""

    every: _Every
    send: Literal["gradient", "delta"]
    apply: ApplyConfig
    codec: CodecConfig = Bf16Config()
    reply_codec: CodecConfig | None = None  # of the merged parts; None: the same as `codec`
    among: Literal["all"] = "all"
    wait: Literal["all"] = "all"  # for all members, until the deadline

    def __post_init__(self) -> None:
        if self.send == "gradient" and self.every != 1:
            raise ConfigError(
                f"method: every: {self.every} inner steps leave no single gradient to send; "
                'set every = 1, or send = "delta".'
            )
        if self.send == "delta" and isinstance(self.apply, InnerConfig):
            raise ConfigError(
                'method: apply: "inner" steps along gradients, a delta already holds inner steps; '
                'set apply to "sgd" or "nesterov", or send = "gradient".'
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


class DiLoCoConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="diloco"):
    """Every H steps, the mean delta, applied with Nesterov momentum."""

    every: _Every = 30
    lr: _Lr | None = None  # None: by number of peers, `diloco_defaults`
    momentum: _Momentum | None = None
    codec: CodecConfig = Int8Config()
    reply_codec: CodecConfig | None = None


MethodConfig = DdpConfig | FedAvgConfig | DiLoCoConfig | Choices


def spell_out(config: MethodConfig, num_peers: int) -> Choices:
    """Return the five choices that `config` names in a run of about `num_peers` (>= 1) peers."""
    match config:
        case Choices():
            return config
        case DdpConfig():
            return Choices(
                every=1, send="gradient", apply=InnerConfig(), codec=config.codec, reply_codec=config.reply_codec
            )
        case FedAvgConfig():
            return Choices(
                every=config.every,
                send="delta",
                apply=SgdConfig(lr=1.0),
                codec=config.codec,
                reply_codec=config.reply_codec,
            )
        case DiLoCoConfig():
            lr, momentum = diloco_defaults(num_peers)
            apply = NesterovConfig(
                lr=lr if config.lr is None else config.lr,
                momentum=momentum if config.momentum is None else config.momentum,
            )
            return Choices(
                every=config.every, send="delta", apply=apply, codec=config.codec, reply_codec=config.reply_codec
            )
    assert_never(config)


def diloco_defaults(num_peers: int) -> tuple[float, float]:
    """Return the outer learning rate and momentum for `num_peers` replicas.

    Best constant rates of "Scaling Laws for DiLoCo" (2503.09799; H = 30, momentum 0.9, 35M to 10B parameters): one
    replica 0.4, two and four 0.6, eight 0.8 to 1.0; they depend on the replicas, hardly on the model's size. They rise
    with H by an amount the paper plots but does not print, so H is not an argument. All are tuned on runs of thousands
    of rounds: where a run has only tens, momentum 0.9 has no time to settle and less is better.
    """
    if num_peers <= 1:
        return 0.4, 0.9
    return (0.6 if num_peers < 6 else 0.8), 0.9  # 6 is nearer to 8 than to 4, by ratio


@final
class Method:
    """The five choices as operations on flat vectors. It holds no state of a run."""

    def __init__(self, choices: Choices, inner: AdamWConfig) -> None:
        self.choices = choices
        self.codec = build_codec(choices.codec)
        self.reply_codec = build_codec(choices.reply_codec or choices.codec)
        self._optimizer = optimizers.build(inner if isinstance(choices.apply, InnerConfig) else choices.apply)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Names of the flat vectors that are equal on all members after a commit."""
        return ("outer", *self.init(0))

    def init(self, num: int) -> State:
        """Return the outer optimizer's state before the first round: replicated."""
        return self._optimizer.init(num)

    def contribution(
        self, outer: Float32[Tensor, " num"], local_or_gradient: Float32[Tensor, " num"]
    ) -> Float32[Tensor, " num"]:
        """Return what this peer brings to a round, on the device it is given.

        Args:
            outer: the parameters after the last commit this peer applied.
            local_or_gradient: the parameters after the inner steps where deltas are sent (carry included: see
                `rebase`); the mean gradient where gradients are.

        Returns:
            outer - local, in new memory; or the gradient itself, not copied.
        """
        if self.choices.send == "gradient":
            return local_or_gradient
        if outer.device.type == "cpu":
            return torch.sub(outer, local_or_gradient, out=bounds.empty(outer.numel()))
        return outer.sub(local_or_gradient)

    def apply(
        self,
        outer: Float32[Tensor, " num"],
        state: State,
        merged: Float32[Tensor, " num"],
        context: StepContext,
    ) -> None:
        """Make the outer step on `outer` and `state`, in place; `merged` is the decoded result of a round."""
        self._optimizer.apply(outer, state, merged, context)

    def rebase(
        self, local: Float32[Tensor, " num"], outer: Float32[Tensor, " num"], carry: Float32[Tensor, " num"] | None
    ) -> None:
        """Set `local` to where training goes on after an outer step: local = outer - carry.

        Args:
            carry: the delta no manifest has counted yet; None where all was counted, or where gradients are sent
                (a carried gradient is no displacement: it is added to the next one).
        """
        local.copy_(outer)
        if carry is not None:
            if self.choices.send == "gradient":
                raise ValueError("a carried gradient does not move the parameters; add it to the next gradient")
            local.sub_(carry)
