"""What of a training step depends on how numbers are added: its loss, the gradient's length, and the optimizer."""

from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule
from weft.run.config import RunConfig
from weft.run.host import take_singly
from weft.sync.merge.outer import CHUNK, fp32, norm
from weft.sync.method.choices import MuonConfig, OptimizerConfig
from weft.training import optimizer as inner
from weft.training.backward import Objective, Samples, summed
from weft.training.device import is_exact
from weft.training.numerics.decoder import loss
from weft.training.optimizer import InnerOptimizer
from weft.training.preference import Sums

_KEPT_NBYTES = 32 << 20  # a step frees blocks and asks for them again: with the demo's model 1,500 page faults


class Arithmetic(Protocol):
    objective: Objective | None
    """The loss; None: the module's own."""

    def optimizer(self, config: OptimizerConfig, model: FlatModel) -> InnerOptimizer: ...

    def norm(self, gradient: Tensor) -> Tensor:
        """Return the Euclidean norm."""
        ...

    def pull(self, gradient: Tensor, vector: Tensor, center: Tensor, strength: float) -> None:
        """Add the gradient of strength / 2 |vector - center|^2."""
        ...


def arithmetic_of(run: RunConfig) -> Arithmetic:
    """Return what a run's training steps are computed in."""
    return Exact() if is_exact(run) else Fast()


class Fast:
    """Whatever torch has that is fast: last bits depend on the processor and the threads."""

    objective: Objective | None = None

    def optimizer(self, config: OptimizerConfig, model: FlatModel) -> InnerOptimizer:
        return inner.build(config, model)

    def norm(self, gradient: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(gradient)
        return length

    def pull(self, gradient: Tensor, vector: Tensor, center: Tensor, strength: float) -> None:
        gradient.add_(vector, alpha=strength).sub_(center, alpha=strength)


class Exact:
    """The same bits on every CPU, as `numerics` defines them."""

    def __init__(self) -> None:
        take_singly(_KEPT_NBYTES)
        self.objective: Objective | None = CrossEntropy()

    def optimizer(self, config: OptimizerConfig, model: FlatModel) -> InnerOptimizer:
        if isinstance(config, MuonConfig):
            raise ConfigError("train.optimizer: muon has no exact numbers")  # `run.trust` says so before
        return inner.Exact(config, model)

    def norm(self, gradient: Tensor) -> Tensor:
        return torch.tensor(norm(gradient), dtype=torch.float64)

    def pull(self, gradient: Tensor, vector: Tensor, center: Tensor, strength: float) -> None:
        strength = fp32(strength)
        for g, x, c in zip(*(torch.split(each, CHUNK) for each in (gradient, vector, center)), strict=True):
            g.add_(torch.sub(x, c).mul_(strength))


class CrossEntropy:
    """The loss in exact numbers; of held-out text, which nobody audits, in fast ones."""

    def loss(self, module: SectionModule, *tensors: Any) -> Tensor:
        return loss(module, *tensors)

    def sums(self, module: SectionModule, batch: Samples) -> Sums:
        return summed(module, batch)
