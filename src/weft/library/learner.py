"""What a peer has in the place of a trainer where a loop of somebody's own trains: lends steps, reads, writes.

    train(positions) ──► Lending ──► the loop's own steps, on data of its own; positions say how many, and no more

The state of its optimizer and its place in its data are the loop's own: a checkpoint holds the parameters, and how many
steps were made.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import Clock
from weft.errors import CheckpointError
from weft.events import Emit, StepDone
from weft.ids import Step
from weft.library.lending import Lending, Made
from weft.library.tensors import Tensors
from weft.run.config import Genesis
from weft.training.learner import Work
from weft.training.optimizer import State


class LoopLearner:
    def __init__(self, run: Genesis, tensors: Tensors, lending: Lending, emit: Emit, clock: Clock) -> None:
        self._tensors = tensors
        self._lending = lending
        self._emit = emit
        self._clock = clock
        self._batch_size = run.settings.batch_size
        self._num_steps = 0
        self._is_parked = False

    def start(self, vector: Float32[Tensor, " num"]) -> None:
        self._tensors.write(vector)
        self._num_steps = 0

    def apply_settings(self, run: Genesis) -> None:
        self._batch_size = run.settings.batch_size

    @property
    def is_warm(self) -> bool:
        return True

    def warm_up(self) -> None:
        pass

    @property
    def is_parked(self) -> bool:
        return self._is_parked

    def park(self) -> None:
        """Lend no steps: the loop stands still. Its device is its own, and stays taken."""
        self._is_parked = True

    def unpark(self) -> None:
        self._is_parked = False

    @property
    def has_ended(self) -> bool:
        return self._lending.has_left

    def train(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,  # noqa: ARG002  # the loop has its own schedule
        pace: float,  # noqa: ARG002
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Work:
        began = self._clock.now()
        made = self._lending.lend(len(positions) // self._batch_size, should_stop)
        took_s = self._clock.now() - began
        for step in made:
            self._tell(step, took_s / len(made))
        losses = [step.loss for step in made if not math.isnan(step.loss)]
        return Work(
            num_steps=len(made),
            num_tokens=sum(step.num_samples for step in made),
            mean_loss=sum(losses) / len(losses) if losses else math.nan,
            duration_s=took_s,
        )

    def gradient(
        self,
        positions: NDArray[np.int64],  # noqa: ARG002
        committed_tokens: int,  # noqa: ARG002
        pace: float,  # noqa: ARG002
    ) -> tuple[Float32[Tensor, " num"], Work]:
        raise RuntimeError("a loop of somebody's own hands in no gradients: such methods are refused before")

    def local(self) -> Float32[Tensor, " num"]:
        return self._tensors.read()

    def set_local(self, vector: Float32[Tensor, " num"]) -> None:
        self._tensors.write(vector)

    def set_center(self, outer: Float32[Tensor, " num"]) -> None:
        pass  # methods with a proximal term are refused before

    def private_state(self) -> State:
        return {"num_steps": torch.tensor([self._num_steps])}

    def load_private_state(self, state: State) -> None:
        if "num_steps" not in state:
            raise CheckpointError("the saved state does not say how many steps were made.")
        self._num_steps = int(state["num_steps"])

    def _tell(self, step: Made, duration_s: float) -> None:
        self._num_steps += 1
        if math.isnan(step.loss):
            return  # there is nothing to show
        self._emit(
            StepDone(
                step=Step(self._num_steps),
                loss=step.loss,
                learning_rate=0.0,  # the loop's own, as is the next
                gradient_norm=0.0,
                num_tokens=step.num_samples,
                duration_s=duration_s,
            )
        )
