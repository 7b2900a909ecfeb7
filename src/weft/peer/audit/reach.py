"""Where training steps can lead, whatever they were made of: no honest state lies beyond. Pure, without torch.

    optimizers   adamw   m = (1 - b1) sum_i b1^i g_i,  v = (1 - b2) sum_i b2^i g_i^2,  of the last t gradients
                         |m| <= k sqrt(v)  of each number                               (Cauchy and Schwarz)
                         k^2 = (1 - b1)^2 / (1 - b2) sum_{i<t} (b1^2 / b2)^i
                         |m| <= clip,  sum(v) <= clip^2  of all,  for each g is shortened to that
                 sgd     |m| <= clip / (1 - mu)
    parameters   adamw   |x_k - x_0| <= R + d (|x_0| + R)  of each number
                         R = sum_t lr_t u_t,  d = sum_t lr_t wd,  u_t = k_t sqrt(1 - b2^t) / (1 - b1^t)
                 sgd     |x_k - x_0| <= sum_t lr_t clip / (1 - mu)  of all

How far states may lie apart is measured of all numbers together (`weft.verify.judge`), relative to what a step changes.
A first moment whose second is next to nothing makes the step of that number as long as one likes, and then all others
could be anything within what is held for honest.

And a step can be right that nobody has computed: where a state is such that steps leave it as it is, as one of zeros
is, all steps from it to itself are. Who names such states takes two false steps, one to it and one from it, which an
audit that draws one of many does not often meet. But such states may lie far from where a run is.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from weft.ids import PeerId
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig, OptimizerConfig
from weft.sync.method.schedule import lr_of_step
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest

SLACK = 1.01  # of rounding
TINY = 1e-15  # of a first moment whose second is too small for a number: it moves nothing
ROUNDED = 2.0**-23  # of a parameter, in each step
PIECE = 1 << 20  # numbers

Vector = NDArray[np.float32]


# --- optimizers ---


def is_possible(config: OptimizerConfig, clip: float, num_steps: int, state: Mapping[str, Vector]) -> bool:
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


def _is_of_adamw(config: AdamWConfig | MuonConfig, clip: float, num_steps: int, state: Mapping[str, Vector]) -> bool:
    if "moment1" not in state or "moment2" not in state:
        return True
    m, v = state["moment1"], state["moment2"]
    if not (length(m) <= SLACK * clip and float(v.sum(dtype=np.float64)) <= SLACK * clip * clip):
        return False
    most = SLACK * steepest(config.beta1, config.beta2, num_steps)
    return all(_is_below(most, *each) for each in pieces(m, v))


def _is_below(most: float, m: Vector, v: Vector) -> bool:
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


# --- parameters ---


def rates(manifest: Manifest, charter: Charter, holder: PeerId, num_steps: int) -> Iterator[float]:
    """Yield the learning rates of the first so many steps on what a manifest leases to a peer, as
    `weft.training.steps` has them."""
    settings, leased = charter.settings, sum(each.num_windows for each in manifest.leases if each.peer == holder)
    pace = Fraction(sum(lease.num_windows for lease in manifest.leases), leased or 1)
    for number in range(1, num_steps + 1):
        yield lr_of_step(settings.schedule, manifest.committed_tokens, number, settings.tokens_per_step, pace)


def is_within(
    config: OptimizerConfig, clip: float, rates: Sequence[float], num_before: int, start: Vector, end: Vector
) -> bool:
    """Return whether steps at these learning rates can lead from one vector of parameters to another.

    Args:
        clip: the longest gradient.
        num_before: steps that the optimizer has made before.
    """
    match config:
        case AdamWConfig():
            farthest = SLACK * sum(
                rate * longest(config, number) for number, rate in enumerate(rates, start=num_before + 1)
            )
            decay = SLACK * sum(rates) * config.weight_decay + ROUNDED * len(rates)
            return farthest == inf or all(_is_near(farthest, decay, *each) for each in pieces(start, end))
        case InnerSgdConfig(momentum=mu):
            moved = sqrt(sum(length(stop - begin) ** 2 for begin, stop in pieces(start, end)))
            return moved <= SLACK * sum(rates) * clip / (1 - mu) + ROUNDED * len(rates) * length(start)
        case MuonConfig():
            return True  # how long its updates are depends on the matrix


def _is_near(farthest: float, decay: float, start: Vector, end: Vector) -> bool:
    most = np.float32(farthest) + np.float32(decay) * (np.abs(start) + np.float32(farthest))
    return bool((np.abs(end - start) <= most).all())


def longest(config: AdamWConfig, number: int) -> float:
    """Return how far a step moves one parameter at most, in learning rates.

    Args:
        number: of the step, from 1.
    """
    b1, b2 = config.beta1, config.beta2
    return steepest(b1, b2, number) * sqrt(1 - b2**number) / (1 - b1**number)


def length(vector: Vector) -> float:
    return sqrt(sum(float(np.square(piece, dtype=np.float64).sum()) for (piece,) in pieces(vector)))


def pieces(*vectors: Vector) -> Iterator[tuple[Vector, ...]]:
    """Yield vectors of one size, piece by piece: what is made of a whole one would take as much memory again."""
    for start in range(0, len(vectors[0]), PIECE):
        yield tuple(vector[start : start + PIECE] for vector in vectors)
