"""Training a block alone (`blocks.block`), which goes on where it was stopped; and what blocks of one cut are worth,
one after the other, beside each of them as a decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.compose.blocks.block import NUM_WAVES, DenoisingBlock, FlatBlock, block_layout, block_over
from weft.compose.blocks.decode import DenoisingModel
from weft.compose.blocks.noise import NoiseConfig, NoiseLevels
from weft.compose.controls import ensemble, losses
from weft.compose.descent import DescentConfig, Draw
from weft.compose.lesson import Lesson
from weft.compose.space import Space
from weft.compose.stacks.align import head_flops, member_flops
from weft.compose.stacks.body import body, require_fit, unattached, vector_of
from weft.compose.stacks.solo import MemberDescent
from weft.compose.stacks.stack import Stack
from weft.data.rows import Batch
from weft.model.config import ModelConfig
from weft.model.transformer import SectionModule

Losses = Float32[Tensor, " texts"]


class BlockDescent(MemberDescent[FlatBlock]):
    """Training of one block.

    Args:
        seed: of levels and noise.
    """

    def __init__(self, training: DescentConfig, space: Space, flat: FlatBlock, draw: Draw, seed: int) -> None:
        super().__init__(training, space, flat, draw)
        self._seed = seed

    def _loss(self, number: int) -> Tensor:
        batch = self._draw(number)
        return self._flat.block.loss_of_step(batch.tokens, batch.targets, self._seed, number)


@dataclass(frozen=True, eq=False, kw_only=True)
class Blocking(Lesson):
    """What is asked for: a block that begins with a member's layers; its seed is that of levels and noise.

    Args:
        place: its number, and how many blocks there are.
    """

    name: ClassVar[str] = "block"

    noise: NoiseConfig
    place: tuple[int, int]

    @property
    def settings(self) -> object:
        return self.noise, self.place

    @property
    def flops(self) -> int:
        return int(self.tokens * block_flops(self.body.config, self.space, self.seq_len))

    def begin(self, draw: Draw) -> BlockDescent:
        return BlockDescent(self.training, self.space, self.block(), draw, self.seed)

    def block(self, vector: Float32[Tensor, " num"] | None = None) -> FlatBlock:
        """Return the block with what was trained; None: before any step, where nothing tells it of noise.

        Raises:
            ConfigError: the member does not fit the space, or there is no block of such a number.
        """
        config = self.body.config
        require_fit(config, self.space, "the member")
        if vector is None:
            layers = vector_of(self.body)
            vector = torch.cat((layers, layers.new_zeros(block_layout(config).num_parameters - len(layers))))
        return block_over(vector, config, self.space, NoiseLevels(self.noise, self.space.width), self.place)

    @torch.no_grad()
    def told(self, flat: FlatBlock, text: Batch, size: int = 8) -> float:
        """Return the loss of a text at the block's own noise, nats per token, each weighed alike.

        The noise is always the same, and none that the block is trained with.
        """
        found, levels = list[tuple[float, int]](), flat.block.levels
        for start in range(0, len(text.tokens), size):
            part = text.part(start, start + size)
            batch, num_tokens = part.tokens.shape
            drawn = levels.draw(*self.place, self.seed, self.training.steps + start, (batch, num_tokens))
            sigma, noise = (each.to(part.tokens.device) for each in drawn)
            z = self.space.begin(part.targets) + sigma[..., None] * noise
            logits = flat.block.predict(flat.block.read(part.tokens), z, sigma)
            found.append((float(cross_entropy(logits.flatten(0, 1), part.targets.flatten())), batch * num_tokens))
        return sum(loss * num for loss, num in found) / sum(num for _, num in found)


def block_flops(config: ModelConfig, space: Space, seq_len: int) -> float:
    """Return the operations of a step on a token: two streams through the layers, and the head.

    Of the context's last layer nothing but keys and values is asked.
    """
    member = Stack(space, (unattached(config),))
    stream, head = member_flops(member, 0, seq_len).total, head_flops(member)
    asked = 2 * config.width * config.num_kv_heads * config.channels_per_head  # of the context's last layer
    tells = (
        config.width**2 + 2 * config.width * NUM_WAVES * config.num_layers
    )  # of noise: it is given, so not back to it
    return stream * (2 - 1 / config.num_layers) + 6 * asked + 4 * tells + head


class Told(NamedTuple):
    """Losses of each text, nats per token.

    Args:
        blocks: one after the other, by the mean over draws of noise.
        draw: by one of them.
        exits: by that one, after each block but the last.
        alone: each block as a decoder of its layers, which knows no noise.
        ensemble: these asked together, alike.
    """

    blocks: Losses
    draw: Losses
    exits: tuple[Losses, ...]
    alone: tuple[Losses, ...]
    ensemble: Losses


@torch.no_grad()
def told(blocks: Sequence[DenoisingBlock], text: Batch, seed: int, num_draws: int, size: int = 8) -> Told:
    """Return what blocks are worth on text that nobody trained on.

    Raises:
        ConfigError: they are not all of one cut, or of several spaces.
    """
    model, space = DenoisingModel(blocks), blocks[0].space
    decoders = [Stack(space, (decoder_of(block),)).logits for block in blocks]
    parts = [text.part(start, start + size) for start in range(0, len(text.tokens), size)]
    found = [_told(model, part, seed, num_draws) for part in parts]
    *exits, draw = (torch.cat(each) for each in zip(*(exits for _, exits in found), strict=True))
    return Told(
        blocks=torch.cat([mixed for mixed, _ in found]),
        draw=draw,
        exits=tuple(exits),
        alone=tuple(losses(each, text) for each in decoders),
        ensemble=ensemble(decoders, text),
    )


def _told(model: DenoisingModel, text: Batch, seed: int, num_draws: int) -> tuple[Losses, list[Losses]]:
    """Return the losses by the mean over draws, and by the first of them after each block."""
    contexts, noise = model.read(text.tokens), model.noise(seed, 0)[: text.tokens.shape[1]]
    exits = [
        cross_entropy(logits.flatten(0, 1), text.targets.flatten(), reduction="none").view_as(text.targets).mean(1)
        for logits in model.exits(contexts, noise)
    ]
    mixed = -model.log_likelihoods(text.tokens, text.targets, seed, num_draws).mean(1)
    return mixed.float().cpu(), [each.cpu() for each in exits]


def decoder_of(block: DenoisingBlock) -> SectionModule:
    """Return a block's layers, which know no noise."""
    return body(block.config, vector_of(block))
