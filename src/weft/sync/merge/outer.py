"""Exact optimizers on flat fp32 vectors: the step every member makes on the same bytes, to the same bytes.

    sgd        x -= lr g;  inside, with momentum: m = mu m + g;  x -= lr m
    sign_sgd   x -= lr wd x (decayed range only);  x -= lr sign(g)
    nesterov   m = mu m + g;  x -= lr (g + mu m)                       as torch.optim.SGD(nesterov=True)
    delayed    b += g;  every N-th step m = mu m + b, b = 0, then x -= lr ((1 - c N + c) mu m + g)
               in other steps x -= lr (c mu m + g)     Liu et al., 2401.09135, algorithm 3, with g = delta / N
    adamw      x -= lr wd x (decayed range only);  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g g;
               x -= lr / (1-b1^t) * m / (sqrt(v) / sqrt(1-b2^t) + eps)  as torch.optim.AdamW (1711.05101)

How the bits stay equal everywhere: each line above is a chain of tensor operations, each of which rounds every element
once (+ - * / sqrt, correctly rounded by IEEE 754 on every machine), in the order written, with no fused multiply-add
(`alpha=`, addcmul, lerp: some machines round them once, some twice). Scalars are computed in Python floats, which are
IEEE doubles, by + - * / and math.sqrt only, and rounded to fp32 once; powers by repeated squaring, because `**` asks
the C library. Two tensors are divided, never a tensor by a number: a GPU would multiply by a rounded reciprocal.

State is a mapping from name to flat fp32 tensor, so that it can be digested, shipped and saved without knowing the
optimizer. The vectors are worked on in cache-sized chunks, in place; nothing of their size is allocated.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, assert_never, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.extension import make
from weft.sync.method import choices
from weft.sync.method.extension import Extension

State = dict[str, Float32[Tensor, " _"]]  # of any sizes

CHUNK = 1 << 16  # elements: three operands of 256 KiB fit a core's second-level cache


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a step needs beside the vectors; equal on all members."""

    number: int  # the round's; with fragments about how many steps its fragment has had: max(round // fragments, 1)
    round: int = 0
    lr: float = 0.0  # of the schedule; sgd and nesterov have their own
    num_decayed: int = 0  # elements [0, num_decayed) decay: the layout puts matrices first
    max_norm: float | None = None  # clip the merged vector to this Euclidean norm


@runtime_checkable  # the shape check that is on in tests asks
class Outer(Protocol):
    def init(self, num: int) -> State:
        """Return the state before the first step, for `num` parameters."""
        ...

    def apply(
        self, outer: Float32[Tensor, " num"], state: State, merged: Float32[Tensor, " num"], context: StepContext
    ) -> None:
        """Make one step on `outer` and `state` in place, along the descent direction -`merged`, which is only read."""
        ...


def build(config: choices.OuterConfig) -> Outer:
    """Return the optimizer that `config` describes."""
    match config:
        case choices.SgdConfig():
            return Sgd(config)
        case choices.SignSgdConfig():
            return SignSgd(config)
        case choices.NesterovConfig():
            return Nesterov(config)
        case choices.DelayedNesterovConfig():
            return DelayedNesterov(config)
        case choices.AdamWConfig():
            return AdamW(config)
        case choices.InnerSgdConfig():
            return InnerSgd(config)
        case choices.ExtensionOuterConfig():
            return Extension(config.name, make(config))
    assert_never(config)


class Sgd:
    def __init__(self, config: choices.SgdConfig) -> None:
        self._config = config

    def init(self, num: int) -> State:  # noqa: ARG002  # the protocol's signature
        return {}

    def apply(self, outer: Tensor, state: State, merged: Tensor, context: StepContext) -> None:
        lr = fp32(self._config.lr)
        clip = clip_factor(merged, context.max_norm)
        for x, g, scratch, _ in _chunks(outer, merged, state, clip):
            torch.mul(g, lr, out=scratch)
            x.sub_(scratch)


class SignSgd:
    """DeMo's step (Peng et al., 2411.19870, algorithm 1)."""

    def __init__(self, config: choices.SignSgdConfig) -> None:
        self._config = config

    def init(self, num: int) -> State:  # noqa: ARG002  # the protocol's signature
        return {}

    def apply(self, outer: Tensor, state: State, merged: Tensor, context: StepContext) -> None:
        lr = fp32(context.lr)
        _decay(outer[: context.num_decayed], fp32(context.lr * self._config.weight_decay))
        for x, g, scratch, _ in _chunks(outer, merged, state, clip=1.0):  # a sign has no length
            torch.sign(g, out=scratch)
            scratch.mul_(lr)
            x.sub_(scratch)


class InnerSgd:
    """SGD with the schedule's learning rate."""

    def __init__(self, config: choices.InnerSgdConfig) -> None:
        self._config = config

    def init(self, num: int) -> State:
        return {"momentum": torch.zeros(num)} if self._config.momentum else {}

    def apply(self, outer: Tensor, state: State, merged: Tensor, context: StepContext) -> None:
        lr, mu = fp32(context.lr), fp32(self._config.momentum)
        clip = clip_factor(merged, context.max_norm)
        for x, g, scratch, part in _chunks(outer, merged, state, clip):
            if mu:
                # m = mu m + g
                m = part("momentum")
                m.mul_(mu)
                m.add_(g)
                g = m
            torch.mul(g, lr, out=scratch)
            x.sub_(scratch)


class Nesterov:
    def __init__(self, config: choices.NesterovConfig) -> None:
        self._config = config

    def init(self, num: int) -> State:
        return {"momentum": torch.zeros(num)}

    def apply(self, outer: Tensor, state: State, merged: Tensor, context: StepContext) -> None:
        lr, mu = fp32(self._config.lr), fp32(self._config.momentum)
        clip = clip_factor(merged, context.max_norm)
        for x, g, scratch, part in _chunks(outer, merged, state, clip):
            m = part("momentum")
            # m = mu m + g
            m.mul_(mu)
            m.add_(g)
            # x -= lr (g + mu m)
            torch.mul(m, mu, out=scratch)
            scratch.add_(g)
            scratch.mul_(lr)
            x.sub_(scratch)


class DelayedNesterov:
    """For what each member brings by itself: were the momentum to act in each step, it would act N times."""

    def __init__(self, config: choices.DelayedNesterovConfig) -> None:
        self._config = config

    def init(self, num: int) -> State:
        return {"momentum": torch.zeros(num), "delayed": torch.zeros(num)}

    def apply(self, outer: Tensor, state: State, merged: Tensor, context: StepContext) -> None:
        config = self._config
        lr, mu, is_due = fp32(config.lr), fp32(config.momentum), context.number % config.delay == 0
        at_once = config.activation * config.momentum
        share = fp32(at_once + is_due * (1 - config.activation * config.delay) * config.momentum)
        clip = clip_factor(merged, context.max_norm)
        for x, g, scratch, part in _chunks(outer, merged, state, clip):
            m, b = part("momentum"), part("delayed")
            b.add_(g)
            if is_due:
                # m = mu m + b
                m.mul_(mu)
                m.add_(b)
                b.zero_()
            # x -= lr (share m + g)
            torch.mul(m, share, out=scratch)
            scratch.add_(g)
            scratch.mul_(lr)
            x.sub_(scratch)


class AdamW:
    def __init__(self, config: choices.AdamWConfig) -> None:
        self._config = config

    def init(self, num: int) -> State:
        return {"moment1": torch.zeros(num), "moment2": torch.zeros(num)}

    def apply(self, outer: Tensor, state: State, merged: Tensor, context: StepContext) -> None:
        config, lr = self._config, context.lr
        b1, b2, eps = fp32(config.beta1), fp32(config.beta2), fp32(config.eps)
        c1, c2 = fp32(1 - config.beta1), fp32(1 - config.beta2)
        decay = fp32(lr * config.weight_decay)
        rate = fp32(lr / (1 - power(config.beta1, context.number)))  # lr / (1 - b1^t)
        widen = fp32(1 / math.sqrt(1 - power(config.beta2, context.number)))  # 1 / sqrt(1 - b2^t)
        _decay(outer[: context.num_decayed], decay)
        clip = clip_factor(merged, context.max_norm)
        for x, g, scratch, part in _chunks(outer, merged, state, clip):
            m, v = part("moment1"), part("moment2")
            # m = b1 m + (1-b1) g
            m.mul_(b1)
            torch.mul(g, c1, out=scratch)
            m.add_(scratch)
            # v = b2 v + (1-b2) g g
            v.mul_(b2)
            torch.mul(g, g, out=scratch)
            scratch.mul_(c2)
            v.add_(scratch)
            # x -= rate m / (sqrt(v) widen + eps)
            roots(v, scratch)
            scratch.mul_(widen)
            scratch.add_(eps)
            torch.div(m, scratch, out=scratch)
            scratch.mul_(rate)
            x.sub_(scratch)


def _decay(x: Tensor, factor: float) -> None:
    """x -= factor x. Not x *= 1 - factor: fp32 would round a small factor's digits away."""
    if factor:
        scratch = x.new_empty(min(CHUNK, x.numel()))
        for start in range(0, x.numel(), CHUNK):
            here = x[start : start + CHUNK]
            torch.mul(here, factor, out=scratch[: here.numel()])
            here.sub_(scratch[: here.numel()])


def _chunks(
    outer: Tensor, merged: Tensor, state: State, clip: float
) -> Iterator[tuple[Tensor, Tensor, Tensor, Callable[[str], Tensor]]]:
    """Yield (parameters, clipped gradient, scratch, state by name) chunk by chunk."""
    num = outer.numel()
    if merged.numel() != num or any(tensor.numel() != num for tensor in state.values()):
        raise ValueError(f"{num} parameters, {merged.numel()} merged values and a state of another size")
    scratch = outer.new_empty(min(CHUNK, num))
    clipped = outer.new_empty(min(CHUNK, num) if clip != 1.0 else 0)
    for start in range(0, num, CHUNK):
        stop = min(start + CHUNK, num)
        g = merged[start:stop]
        if clip != 1.0:
            g = torch.mul(g, clip, out=clipped[: stop - start])
        here = slice(start, stop)
        yield outer[here], g, scratch[: stop - start], lambda name, here=here: state[name][here]  # type: ignore[misc]


def roots(x: Tensor, out: Tensor) -> None:
    """Write the square roots of x, each rounded once, to `out`.

    Of a CPU's numbers torch.sqrt asks MKL, which rounds one in 170 the wrong way on some processors; numpy asks the
    processor itself. CUDA rounds as IEEE 754 says.
    """
    if x.is_cuda:
        torch.sqrt(x, out=out)
    else:
        np.sqrt(x.numpy(), out=out.numpy())


def fp32(value: float) -> float:
    """Return `value` rounded once to fp32, as a Python float: tensors then take it unchanged."""
    return float(torch.tensor(value, dtype=torch.float32))


def power(base: float, exponent: int) -> float:
    """Return base^exponent by repeated squaring of Python floats: the same double on every machine."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def norm(vector: Float32[Tensor, " num"]) -> float:
    """Return the Euclidean norm of `vector`, the same double on every machine.

    Squares are exact in float64; they are added in one fixed order: chunks are folded in halves, elementwise, then the
    chunks' sums are added from first to last.
    """
    return root_of(square_sums(vector))


def root_of(sums: Iterable[float]) -> float:
    """Return the norm of a vector from the sums over its chunks."""
    total = 0.0
    for each in sums:
        total += each
    return math.sqrt(total)


def square_sums(vector: Float32[Tensor, " num"]) -> Iterator[float]:
    """Yield the sum of squares of each chunk of `vector`."""
    for start in range(0, vector.numel(), CHUNK):
        num = min(CHUNK, vector.numel() - start)
        width = 1 << (num - 1).bit_length()  # what a shorter chunk lacks are zeros
        squares = torch.zeros(width, dtype=torch.float64, device=vector.device)
        here = squares[:num]
        here.copy_(vector[start : start + CHUNK])
        here.mul_(here)
        while width > 1:
            width //= 2
            squares[:width].add_(squares[width : 2 * width])
        yield float(squares[0])


def clip_factor(vector: Float32[Tensor, " num"], max_norm: float | None) -> float:
    """Return the fp32 factor that brings `vector` to a norm of at most `max_norm`; 1 where it is there already."""
    return 1.0 if max_norm is None else shortening(norm(vector), max_norm)


def shortening(length: float, max_norm: float) -> float:
    """Return the fp32 factor that brings a vector of this length to `max_norm`; 1 where it is no longer."""
    return fp32(max_norm / length) if length > max_norm else 1.0
