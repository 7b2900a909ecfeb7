"""The matrix that embedding and head are in one: sections at both ends compute with it, and add up its gradient.

    model                         what end sections of this peer compute with (`FlatModel.use`)
    trainer.hand_in(total)        what one of them has added up: of so many samples, at its end
    trainer.gradient(...)         the mean of what was handed in

A sample adds to the gradient twice, where the first section embeds its tokens and where the last one tells how likely
they are; each end hands in its half. So the mean over halves counts twice, and a half is worth half a sample's tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.errors import CallFailed
from weft.model.flat import FlatModel
from weft.pipeline.worker import Sum
from weft.training.device import to_host
from weft.training.learner import NOTHING_CAME, Work
from weft.training.steps import Mean
from weft.training.trainer import Trainer

ENDS = 2


class TiedTrainer(Trainer):
    """A `Trainer` of nothing but that matrix. It makes no step of its own."""

    _started: tuple[Callable[[], object], ...] = ()  # who is told
    _handed: Float32[Tensor, " num"] | None = None  # the sum of the halves' gradients
    _total = Sum()  # of halves

    def on_started(self, told: Callable[[], object]) -> None:
        """Let `told` be called when others may compute with it."""
        self._started += (told,)

    def start(self, vector: Float32[Tensor, " num"]) -> None:
        super().start(vector)
        for told in self._started:
            told()

    def _fitting(self) -> int:
        return self._run.train.batch_size  # nothing is computed here

    @property
    def model(self) -> FlatModel:
        """Return the matrix, on the device.

        Raises:
            CallFailed: this peer is paused, and has left its device.
        """
        if self._parked is not None:
            raise CallFailed("this peer is paused, and has left its device")
        return self._model

    @property
    def is_warm(self) -> bool:
        return True

    def hand_in(self, total: Sum) -> bool:
        """Take what a section has added up of so many samples, and let nothing be added up.

        Returns:
            Whether it was there: it goes with the device, where this peer is paused.
        """
        if self._parked is not None:
            return False
        gradient = self._model.gradient
        self._handed = gradient.clone() if self._handed is None else self._handed.add_(gradient)
        self._total += total
        gradient.zero_()
        return True

    def gradient(
        self, positions: NDArray[np.int64], committed_tokens: int, pace: Fraction | int
    ) -> tuple[Float32[Tensor, " num"], Work]:
        """Return the mean gradient over what was handed in, whatever the positions, and change no parameter.

        Raises:
            NotFinite: as `train`.
        """
        if self._handed is None:
            return self._vector, NOTHING_CAME
        gradient, work = super().gradient(positions, committed_tokens, pace)
        return gradient, halved(work)

    def _fill(self, positions: NDArray[np.int64]) -> Mean:  # noqa: ARG002  # what was handed in counts
        total, self._total = self._total, Sum()
        assert self._handed is not None
        return averaged(self._handed, total, ENDS * self._run.train.batch_size)

    def _taken(self, factor: float) -> Float32[Tensor, " num"]:
        handed, self._handed = self._handed, None
        assert handed is not None
        return to_host(handed.mul_(factor))


def averaged(gradient: Tensor, total: Sum, num: int) -> Mean:
    """Make a gradient the mean over samples, in place: it is their sum, divided by `num`."""
    gradient.mul_(num / total.weight)
    norm = float(torch.linalg.vector_norm(gradient))
    return Mean(loss=total.loss / total.weight, norm=norm, num_samples=total.num_samples)


def halved(work: Work) -> Work:
    """Return `work` on as many halves of samples as it has samples."""
    return replace(work, num_tokens=work.num_tokens // ENDS)
