"""Each matrix by a few of its directions: P = M R and Q = M^T L, of which peers take the mean.

    both        send P and Q        mean M is taken as P R^T + L (Q^T - L^T P R^T)      L, R = bases of those means
    by turns    odd rounds send P, mean M is taken as P R^T, L = basis of P;
                even rounds send Q, mean M is taken as L Q^T, R = basis of Q

L (height x rank) and R (width x rank) are orthonormal and replicated: those of the rounds before. So over rounds they
turn towards the largest directions of what is sent. What a round leaves of M, (I - L L^T) M (I - R R^T) where both are
sent, is kept as feedback.

PowerSGD (Vogels et al., 1905.13727, algorithm 1) sends P and then M^T times the basis of this very P: two rounds, one
after the other, in each step. Here a step is one round. Both factors are its bytes; one by turns is half of them:
ACP-SGD (Zhang et al., ICDCS 2023, algorithm 1). docs/measured.md has what each learns.

Vectors and small matrices are sent whole. What all compute alike is computed by `codec.exact`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec.exact import matmul
from weft.rng import integers64, stream
from weft.sync.merge.outer import State, norm
from weft.sync.method.choices import LowRankConfig

_AT_ONCE = 1 << 18  # numbers of a matrix that are multiplied together: 2 MiB in float64
_LEAST = 1e-6  # length of what is left of a column, relative to it, below which it is in the others' span


@dataclass(frozen=True)
class _Matrix:
    place: slice  # in the vector
    height: int
    width: int
    p: slice  # in what is sent: height x rank
    q: slice
    left: slice  # in the state, flat: height x rank
    right: slice


@final
class LowRank:
    """
    Args:
        shapes: of the tensors, in the order of the vector; what comes after them is sent whole.
    """

    is_orthonormal = False  # more goes in than comes out

    def __init__(self, config: LowRankConfig, shapes: Sequence[tuple[int, ...]]) -> None:
        self._rank = rank = config.rank
        self._has_turns = config.factors == "by_turns"
        self._matrices: list[_Matrix] = []
        self._whole: list[range] = []  # in the vector
        start = sent = left = right = 0
        for shape in shapes:
            stop = start + math.prod(shape)
            num = rank * (max(shape, default=0) if self._has_turns else sum(shape))
            if len(shape) == 2 and 2 * num <= math.prod(shape):  # a matrix
                height, width = shape
                ends = sent + num, left + rank * height, right + rank * width
                p, q = slice(sent, sent + rank * height), slice(ends[0] - rank * width, ends[0])
                if self._has_turns:
                    q = slice(sent, sent + rank * width)
                here = (p, q, slice(left, ends[1]), slice(right, ends[2]))
                self._matrices.append(_Matrix(slice(start, stop), height, width, *here))
                sent, left, right = ends
            else:
                self._whole.append(range(start, stop))
            start = stop
        self._num_shaped, self._num_factors, self._sizes = start, sent, (left, right)

    def num_sent(self, num: int) -> int:
        return self._num_factors + sum(len(here) for here in self._pieces(num))

    def init(self) -> State:
        """Return the bases before the first round: by chance, and the same for all."""
        state = {"left": torch.zeros(self._sizes[0]), "right": torch.zeros(self._sizes[1])}
        for number, matrix in enumerate(self._matrices):
            for name, here, height in (("left", matrix.left, matrix.height), ("right", matrix.right, matrix.width)):
                state[name][here] = orthonormal(_drawn(height, self._rank, name, number)).view(-1)
        return state

    def forward(self, vector: Float32[Tensor, " num"], state: State, round: int) -> Float32[Tensor, " num_sent"]:
        sent = vector.new_zeros(self.num_sent(vector.numel()))
        for matrix in self._matrices:
            m = vector[matrix.place].view(matrix.height, matrix.width)
            if self._has_p(round):
                sent[matrix.p] = _product(m, self._right(state, matrix)).view(-1)
            if self._has_q(round):
                sent[matrix.q] = _product(m.T, self._left(state, matrix)).view(-1)
        start = self._num_factors
        for here in self._pieces(vector.numel()):
            sent[start : start + len(here)] = vector[here.start : here.stop]
            start += len(here)
        return sent

    def inverse(self, vector: Float32[Tensor, " num_sent"], state: State, round: int) -> Float32[Tensor, " num"]:
        found = vector.new_zeros(self._num_shaped + self._num_after(vector.numel()))
        for matrix in self._matrices:
            left, right = self._left(state, matrix), self._right(state, matrix)
            m = found[matrix.place].view(matrix.height, matrix.width)
            p, q = vector[matrix.p].view(-1, self._rank), vector[matrix.q].view(-1, self._rank)
            if self._has_p(round):
                m.add_(_product(p, right.T))
            if self._has_p(round) and self._has_q(round):
                q = q - _product(right, _product(p.T, left))  # what P has said of it
            if self._has_q(round):
                m.add_(_product(left, q.T))
        start = self._num_factors
        for here in self._pieces(found.numel()):
            found[here.start : here.stop] = vector[start : start + len(here)]
            start += len(here)
        return found

    def advance(self, vector: Float32[Tensor, " num_sent"], state: State, round: int) -> None:
        """Take up in `state` in which directions the mean of what was sent lies."""
        for matrix in self._matrices:
            if self._has_p(round):
                state["left"][matrix.left] = orthonormal(vector[matrix.p].view(-1, self._rank)).view(-1)
            if self._has_q(round):
                state["right"][matrix.right] = orthonormal(vector[matrix.q].view(-1, self._rank)).view(-1)

    def _has_p(self, round: int) -> bool:
        return not self._has_turns or bool(round % 2)

    def _has_q(self, round: int) -> bool:
        return not self._has_turns or not round % 2

    def _left(self, state: State, matrix: _Matrix) -> Tensor:
        return state["left"][matrix.left].view(matrix.height, self._rank)

    def _right(self, state: State, matrix: _Matrix) -> Tensor:
        return state["right"][matrix.right].view(matrix.width, self._rank)

    def _pieces(self, num: int) -> Iterator[range]:
        """Yield what is sent whole."""
        yield from self._whole
        yield range(self._num_shaped, num)

    def _num_after(self, num_sent: int) -> int:
        """Return how many numbers come after those that have a shape."""
        return num_sent - self._num_factors - sum(map(len, self._whole))


def orthonormal(columns: Float32[Tensor, "height rank"]) -> Float32[Tensor, "height rank"]:
    """Return an orthonormal basis of the columns' span, by Gram and Schmidt, each column twice; for those that lie in
    the others' span, directions by chance. The same bits everywhere."""
    basis = torch.zeros_like(columns)
    height, rank = columns.shape
    for number in range(min(height, rank)):
        column = _apart(columns[:, number : number + 1], basis[:, :number])
        for attempt in range(height + 1):
            if column is not None:
                break
            drawn = basis.new_empty(height, 1).copy_(_drawn(height, 1, "instead", attempt))
            column = _apart(drawn, basis[:, :number])
        basis[:, number : number + 1] = basis[:, number : number + 1] if column is None else column
    return basis


def _apart(column: Tensor, basis: Tensor) -> Tensor | None:
    """Return what a column has beyond the span of `basis`, of length 1; None: nothing."""
    length = norm(column.contiguous().view(-1))
    if not length:
        return None
    found = torch.div(column, torch.tensor(length, device=column.device))
    for _ in range(2):
        if basis.shape[1]:
            found = found - matmul(basis, matmul(basis.T, found))
        length = norm(found.contiguous().view(-1))
        if length < _LEAST:
            return None
        found = torch.div(found, torch.tensor(length, device=column.device))
    return found


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, some rows at a time."""
    num_rows = max(1, _AT_ONCE // max(a.shape[1], b.shape[1]))
    found = a.new_empty(len(a), b.shape[1])
    for start in range(0, len(a), num_rows):
        found[start : start + num_rows] = matmul(a[start : start + num_rows], b)
    return found


def _drawn(height: int, width: int, *name: str | int) -> Float32[Tensor, "height width"]:
    """Return numbers of (-1, 1) by chance, the same on every machine."""
    drawn = integers64(stream(0, "low rank", *name), height * width)
    return torch.from_numpy((drawn >> 40).astype("f4")).mul_(1 / (1 << 23)).sub_(1.0).view(height, width)
