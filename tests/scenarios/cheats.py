"""Peers that do less than they claim, or something else, in as many ways as matter: each a trainer that lies.

What one names of its states is what it has come to, so it shows auditors what it has named.
"""

from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from weft.training.steps import Mean
from weft.training.trainer import Trainer


class NoWork(Trainer):
    """Says that it has trained, and moves nothing."""

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        return Mean(loss=1.0, norm=1.0, num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:  # as fast as may be
        return norm


class Noise(NoWork):
    """Moves all parameters by chance, about as far as training does."""

    def _descend(self, norm: float, rate: float) -> float:
        steps = torch.arange(self._vector.numel(), dtype=torch.float64) + self._num_steps
        self._vector.add_(rate * torch.sin(12.9898 * steps).float())
        return norm


class Flip(Trainer):
    """Steps up the gradient."""

    def _descend(self, norm: float, rate: float) -> float:
        self._model.gradient.neg_()
        return super()._descend(norm, rate)


class HalfTheSteps(Trainer):
    """Leaves every second step out."""

    def _descend(self, norm: float, rate: float) -> float:
        return super()._descend(norm, rate) if self._num_steps % 2 else norm


class HalfABatch(Trainer):
    """Trains on the first half of each batch."""

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        half = super()._fill(positions[: len(positions) // 2])
        return Mean(loss=half.loss, norm=half.norm, num_samples=len(positions))


class OneOther(Trainer):
    """Trains on another sample than its lease's last."""

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        return super()._fill(np.concatenate((positions[:-1], positions[-1:] + 1)))


class OtherText(Trainer):
    """Trains on what it likes."""

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        return super()._fill(np.arange(len(positions)))


class Slower(Trainer):
    """Trains at a learning rate one hundredth lower."""

    def _rate(self, committed_tokens: int, num_steps: int, pace: Fraction | int) -> float:
        return 0.99 * super()._rate(committed_tokens, num_steps, pace)


class NewOptimizer(Trainer):
    """Begins each lease with empty moments, and says that it goes on with them."""

    def _descend(self, norm: float, rate: float) -> float:
        if self._num_steps % 2 == 0 and self._optimizer is not None:
            zero = {name: torch.zeros_like(value) for name, value in self._optimizer.state().items()}
            self._optimizer.load(zero, self._num_steps)
        return super()._descend(norm, rate)


class FalseMoments(Trainer):
    """Makes the step, and leaves an optimizer behind that will go where it likes."""

    def _descend(self, norm: float, rate: float) -> float:
        norm = super()._descend(norm, rate)
        if self._optimizer is not None:
            moments = self._optimizer.state()
            self._optimizer.load(moments | {"moment1": 1.5 * moments["moment1"]}, self._num_steps + 1)
        return norm


CHEATS: tuple[type[Trainer], ...] = (
    *(NoWork, Noise, Flip, HalfTheSteps, HalfABatch, OneOther, OtherText, Slower, NewOptimizer, FalseMoments),
)
