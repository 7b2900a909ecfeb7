"""How far training steps can have moved parameters, whatever they were made of: no honest state lies beyond.

    adamw   |x_k - x_0| <= R + d (|x_0| + R)  of each number
            R = sum_t lr_t u_t,  d = sum_t lr_t wd,  u_t = k_t sqrt(1 - b2^t) / (1 - b1^t)      the longest update
            k_t as in `weft.verify.moments`
    sgd     |x_k - x_0| <= sum_t lr_t clip / (1 - mu)  of all

A step can be right that nobody has computed: where a state is such that steps leave it as it is, as one of zeros is,
all steps from it to itself are. Who names such states takes two false steps, one to it and one from it, which an audit
that draws one of many does not often meet. But such states may lie far from where a run is.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from weft.ids import PeerId
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig, OptimizerConfig
from weft.sync.method.schedule import lr
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.verify.moments import SLACK, length, pieces, steepest

ROUNDED = 2.0**-23  # of a parameter, in each step

Vector = NDArray[np.float32]


def rates(manifest: Manifest, charter: Charter, holder: PeerId, num_steps: int) -> Iterator[float]:
    """Yield the learning rates of the first so many steps on what a manifest leases to a peer, as
    `weft.training.steps` has them."""
    leased = sum(lease.num_windows for lease in manifest.leases if lease.peer == holder)
    pace = Fraction(sum(lease.num_windows for lease in manifest.leases), leased or 1)
    for number in range(1, num_steps + 1):
        made = int(number * charter.settings.tokens_per_step * pace)
        yield lr(charter.settings.schedule, manifest.committed_tokens + made)


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
