"""Peers that do less than they claim, or something else, in as many ways as matter, in every step.

What one names of its states is what it has come to, so it shows auditors what it has named.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.sim.cheats import Cheating
from weft.sim.scenario import Way
from weft.training.steps import Mean
from weft.training.trainer import Trainer


class Always(Cheating):
    way: Way

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ways = lambda _first: frozenset({self.way})


class NoWork(Always):
    way = "none"


class Noise(Always):
    way = "noise"


class Flip(Always):
    way = "upwards"


class HalfTheSteps(Always):
    way = "half the steps"


class HalfABatch(Always):
    way = "half a batch"


class OneOther(Always):
    way = "one other sample"


class OtherText(Always):
    way = "other text"


class Slower(Always):
    way = "slower"


class NewOptimizer(Always):
    way = "new optimizer"


class FalseMoments(Always):
    way = "false moments"


CHEATS: tuple[type[Trainer], ...] = (
    *(NoWork, Noise, Flip, HalfTheSteps, HalfABatch, OneOther, OtherText, Slower, NewOptimizer, FalseMoments),
)


class ByChance(Trainer):
    """No cheat: all members of a run move all parameters by chance, whatever they are."""

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        return Mean(loss=1.0, norm=1.0, num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:
        steps = torch.arange(self._vector.numel(), dtype=torch.float64) + self._num_steps
        self._vector.add_(rate * torch.sin(12.9898 * steps).float())
        return norm
