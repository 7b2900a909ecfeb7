"""Rules by which a few contributors cannot move what is merged far, whatever they bring. They are of the vectors x_i,
of v_i tokens each, that peers bring to a part; all of them are held at once.

    clipped_mean   x_i longer than 1.5 times the median are made so long; the mean
    centered_clip  c, first the median, moves five times by the mean of x_i - c, none longer than their median
    trimmed_mean   of each element so many of the largest, and of the smallest, are left out; the mean of the rest
    median         trimmed_mean that leaves out as many as it can: one number is left, or two
    multi_krum     so many vectors are left out, those furthest from their nearest others; the mean of the rest

Means are weighted by tokens; so are medians of lengths, the lower one of two. What inner steps come to is longer with
more of them. So lengths, distances and elements are compared in units of a peer's tokens to the power of 3/4, about as
AdamW makes a delta grow; gradients as they are. What a group brings is the mean of its peers, and is compared by the
tokens of one. Where too few are there for what a rule leaves out, it leaves out fewer: of n contributors (n - 1) / 2
on either side, and of vectors (n - 3) / 2. Of a part to which most of the weight brings zeros, all come to zeros.

What is late takes its share as of any mean: the result is multiplied by V / (V + a), where V is the weight of those who
are there and a that of the late. A legacy is the work of many: it is added after all others, as to any mean.

None of them finds who brings a little too much of what all bring, round after round (ALIE, 1902.06156).

A part costs 4 bytes for each element and contributor, and 16 more. All in float64, elementwise, contributors ascending,
one rounding per operation, and one more to fp32 at the end: the same bits on every machine (see `mean`).

Karimireddy, He, Jaggi, 2012.10333, algorithm 2 (here from the median, the radius found anew in each turn); Yin et al.,
1803.01498 (trimmed mean, median); Blanchard et al., 1703.02757, section 4 (Multi-Krum).
"""

import math
from collections.abc import Iterator, Sequence
from typing import assert_never, final

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.bounds import Empty
from weft.sync.merge.mean import accumulate, divide
from weft.sync.merge.outer import norm
from weft.sync.method.choices import MultiKrumConfig, RobustRule, TrimmedMeanConfig

LONGEST = 1.5  # times the median length
NUM_TURNS = 5
_CHUNK = 1 << 14  # elements, of all contributors at once


@final
class RobustMean:
    """
    Args:
        num: elements of a vector.
        is_of_steps: vectors are what inner steps came to.
    """

    def __init__(self, rule: RobustRule, num: int, empty: Empty = bounds.empty, *, is_of_steps: bool = True) -> None:
        self._rule = rule
        self._num = num
        self._empty = empty
        self._is_of_steps = is_of_steps
        self._vectors = list[Tensor]()
        self._weights = list[int]()
        self._units = list[float]()  # in which lengths of each are compared
        self._legacies = list[tuple[int, Tensor]]()

    def add(self, weight: int, vector: Float32[Tensor, " num"], num_peers: int = 1) -> None:
        if weight:
            self._vectors.append(self._copied(vector))
            self._weights.append(weight)
            self._units.append(unit(weight / num_peers) if self._is_of_steps else 1.0)

    def add_legacy(self, weight: int, vector: Float32[Tensor, " num"]) -> None:
        self._legacies.append((weight, self._copied(vector)))

    def result(self, awaited: int = 0) -> Float32[Tensor, " num"]:
        total, found = sum(self._weights), self._zeros()
        if self._vectors:
            self._add_to(found, total)
        for weight, vector in self._legacies:
            accumulate(found, weight, vector)
            total += weight
        mean = self._empty(self._num, torch.float32)
        divide(found, max(1, total + awaited), mean)  # where nothing weighs anything, 0 over 1
        return mean

    def _add_to(self, found: Tensor, total: int) -> None:
        """found = what the rule makes of the vectors, times their weight."""
        match self._rule:
            case "clipped_mean":
                lengths = [norm(vector) for vector in self._vectors]
                self._sum(found, self._factors(lengths, LONGEST))
            case "centered_clip":
                self._center(found, total)
                found.mul_(float(total))
            case "median":
                self._trim(found, len(self._vectors))
                found.mul_(float(total))
            case TrimmedMeanConfig(left_out=most):
                self._trim(found, most)
                found.mul_(float(total))
            case MultiKrumConfig(left_out=most):
                kept = nearest(self._apart(), most)
                self._sum(found, [float(number in kept) for number in range(len(self._vectors))])
                weight = sum(self._weights[number] for number in kept)
                if weight != total:
                    found.copy_(torch.div(found, _number(weight)))
                    found.mul_(float(total))
            case _:
                assert_never(self._rule)

    # --- whole vectors ---

    def _sum(self, found: Tensor, factors: Sequence[float]) -> None:
        """found = sum v_i f_i x_i"""
        is_first = True
        for weight, factor, vector in zip(self._weights, factors, self._vectors, strict=True):
            if factor:
                accumulate(found, weight * factor, vector, is_first=is_first)
                is_first = False

    def _factors(self, lengths: Sequence[float], most: float) -> list[float]:
        """Return what makes each vector no longer than `most` times the median, of such lengths."""
        usual = lower_median([length / each for length, each in zip(lengths, self._units, strict=True)], self._weights)
        limits = [most * usual * each for each in self._units]
        return [limit / length if length > limit else 1.0 for length, limit in zip(lengths, limits, strict=True)]

    def _center(self, center: Tensor, total: int) -> None:
        self._trim(center, len(self._vectors))
        divisor, apart = _number(total), self._empty(self._num, torch.float32)
        for _ in range(NUM_TURNS):
            lengths = []
            for vector in self._vectors:
                apart.copy_(torch.sub(vector, center))
                lengths.append(norm(apart))
            factors = self._factors(lengths, 1.0)
            for here in self._pieces():
                moved = torch.zeros_like(center[here])
                for weight, factor, vector in zip(self._weights, factors, self._vectors, strict=True):
                    moved.add_(torch.sub(vector[here], center[here]).mul_(weight * factor))
                center[here].add_(torch.div(moved, divisor))

    def _apart(self) -> list[list[float]]:
        """Return how far each two vectors are apart, each in its unit."""
        apart, num = self._empty(self._num, torch.float32), len(self._vectors)
        found = [[0.0] * num for _ in range(num)]
        for one in range(num):
            for other in range(one):
                for here in self._pieces():
                    apart[here].copy_(torch.sub(self._scaled(one, here), self._scaled(other, here)))
                found[one][other] = found[other][one] = norm(apart)
        return found

    def _scaled(self, number: int, here: slice) -> Tensor:
        return torch.div(self._vectors[number][here].double(), _number(self._units[number]))

    # --- elements ---

    def _trim(self, found: Tensor, most: int) -> None:
        """found = of each element the mean without the `most` largest and smallest, or as many as leave one or two."""
        num = len(self._vectors)
        most = min(most, (num - 1) // 2)
        for here in self._pieces():
            values = torch.cat([self._scaled(number, here).unsqueeze(1) for number in range(num)], 1)
            order = torch.argsort(values, dim=1, stable=True)  # of equal ones, contributors ascending
            is_kept = torch.zeros_like(values)
            is_kept.scatter_(1, order[:, most : num - most], 1.0)
            weights = torch.zeros_like(found[here])
            for number, weight in enumerate(self._weights):
                share = is_kept[:, number].mul_(float(weight))
                weights.add_(share)
                found[here].add_(torch.mul(share, self._vectors[number][here]))
            found[here].copy_(torch.div(found[here], weights))

    def _pieces(self) -> Iterator[slice]:
        for start in range(0, self._num, _CHUNK):
            yield slice(start, min(start + _CHUNK, self._num))

    def _zeros(self) -> Tensor:
        return self._empty(self._num, torch.float64).zero_()

    def _copied(self, vector: Tensor) -> Tensor:
        return self._empty(self._num, torch.float32).copy_(vector)


def unit(weight: float) -> float:
    """Return how much longer a delta of so many tokens is than one of a single token."""
    root = math.sqrt(weight)
    return root * math.sqrt(root)


def lower_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the least value that, with all that are no larger, has half of the weight or more."""
    total, reached = sum(weights), 0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if 2 * reached >= total:
            return value
    raise ValueError("there is no median of nothing")


def nearest(apart: Sequence[Sequence[float]], most: int) -> set[int]:
    """Return all vectors but the `most` whose nearest others are furthest away, of equal ones the last.

    Args:
        apart: how far each two are apart.
    """
    num = len(apart)
    most = max(0, min(most, (num - 3) // 2))  # 2 f + 2 < n
    scores = list[tuple[float, int]]()
    for number, distances in enumerate(apart):
        score = 0.0
        others = sorted(distance for other, distance in enumerate(distances) if other != number)
        for distance in others[: max(1, num - most - 2)]:
            score += distance * distance
        scores.append((score, number))
    return {number for _, number in sorted(scores)[: num - most]}


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
