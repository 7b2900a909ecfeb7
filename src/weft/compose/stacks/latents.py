"""Latent loops: a member learns to read what a member writes, before it ever meets another.

A second pass reads the same tokens, but at some positions, in their place, what the first pass made:

    same    at t what came out at t        what a stack gives to a member, which still predicts the token after t
    prev    at t what came out at t - 1    COCONUT for all positions at once: the output stands for the token at t

    loss = (1 - w) CE(first pass) + w CE(second pass, at replaced positions alone)

Both have the targets of their batch, and what is looped is detached: gradients of the second pass end at its inputs.
Positions are drawn with a probability that rises from p0 to p1; where the first pass is to be unsure of them, only
among those.

COCONUT for all positions at once: snimu, COCONUT-parallel pretraining, 2025. As published: `stacks.thoughts`.
"""

from typing import Annotated, Literal

import msgspec
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.compose.descent import DescentConfig, Draw
from weft.compose.space import Space, normed
from weft.compose.stacks.align import head_flops, member_flops
from weft.compose.stacks.solo import MemberDescent, member_over
from weft.compose.stacks.stack import Stack
from weft.config import Config
from weft.data.rows import UNTRAINED, Batch
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule
from weft.rng import stream

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]


class RandomConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="random"):
    """Any position may be replaced."""


class EntropyConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="entropy"):
    """Only positions may be replaced of which the first pass is unsure."""

    threshold: Annotated[float, msgspec.Meta(ge=0, le=32, description="nats; its prediction has more of entropy")]


class LatentConfig(Config, frozen=True, kw_only=True):
    """How a member is trained on what it wrote itself."""

    kind: Literal["same", "prev"] = "same"
    select: RandomConfig | EntropyConfig = RandomConfig()
    p0: Probability = 0.1
    p1: Probability = 1.0
    ramp: Annotated[float, msgspec.Meta(ge=0, le=1, description="share of all steps after which it is p1")] = 0.5
    every: Annotated[int, msgspec.Meta(ge=1, le=10**6, description="steps, of which one has a second pass")] = 1
    weight: Annotated[float, msgspec.Meta(gt=0, le=1, description="of the second pass in the loss")] = 0.5

    def probability(self, number: int, num_steps: int) -> float:
        """Return with which probability a position is replaced in a step."""
        done = number / (self.ramp * num_steps) if self.ramp else 1.0
        return self.p0 + (self.p1 - self.p0) * min(done, 1.0)


class LatentDescent(MemberDescent[FlatModel]):
    """Training of one member with a latent loop.

    Args:
        member: its config, and the vector of its body, which is copied.
        seed: of which positions are replaced.
    """

    def __init__(
        self,
        config: LatentConfig,
        training: DescentConfig,
        space: Space,
        member: tuple[ModelConfig, Float32[Tensor, " num"]],
        draw: Draw,
        seed: int,
    ) -> None:
        super().__init__(training, space, member_over(space, member), draw)
        self._latent, self._seed = config, seed

    def _loss(self, number: int) -> Tensor:
        batch, config = self._draw(number), self._latent
        probability = 0.0 if number % config.every else config.probability(number, self.config.steps)
        chosen = stream(self._seed, "latents", number).random(tuple(batch.tokens.shape)) < probability
        return loop_loss(config, self._space, self._flat.module, batch, torch.from_numpy(chosen))


def loop_loss(
    config: LatentConfig, space: Space, body: SectionModule, batch: Batch, chosen: Bool[Tensor, "batch tokens"]
) -> Float32[Tensor, ""]:
    """Return the loss of both passes; where no position is replaced, that of the first.

    Args:
        chosen: positions that may be replaced.
    """
    first, logits, targets = passes(config, space, body, batch, chosen)
    if not len(targets):
        return first
    return (1 - config.weight) * first + config.weight * cross_entropy(logits, targets)


def passes(
    config: LatentConfig, space: Space, body: SectionModule, batch: Batch, chosen: Bool[Tensor, "batch tokens"]
) -> tuple[Float32[Tensor, ""], Float32[Tensor, "replaced vocab"], Int64[Tensor, " replaced"]]:
    """Return the loss of the first pass, and logits and targets of the second at replaced positions.

    Args:
        chosen: as of `loop_loss`.
    """
    tokens, targets, positions = batch
    embedded = space.begin(tokens)
    made = body(embedded, positions=positions)
    first = space.loss(made, targets)
    latents = looped(config.kind, made.detach(), space.norm_eps)
    replaced = replaceable(config, space, made.detach(), batch) & chosen.to(tokens.device)
    counted = replaced & (targets != UNTRAINED)
    if not counted.any():
        return first, first.new_empty(0, space.vocab_size), targets[counted]
    again = body(torch.where(replaced[..., None], latents, embedded), positions=positions)
    return first, space.logits(again[counted]), targets[counted]


@torch.no_grad()
def reads_itself(
    config: LatentConfig, space: Space, body: SectionModule, text: Batch, seed: int, size: int = 8
) -> tuple[float, float]:
    """Return the loss of a member alone, and where it reads what it wrote, NaN if nowhere: nats per token.

    As many positions are replaced as at the end of training.

    Args:
        seed: of which.
        size: sequences at a time.
    """
    alone, again = list[Tensor](), list[Tensor]()
    chosen = torch.from_numpy(stream(seed, "latents", "told").random(tuple(text.tokens.shape)) < config.p1)
    for start in range(0, len(text.tokens), size):
        part = text.part(start, start + size)
        first, logits, targets = passes(config, space, body, part, chosen[start : start + size])
        alone.append(first * part.num_predicted)
        again.append(cross_entropy(logits, targets, reduction="none"))
    return float(torch.stack(alone).sum() / text.num_predicted), float(torch.cat(again).mean())


def loop_flops(config: LatentConfig, steps: int, member: Stack, seq_len: int) -> float:
    """Return the operations of so many steps on a token each: two passes, and the head where the second is told.

    Where only unsure positions may be replaced, the second's head is counted for more than there are.

    Args:
        member: alone.
    """
    once, head = member_flops(member, 0, seq_len).total, head_flops(member)
    shares = [config.probability(number, steps) for number in range(0, steps, config.every)]
    looked_at = head / 2 if isinstance(config.select, EntropyConfig) else 0.0  # forward alone
    return steps * (once + head) + sum(once + share * head + looked_at for share in shares if share)


def looped(
    kind: Literal["same", "prev"], made: Float[Tensor, "batch tokens width"], eps: float
) -> Float[Tensor, "batch tokens width"]:
    """Return what may stand at each position; of kind "prev" nothing may at the first."""
    latents = normed(made, eps)
    return latents if kind == "same" else latents.roll(1, dims=1)


@torch.no_grad()
def replaceable(
    config: LatentConfig, space: Space, made: Float[Tensor, "batch tokens width"], batch: Batch
) -> Bool[Tensor, "batch tokens"]:
    """Return at which positions something may stand in place of a token: of the same text, and unsure if asked for."""
    allowed = torch.ones_like(batch.tokens, dtype=torch.bool)
    if isinstance(config.select, EntropyConfig):
        allowed = entropy(space.logits(made)) > config.select.threshold
    if config.kind == "same":
        return allowed
    allowed = allowed.roll(1, dims=1)  # what stands there is what came out before
    if batch.positions is None:
        allowed[:, 0] = False
        return allowed
    return allowed & (batch.positions != 0)


def entropy(logits: Float32[Tensor, "*dims vocab"]) -> Float32[Tensor, "*dims"]:
    """Return the entropy of each prediction, in nats."""
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)
