"""A micro-batch's activations as two thin matrices of int8, whose product is close to them.

    X        n x width: a row for each token of the micro-batch
    Q        a basis of X (X^T (X S))       S: width x (rank + 8), signs drawn from a seed
    L        int8 of Q times the first left singular vectors of Q^T X
    R        int8 of (L^T L)^-1 L^T X: the nearest to X that this L allows
    sent     L^T, then R; there X is taken as L R

L has a scale for each 256 numbers of a column, R one for each row: rows lie apart by the singular values of X. R makes
up for what L lost by its rounding. A micro-batch of n tokens takes about rank (1 + width / n) bytes a token.

It knows X once and keeps nothing: what is left out is lost.

LPLR: Saha et al., 2310.11028, algorithm 1, whose L is int8 of X S, S of rank columns; here it is of the basis that
Halko et al. find (0909.4061, algorithms 4.4 and 5.1): it leaves less where singular values fall slowly.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.blocks import Blocks
from weft.codec.quantize import Int8
from weft.errors import ConfigError
from weft.pipeline.codec.activations import LplrConfig
from weft.pipeline.codec.boundary import Activations, Samples, Shape
from weft.rng import integers64, stream
from weft.wire import Buffer

_BLOCK = 256
_BEYOND = 8  # directions that are looked for beyond those that are sent: the last found are not the largest
_RIDGE = 1e-6  # of L^T L, whose diagonal is about 1: no L makes it singular


@final
class Lplr:
    """
    Raises:
        ConfigError: its factors have more columns than activations.
    """

    def __init__(self, config: LplrConfig, shape: Shape) -> None:
        if config.rank > shape.width:
            raise ConfigError(f"activations lplr: rank: {config.rank} is above the model's width, {shape.width}.")
        self._shape = shape
        self._rank = config.rank
        self._sketch = _signs(shape.width, self._rank + _BEYOND)
        self._left, self._right = Blocks(Int8(), _BLOCK), Blocks(Int8(), shape.width)

    def encode(self, x: Activations, samples: Samples) -> Buffer:  # noqa: ARG002  # the protocol's signature
        x = x.flatten(0, 1)
        bounds.require_finite_vector(bounds.largest(x.flatten()))
        rank = self._rank_of(len(x))
        left_data = self._left.encode(_basis(x, self._sketch, rank).T.contiguous().view(-1))
        left = self._left.decode(left_data, len(x) * rank).view(rank, -1)
        gram = left @ left.T + _RIDGE * torch.eye(rank)
        right = torch.linalg.solve(gram, left @ x)
        return b"".join((left_data, self._right.encode(right.contiguous().view(-1))))

    def decode(self, data: Buffer, samples: Samples) -> Activations:
        shape = self._shape
        num = len(samples) * shape.seq_len
        rank = self._rank_of(num)
        view = bounds.require_nbytes(data, self.nbytes(len(samples)))
        end = self._left.nbytes(num * rank)
        left = self._left.decode(view[:end], num * rank).view(rank, num)
        right = self._right.decode(view[end:], rank * shape.width).view(rank, shape.width)
        x = left.T @ right
        bounds.require_finite_payload(bounds.largest(x.flatten()))
        return x.view(len(samples), shape.seq_len, shape.width)

    def nbytes(self, num_samples: int) -> int:
        num = num_samples * self._shape.seq_len
        rank = self._rank_of(num)
        return self._left.nbytes(num * rank) + self._right.nbytes(rank * self._shape.width)

    def _rank_of(self, num_tokens: int) -> int:
        return min(self._rank, num_tokens)


def _basis(
    x: Float32[Tensor, "num width"], sketch: Float32[Tensor, "width more"], rank: int
) -> Float32[Tensor, "num rank"]:
    """Return orthonormal columns that span about what x's largest directions do."""
    most = x.abs().max()
    scaled = x / most if most > 0 else x  # products of the largest numbers would be none
    found = torch.linalg.qr(scaled @ sketch).Q
    found = torch.linalg.qr(scaled @ (scaled.T @ found)).Q
    turned = torch.linalg.svd(found.T @ scaled, full_matrices=False).U
    basis: Tensor = found @ turned[:, :rank]
    return basis


def _signs(height: int, width: int) -> Float32[Tensor, "height width"]:
    """Return 1 and -1 by chance, the same on every machine: a sketch as good as one of normal numbers."""
    words = integers64(stream(0, "lplr"), height * width)
    return torch.from_numpy((words >> np.uint64(63)).astype(np.float32)).mul_(2).sub_(1).view(height, width)
