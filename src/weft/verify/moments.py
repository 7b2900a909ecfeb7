"""What an optimizer can hold, whatever it was given: a bound that every honest state is within.

    adamw   m = (1 - b1) sum_i b1^i g_i,  v = (1 - b2) sum_i b2^i g_i^2,  of the last t gradients, the newest first
            |m| <= k sqrt(v)  of each number,  k^2 = (1 - b1)^2 / (1 - b2) sum_{i<t} (b1^2 / b2)^i    (Cauchy, Schwarz)
            |m| <= clip,  sum(v) <= clip^2  of all,  for each g is shortened to that
    sgd     |m| <= clip / (1 - mu)

How far states may lie apart is measured of all numbers together (`weft.verify.judge`), relative to what a step changes.
A first moment whose second is next to nothing makes the step of that number as long as one likes, and then all others
could be anything within what is held for honest.
"""

from collections.abc import Iterator, Mapping
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig, OptimizerConfig

SLACK = 1.01  # of rounding
TINY = 1e-15  # of a first moment whose second is too small for a number: it moves nothing

PIECE = 1 << 20  # numbers

Vectors = Mapping[str, NDArray[np.float32]]


def is_possible(config: OptimizerConfig, clip: float, num_steps: int, state: Vectors) -> bool:
    """Return whether gradients of at most the length `clip` can have left what an optimizer holds.

    Args:
        num_steps: that it has made.
        state: its vectors; others are not looked at.
    """
    match config:
        case AdamWConfig() | MuonConfig():
            return _is_of_adamw(config, clip, num_steps, state)
        case InnerSgdConfig(momentum=mu):
            return "momentum" not in state or length(state["momentum"]) <= SLACK * clip / (1 - mu)


def _is_of_adamw(config: AdamWConfig | MuonConfig, clip: float, num_steps: int, state: Vectors) -> bool:
    if "moment1" not in state or "moment2" not in state:
        return True
    m, v = state["moment1"], state["moment2"]
    if not (length(m) <= SLACK * clip and float(v.sum(dtype=np.float64)) <= SLACK * clip * clip):
        return False
    most = SLACK * steepest(config.beta1, config.beta2, num_steps)
    return all(_is_below(most, *each) for each in pieces(m, v))


def _is_below(most: float, m: NDArray[np.float32], v: NDArray[np.float32]) -> bool:
    if not (v >= 0).all():
        return False
    return most == inf or bool((np.abs(m) <= np.float32(most) * np.sqrt(v) + np.float32(TINY)).all())


def steepest(beta1: float, beta2: float, num_steps: int) -> float:
    """Return the largest m / sqrt(v) after so many steps."""
    ratio = beta1**2 / beta2 if beta2 else inf if beta1 else 0.0
    if ratio > 1:
        return inf  # it grows with their number
    num = float(num_steps) if ratio == 1 else (1 - ratio**num_steps) / (1 - ratio)
    return float(((1 - beta1) ** 2 / (1 - beta2) * num) ** 0.5)


def length(vector: NDArray[np.float32]) -> float:
    return sqrt(sum(float(np.square(piece, dtype=np.float64).sum()) for (piece,) in pieces(vector)))


def pieces(*vectors: NDArray[np.float32]) -> Iterator[tuple[NDArray[np.float32], ...]]:
    """Yield vectors of one size, piece by piece: what is made of a whole one would take as much memory again."""
    for start in range(0, len(vectors[0]), PIECE):
        yield tuple(vector[start : start + PIECE] for vector in vectors)
