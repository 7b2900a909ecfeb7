"""The layers of a section, as one member of a team computes them: of each a part, the team the rest.

    layers = SplitLayers(model, split, number)     # of weights as they are now
    passing = layers.passing(seq_len)
    y = await passing.forward(team, x)             # x and dy: the member's `piece` of all
    dx = await passing.backward(team, dy)          # by the same members, in another team
    passing.add(weight, into)                      # what it found of the weights' gradients

By heads a piece is all there is; by segments it is the member's tokens.
"""

from collections.abc import Mapping
from typing import cast

import torch
from jaxtyping import Float
from msgspec import UNSET
from torch import Tensor

from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel
from weft.model.layers import Block, rotation
from weft.pipeline.device import Step
from weft.pipeline.split.cut import Segment, SplitConfig, heads_parts, num_tokens, zigzag
from weft.pipeline.split.layer import ByHeads, BySegments
from weft.pipeline.split.ring_attention import Activations, put, select
from weft.pipeline.split.team import Team
from weft.pipeline.split.tensor_parallel import add_gradients, cut_layer
from weft.pipeline.written import AsWritten

Vector = Float[Tensor, " num"]


def check_split(split: SplitConfig, model: ModelConfig, seq_len: int) -> None:
    """
    Raises:
        ConfigError: there is less to share than members, or segments would have to look past a window.
    """
    speeds = _speeds(split)
    if split.by == "heads":
        heads_parts(model, speeds)
    elif seq_len < 2 * split.members:
        raise ConfigError(f"split by segments: {split.members} members of {seq_len} tokens. Each needs two at least.")
    elif model.window is not UNSET and model.window < seq_len:
        raise ConfigError(
            f"split by segments: the model's tokens see {model.window} tokens, and samples have {seq_len}. Split by "
            f"heads, or set train.seq_len to at most {model.window}."
        )


class SplitLayers:
    """
    Args:
        model: of a section; its layers' weights are copied, where a part has less than all.
        number: of this member in the team; 0 leads.
    """

    def __init__(self, model: FlatModel, split: SplitConfig, number: int) -> None:
        self.model = model
        self.weights = AsWritten(model)
        self._split = split
        self.blocks = [cast(Block, block) for block in model.module.layers.values()]
        self._spans = [
            {span.name.removeprefix(start): span for span in model.layout if span.name.startswith(start)}
            for start in (f"layers.{layer}." for layer in model.module.layers)
        ]
        if split.by == "heads":
            self._part = heads_parts(model.config, _speeds(split))[number]
            self._cut = [cut_layer(block, model.config, self._part) for block in self.blocks]

    def passing(self, seq_len: int) -> "Passing":
        """Return a micro-batch that has yet to pass, of samples of so many tokens."""
        return Passing(self, zigzag(seq_len, _speeds(self._split)) if self._split.by == "segments" else None)

    def layer(
        self, number: int, team: Team, segments: tuple[Segment, ...] | None, x: Activations
    ) -> ByHeads | BySegments:
        """Return what computes this member's part of a layer."""
        inverse = self.model.module.angle_bits.view(torch.float32)
        if segments is not None:
            return BySegments(team, self.blocks[number], inverse.to(x.device), segments)
        return ByHeads(team, self._cut[number], rotation(inverse.to(x.device), 0, x.shape[1]))

    def add(self, number: int, found: Mapping[str, Tensor], weight: float, into: Vector) -> None:
        """Add a layer's gradients to a vector as long as the section's."""
        places = {name: self.model.layout.view(into, span) for name, span in self._spans[number].items()}
        scaled = {name: gradient * weight for name, gradient in found.items()}
        if self._split.by == "heads":
            add_gradients(self.model.config, self._part, scaled, places)
        else:
            for name, gradient in scaled.items():
                places[name].add_(gradient)


class LayersAt:
    """The layers of each step: weights change between two, and may be written within one, too."""

    def __init__(self, split: SplitConfig, width: int) -> None:
        self.width = width
        self._split = split
        self._made: tuple[FlatModel, Step, int, SplitLayers] | None = None

    def forget(self) -> None:
        """Weights have changed, or leave their device."""
        self._made = None

    def at(self, model: FlatModel, step: Step, number: int) -> SplitLayers:
        """Return the layers of what computes the section in a step, as member `number` of a team has them."""
        made = self._made
        if made is None or made[0] is not model or made[1:3] != (step, number) or made[3].weights.are_outdated:
            made = self._made = model, step, number, SplitLayers(model, self._split, number)
        return made[3]


class Passing:
    """One micro-batch on its way.

    Args:
        segments: whose tokens are whose; None: all have all.
    """

    def __init__(self, layers: SplitLayers, segments: tuple[Segment, ...] | None) -> None:
        self._layers = layers
        self._segments = segments
        self._made: list[ByHeads | BySegments] = []

    @property
    def weights(self) -> AsWritten:
        return self._layers.weights

    async def forward(self, team: Team, x: Activations) -> Activations:
        for number in range(len(self._layers.blocks)):
            member = self._layers.layer(number, team, self._segments, x)
            self._made.append(member)
            x = await member.forward(x)
        return x

    async def backward(self, team: Team, dy: Activations) -> Activations:
        for member in reversed(self._made):
            dy = await member.backward(dy, team)
        return dy

    def add(self, weight: float, into: Vector) -> None:
        """Add this member's part of the gradients of weights to `into`, `weight` times. Once, after `backward`."""
        with torch.no_grad():
            for number, member in enumerate(self._made):
                self._layers.add(number, member.gradients, weight, into)
        self._made.clear()

    # --- pieces ---

    def piece(self, x: Activations, number: int) -> Activations:
        """Return what a member has of numbers of all tokens."""
        return x if self._segments is None else select(x, self._segments[number])

    def shape(self, whole: torch.Size, number: int) -> torch.Size:
        """Return the shape of a member's piece."""
        if self._segments is None:
            return whole
        return torch.Size((whole[0], num_tokens(self._segments[number]), whole[2]))

    def joined(self, pieces: list[Activations], whole: torch.Size) -> Activations:
        """Return numbers of all tokens, of each member's in their order; by heads the first has all."""
        if self._segments is None:
            return pieces[0]
        found = pieces[0].new_empty(whole)
        for segment, piece in zip(self._segments, pieces, strict=True):
            put(piece, segment, found)
        return found

    @property
    def vector(self) -> Vector:
        """Return the section's weights, to know where and how long they are."""
        return self._layers.model.vector

    @property
    def has_pieces(self) -> bool:
        """Whether members have less than all."""
        return self._segments is not None


def _speeds(split: SplitConfig) -> list[float]:
    return [1.0] * split.members  # nobody's is known so well
