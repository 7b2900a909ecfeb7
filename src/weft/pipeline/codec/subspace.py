"""Activations as coordinates in a space of few dimensions, in which the model is held: a subspace network.

    U        width x k, orthonormal columns; drawn from a seed and never changed
    F        a fixed number for each token and channel, drawn from the same seed: not trained, not sent
    table    E + F, where the rows of E lie in the span of U: what the first section embeds with

    here     c = U^T (h - F[token])            k numbers a token
    there    h = U c + F[token]                h again, to rounding: all that is added to F[token] is in the span
    back     U^T g, and U of that there        what the chain rule makes of these two lines

The residual stream stays in F[token] + span U because each matrix that writes to it does. After every optimizer step,
and whatever else changes weights (of a round, what its codec rounds lies anywhere):

    out <- U U^T out      down <- U U^T down      E <- E U U^T        not in the last section, which sends nothing on

Activations of weights that are not so held are not sent: most of them would be lost.

Its authors norm what blocks write, so the gains of those norms must not be trained; here blocks norm what they read,
and no gain is in the way. They append the token's id to the coordinates; here tokens come with each micro-batch.

    held = confined(config, model, section)
    held.begin(vector)            # once, of the initial weights
    held.constrain(vector)        # after each step of the optimizer

Both change weights to the same bits on every machine (`codec.exact`). The optimizer's moments are left as they are.

Protocol Models (Ramasinghe et al., 2506.01260), as Pluralis' node0 has it. Experimental: others find that projections
that do not change cost quality, and benchmarks/reports/activations.md has how much here.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.codec import Codec
from weft.codec.exact import matmul
from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import Layout, layout
from weft.model.sections import Section
from weft.pipeline.codec.activations import SubspaceConfig
from weft.pipeline.codec.boundary import Activations, Samples, Shape
from weft.rng import integers64, stream
from weft.wire import Buffer

_FAR = 0.02  # of their length may lie outside of the space: more than rounding, of bf16 too, leaves of matrices
_ROUNDING = 1e-5  # and of their length with the fixed table, from which they are told by a difference
WRITERS = (".attention.out.weight", ".ffn.down.weight")  # of the residual stream


@dataclass(frozen=True)
class Space:
    directions: Float32[Tensor, "width rank"]  # U
    fixed: Float32[Tensor, "vocab width"]  # F


@lru_cache(maxsize=2)  # who sends and who holds weights have one, and it is large
def drawn(config: SubspaceConfig, width: int, vocab_size: int) -> Space:
    """Return the space that all members of a run have alike.

    Raises:
        ConfigError: it has more dimensions than the model.
    """
    if config.rank > width:
        raise ConfigError(f"activations subspace: rank: {config.rank} is above the model's width, {width}.")
    columns = _normal(width * config.rank, config.seed, "directions").view(width, config.rank)
    fixed = _normal(vocab_size * width, config.seed, "fixed").mul_(config.fixed_std)
    return Space(_orthonormal(columns), fixed.view(vocab_size, width))


class Confined:
    """Weights of a section, or of the whole model, that are held to a space.

    Args:
        layout: of their vector.
        is_sent_on: their output goes to another section: what writes to the residual stream is projected.
    """

    def __init__(self, layout: Layout, space: Space, *, is_sent_on: bool) -> None:
        self._spaces = {torch.device("cpu"): space}  # by where weights have been
        self._embeddings = [span for span in layout if span.name == "embed.weight"]
        self._writers = [span for span in layout if is_sent_on and span.name.endswith(WRITERS)]
        self._layout = layout

    def begin(self, vector: Tensor) -> None:
        """Make initial weights those of a model in the space: add the fixed table to the embedding, and `constrain`."""
        for span in self._embeddings:
            self._layout.view(vector, span).add_(self._space(vector.device).fixed)
        self.constrain(vector)

    def constrain(self, vector: Tensor) -> None:
        """Project what has left the space since."""
        space = self._space(vector.device)
        directions, fixed = space.directions, space.fixed
        for span in self._embeddings:
            matrix = self._layout.view(vector, span)
            matrix.copy_(fixed + matmul(matmul(matrix.float() - fixed, directions), directions.T))
        for span in self._writers:
            matrix = self._layout.view(vector, span)
            matrix.copy_(matmul(directions, matmul(directions.T, matrix.float())))

    def _space(self, device: torch.device) -> Space:
        if device not in self._spaces:
            here = self._spaces[torch.device("cpu")]
            self._spaces[device] = Space(here.directions.to(device), here.fixed.to(device))
        return self._spaces[device]


def confined(config: SubspaceConfig, model: ModelConfig, section: Section) -> Confined:
    """Return what holds the weights of a section of a model to the run's space.

    Raises:
        ConfigError: as `drawn`.
    """
    space = drawn(config, model.width, model.vocab_size)
    return Confined(layout(model, section), space, is_sent_on=not section.is_last)


@final
class InSubspace:
    """Coordinates of activations, or of their gradients.

    Args:
        fixed: None: of gradients, which no fixed table is part of.
        values: encodes coordinates.
    """

    def __init__(
        self, directions: Float32[Tensor, "width rank"], fixed: Tensor | None, values: Codec, shape: Shape
    ) -> None:
        self._directions = directions
        self._fixed = fixed
        self._values = values
        self._seq_len = shape.seq_len
        self._rank = directions.shape[1]

    def encode(self, x: Activations, samples: Samples) -> Buffer:
        if self._fixed is None:
            return self._values.encode((x @ self._directions).flatten())
        within = x - self._fixed[samples.tokens]
        coordinates = within @ self._directions
        outside, length = float((within - coordinates @ self._directions.T).norm()), float(within.norm())
        if outside > _FAR * length + _ROUNDING * float(x.norm()):  # never where a number is NaN: the codec says so
            raise ConfigError(
                f"activations subspace: {outside / length:.0%} of what is to be sent lies outside of the space. Make "
                "initial weights ready with Confined.begin, and call Confined.constrain whenever they have changed."
            )
        return self._values.encode(coordinates.flatten())

    def decode(self, data: Buffer, samples: Samples) -> Activations:
        num = len(samples) * self._seq_len
        found = self._values.decode(data, num * self._rank).view(len(samples), self._seq_len, self._rank)
        x = found @ self._directions.T
        if self._fixed is not None:
            x += self._fixed[samples.tokens]
        bounds.require_finite_payload(bounds.largest(x.flatten()))
        return x

    def nbytes(self, num_samples: int) -> int:
        return self._values.nbytes(num_samples * self._seq_len * self._rank)


def _orthonormal(columns: Float32[Tensor, "width rank"]) -> Float32[Tensor, "width rank"]:
    """Return an orthonormal basis of the columns' span: Gram and Schmidt, each twice; to the same bits everywhere."""
    basis = torch.zeros_like(columns)
    for number in range(columns.shape[1]):
        column, before = columns[:, number : number + 1], basis[:, :number]
        for _ in range(2):
            if number:
                column = column - matmul(before, matmul(before.T, column))
            column = column / torch.sqrt(matmul(column.T, column))
        basis[:, number : number + 1] = column
    return basis


def _normal(num: int, seed: int, name: str) -> Float32[Tensor, " num"]:
    """Return numbers of deviation 1: the sum of a random word's four quarters, centred, as initial weights are."""
    quarters = integers64(stream(seed, "subspace", name), num).view(np.uint16).reshape(num, 4)
    sums = quarters.astype(np.int64).sum(1) - 2 * 0xFFFF
    return torch.from_numpy(sums.astype(np.float32)).div_(math.sqrt(((1 << 32) - 1) / 3))
