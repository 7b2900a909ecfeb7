"""The inner optimizer: AdamW, Muon or SGD on a model's flat vector, with flat state.

    adamw   x -= lr wd x (decayed range only);  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g g;
            x -= lr / (1-b1^t) * m / (sqrt(v / (1-b2^t)) + eps)
    muon    of each matrix of the layers, A x B:  m = mu m + (1-mu) g;  O = orthogonalize(mu m + (1-mu) g);
            x -= lr wd x;  x -= 0.2 sqrt(max(A, B)) lr O;  the rest by adamw
    sgd     m = mu m + g;  x -= lr m

torch's fused AdamW reads and writes each number once. It is called as a function, because the state is ours (flat
vectors and a count, which a checkpoint saves as they are) and because making a `torch.optim.Optimizer` imports the
compiler, which takes seconds. Last bits differ between instruction sets: it is for what stays on one peer. Where they
may not, AdamW and SGD are those of the outer step (`Exact`).

AdamW: Loshchilov and Hutter, 1711.05101, algorithm 2. Muon: Jordan et al., 2024; its length: Liu et al., 2502.16982,
equation 4.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import assert_never

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from weft.errors import CheckpointError
from weft.model.flat import FlatModel, layer_matrices
from weft.sync.merge import outer
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig, MuonConfig, OptimizerConfig
from weft.training.device import to_host

State = dict[str, Tensor]

# The quintic x -> a x + b x^3 + c x^5 brings singular values of (0, 1] near 1 in five rounds (Jordan et al.).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_TINY = 1e-7
_RMS = 0.2  # of AdamW's updates (2502.16982, section 2.2)


class InnerOptimizer(ABC):
    """
    Args:
        sizes: of its moments: flat vectors by name, on the model's device.
    """

    def __init__(self, model: FlatModel, sizes: Mapping[str, int]) -> None:
        self._model = model
        self._moments = {name: torch.zeros(num, device=model.vector.device) for name, num in sizes.items()}

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """Move the model's vector against its gradient."""

    def state(self) -> State:
        """Return the moments, flat fp32 on the CPU; there they share memory with the optimizer."""
        return {name: to_host(vector) for name, vector in self._moments.items()}

    def load(self, state: State, num_steps: int) -> None:  # noqa: ARG002  # some count them
        """Take up the moments that `state` returned after `num_steps` steps, by copying.

        Raises:
            CheckpointError: they belong to another model or are incomplete; nothing is changed.
        """
        for name, vector in self._moments.items():
            size, found = vector.numel(), state[name].numel() if name in state else 0
            if found != size:
                raise CheckpointError(
                    f"the inner optimizer's {name} should hold {size:,} numbers, found {found}. The saved state "
                    "belongs to another run or is incomplete: resume from another checkpoint, or join the run again."
                )
        for name, vector in self._moments.items():
            vector.copy_(state[name])


def build(config: OptimizerConfig, model: FlatModel) -> InnerOptimizer:
    """Return the optimizer that `config` describes, before its first step."""
    match config:
        case AdamWConfig():
            return AdamW(config, model)
        case MuonConfig():
            return Muon(config, model)
        case InnerSgdConfig():
            return Sgd(config, model)
    assert_never(config)


@dataclass(frozen=True)
class _Group:
    """Numbers that AdamW treats alike: ranges of the vector, and how they decay."""

    ranges: tuple[slice, ...]
    decay: float

    @property
    def num(self) -> int:
        return sum(here.stop - here.start for here in self.ranges)


@torch.no_grad()
def adamw_step(
    config: AdamWConfig | MuonConfig, decay: float, learning_rate: float, numbers: Iterable[tuple[Tensor, ...]]
) -> None:
    """Make one step of AdamW, in place.

    Args:
        numbers: of each range: parameters, gradient, both moments, count of steps.
    """
    parameters, gradients, moments1, moments2, counts = (list(each) for each in zip(*numbers, strict=True))
    adamw(
        parameters,
        gradients,
        moments1,
        moments2,
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=learning_rate,
        weight_decay=decay,
        eps=config.eps,
        maximize=False,
    )


def adamw_direction(config: AdamWConfig, moment1: Tensor, moment2: Tensor, num_steps: int) -> Float[Tensor, " num"]:
    """Return what AdamW's step goes along, once for each unit of the learning rate, fp64; without decay.

    Args:
        moment1, moment2: after the step; num_steps: that were made with it.
    """
    mean = moment1.double() / (1 - config.beta1**num_steps)
    return mean / ((moment2.double() / (1 - config.beta2**num_steps)).sqrt() + config.eps)


class _AdamWStep:
    """AdamW on some ranges of a model's vector. The moments hold these ranges alone, one after the other."""

    def __init__(self, config: AdamWConfig | MuonConfig, model: FlatModel, groups: Sequence[_Group]) -> None:
        self._config = config
        self._model = model
        self._groups = tuple(groups)
        # fp32 on the device, one per range: what the fused kernel counts in. Exact up to 2^24 steps.
        self._counts = [[torch.zeros((), device=model.vector.device) for _ in group.ranges] for group in groups]

    @property
    def num(self) -> int:
        return sum(group.num for group in self._groups)

    def step(self, learning_rate: float, moment1: Tensor, moment2: Tensor) -> None:
        config, model, start = self._config, self._model, 0
        for group, counts in zip(self._groups, self._counts, strict=True):
            numbers = []
            for here, count in zip(group.ranges, counts, strict=True):
                stop = start + here.stop - here.start
                numbers.append(
                    (model.vector[here], model.gradient[here], moment1[start:stop], moment2[start:stop], count)
                )
                start = stop
            if numbers:
                adamw_step(config, group.decay, learning_rate, numbers)

    def set_steps(self, num_steps: int) -> None:
        for counts in self._counts:
            for count in counts:
                count.fill_(num_steps)


class AdamW(InnerOptimizer):
    def __init__(self, config: AdamWConfig, model: FlatModel) -> None:
        border, num = model.layout.num_decayed, model.layout.num_parameters
        decayed, rest = _Group((slice(0, border),), config.weight_decay), _Group((slice(border, num),), 0.0)
        self._adamw = _AdamWStep(config, model, (decayed, rest))
        super().__init__(model, {"moment1": num, "moment2": num})

    def step(self, learning_rate: float) -> None:
        self._adamw.step(learning_rate, self._moments["moment1"], self._moments["moment2"])

    def load(self, state: State, num_steps: int) -> None:
        super().load(state, num_steps)
        self._adamw.set_steps(num_steps)


class Muon(InnerOptimizer):
    def __init__(self, config: MuonConfig, model: FlatModel) -> None:
        self._config = config
        self._matrices = layer_matrices(model.config, model.section)
        is_muons = {span.name for span in self._matrices}
        rest = [span for span in model.layout if span.name not in is_muons]
        self._adamw = _AdamWStep(
            config,
            model,
            [
                _Group(tuple(slice(span.offset, span.stop) for span in rest if span.has_decay), config.weight_decay),
                _Group(tuple(slice(span.offset, span.stop) for span in rest if not span.has_decay), 0.0),
            ],
        )
        sizes = {"momentum": sum(span.num for span in self._matrices)}
        sizes["moment1"] = sizes["moment2"] = self._adamw.num
        super().__init__(model, sizes)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        config, model, start = self._config, self._model, 0
        for span in self._matrices:
            x, g = model.layout.view(model.vector, span), model.layout.view(model.gradient, span)
            m = self._moments["momentum"][start : start + span.num].view(span.shape)
            m.lerp_(g, 1 - config.momentum)
            start += span.num
            mixed = g.lerp(m, config.momentum)
            x.mul_(1 - learning_rate * config.weight_decay)
            x.add_(orthogonalized(mixed), alpha=-_RMS * sqrt(max(span.shape)) * learning_rate)
        self._adamw.step(learning_rate, self._moments["moment1"], self._moments["moment2"])

    def load(self, state: State, num_steps: int) -> None:
        super().load(state, num_steps)
        self._adamw.set_steps(num_steps)


class Sgd(InnerOptimizer):
    def __init__(self, config: InnerSgdConfig, model: FlatModel) -> None:
        super().__init__(model, {"momentum": model.layout.num_parameters} if config.momentum else {})
        self._config = config

    def step(self, learning_rate: float) -> None:
        sgd_step(self._config, learning_rate, self._model.vector, self._model.gradient, self._moments.get("momentum"))


@torch.no_grad()
def sgd_step(
    config: InnerSgdConfig, learning_rate: float, parameters: Tensor, gradient: Tensor, momentum: Tensor | None
) -> None:
    """Make one step of SGD, in place; `momentum` where there is any."""
    if momentum is not None:
        gradient = momentum.mul_(config.momentum).add_(gradient)
    parameters.sub_(gradient, alpha=learning_rate)


class Exact(InnerOptimizer):
    """AdamW or SGD by operations that IEEE 754 rounds once, in their order (`sync.merge.outer`)."""

    def __init__(self, config: AdamWConfig | InnerSgdConfig, model: FlatModel) -> None:
        self._outer = outer.build(config)
        self._num_steps = 0
        moments = self._outer.init(model.layout.num_parameters)
        super().__init__(model, {name: vector.numel() for name, vector in moments.items()})

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self._num_steps += 1
        model, decayed = self._model, self._model.layout.num_decayed
        context = outer.StepContext(number=self._num_steps, lr=learning_rate, num_decayed=decayed)
        self._outer.apply(model.vector, self._moments, model.gradient, context)

    def load(self, state: State, num_steps: int) -> None:
        super().load(state, num_steps)
        self._num_steps = num_steps


def orthogonalized(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Return U V^T of the matrix U S V^T, roughly: singular values of 0.7 to 1.2, by Newton and Schulz' iteration.

    In bf16 on a GPU; a CPU multiplies faster in fp32.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    x = x / x.norm().clamp(min=_TINY)
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x
