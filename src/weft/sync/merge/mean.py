"""Means of what members bring to a part, one vector after the other.

    rule           element of the mean                          what it does to the step
    peers_mean     sum v_i x_i / (sum v_i + a)                  an element that few peers send makes a small one
    senders_mean   sum v_i x_i / sum v_i, over i with x_i != 0  it makes one as large as theirs

v are weights (tokens), a is the weight of what is late. FedAvg and DiLoCo take the mean over peers; the public code of
DeMo, CCLoco and SparseLoCo that over senders. Where peers send different elements, as top-k lets them, it is up to n
times larger: an outer learning rate that fits one rule does not fit the other. It awaits nothing: what is late will be
a sender's in its own round.

All in float64, elementwise, one rounding per operation, and one more to fp32 at the end: a fixed sequence of IEEE
operations, equal on every machine. Weights are integers and are not normalised first: w/W rounded to fp32 would not
sum to one. With float64 every w x is exact (24 + 29 bits, for w < 2^29), so
- the mean of equal vectors is that vector, bit for bit, where nobody is late; one contributor's mean is its own;
- the result differs from the true mean by little more than the final rounding (fp32 sums lose up to n of those);
- finite contributions have a finite mean: nothing can overflow on the way (n w x < 2^10 2^53 2^128).

It costs the owner 8 bytes per element of its own part, and one accumulator whatever the number of peers.
"""

from collections.abc import Iterable
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.bounds import Empty

MAX_WEIGHT = 1 << 53  # above, an integer is not exact in float64

_CHUNK = 1 << 16  # elements: the accumulator's and the scratch's 512 KiB each


@runtime_checkable  # the shape check that is on in tests asks
class Mean(Protocol):
    """Vectors must be added in one order everywhere: float64 sums may round, so the order is part of the result."""

    def add(self, weight: int, vector: Float32[Tensor, " num"], num_peers: int = 1) -> None:
        """Add a vector that weighs `weight` >= 0.

        Args:
            num_peers: whose mean it is.
        """
        ...

    def add_legacy(self, weight: int, vector: Float32[Tensor, " num"]) -> None:
        """Add what a branch had counted, after all others."""
        ...

    def result(self, awaited: int = 0) -> Float32[Tensor, " num"]:
        """Return the mean of what was added, one vector or more.

        Args:
            awaited: a, the weight of what is late.
        """
        ...


@final
class PeersMean:
    def __init__(self, num: int, empty: Empty = bounds.empty) -> None:
        self._empty = empty
        self._sum = empty(num, torch.float64)
        self._is_first = True
        self._weight = 0

    def add(self, weight: int, vector: Float32[Tensor, " num"], num_peers: int = 1) -> None:  # noqa: ARG002
        accumulate(self._sum, weight, vector, is_first=self._is_first)
        self._is_first = False
        self._weight += weight

    add_legacy = add

    def result(self, awaited: int = 0) -> Float32[Tensor, " num"]:
        mean = self._empty(self._sum.numel(), torch.float32)
        divide(self._sum, self._weight + awaited, mean)
        return mean


@final
class SendersMean:
    """Holds a sum and a weight for each element: twice the memory of a mean over peers."""

    def __init__(self, num: int, empty: Empty = bounds.empty) -> None:
        self._empty = empty
        self._sum = empty(num, torch.float64)
        self._weights = empty(num, torch.float64)
        self._is_first = True

    def add(self, weight: int, vector: Float32[Tensor, " num"], num_peers: int = 1) -> None:  # noqa: ARG002
        accumulate(self._sum, weight, vector, is_first=self._is_first)
        accumulate(self._weights, weight, vector != 0, is_first=self._is_first)
        self._is_first = False

    add_legacy = add

    def result(self, awaited: int = 0) -> Float32[Tensor, " num"]:  # noqa: ARG002  # the protocol's signature
        mean = self._empty(self._sum.numel(), torch.float32)
        divide(self._sum, self._weights.clamp(min=1.0), mean)  # where nobody sent anything, 0 over 1
        return mean


def merge(contributions: Iterable[tuple[int, Float32[Tensor, " num"]]]) -> Float32[Tensor, " num"]:
    """Return the mean of decoded vectors weighted by tokens, given in ascending peer order.

    Bit for bit what `PeersMean` computes, where nobody is late, and with less memory. NaN stays NaN: codecs refuse it.
    """
    total, accumulator = 0, None
    for weight, vector in contributions:
        total += weight
        if accumulator is None:
            accumulator = torch.empty_like(vector, dtype=torch.float64)
            accumulate(accumulator, weight, vector, is_first=True)
        else:
            accumulate(accumulator, weight, vector)
    if accumulator is None or not 0 < total <= MAX_WEIGHT:
        raise ValueError(f"cannot take a mean over {total} tokens")
    mean = accumulator.new_empty(accumulator.shape, dtype=torch.float32)
    divide(accumulator, total, mean)
    return mean


def accumulate(accumulator: Tensor, weight: float, vector: Tensor, *, is_first: bool = False) -> None:
    """accumulator += weight vector; the first time it begins with that."""
    scratch = accumulator.new_empty(min(_CHUNK, vector.numel()))
    for start in range(0, vector.numel(), _CHUNK):
        here, there = vector[start : start + _CHUNK], accumulator[start : start + _CHUNK]
        product = there if is_first else scratch[: here.numel()]
        product.copy_(here)
        product.mul_(float(weight))
        if not is_first:
            there.add_(product)


def divide(accumulator: Tensor, total: int | Tensor, mean: Tensor) -> None:
    """mean = accumulator / total, rounded to fp32; `total` is a number, or one for each element."""
    if isinstance(total, int):  # as a tensor: a GPU multiplies by a rounded reciprocal when it divides by a number
        total = torch.tensor([float(total)], dtype=torch.float64, device=accumulator.device)
    scratch = accumulator.new_empty(min(_CHUNK, accumulator.numel()))
    for start in range(0, accumulator.numel(), _CHUNK):
        here = accumulator[start : start + _CHUNK]
        divisor = total if total.numel() == 1 else total[start : start + _CHUNK]
        mean[start : start + _CHUNK].copy_(torch.div(here, divisor, out=scratch[: here.numel()]))
