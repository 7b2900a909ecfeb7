"""Products of matrices, a b^T, of rows on grids: each number is made of a row of a and a row of b."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.verify.evidence.program.grids import Array, gridded
from weft.verify.evidence.program.operation import Kind, Read, pieces


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees: its own, and those before it in its window.

    Args:
        num: tokens of a text, of which queries have several rows.
        window: None: all before it.
    """

    num: int
    window: int | None

    def sees(self, query: Array, key: Array) -> Array:
        token = query % self.num
        is_seen: Array = key <= token
        return is_seen if self.window is None else is_seen & (key > token - self.window)


@dataclass(frozen=True)
class Product(Kind):
    """The products of some pairs of matrices [rows, depth] and [cols, depth], rounded once to fp32.

    Operands: a and b; then a bias [cols], or a scale of each pair, that sums are multiplied by, where it has one.

    Args:
        batch: pairs.
        left, right: of how many products the grids of rows of a and of b are; None: rows of a are on one already.
        seen: what is not is -inf.
        is_mean: sums are divided by those of a's rows.
        factor: that what was rounded is multiplied by.
    """

    batch: int
    rows: int
    cols: int
    depth: int
    left: int | None
    right: int
    has_bias: bool = False
    has_scale: bool = False
    is_mean: bool = False
    seen: Seen | None = None
    factor: float = 1.0

    @property
    def is_wide(self) -> bool:  # type: ignore[override]
        return self.seen is not None

    @property
    def num(self) -> int:
        return self.batch * self.rows * self.cols

    def whole(self, operands: Sequence[Array]) -> Array:
        a, b = operands[0].reshape(self.batch, self.rows, -1), operands[1].reshape(self.batch, self.cols, -1)
        found, more = np.empty((self.batch, self.rows, self.cols), np.float32), operands[2:]
        for pair in range(self.batch):
            right = gridded(b[pair], self.right)
            given = [more[0]] if self.has_bias else [more[0][pair : pair + 1]] if self.has_scale else []
            for here in pieces(self.rows, self.depth + self.cols):
                y = self._made(a[pair, here], right, given)
                if self.seen is not None:
                    query, key = np.arange(self.rows)[here, None], np.arange(self.cols)
                    y = np.where(self.seen.sees(query, key), y, np.float32(-np.inf))
                found[pair, here] = y
        return found.reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, col = divmod(at, self.cols)
        pair = row // self.rows
        if self.seen is not None and not self.seen.sees(np.array(row % self.rows), np.array(col)):
            return np.array([-np.inf], np.float32)
        a = read(0, row * self.depth, self.depth)
        b = read(1, (pair * self.cols + col) * self.depth, self.depth)
        given = [read(2, col, 1)] if self.has_bias else [read(2, pair, 1)] if self.has_scale else []
        return self._made(a[None], gridded(b[None], self.right), given).reshape(-1)

    def _made(self, a: Array, right: Array, given: Sequence[Array]) -> Array:
        left = a.astype(np.float64) if self.left is None else gridded(a, self.left)
        sums = left @ right.T + 0.0  # of nothing but zeros libraries make zeros of either sign
        if self.is_mean:
            sums = sums / left.sum(-1, keepdims=True)
        if self.has_scale:
            sums = sums * given[0].astype(np.float64)
        y: Array = sums.astype(np.float32)
        if self.has_bias:
            y = y + given[0]
        return y if self.factor == 1.0 else y * np.float32(self.factor)
