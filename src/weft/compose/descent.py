"""What trains vectors by AdamW, step after step, and goes on to the same bits after it was stopped.

    number of the step ─► its batch ─► loss ─► gradients, shortened ─► AdamW ─► vectors

A step depends on the state and on its number alone: what it reads is drawn by the number, and so is its learning rate.
The state is what was trained, the moments, whatever else a method needs, and how many steps were made. Who begins anew
with the same config and takes up a state makes the steps that the other would have made.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vector_norm

from weft.config import Config
from weft.data.rows import Batch, batch_of
from weft.errors import CheckpointError, ConfigError, DataError, NotFinite
from weft.model.flat import FlatModel
from weft.rng import integers64, stream
from weft.sync.method.choices import AdamWConfig
from weft.sync.method.schedule import CosineConfig, lr
from weft.training.optimizer import adamw_step

Draw = Callable[[int], Batch]  # the batch of a step, by its number


class DescentConfig(Config, frozen=True, kw_only=True):
    """How vectors are trained: warm-up, then half a cosine down to floor x peak."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    lr: Annotated[float, msgspec.Meta(gt=0, le=10, description="peak learning rate")] = 1.5e-3
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 40
    floor: Annotated[float, msgspec.Meta(ge=0, le=1, description="fraction of the peak that remains at the end")] = 0.1
    clip: Annotated[float, msgspec.Meta(gt=0, le=1e6, description="longest gradient")] = 1.0
    optimizer: AdamWConfig = AdamWConfig(weight_decay=0.01)

    def __post_init__(self) -> None:
        if self.warmup_steps > self.steps:
            raise ConfigError(f"warmup_steps: {self.warmup_steps:,} of {self.steps:,} steps. At most all are warm-up.")

    def rate(self, number: int) -> float:
        """Return the learning rate of a step. The schedule counts steps, where a run counts tokens."""
        cosine = CosineConfig(lr=self.lr, warmup_tokens=self.warmup_steps, total_tokens=self.steps, floor=self.floor)
        return lr(cosine, number + 1)


@dataclass(frozen=True)
class State:
    """What training goes on from.

    Args:
        num_steps: that were made.
        tensors: by name: what is trained, its moments, and what else a method needs.
    """

    num_steps: int
    tensors: Mapping[str, Tensor]


class Trained:
    """A vector that is trained.

    Args:
        gradient: as long, into which backward passes add.
        num_decayed: its first numbers, to which weight decay applies.
    """

    def __init__(self, vector: Float[Tensor, " num"], gradient: Float[Tensor, " num"], num_decayed: int) -> None:
        self.vector = vector
        self.gradient = gradient
        self.moments = {name: torch.zeros_like(vector) for name in ("moment1", "moment2")}
        self._ranges = (slice(0, num_decayed), slice(num_decayed, None))

    @classmethod
    def of(cls, model: FlatModel) -> "Trained":
        return cls(model.vector, model.gradient, model.layout.num_decayed)

    def step(self, config: AdamWConfig, rate: float, number: int) -> None:
        """Make AdamW's step; `number` were made before it."""
        for here, decay in zip(self._ranges, (config.weight_decay, 0.0), strict=True):
            numbers = (self.vector[here], self.gradient[here], *(moment[here] for moment in self.moments.values()))
            count = torch.tensor(float(number), device=self.vector.device)
            adamw_step(config, decay, rate, [(*numbers, count)])

    def tensors(self) -> dict[str, Tensor]:
        return {"vector": self.vector, **self.moments}


class Descent(ABC):
    """
    Args:
        config: how it trains.
        draw: what it trains on.
        trained: what it trains, by name.
    """

    def __init__(self, config: DescentConfig, draw: Draw, trained: Mapping[str, Trained]) -> None:
        self.config = config
        self.num_steps = 0
        self._draw = draw
        self._trained = trained

    @abstractmethod
    def _loss(self, number: int) -> Tensor:
        """Return the loss of a step, from which gradients are found."""

    def run(self, until: int | None = None) -> list[float]:
        """Make the steps up to the one of this number, None: all; return their losses.

        Raises:
            NotFinite: as `step`.
        """
        stop = self.config.steps if until is None else min(until, self.config.steps)
        return [self.step() for _ in range(self.num_steps, stop)]

    def step(self) -> float:
        """Make the next step and return its loss.

        Raises:
            NotFinite: the loss or its gradient is NaN or infinite; nothing was changed.
        """
        config, number, trained = self.config, self.num_steps, self._trained.values()
        for each in trained:
            each.gradient.zero_()
        loss = self._loss(number)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = math.hypot(*(float(vector_norm(each.gradient, dtype=torch.float64)) for each in trained))
        if not (math.isfinite(norm) and math.isfinite(loss.item())):
            raise NotFinite(
                f"step {number}: the loss is {loss.item()}, the gradient's norm {norm}: training has diverged. Begin "
                f"from an earlier state with a lower learning rate than {config.rate(number):g}."
            )
        for each in trained:
            each.gradient.mul_(min(1.0, config.clip / norm) if norm else 1.0)
            each.step(config.optimizer, config.rate(number), number)
        self.num_steps += 1
        return loss.item()

    # --- its state ---

    def state(self) -> State:
        """Return a copy of all that the next step depends on."""
        return State(self.num_steps, {name: each.clone() for name, each in self._tensors().items()})

    def load(self, state: State) -> None:
        """Take up what `state` returned.

        Raises:
            CheckpointError: it belongs to something else; nothing is changed.
        """
        mine = self._tensors()
        shapes, found = ({name: tuple(x.shape) for name, x in each.items()} for each in (mine, state.tensors))
        if wrong := sorted({name for name, _ in shapes.items() ^ found.items()}):
            raise CheckpointError(
                f"the state of another training: {', '.join(wrong)} should not be there, or be there, or have another "
                "size. Take up the state of the same members and method, or begin anew."
            )
        for name, each in mine.items():
            each.copy_(state.tensors[name])
        self.num_steps = state.num_steps

    def _tensors(self) -> dict[str, Tensor]:
        """Return what a state holds; its memory is in use."""
        parts = {name: each.tensors() for name, each in self._trained.items()}
        return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()}


def windows(tokens: Int[Tensor, " tokens"], seq_len: int, batch_size: int, seed: int) -> Draw:
    """Return what draws a batch of windows of running text, by the number of the step.

    Raises:
        DataError: the text is shorter than a window.
    """
    num = len(tokens) - seq_len
    if num < 1:
        raise DataError(
            f"{len(tokens):,} tokens, and a window takes {seq_len + 1:,}. Give more text, or a shorter one."
        )
    ahead = torch.arange(seq_len + 1)

    def draw(number: int) -> Batch:
        starts = (integers64(stream(seed, "windows", number), batch_size) % np.uint64(num)).astype(np.int64)
        return batch_of(tokens[torch.from_numpy(starts)[:, None] + ahead].long(), has_rows=False)

    return draw
