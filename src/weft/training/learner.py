"""What a peer asks of what trains: a vector to begin with, inner steps when a lease says so, the vector they arrive at.

    start(outer) ──► train(positions) ──► local() ──► set_local(outer - carry) ──► train(positions) ──► ...

`Trainer` makes the steps itself, on a transformer. Where members train in loops of their own (`weft.library`), the loop
is lent the steps and makes them in its own thread. What a peer's rounds, states, checkpoints and pauses need is the
same.

All calls are one after the other, but `park` and `unpark`, which may come beside whoever reads or sets what is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.data.batch import Batches
from weft.data.tokenizer import Tokenizer
from weft.events import Preferred
from weft.run.config import Genesis
from weft.training.optimizer import State


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a call of the trainer did."""

    num_steps: int
    num_tokens: int
    mean_loss: float  # nats per token; NaN where nothing was trained on
    duration_s: float


NOTHING_CAME = Work(num_steps=1, num_tokens=0, mean_loss=math.nan, duration_s=0.0)  # a step with no micro-batch in it


def nothing() -> None:
    """Do nothing between two pieces of work."""


class Measured(NamedTuple):
    """What was found on held-out windows.

    Args:
        loss: the mean, in nats per token, or per pair.
        num: tokens that were predicted, or pairs, or answers.
        preferred: of pairs of answers.
        reward: of answers to tasks, on the mean; the loss is what lacks to 1.
    """

    loss: float
    num: int
    preferred: Preferred | None = None
    reward: float | None = None


@runtime_checkable
class Measure(Protocol):
    """What is asked of parameters, beside training."""

    def evaluate(
        self, vector: Float32[Tensor, " num"], batches: Batches, num_windows: int, between: Callable[[], None] = nothing
    ) -> Measured:
        """Return what the outer parameters `vector` do on held-out windows.

        Args:
            between: called after each batch; what it raises ends the evaluation.

        Raises:
            NotFinite: the loss is NaN or infinite.
            OutOfMemory: there is no room for them beside what trains.
        """
        ...

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
        """Return the text that the outer parameters `vector` write after `prompt`, of at most `num_tokens` tokens.

        An empty prompt stands for the end of the text before; where the tokenizer has none, for its first token.

        Args:
            between: called between tokens, or at the end; what it raises ends the text.
            within_s: seconds after which no other token is begun.

        Raises:
            DataError: the prompt has a character that the tokenizer does not know.
            NotFinite: the model's logits are NaN or infinite.
            OutOfMemory: there is no room for them beside what trains.
        """
        ...


@runtime_checkable
class Learner(Protocol):
    """Inner steps from one vector to another. All vectors are flat, fp32, on the CPU; or spread, if the first is."""

    # --- the local parameters, wherever they lie ---

    @property
    def is_parked(self) -> bool: ...

    def park(self) -> None:
        """Leave the device, if it has not been left."""
        ...

    def unpark(self) -> None:
        """Take the device again, as it was left."""
        ...

    def local(self) -> Float32[Tensor, " num"]:
        """Return the local parameters: a copy, or memory that is theirs until the next `train`."""
        ...

    def set_local(self, vector: Float32[Tensor, " num"]) -> None:
        """Set the local parameters."""
        ...

    def set_center(self, outer: Float32[Tensor, " num"]) -> None:
        """Let inner steps be pulled towards `outer`, where the method says so."""
        ...

    def private_state(self) -> State:
        """Return what only this peer has and an exact resume needs: flat fp32 vectors, and counters of one int64."""
        ...

    def load_private_state(self, state: State) -> None:
        """Take up what `private_state` returned, by copying.

        Raises:
            CheckpointError: it belongs to another model or is incomplete.
        """
        ...

    # --- steps on them ---

    def start(self, vector: Float32[Tensor, " num"]) -> None:
        """Take what training needs, and `vector` as the local parameters."""
        ...

    def apply_settings(self, run: Genesis) -> None:
        """Train by the settings of `run` from now on: those of the same run, as amended."""
        ...

    @property
    def is_warm(self) -> bool: ...

    def warm_up(self) -> None: ...

    @property
    def has_ended(self) -> bool:
        """Whether it makes no more steps: what it has made is all it brings."""
        ...

    def train(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,
        pace: Fraction | int,
        should_stop: Callable[[], bool] = ...,
        num_done: int = 0,
    ) -> Work:
        """Make inner steps, one for each whole batch in `positions`, or fewer where it should stop or has ended."""
        ...

    def gradient(
        self, positions: NDArray[np.int64], committed_tokens: int, pace: Fraction | int
    ) -> tuple[Float32[Tensor, " num"], Work]:
        """Return the mean gradient over the samples at `positions`, and change no parameter."""
        ...
