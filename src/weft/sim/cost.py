"""A trainer that learns nothing: what a peer's other code sees of training, without a model, gradients or torch's work.

Its vector has the run's true length, so payloads, digests, merges, states and checkpoints of outer parameters are as
long as ever, and every byte is there. What each call changes is different on every peer and for every lease, and as
cheap as it can be:

    local <- local (1 - d),   d = RATE (1 + u),   u in [0, 1) from the lease's first position

Its loss is that of a model that guesses every token alike: nothing here tells how well a run would learn.

Sections in a simulated world: computing takes the virtual time that their share of the tokens takes.

    PacedSection    computes what production computes
    CostSection     computes nothing: bytes are as long as ever, and the loss is a guess's

A micro-batch has three pieces, forward, input gradient and weights' gradients, which are taken to be alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor, tensor

from weft.data.batch import Batches
from weft.data.tokenizer import Tokenizer
from weft.errors import CheckpointError
from weft.ids import PeerId
from weft.model.config import ModelConfig, num_layer_parameters, num_table_parameters
from weft.model.sections import Section, whole
from weft.pipeline.codec.boundary import Shape
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import TOKEN_NBYTES, Given, Passed
from weft.pipeline.worker import Sum
from weft.stages.report import PIECES
from weft.training.device import choose
from weft.training.learner import Measured, Work, nothing
from weft.training.optimizer import State
from weft.training.section import SectionTrainer
from weft.training.steps import Mean, Stepper
from weft.training.tied import TiedTrainer, halved
from weft.training.trainer import Trainer
from weft.wire import Buffer, digest

RATE = 1e-4  # of one call: a vector of weights keeps its size for thousands of rounds
SPREAD = 1009  # a prime: u has so many values


class Silent(Trainer):
    """Writes no samples: nobody would read them."""

    def sample(
        self,
        vector: Float32[Tensor, " num"],  # noqa: ARG002
        tokenizer: Tokenizer,  # noqa: ARG002
        prompt: str,  # noqa: ARG002
        num_tokens: int,  # noqa: ARG002
        seed: int,  # noqa: ARG002
        between: Callable[[], None] = nothing,
        within_s: float = math.inf,  # noqa: ARG002
    ) -> str:
        between()
        return ""


class CostTrainer(Silent):
    def start(self, vector: Float32[Tensor, " num"]) -> None:
        self._held = vector if self._sends_gradient else vector.clone()
        self._has_left, self._num_steps, self.has_started = False, 0, True

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
        pace: Fraction | int,
        should_stop: Callable[[], bool] = lambda: False,
        num_done: int = 0,
    ) -> Work:
        work = super().train(positions, committed_tokens, pace, should_stop, num_done)
        if work.num_steps:
            self._vector.mul_(1 - change(positions))
        return work

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        self._change = change(positions)
        return Mean(loss=self._loss, norm=0.0, num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:  # noqa: ARG002  # `train` changes the vector once
        return norm

    def _taken(self, factor: float) -> Float32[Tensor, " num"]:  # noqa: ARG002  # as short as it should be
        return self._vector * self._change

    def private_state(self) -> State:
        return {"num_steps": tensor([self._num_steps])}

    def load_private_state(self, state: State) -> None:
        if "num_steps" not in state:
            raise CheckpointError("the saved state does not say how many steps were made.")
        self._num_steps = int(state["num_steps"])

    def evaluate(
        self,
        vector: Float32[Tensor, " num"],  # noqa: ARG002
        batches: Batches,  # noqa: ARG002
        num_windows: int,
        between: Callable[[], None] = nothing,
    ) -> Measured:
        between()
        return Measured(self._loss, num_windows * self._run.train.seq_len)

    @property
    def _vector(self) -> Tensor:
        return self._held

    @property
    def _loss(self) -> float:
        return math.log(self._run.model.vocab_size)


class StepwiseCostTrainer(CostTrainer):
    """Changes its vector in each step, and not once a call: what can be audited. How far is up to all samples, and to
    the learning rate, by that of the schedule's peak."""

    def start(self, vector: Float32[Tensor, " num"]) -> None:
        super().start(vector)
        self.device = choose(self._peer)

    train = Stepper.train

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        return replace(super()._fill(positions.sum(keepdims=True)), num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:
        self._vector.mul_(1 - self._change * rate / self._run.train.schedule.lr)
        return norm


def change(positions: NDArray[np.int64]) -> float:
    return RATE * (1 + int(positions[0]) % SPREAD / SPREAD)


class Owing(NamedTuple):
    """Of one machine.

    Args:
        owe: lets what it computes take the time of so many tokens of the whole model.
        name: of its process; no two have the same.
    """

    owe: Callable[[float], None]
    name: str


def share(model: ModelConfig, section: Section) -> float:
    """Return a section's part of the work: a token is looked up for nothing, and the head multiplies."""
    return _products(model, section) / _products(model, whole(model))


def _products(model: ModelConfig, section: Section) -> int:
    return len(section.layers) * num_layer_parameters(model) + section.is_last * num_table_parameters(model)


class PacedSection(SectionTrainer):
    def __init__(self, owing: Owing, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._owing = owing
        self._share = share(self._run.model, self._section)

    def owe(self, num_samples: int) -> None:
        """Let a piece of a micro-batch take its time."""
        self._owing.owe(num_samples * self._run.train.seq_len * self._share / PIECES)

    def forward(self, given: Given) -> Passed:
        self.owe(given.num_samples)
        return _Paced(self, given.num_samples, self._passed(given))

    def _passed(self, given: Given) -> Passed:
        return super().forward(given)


class _Paced:
    def __init__(self, section: PacedSection, num_samples: int, passed: Passed) -> None:
        self._section = section
        self._num_samples = num_samples
        self._passed = passed
        self.output, self.loss = passed.output, passed.loss

    def backward(self, gradient: Buffer | None, member: PeerId | None = None) -> Buffer | None:
        self._section.owe(self._num_samples)
        return self._passed.backward(gradient, member)

    def count(self) -> None:
        self._section.owe(self._num_samples)
        self._passed.count()


class CostSection(PacedSection, CostTrainer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        shape = Shape(self._run.train.seq_len, self._run.model.width, self._run.model.vocab_size)
        self._boundary = Boundaries(self._pipeline.activations, self._pipeline.gradients).boundary(shape)
        self._num_made = 0

    @property
    def is_warm(self) -> bool:
        return True

    @property
    def tokens_nbytes(self) -> int:
        return TOKEN_NBYTES * (self._run.train.seq_len + 1)

    def input_nbytes(self, num_samples: int) -> int:
        return 0 if self._section.is_first else self._boundary.activations.nbytes(num_samples)

    def gradient_nbytes(self, num_samples: int) -> int:
        return 0 if self._section.is_last else self._boundary.gradients.nbytes(num_samples)

    def _passed(self, given: Given) -> Passed:
        boundary, section, num = self._boundary, self._section, given.num_samples
        self._num_made += 1
        return _Nothing(
            output=None if section.is_last else self._numbers(given, "on", boundary.activations.nbytes(num)),
            loss=self._loss if section.is_last else None,
            gradient=None if section.is_first else self._numbers(given, "back", boundary.gradients.nbytes(num)),
        )

    def _numbers(self, given: Given, way: str, nbytes: int) -> Buffer:
        """Return as many bytes, on all machines alike: others may compute them again."""
        return f"{way} {self._section.number} {digest(given.tokens)} ".encode().ljust(nbytes, b"\0")[:nbytes]

    def clear(self) -> None:
        """Do nothing: nothing is added up."""

    def _mean(self, total: Sum) -> Mean:
        self._change = RATE * (1 + 1 / (1 + self._num_made))  # another on each machine, and at each step
        return Mean(loss=self._loss, norm=0.0, num_samples=total.num_samples)

    def _descend(self, norm: float, rate: float) -> float:  # noqa: ARG002
        self._vector.mul_(1 - self._change)
        return norm


@dataclass(frozen=True)
class _Nothing:
    """What a micro-batch comes to that is not computed."""

    output: Buffer | None
    loss: float | None
    gradient: Buffer | None  # of its input

    def backward(self, _gradient: Buffer | None, _member: PeerId | None = None) -> Buffer | None:
        return self.gradient

    def count(self) -> None:
        """Add nothing."""


class CostTied(TiedTrainer, CostTrainer):
    """Of a machine that computes nothing."""

    def hand_in(self, total: Sum) -> bool:
        self._total += total
        return True

    def gradient(
        self,
        positions: NDArray[np.int64],  # noqa: ARG002  # what was handed in counts
        committed_tokens: int,  # noqa: ARG002
        pace: Fraction | int,  # noqa: ARG002
    ) -> tuple[Float32[Tensor, " num"], Work]:
        total, self._total = self._total, Sum()
        work = self._work([self._loss], total.num_samples, self._clock.now())
        return self._vector * RATE, halved(work)
