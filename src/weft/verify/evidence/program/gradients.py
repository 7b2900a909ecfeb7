"""The gradient of a step, added up over micro-batches, and how long it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from weft.verify.evidence.program.grids import Array
from weft.verify.evidence.program.operation import Kind, Read, halves

CHUNK = 1 << 16  # numbers whose squares are added in one order (`weft.sync.merge.outer`)
TIMES = 16  # of which one is made at a time


@dataclass(frozen=True)
class Span:
    """Where one tensor lies in the flat gradient, and which operands add up to it."""

    start: int
    num: int
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Gradient(Kind):
    """The gradients of all tensors, added to what was there before; operands: that, if anything was, then theirs."""

    spans: tuple[Span, ...]
    has_before: bool

    @property
    def num(self) -> int:
        return self.spans[-1].start + self.spans[-1].num

    def whole(self, operands: Sequence[Array]) -> Array:
        found = operands[0].copy() if self.has_before else np.zeros(self.num, np.float32)
        for span in self.spans:
            found[span.start : span.start + span.num] += _added([operands[each] for each in span.operands])
        return found

    def one(self, at: int, read: Read) -> Array:
        span = next(each for each in self.spans if each.start <= at < each.start + each.num)
        before = read(0, at, 1) if self.has_before else np.zeros(1, np.float32)
        return before + _added([read(each, at - span.start, 1) for each in span.operands])


def _added(some: Sequence[Array]) -> Array:
    return some[0] if len(some) == 1 else some[0] + some[1]


@dataclass(frozen=True)
class Folded(Kind):
    """Sums of 16 numbers of each chunk, one from each sixteenth of it, added in halves.

    Args:
        widths: of each chunk before it: powers of two.
        num_given: numbers that there are: a chunk that has fewer than its width ends with zeros.
        is_first: of squares.
    """

    widths: tuple[int, ...]
    num_given: int
    is_first: bool
    dtype = np.float64

    @property
    def num(self) -> int:
        return sum(self.folded)

    @property
    def folded(self) -> tuple[int, ...]:
        """Return how wide each chunk is afterwards."""
        return tuple(max(width // TIMES, 1) for width in self.widths)

    def whole(self, operands: Sequence[Array]) -> Array:
        found, start = list[Array](), 0
        for width, after in zip(self.widths, self.folded, strict=True):
            here = np.zeros(width)
            given = operands[0][start : start + width].astype(np.float64)
            here[: len(given)] = given * given if self.is_first else given
            found.append(halves(here.reshape(-1, after)))
            start += width
        return np.concatenate(found)

    def one(self, at: int, read: Read) -> Array:
        start = 0
        for width, after in zip(self.widths, self.folded, strict=True):
            if at < after:
                break
            at, start = at - after, start + width
        some = np.zeros((width // after, 1))
        for number in range(width // after):
            place = start + number * after + at
            if place < self.num_given:
                some[number] = read(0, place, 1).astype(np.float64)
        found: Array = halves(some * some if self.is_first else some)
        return found


@dataclass(frozen=True)
class Length(Kind):
    """The root of the sum of all chunks' sums, from first to last."""

    chunks: int
    dtype = np.float64

    @property
    def num(self) -> int:
        return 1

    def whole(self, operands: Sequence[Array]) -> Array:
        summed = 0.0
        for each in operands[0].tolist():
            summed += each
        return np.array([sqrt(summed)])

    def one(self, at: int, read: Read) -> Array:
        return self.whole([read(at, 0, self.chunks)])


def widths(num: int) -> tuple[int, ...]:
    """Return how wide the chunks of a vector are: the last is as wide as the least power of two that holds it."""
    full, rest = divmod(num, CHUNK)
    return (CHUNK,) * full + ((1 << (rest - 1).bit_length(),) if rest else ())
