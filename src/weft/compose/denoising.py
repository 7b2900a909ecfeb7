"""Training a member to tell what is masked (`blocks.denoise`), which goes on where it was stopped; and what it is below
a causal one, asked for each token by those before it alone.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.compose.blocks.denoise import (
    BertConfig,
    Masked,
    StackedBody,
    bert,
    denoising_loss,
    next_by_mask,
    prefix_logits,
    spans,
)
from weft.compose.descent import DescentConfig, Draw
from weft.compose.lesson import Lesson
from weft.compose.space import Space
from weft.compose.stacks.align import head_flops, member_flops
from weft.compose.stacks.body import vector_of
from weft.compose.stacks.solo import MemberDescent, member_over
from weft.compose.stacks.stack import PostConfig, Stack, uniform
from weft.data.rows import Batch
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule

Masks = Literal["bert", "spans"]
"""Single tokens, or UL2's spans."""
AT_ONCE = (
    8192  # tokens of one forward pass: each place that is asked reads a whole text, and holds what sees what of it
)


class DenoisingDescent(MemberDescent[FlatModel]):
    """Training of one member to tell what is masked.

    Args:
        member: its config, and the vector of its body, which is copied.
        seed: of what is masked.
    """

    def __init__(
        self,
        masks: Masks,
        training: DescentConfig,
        space: Space,
        member: tuple[ModelConfig, Float32[Tensor, " num"]],
        draw: Draw,
        seed: int,
    ) -> None:
        super().__init__(training, space, member_over(space, member), draw)
        self._masks: Masks = masks
        self._seed = seed

    def _loss(self, number: int) -> Tensor:
        tokens = self._draw(number).tokens
        return denoising_loss(
            self._space, self._flat.module, masked(self._masks, self._space, tokens, self._seed, number)
        )


def masked(masks: Masks, space: Space, tokens: Int64[Tensor, "batch tokens"], seed: int, step: int) -> Masked:
    """Return texts with something left out, as BERT or UL2 does; arguments as of these."""
    match masks:
        case "bert":
            return bert(BertConfig(), tokens, space.vocab_size, seed, step)
        case "spans":
            return spans(tokens, seed, step)


@dataclass(frozen=True, eq=False, kw_only=True)
class Denoising(Lesson):
    """What is asked for; its seed is that of what is masked."""

    name: ClassVar[str] = "denoise"

    masks: Masks

    @property
    def settings(self) -> object:
        return self.masks

    @property
    def flops(self) -> int:
        return int(self.tokens * (member_flops(self.member, 0, self.seq_len).total + head_flops(self.member)))

    def begin(self, draw: Draw) -> DenoisingDescent:
        member = self.body.config, vector_of(self.body)
        return DenoisingDescent(self.masks, self.training, self.space, member, draw, self.seed)

    @torch.no_grad()
    def told(self, body: SectionModule, text: Batch, size: int = 8) -> float:
        """Return the loss of what is masked in a text, nats per token; always the same is masked."""
        found = list[tuple[float, int]]()
        for start in range(0, len(text.tokens), size):
            part = masked(self.masks, self.space, text.part(start, start + size).tokens, self.seed, start)
            found.append((float(denoising_loss(self.space, body, part)), int((part.targets >= 0).sum())))
        return sum(loss * num for loss, num in found) / sum(num for _, num in found)


class Below(NamedTuple):
    """Losses of each text at some places, nats per token: mean over these.

    Args:
        stack: the causal member on what the other makes of the tokens up to each place, all of which see each other.
        masked: the same where no place sees a later one.
        top: the causal member alone.
        denoiser: the other alone, which is asked for a mask after these tokens.
        ensemble: both asked together, alike.
    """

    stack: Float32[Tensor, " texts"]
    masked: Float32[Tensor, " texts"]
    top: Float32[Tensor, " texts"]
    denoiser: Float32[Tensor, " texts"]
    ensemble: Float32[Tensor, " texts"]


@torch.no_grad()
def below(space: Space, lower: SectionModule, top: SectionModule, text: Batch, num_places: int) -> Below:
    """Return what a member that sees all is worth below a causal one, on text that nobody trained on.

    It costs a pass for each place.

    Args:
        num_places: of each text, spread evenly over it; at most as many as it has tokens but for the last.
    """
    length = text.tokens.shape[1]
    num = min(num_places, length - 1)
    places = (torch.arange(num, device=text.tokens.device) + 1) * (length - 1) // num - 1
    parts = [_below(space, lower, top, tokens, places) for tokens in text.tokens]
    return Below(*(torch.stack(each).cpu() for each in zip(*parts, strict=True)))


def _below(
    space: Space,
    lower: SectionModule,
    top: SectionModule,
    tokens: Int64[Tensor, " tokens"],
    places: Int64[Tensor, " places"],
) -> Below:
    targets, some_places = tokens[places + 1], torch.split(places, max(1, AT_ONCE // len(tokens)))
    members = StackedBody(lower, sees_all=True), StackedBody(top, sees_all=False)
    stacks = Stack(space, (lower, top), uniform(PostConfig(), 2)), Stack(space, (top,))
    stack = torch.cat([prefix_logits(space, members, tokens, some) for some in some_places])
    by_mask = torch.cat([next_by_mask(space, lower, tokens, some) for some in some_places])
    masked, alone = (each.logits(tokens[None])[0, places] for each in stacks)
    losses = [cross_entropy(each, targets, reduction="none") for each in (stack, masked, alone, by_mask)]
    together = log(2) - torch.stack((-losses[2], -losses[3])).logsumexp(0)
    return Below(*(each.mean() for each in (*losses, together)))
