"""Inner steps, wherever the vector lies that they change: their rate, their count, what they do in which order.

    train       of each batch: gradient ──► pull to the center, shorten, step
    gradient    of all samples at once, shortened where the error that a codec leaves is kept
    evaluate    the held-out loss of other parameters
    sample      a text by other parameters

It is one half of a learner. The other keeps the vector, and says how: `Trainer` on a device, `SiteLearner` on ranks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from jaxtyping import Float32, Int64
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import Clock
from weft.data.batch import Batches
from weft.data.rows import Batch, written
from weft.data.tokenizer import Tokenizer
from weft.errors import NotFinite
from weft.events import Emit, StepDone
from weft.ids import Digest, Step
from weft.inference.sample import Sampling
from weft.run.config import Genesis, RunConfig
from weft.sync.method.schedule import lr_of_step
from weft.training.learner import Measured, Work, nothing
from weft.training.preference import Sums, mean_of
from weft.wire import Buffer


@dataclass(frozen=True, kw_only=True)
class Mean:
    """What the mean gradient was found on."""

    loss: float
    norm: float
    num_samples: int


@dataclass(frozen=True)
class Shown:
    """What is asked of a model that has other parameters than the local ones.

    Args:
        sums: returns what is found on a batch.
        write: returns the tokens that follow some, by a seed, and begins none after so many seconds.
    """

    sums: Callable[[Batch], Sums]
    write: Callable[[list[int], Sampling, int, float], Iterable[int]]


class Stepper(ABC):
    """
    Args:
        run: what all peers share.
        batches: the run's training windows.
        emit: told of every step.
    """

    def __init__(self, run: RunConfig, batches: Batches, emit: Emit, clock: Clock) -> None:
        self._run = run
        self._batches = batches
        self._emit = emit
        self._clock = clock
        self._num_steps = 0
        self.on_step: Callable[[int], None] = lambda _num: None  # told after each how many are made of the lease

    # --- of whatever keeps the vector ---

    @abstractmethod
    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        """Make the gradient the mean over the samples at `positions`."""

    @abstractmethod
    def _descend(self, norm: float, rate: float) -> float:
        """Pull the gradient, whose norm this is, to the center; shorten it, and step along. Return its norm."""

    @abstractmethod
    def _taken(self, factor: float) -> Float32[Tensor, " num"]:
        """Return the gradient, times `factor`."""

    @abstractmethod
    def _showing(self, vector: Float32[Tensor, " num"]) -> AbstractContextManager[Shown]:
        """Let the model have the parameters `vector` meanwhile."""

    # --- steps ---

    def apply_settings(self, run: Genesis) -> None:
        """Train by the settings of `run` from now on: those of the same run, as amended."""
        assert isinstance(run, RunConfig)
        if run.train.seq_len != self._batches.seq_len:
            self._batches = self._batches.resized(run.train.seq_len)
        self._run = run

    def words(self, positions: NDArray[np.int64], seq_len: int) -> Int64[Tensor, "batch words"]:
        """Return the words of the run's samples at `positions`, each with the one after it.

        Raises:
            DataError: as `Batches.at`.
        """
        batches = self._batches if seq_len == self._batches.seq_len else self._batches.resized(seq_len)
        return written(batches.at(positions))

    def shard(self, digest: Digest) -> Buffer | None:
        """As `Batches.shard`."""
        return self._batches.shard(digest)

    @property
    def has_ended(self) -> bool:
        return False

    def train(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,
        pace: Fraction | int,
        should_stop: Callable[[], bool] = lambda: False,
        num_done: int = 0,
    ) -> Work:
        """Make inner steps, one for each whole batch in `positions`. What they are does not depend on how many are made
        in a call.

        Args:
            positions: of the run's samples, from this peer's lease.
            committed_tokens: of the run, at the last commit.
            pace: of the whole run, in multiples of this peer's: what all members make while it makes one step.
            should_stop: asked between steps; True ends the call early with what was done.
            num_done: inner steps that this peer has made since the last commit.

        Raises:
            NotFinite: a loss or gradient is NaN or infinite; the parameters are those before the step.
            OutOfMemory: not even one sample at a time fits.
            SiteBroken: a rank has ended.
        """
        began, size, losses = self._clock.now(), self._run.train.batch_size, list[float]()
        for start in range(0, len(positions) - size + 1, size):
            if should_stop():
                break
            began_step = self._clock.now()
            rate = self._rate(committed_tokens, num_done + len(losses) + 1, pace)
            mean = self._step(self._fill(positions[start : start + size]), rate)
            losses.append(mean.loss)
            self._done(mean, rate, began_step)
            self.on_step(num_done + len(losses))
        return self._work(losses, len(losses) * size, began)

    def _step(self, mean: Mean, rate: float) -> Mean:
        self._require_finite(mean, rate)
        return replace(mean, norm=self._descend(mean.norm, rate))

    def gradient(
        self, positions: NDArray[np.int64], committed_tokens: int, pace: Fraction | int
    ) -> tuple[Float32[Tensor, " num"], Work]:
        """Return the mean gradient over the samples at `positions`, and change no parameter.

        It is clipped where the error that a codec leaves is kept: what is merged is no gradient then. Elsewhere what is
        merged is clipped.

        It may be the model's own memory, until the next call.

        Raises:
            NotFinite, OutOfMemory, SiteBroken: as `train`.
        """
        began, rate = self._clock.now(), self._rate(committed_tokens, 1, pace)
        mean = self._fill(positions)
        self._require_finite(mean, rate)
        taken = self._taken(1.0 if self._run.method.feedback is None else self._shortening(mean.norm))
        self._done(mean, rate, began)
        return taken, self._work([mean.loss], mean.num_samples, began)

    # --- other parameters ---

    def evaluate(
        self, vector: Float32[Tensor, " num"], batches: Batches, num_windows: int, between: Callable[[], None] = nothing
    ) -> Measured:
        """As `Measure.evaluate`."""
        total, num = Sums(0.0), 0
        with self._showing(vector) as shown:
            for batch in batches.heldout_batches(num_windows, self._run.train.batch_size):
                total = total.plus(shown.sums(batch))
                num += batch.num_predicted
                between()
        if not math.isfinite(total.loss):
            raise NotFinite(
                "the held-out loss of the outer parameters is NaN or infinite: the run has diverged. Resume from an "
                "earlier checkpoint, with a lower learning rate."
            )
        return mean_of(total, num, is_paired=self._run.train.loss is not UNSET)

    def sample(
        self,
        vector: Float32[Tensor, " num"],
        tokenizer: Tokenizer,
        prompt: str,
        num_tokens: int,
        seed: int,
        between: Callable[[], None] = nothing,
        within_s: float = math.inf,
    ) -> str:
        """As `Measure.sample`."""
        end, written = tokenizer.end_of_text, list[int]()
        ids = [int(token) for token in tokenizer.encode(prompt)] or [0 if end is None else end]
        with self._showing(vector) as shown:
            for token in shown.write(ids, Sampling(max_new_tokens=num_tokens, stop_id=end), seed, within_s):
                written.append(token)
                between()
        return tokenizer.decode(written)

    # --- of each step ---

    def _rate(self, committed_tokens: int, num_steps: int, pace: Fraction | int) -> float:
        train, tokens_per_step = self._run.train, self._run.tokens_per_step
        return lr_of_step(train.schedule, committed_tokens, num_steps, tokens_per_step, pace)

    def _require_finite(self, mean: Mean, rate: float) -> None:
        """Refuse a step that would ruin the parameters.

        Raises:
            NotFinite: the loss or the gradient's norm is NaN or infinite.
        """
        if not (math.isfinite(mean.loss) and math.isfinite(mean.norm)):
            raise NotFinite(
                f"step {self._num_steps + 1} at learning rate {rate:.3g}: the loss is {mean.loss}, the gradient's norm "
                f"{mean.norm}. The parameters are those before it. Lower train.schedule's lr, lengthen its warm-up or "
                "lower train.clip: that makes another run, which may begin from the last checkpoint's weights (weft "
                "export). In half precision, try to resume in fp32 first."
            )

    def _shortening(self, norm: float) -> float:
        """Return the factor that brings a gradient of this norm to the longest that is allowed."""
        return self._run.train.clip / norm if norm > self._run.train.clip else 1.0

    def _done(self, mean: Mean, rate: float, began: float) -> None:
        """Count a step, and tell of it."""
        self._num_steps += 1
        self._emit(
            StepDone(
                step=Step(self._num_steps),
                loss=mean.loss,
                learning_rate=rate,
                gradient_norm=mean.norm,
                num_tokens=mean.num_samples * self._run.train.seq_len,
                duration_s=self._clock.now() - began,
            )
        )

    def _work(self, losses: list[float], num_samples: int, began: float) -> Work:
        """Return what was done since `began`: a step for each loss."""
        return Work(
            num_steps=len(losses),
            num_tokens=num_samples * self._run.train.seq_len,
            mean_loss=sum(losses) / len(losses) if losses else math.nan,
            duration_s=self._clock.now() - began,
        )
