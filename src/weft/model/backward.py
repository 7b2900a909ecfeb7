"""The backward pass of a model or a section in two parts: first what others wait for, then what may not count at all.

    passed = forward(model, lambda module: module(x), x)
    dx = passed.input_gradient(dy)      # the gradient of its input; none of its weights'
    passed.add_weight_gradients()       # into model.gradient; whoever drops `passed` instead adds nothing

A matrix's gradient dW = dy^T x needs no chain rule: what came in and what came back are kept until it is asked for, as
are the tokens of an embedding. What little the others have (norms, biases) is computed on the way, and kept, too. Each
sum is the one that torch's own backward pass makes, bit for bit.

Where memory is scarce, a pass keeps its input alone, and is made again when its gradient is asked for (`Recomputing`).

After Qi et al., Zero Bubble Pipeline Parallelism, 2401.10241, section 2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear
from torch.overrides import TorchFunctionMode

from weft.model.flat import FlatModel
from weft.model.transformer import SectionModule

Owed = Callable[[], tuple[Tensor, Tensor]]  # of a weight: the weight, or rows of it, and their gradient


class Passed:
    """What a forward pass leaves for the backward one."""

    def __init__(self, model: FlatModel, x: Tensor, y: Tensor, owed: list[Owed]) -> None:
        self.output = y.detach()
        self._model = model
        self._x = x
        self._y: Tensor | None = y
        self._owed = owed

    def input_gradient(self, dy: Tensor | None = None) -> Tensor | None:
        """Return the gradient of the input, as long as the input; None: the input is tokens. Once.

        Args:
            dy: the gradient of the output, of its shape; None: the output is a loss.
        """
        assert self._y is not None, "the graph of a forward pass serves once"
        y, self._y = self._y, None  # its memory is free as the pass goes back
        trained = [each for each in self._model.module.parameters() if each.requires_grad]
        small = [each for each in trained if each.dim() < 2]
        ends = [self._x] if self._x.requires_grad else self._ends(trained)
        found = torch.autograd.grad(y, [*small, *ends], dy, allow_unused=True)
        self._owed += [_known(*each) for each in zip(small, found, strict=False) if each[1] is not None]
        return found[-1] if self._x.requires_grad else None

    def _ends(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """Return weights to which torch goes back, and finds nothing: what they owe is kept on the way."""
        embed = self._model.module.embed
        assert embed is not None, "only who has an embedding takes tokens"
        return [embed.weight] if embed.weight.requires_grad else [each for each in trained if each.dim() == 2]

    def add_weight_gradients(self, weight: float = 1.0) -> None:
        """Add the gradients of all weights to those of the model, `weight` times. Once."""
        with torch.no_grad():
            for owed in self._owed:
                of, gradient = owed()
                self._model.gradient_of(of).add_(gradient, alpha=weight)
        self._owed.clear()


def forward(model: FlatModel, compute: Callable[[SectionModule], Tensor], x: Tensor) -> Passed:
    """Compute something of a model, to be gone back through in two parts.

    Args:
        model: its module must not be compiled, and keep what it computes (`has_recompute=False`).
        compute: what to compute, from the module and `x`.
        x: its input: tokens, or activations, whose gradient will be asked for.
    """
    if x.is_floating_point():
        x.requires_grad_()
    owed: list[Owed] = []
    with torch.enable_grad(), _Keeping(owed):
        y = compute(model.module)
    return Passed(model, x, y, owed)


class Recomputing:
    """Passes through one model that keep their inputs alone, and are made again to go back. What they find is the same.

    What weights' gradients are made of is kept of the last `num_owed` that went back; others are made a third time.
    """

    def __init__(self, model: FlatModel, num_owed: int) -> None:
        self._model = model
        self._num_owed = num_owed
        self._owing: list[Recomputed] = []  # the oldest first

    def forward(self, compute: Callable[[SectionModule], Tensor], x: Tensor) -> "Recomputed":
        """As the function `forward`, of this model."""
        again = partial(forward, self._model, compute, x)
        return Recomputed(again().output, again, self._owes)  # not without grad: some layers would round otherwise

    def _owes(self, made: "Recomputed") -> None:
        self._owing = [*(each for each in self._owing if each.owes), made]
        while len(self._owing) > self._num_owed:
            self._owing.pop(0).forget()


class Recomputed:
    """What a pass leaves that is made again: as `Passed`.

    Args:
        again: makes it.
        on_owing: told once it keeps what weights' gradients are made of.
    """

    def __init__(self, output: Tensor, again: Callable[[], Passed], on_owing: Callable[["Recomputed"], None]) -> None:
        self.output = output
        self._again = again
        self._on_owing = on_owing
        self._dy: Tensor | None = None
        self._passed: Passed | None = None

    @property
    def owes(self) -> bool:
        """Whether it keeps what weights' gradients are made of."""
        return self._passed is not None

    def forget(self) -> None:
        self._passed = None

    def input_gradient(self, dy: Tensor | None = None) -> Tensor | None:
        self._dy, self._passed = dy, self._again()
        found = self._passed.input_gradient(dy)
        self._on_owing(self)
        return found

    def add_weight_gradients(self, weight: float = 1.0) -> None:
        passed = self._passed
        if passed is None:
            passed = self._again()
            passed.input_gradient(self._dy)
        passed.add_weight_gradients(weight)
        self.forget()


class _Keeping(TorchFunctionMode):
    """Has layers keep what their weights' gradients are made of."""

    def __init__(self, owed: list[Owed]) -> None:
        super().__init__()
        self._owed = owed

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is linear:
            return _linear(self._owed, *args, **named)
        if func is embedding:
            return _Embedding.apply(args[1], args[0], self._owed)  # type: ignore[no-untyped-call]
        return func(*args, **named)


def _linear(owed: list[Owed], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    y: Tensor = _Linear.apply(x, weight, bias, owed)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owed: list[Owed]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owed = owed
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # Detached: what is owed would hold the graph, whose nodes hold what is owed, and nobody could free either.
        rows, back = x.detach().flatten(0, -2), dy.flatten(0, -2)
        if ctx.needs_input_grad[1]:  # else it is frozen
            ctx.owed.append(lambda: (weight, back.T.mm(rows)))  # dW = dy^T x
        dx = back.mm(weight.to(back.dtype)).view_as(x) if ctx.needs_input_grad[0] else None  # dx = dy W
        return dx, None, back.sum(0) if ctx.needs_input_grad[2] else None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, owed: list[Owed]) -> Tensor:
        ctx.save_for_backward(weight, tokens)
        ctx.owed = owed
        return embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        weight, tokens = ctx.saved_tensors
        ctx.owed.append(lambda: (weight, _rows(dy, tokens, len(weight))))
        return None, None, None


def _rows(dy: Float[Tensor, "*dims width"], tokens: Tensor, num: int) -> Float[Tensor, "num width"]:
    gradient: Tensor = torch.ops.aten.embedding_dense_backward(dy, tokens, num, -1, False)
    return gradient


def _known(weight: Tensor, gradient: Tensor) -> Owed:
    return lambda: (weight, gradient)
