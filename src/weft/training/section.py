"""Inner steps of one section: the gradient is what its stage's micro-batches have brought, whoever began them.

    trainer.forward(given)                  # as a `Device`: of each micro-batch that is routed here
    trainer.hand_in(total)                  # methods that send gradients: what `gradient` returns next
    trainer.make_step(total, rate)          # methods that send deltas: an inner step on what has been added up

It shares what a `Trainer` keeps, on the section's vector, and makes its steps otherwise. Evaluation and text need all
sections, and are made elsewhere.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import Clock
from weft.data.batch import Batches
from weft.errors import CallFailed
from weft.events import Emit, WarmedUp
from weft.model.backward import forward as passed_through
from weft.model.transformer import SectionModule
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import Given, Passed, Ways
from weft.pipeline.split.section import LayersAt
from weft.pipeline.torch_device import TorchDevice
from weft.pipeline.worker import Sum
from weft.run.frozen import Frozen, LoadFrozen
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig, confinement
from weft.training.learner import NOTHING_CAME, Work
from weft.training.steps import Mean
from weft.training.tied import TiedTrainer, averaged
from weft.training.trainer import Trainer
from weft.wire import Buffer


class SectionTrainer(Trainer):
    """
    Args:
        run: of the stage.
        tied: of the matrix that lies apart from this end section, if one does: it has started.
    """

    def __init__(
        self,
        run: StagedConfig,
        peer: PeerConfig,
        batches: Batches,
        emit: Emit,
        clock: Clock,
        tied: TiedTrainer | None = None,
        frozen: LoadFrozen = Frozen,
    ) -> None:
        super().__init__(run, peer, batches, emit, clock, frozen)
        self._tied = tied
        section = run.section
        assert section is not None, "the whole run has no section of its own"
        self._section = section
        self._confinement = confinement(run)
        split = run.pipeline.split
        self.split = None if split is None else LayersAt(split, run.model.width)
        """What a team computes of it, if members compute together."""
        self._pipeline = run.pipeline
        self._lent: TorchDevice | None = None  # None: the device has been left
        self._handed = Sum()
        self._made: list[tuple[float, int]] = []  # of steps that `train` has yet to tell of: losses and samples

    # --- a section's device ---

    def _fitting(self) -> int:
        return max(self._pipeline.micro_batch, self._run.train.batch_size)  # how many at a time, the pipeline says

    def _take_device(self, held: Float32[Tensor, " num"], micro_batch: int) -> None:
        super()._take_device(held, micro_batch)
        codecs = Boundaries(self._pipeline.activations, self._pipeline.gradients)
        train, has_recompute = self._run.train, self._peer.has_recompute
        self._lent = TorchDevice(
            self._model,
            codecs,
            train.seq_len,
            train.batch_size,
            has_rows=self._run.data.has_rows,
            has_recompute=has_recompute,
        )

    def park(self) -> None:
        self._lent = None
        if self.split is not None:
            self.split.forget()
        super().park()

    @property
    def here(self) -> TorchDevice:
        """Return what computes the section.

        Raises:
            CallFailed: it is nowhere now.
        """
        if self._lent is None:
            raise CallFailed("this peer is paused, and has left its device")
        self._take_tied()
        return self._lent

    def _take_tied(self) -> None:
        if self._tied is not None:
            self._model.use(self._tied.model)  # it may have left its device, and be back

    @property
    def tokens_nbytes(self) -> int:
        return self.here.tokens_nbytes

    def input_nbytes(self, num_samples: int) -> int:
        return self.here.input_nbytes(num_samples)

    def gradient_nbytes(self, num_samples: int) -> int:
        return self.here.gradient_nbytes(num_samples)

    def forward(self, given: Given) -> Passed:
        return self.here.forward(given)

    def apart(self, given: Given, returned: Buffer | None, theirs: Ways, mine: Ways) -> tuple[float, float]:
        return self.here.apart(given, returned, theirs, mine)

    @property
    def is_warm(self) -> bool:
        return self._parked is not None or self._warm_shape is not None

    def warm_up(self) -> None:
        """Pass a blank micro-batch through, both ways. No number of the section changes.

        Raises:
            OutOfMemory: as `train`.
        """
        if self.is_warm:
            return
        self._take_tied()
        began, num, seq_len = self._clock.now(), self._pipeline.micro_batch, self._run.train.seq_len
        blank = torch.zeros(num, seq_len, dtype=torch.int64, device=self._model.vector.device)
        x = blank if self._section.is_first else torch.zeros(*blank.shape, self._run.model.width, device=blank.device)

        def compute(module: SectionModule) -> Tensor:
            positions = blank if self._run.data.has_rows else None
            return module.loss(x, blank, positions) if self._section.is_last else module(x, positions=positions)

        passed = passed_through(self._model, compute, x)
        passed.input_gradient(None if self._section.is_last else torch.zeros_like(passed.output))
        passed.add_weight_gradients(0.0)
        self._warm_shape = num, seq_len
        self._emit(WarmedUp(is_compiled=False, micro_batch=num, duration_s=self._clock.now() - began))

    # --- steps ---

    def clear(self) -> None:
        if self._parked is None:
            self._model.zero_gradient()

    def hand_in(self, total: Sum) -> None:
        """Let `gradient` return the mean over so many samples, which the section's gradient is the sum of."""
        self._handed = total

    def gradient(
        self, positions: NDArray[np.int64], committed_tokens: int, pace: Fraction | int
    ) -> tuple[Float32[Tensor, " num"], Work]:
        """Return the mean gradient over what was handed in, whatever the positions, and change no parameter.

        Raises:
            NotFinite: as `train`.
        """
        if not self._handed.num_samples or self._parked is not None:  # what was added up went with the device
            self._handed = Sum()
            return self._vector, NOTHING_CAME
        return super().gradient(positions, committed_tokens, pace)

    def _fill(self, positions: NDArray[np.int64]) -> Mean:  # noqa: ARG002  # what was routed here counts
        total, self._handed = self._handed, Sum()
        return self._mean(total)

    def _mean(self, total: Sum) -> Mean:
        return averaged(self._model.gradient, total, self._run.train.batch_size)

    def _descend(self, norm: float, rate: float) -> float:
        norm = super()._descend(norm, rate)
        if self._confinement is not None:
            self._confinement.constrain(self._model.vector)
        return norm

    def make_step(self, total: Sum, committed_tokens: int, num_steps: int, pace: Fraction | int) -> None:
        """Make an inner step on what has been added up: the last of `num_steps` since a commit. `train` tells of it.

        Raises:
            NotFinite: as `train`.
        """
        if self._parked is not None:
            return
        if total.num_samples:
            began, rate = self._clock.now(), self._rate(committed_tokens, num_steps, pace)
            mean = self._step(self._mean(total), rate)
            self._done(mean, rate, began)
            self._made.append((mean.loss, total.num_samples))
        self.clear()

    def train(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,  # noqa: ARG002  # the steps are made
        pace: Fraction | int,  # noqa: ARG002
        should_stop: Callable[[], bool] = lambda: False,  # noqa: ARG002
        num_done: int = 0,  # noqa: ARG002
    ) -> Work:
        """Tell of the inner steps that were made since the last call; as many as `positions` have room for count."""
        made, self._made = self._made, []
        now, num_samples = self._clock.now(), sum(num for _, num in made)
        work = self._work([loss for loss, _ in made], num_samples, now)
        return replace(work, num_steps=len(positions) // self._run.train.batch_size)
