"""What inner steps have in common wherever they are made: their rate, their count, and what is told of them."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weft.clock import Clock
from weft.data import Tokenizer
from weft.errors import NotFinite
from weft.events import Emit, StepDone
from weft.ids import Step
from weft.run.config import RunConfig
from weft.sync.method.schedule import lr
from weft.training.learner import Work


class Steps:
    """Inner steps of one peer.

    Args:
        emit: told of every step.
    """

    def __init__(self, run: RunConfig, emit: Emit, clock: Clock) -> None:
        self.run = run
        self.num_made = 0
        self._emit = emit
        self._clock = clock

    def rate(self, committed_tokens: int, num_steps: int, pace: float) -> float:
        """Return the learning rate of the step that makes `num_steps` since the last commit.

        Args:
            pace: of the whole run, in multiples of this peer's.
        """
        made = round(num_steps * self.run.tokens_per_step * pace)
        return lr(self.run.train.schedule, committed_tokens + made)

    def make(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,
        pace: float,
        should_stop: Callable[[], bool],
        step: Callable[[NDArray[np.int64], float], tuple[float, float]],
    ) -> Work:
        """Make a step for each whole batch in `positions`.

        Args:
            should_stop: asked between steps.
            step: makes one at a rate, and returns its loss and the gradient's norm.
        """
        began, size, losses = self._clock.now(), self.run.train.batch_size, list[float]()
        for start in range(0, len(positions) - size + 1, size):
            if should_stop():
                break
            began_step = self._clock.now()
            rate = self.rate(committed_tokens, len(losses) + 1, pace)
            loss, norm = step(positions[start : start + size], rate)
            losses.append(loss)
            self.done(loss, norm, rate, size, began_step)
        return self.work(losses, len(losses) * size, began)

    def require_finite(self, loss: float, norm: float, rate: float) -> None:
        """Refuse a step that would ruin the parameters.

        Raises:
            NotFinite: the loss or the gradient's norm is NaN or infinite.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFinite(
                f"step {self.num_made + 1} at learning rate {rate:.3g}: the loss is {loss}, the gradient's norm "
                f"{norm}. The parameters are those before it. Lower train.schedule's lr, lengthen its warm-up or lower "
                "train.clip: that makes another run, which may begin from the last checkpoint's weights (weft export). "
                "In half precision, try to resume in fp32 first."
            )

    def shortening(self, norm: float) -> float:
        """Return the factor that brings a gradient of this norm to the longest that is allowed."""
        return self.run.train.clip / norm if norm > self.run.train.clip else 1.0

    def done(self, loss: float, norm: float, rate: float, num_samples: int, began: float) -> None:
        """Count a step, and tell of it."""
        self.num_made += 1
        self._emit(
            StepDone(
                step=Step(self.num_made),
                loss=loss,
                learning_rate=rate,
                gradient_norm=norm,
                num_tokens=num_samples * self.run.train.seq_len,
                duration_s=self._clock.now() - began,
            )
        )

    def work(self, losses: list[float], num_samples: int, began: float) -> Work:
        """Return what was done since `began`: a step for each loss."""
        return Work(
            num_steps=len(losses),
            num_tokens=num_samples * self.run.train.seq_len,
            mean_loss=sum(losses) / len(losses) if losses else math.nan,
            duration_s=self._clock.now() - began,
        )


def mean_loss(total: float, num_tokens: int) -> float:
    """Return the mean of a summed loss over held-out text.

    Raises:
        NotFinite: it is NaN or infinite.
    """
    if not math.isfinite(total):
        raise NotFinite(
            "the held-out loss of the outer parameters is NaN or infinite: the run has diverged. Resume from an "
            "earlier checkpoint, with a lower learning rate."
        )
    return total / num_tokens


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return what a text begins with: an empty prompt stands for the end of the text before, or for the first token."""
    end = tokenizer.end_of_text
    return [int(token) for token in tokenizer.encode(prompt)] or [0 if end is None else end]
