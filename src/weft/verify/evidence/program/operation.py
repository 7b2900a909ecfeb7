"""One operation of a training step: what it reads, and what it comes to, as a whole and number by number.

    whole = kind.whole(operands)           all numbers of what it comes to
    one   = kind.one(number, read)         one of them: `read` gives the few numbers of operands that it is made of

Both come to the same bits. What operands are is a row of numbers each, whatever its shape: an operation knows how long
rows are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from weft.verify.evidence.program.grids import Array

PIECE = 1 << 18  # numbers that are computed at a time: what is made of them on the way takes a few megabytes

Read = Callable[[int, int, int], Array]
"""Of an operand, the first number, and how many: those."""


class Kind(ABC):
    """Operations of one kind and shape."""

    dtype: DTypeLike = np.float32
    is_wide = False  # tokens by tokens: made again where it is needed long afterwards

    @property
    @abstractmethod
    def num(self) -> int:
        """Return how many numbers it comes to."""

    @abstractmethod
    def whole(self, operands: Sequence[Array]) -> Array:
        """Return all of them."""

    @abstractmethod
    def one(self, at: int, read: Read) -> Array:
        """Return the one at a place, alone in an array."""


@dataclass(frozen=True)
class Parameters:
    """Some of the state before the step: an operand."""

    start: int
    num: int


@dataclass(frozen=True)
class Operation:
    """
    Args:
        operands: numbers of operations before it, or parameters.
    """

    name: str
    kind: Kind
    operands: tuple[int | Parameters, ...]

    @property
    def num_words(self) -> int:
        """Return how many words of four bytes it comes to."""
        return self.kind.num * np.dtype(self.kind.dtype).itemsize // 4

    def one(self, at: int, read: Read) -> Array:
        """Return the number at a place, whatever strange numbers it is made of."""
        with np.errstate(all="ignore"):
            return self.kind.one(at, read)


def pieces(num: int, width: int) -> list[slice]:
    """Return rows that are computed at a time."""
    size = max(PIECE // max(width, 1), 1)
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def halves(x: Any) -> Any:
    """Return rows folded onto each other, half by half, until one is left: x[i] + x[i + half], over and over."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    return x[0]
