"""How far a row is behind the yardstick, length by length, and at which length it would be within one percent.

    gap(steps) = loss(row) / loss(yardstick) - 1, of equal seeds;    fitted: gap = a * steps ** -b

Least squares of log gap over log steps. What the fit says beyond the lengths that were played is a guess.

It does not know where figures come from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean, stdev

WITHIN = 0.01  # of the yardstick's loss


@dataclass(frozen=True)
class Gap:
    """Of one length, in shares of the yardstick's loss: mean over seeds and the deviation between them."""

    mean: float
    deviation: float | None  # None: one seed


@dataclass(frozen=True)
class Trend:
    """gap = scale * steps ** -exponent."""

    scale: float
    exponent: float

    def steps_to(self, gap: float) -> float:
        """Return the length at which the gap has closed so far; infinite: it never does."""
        try:
            return (self.scale / gap) ** (1 / self.exponent) if self.exponent > 0 else math.inf
        except OverflowError:
            return math.inf


def gap_of(losses: Mapping[int, float], yardstick: Mapping[int, float]) -> Gap | None:
    """Return the gap between losses by seed; None: they have no seed in common."""
    gaps = [losses[seed] / yardstick[seed] - 1 for seed in losses if seed in yardstick]
    return Gap(mean(gaps), stdev(gaps) if len(gaps) > 1 else None) if gaps else None


def fit(gaps: Mapping[int, float]) -> Trend | None:
    """Return how gaps by length go on; None: there are fewer than two, or a row is not behind at each."""
    if len(gaps) < 2 or min(gaps.values()) <= 0:
        return None
    slope, intercept = linear_regression(*_logs(list(gaps), list(gaps.values())))
    return Trend(math.exp(intercept), -slope)


def _logs(*columns: Sequence[float]) -> list[list[float]]:
    return [[math.log(value) for value in column] for column in columns]
