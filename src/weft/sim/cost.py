"""A trainer that learns nothing: what a peer's other code sees of training, without a model, gradients or torch's work.

Its vector has the run's true length, so payloads, digests, merges, states and checkpoints of outer parameters are as
long as ever, and every byte is there. What each call changes is different on every peer and for every lease, and as
cheap as it can be:

    local <- local (1 - d),   d = RATE (1 + u),   u in [0, 1) from the lease's first position

Its loss is that of a model that guesses every token alike: nothing here tells how well a run would learn.

It does not know time: who calls it lets pass what the tokens take.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor, tensor

from weft.data import Tokenizer
from weft.data.batch import Batches
from weft.errors import CheckpointError
from weft.train.learner import Work, nothing
from weft.train.optimizer import State
from weft.train.trainer import Trainer

RATE = 1e-4  # of one call: a vector of weights keeps its size for thousands of rounds
SPREAD = 1009  # a prime: u has so many values


class CostTrainer(Trainer):
    def start(self, vector: Float32[Tensor, " num"]) -> None:
        self._held = vector if self._sends_gradient else vector.clone()
        self._has_left = False
        self._steps.num_made = 0

    @property
    def is_parked(self) -> bool:
        return self._has_left

    @property
    def is_warm(self) -> bool:
        return True

    def park(self) -> None:
        self._has_left = True

    def unpark(self) -> None:
        self._has_left = False

    def train(
        self,
        positions: NDArray[np.int64],
        committed_tokens: int,
        pace: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Work:
        began, size, losses = self._clock.now(), self._run.train.batch_size, list[float]()
        for _ in range(len(positions) // size):
            if should_stop():
                break
            rate = self._steps.rate(committed_tokens, len(losses) + 1, pace)
            losses.append(self._loss)
            self._steps.done(self._loss, 0.0, rate, size, began)
        if losses:
            self._vector.mul_(1 - change(positions))
        return self._steps.work(losses, len(losses) * size, began)

    def gradient(
        self, positions: NDArray[np.int64], committed_tokens: int, pace: float
    ) -> tuple[Float32[Tensor, " num"], Work]:
        began = self._clock.now()
        self._steps.done(self._loss, 0.0, self._steps.rate(committed_tokens, 1, pace), len(positions), began)
        return self._vector * change(positions), self._steps.work([self._loss], len(positions), began)

    def private_state(self) -> State:
        return {"num_steps": tensor([self._steps.num_made])}

    def load_private_state(self, state: State) -> None:
        if "num_steps" not in state:
            raise CheckpointError("the saved state does not say how many steps were made.")
        self._steps.num_made = int(state["num_steps"])

    def evaluate(
        self,
        vector: Float32[Tensor, " num"],  # noqa: ARG002
        batches: Batches,  # noqa: ARG002
        num_windows: int,
        between: Callable[[], None] = nothing,
    ) -> tuple[float, int]:
        between()
        return self._loss, num_windows * self._run.train.seq_len

    def sample(
        self,
        vector: Float32[Tensor, " num"],  # noqa: ARG002
        tokenizer: Tokenizer,  # noqa: ARG002
        prompt: str,  # noqa: ARG002
        num_tokens: int,  # noqa: ARG002
        seed: int,  # noqa: ARG002
        between: Callable[[], None] = nothing,
    ) -> str:
        between()
        return ""

    @property
    def _vector(self) -> Tensor:
        return self._held

    @property
    def _loss(self) -> float:
        return math.log(self._run.model.vocab_size)


def change(positions: NDArray[np.int64]) -> float:
    return RATE * (1 + int(positions[0]) % SPREAD / SPREAD)
