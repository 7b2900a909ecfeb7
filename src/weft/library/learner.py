"""What a peer has in the place of a trainer where a loop of somebody's own trains: lends steps, reads, writes.

    the peer's training thread      lend(n) ───────────────── waits ──────────────────► [what was made]
    the loop's thread                  └► begin() … step … made() … step … made() ─ waits ─┘   next lend ─► …

The loop runs only while steps are lent, on data of its own: positions say how many, and no more. Between two loans it
waits inside `begin` or `made`, and its tensors may be read and written. Steps may be taken back: the one under way is
finished, and no further one begins. The loop may leave for good; then nothing is lent any more.

The state of its optimizer and its place in its data are the loop's own: a checkpoint holds the parameters, and how many
steps were made.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import Clock
from weft.errors import CheckpointError
from weft.events import Emit, StepDone
from weft.ids import Step
from weft.library.tensors import Tensors
from weft.run.config import Genesis
from weft.training.learner import Work
from weft.training.optimizer import State

LOOK_S = 0.1  # between two looks whether steps are to be taken back


@dataclass(frozen=True)
class Made:
    """One inner step of the loop."""

    num_samples: int
    loss: float  # NaN: it was not told


class Lending:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_lent = 0  # steps that the loop may make, the one under way included
        self._made: list[Made] = []  # of the present loan
        self._is_over = False
        self._has_left = False

    @property
    def has_left(self) -> bool:
        """Whether the loop makes no more steps."""
        return self._has_left

    @property
    def is_last(self) -> bool:
        """Whether no step is lent beyond the one under way."""
        return self._num_lent <= 1

    # --- the peer's side ---

    def lend(self, num_steps: int, should_stop: Callable[[], bool]) -> list[Made]:
        """Let the loop make so many steps; return those it made once it waits again, or has left.

        Args:
            should_stop: asked from time to time; True takes back what is not begun.
        """
        with self._changed:
            self._made, self._num_lent = [], num_steps
            self._changed.notify_all()
            while self._num_lent > 0 and not self._has_left:
                self._changed.wait(LOOK_S)
                if should_stop():
                    self._num_lent = min(self._num_lent, 1)
            self._num_lent = 0
            return self._made

    def end(self) -> None:
        """Let the loop wait no more: nothing will be lent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- the loop's side ---

    def begin(self) -> bool:
        """Wait until a step may be made; return False where none will be."""
        with self._changed:
            while self._num_lent <= 0 and not self._is_over:
                self._changed.wait(1.0)  # not for ever: some systems deliver no signal meanwhile
            return not self._is_over

    def made(self, num_samples: int, loss: float = math.nan) -> bool:
        """Hand in the step that was just made, and wait until another may be made; as `begin`."""
        with self._changed:
            if not self._is_over:
                self._made.append(Made(num_samples, loss))
                self._num_lent -= 1
                self._changed.notify_all()
        return self.begin()

    def leave(self) -> None:
        """Make no more steps."""
        with self._changed:
            self._has_left = True
            self._changed.notify_all()


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
        pace: Fraction | int,  # noqa: ARG002
        should_stop: Callable[[], bool] = lambda: False,
        num_done: int = 0,  # noqa: ARG002
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
        pace: Fraction | int,  # noqa: ARG002
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
