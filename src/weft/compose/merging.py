"""Merging experts to a mixture, stage by stage, and its control: the best of them, trained on as long."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from jaxtyping import Float32
from torch import Tensor

from weft import wire
from weft.compose.descent import DescentConfig, Draw
from weft.compose.experts.mixture import MixtureConfig, Stage
from weft.compose.experts.routing import MixtureDescent, WholeDescent, mixture_flops
from weft.compose.shelf import Shelf, later, through
from weft.compose.space import numbers_digest
from weft.cost.training import flops_per_token
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.training.device import decoder

Numbers = Float32[Tensor, " num"]


@dataclass(frozen=True, eq=False)
class Merge:
    """
    Args:
        begun: of the mixture the vector, as `mixture.mix` makes it.
        single: of the best expert.
        stages: that are gone through, each with as many steps.
    """

    config: MixtureConfig
    begun: Numbers
    single: Numbers
    stages: tuple[Stage, ...]
    training: DescentConfig
    batch_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        return len(self.stages) * self.training.steps * self.batch_size * self.seq_len

    @property
    def flops(self) -> int:
        each = self.tokens / len(self.stages)
        return int(sum(each * mixture_flops(self.config, self.seq_len, stage) for stage in self.stages))

    @property
    def continued(self) -> DescentConfig:
        """How the best expert is trained on: for as many operations."""
        steps = continued_steps(self.config.model, self.flops, self.batch_size, self.seq_len)
        warmup = min(self.training.warmup_steps, steps)
        return msgspec.structs.replace(self.training, steps=steps, warmup_steps=warmup)

    @property
    def num_steps(self) -> int:
        return len(self.stages) * self.training.steps + self.continued.steps

    def digest(self, text: Digest) -> Digest:
        """Return what names all that the trainings depend on; `text` names what is read."""
        parts = [numbers_digest(self.begun), numbers_digest(self.single), text]
        told = msgspec.to_builtins((self.config, self.stages, self.training, self.batch_size, self.seq_len))
        return wire.digest(msgspec.json.encode([parts, told]))

    def make(self, draw: Draw, shelf: Shelf, on_step: Callable[[], None]) -> tuple[Numbers, Numbers]:
        """Return the vectors of the mixture and of the expert that was trained on; arguments as of `making.make`.

        Raises:
            NotFinite: a training has diverged.
        """
        vector, device = self.begun, self.begun.device
        for number, stage in enumerate(self.stages):
            text = later(draw, number * self.training.steps)
            begin = partial(MixtureDescent, self.training, self.config, vector.to(device), stage, text)
            vector = through(stage, self.training.steps, begin, _vector, shelf, on_step)["vector"]
        single = continued(self.continued, self.config.model, self.single, draw, shelf, on_step)
        return vector, single


def continued_steps(model: ModelConfig, flops: int, batch_size: int, seq_len: int) -> int:
    """Return how many steps of a single model take so many operations."""
    return max(1, round(flops / (batch_size * seq_len * flops_per_token(decoder(model), seq_len))))


def continued(
    training: DescentConfig, model: ModelConfig, vector: Numbers, draw: Draw, shelf: Shelf, on_step: Callable[[], None]
) -> Numbers:
    """Return the vector of a single expert after it was trained on; arguments as of `making.make`.

    Raises:
        NotFinite: it has diverged.
    """
    begin = partial(WholeDescent, training, model, vector, draw)
    return through("continued", training.steps, begin, _vector, shelf, on_step)["vector"]


def _vector(descent: MixtureDescent | WholeDescent) -> dict[str, Tensor]:
    return {"vector": descent.vector}
