"""One number of each row, and a row of each row where all of it is needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.verify.evidence.program.grids import LOG2_E, Array, exp2, on_grid, steps, total
from weft.verify.evidence.program.operation import Kind, Read, pieces

Role = Literal["row", "one", "all"]  # of an operand: a row of each row, one number of each, or the same row of all
What = Literal["inverse", "slope", "step", "largest", "sum", "dot", "total", "powers"]


def _inverse(x: Array, given: float) -> Array:
    """Return 1 / sqrt(mean(x^2) + eps)."""
    return 1.0 / np.sqrt(total(x * x) / float(x.shape[-1]) + given)


def _slope(grad: Array, x: Array, inverse: Array, weight: Array, _given: float) -> Array:
    """Return mean(g w n), n = x i."""
    return total(grad * (x * inverse[:, None]) * weight) / float(x.shape[-1])


def _powers(x: Array, most: Array, _given: float) -> Array:
    """Return sum(e^(x - most))."""
    return total(exp2((x - most[:, None]) * np.float32(LOG2_E)))


_WHAT: Mapping[What, tuple[tuple[Role, ...], Callable[..., Array]]] = {
    "inverse": (("row",), _inverse),
    "slope": (("row", "row", "one", "all"), _slope),
    "step": (("row",), lambda x, given: steps(x, int(given))),
    "largest": (("row",), lambda x, _given: x.max(-1) + np.float32(0)),  # of two zeros one or the other
    "sum": (("row",), lambda x, _given: x.astype(np.float64).sum(-1)),
    "dot": (("row", "row"), lambda a, b, _given: total(a * b)),
    "total": (("row",), lambda x, _given: total(x)),
    "powers": (("row", "one"), _powers),
}


@dataclass(frozen=True)
class Rows(Kind):
    """What each row comes to.

    Args:
        given: eps of `inverse`; of `step`, of how many products the grid is.
    """

    rows: int
    width: int
    what: What
    given: float = 0.0

    @property
    def num(self) -> int:
        return self.rows

    def whole(self, operands: Sequence[Array]) -> Array:
        roles, made = _WHAT[self.what]
        found = np.empty(self.rows, np.float32)
        for here in pieces(self.rows, self.width):
            parts = [
                each if role == "all" else each[here] if role == "one" else each.reshape(self.rows, -1)[here]
                for role, each in zip(roles, operands, strict=True)
            ]
            found[here] = made(*parts, self.given)
        return found

    def one(self, at: int, read: Read) -> Array:
        roles, made = _WHAT[self.what]
        parts = []
        for number, role in enumerate(roles):
            match role:
                case "row":
                    parts.append(read(number, at * self.width, self.width)[None])
                case "one":
                    parts.append(read(number, at, 1))
                case "all":
                    parts.append(read(number, 0, self.width))
        return made(*parts, self.given).astype(np.float32)


@dataclass(frozen=True)
class Weights(Kind):
    """e^(x - max) of rows of scores, on a grid of so many bits: what attention weighs values by."""

    rows: int
    width: int
    bits: int
    is_wide = True

    @property
    def num(self) -> int:
        return self.rows * self.width

    def whole(self, operands: Sequence[Array]) -> Array:
        x = operands[0].reshape(self.rows, self.width)
        found = np.empty_like(x)
        for here in pieces(self.rows, self.width):
            found[here] = self._made(x[here])
        return found.reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, col = divmod(at, self.width)
        return self._made(read(0, row * self.width, self.width)[None])[0, col : col + 1]

    def _made(self, x: Array) -> Array:
        return on_grid(exp2((x - x.max(-1, keepdims=True)) * np.float32(LOG2_E)), self.bits)
