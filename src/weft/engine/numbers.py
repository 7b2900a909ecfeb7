"""A model's matrices as a step multiplies by them: full, half, or eight bits.

    fp32   as trained
    bf16   weights and activations rounded to bf16; sums in fp32, as the matmul has them
    int8   weights to seven bits with a scale per output, activations to eight with a scale per row; sums are integers
    w8a16  weights to eight bits with a scale per output; activations rounded to bf16; sums in fp32; on CPUs alone
    exact  as int8; keys and values (`attention`) and norms are summed as integers, too

Before numbers are rounded to eight bits, rows and weights are turned (`hadamard`).

Integer sums have no order: with `exact` a row comes to the same bits whatever else is in the step. Weights have seven
bits and not eight: processors that add pairs of products in 16 bits (AVX2 and AVX-512 without VNNI) saturate in silence
beyond (`probe`).
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.nn.functional import linear

from weft import rng
from weft.clock import cpu_s
from weft.engine.hadamard import Turn
from weft.engine.sizes import filled, of_matrices

Kind = Literal["fp32", "bf16", "w8a16", "int8", "exact"]
MAX_WEIGHT, MAX_ACTIVATION = 63, 127


class Matrix(Protocol):
    nbytes: int

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        """Return x W^T, fp32."""
        ...


class Full:
    def __init__(self, weight: Float[Tensor, "out in"]) -> None:
        self._weight = weight.float()
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        return linear(x, self._weight)


class Half:
    def __init__(self, weight: Float[Tensor, "out in"]) -> None:
        self._weight = weight.to(torch.bfloat16)
        self.nbytes = self._weight.nbytes

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        half = x.to(torch.bfloat16)
        if x.is_cpu:
            return linear(filled(half, of_matrices(len(x))), self._weight)[: len(x)].float()
        return linear(half, self._weight).float()


class Eight:
    """On a CPU oneDNN keeps the weight in the order in which it reads it: twice as fast as `torch._int_mm`."""

    def __init__(self, weight: Float[Tensor, "out in"], *, is_whole: bool = False) -> None:
        self._turn = Turn(weight.shape[1], weight.device, is_whole=is_whole)
        weight = self._turn.of_weight(weight.float())
        scale = weight.abs().amax(1).clamp_min_(_LEAST) / MAX_WEIGHT
        eighths = (weight / scale[:, None]).round_().to(torch.int8)
        self.nbytes = eighths.nbytes + scale.nbytes
        self._product = _packed(eighths, scale) if eighths.device.type == "cpu" else _plain(eighths, scale)

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        whole, scale = rounded(self._turn(x))
        return self._product(whole.to(torch.int8)).mul_(scale)


class EightByHalf:
    """Fast on CPUs that have no instructions for products of eight bits (AVX2, AVX-512 without VNNI)."""

    def __init__(self, weight: Float[Tensor, "out in"]) -> None:
        weight = weight.float()
        self._scale = weight.abs().amax(1).clamp_min_(_LEAST) / MAX_ACTIVATION
        self._weight = (weight / self._scale[:, None]).round_().to(torch.int8)
        self.nbytes = self._weight.nbytes + self._scale.nbytes

    def __call__(self, x: Float[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        ones = torch.ones(len(self._scale), dtype=torch.bfloat16)  # it would round scales to bf16
        return torch._weight_int8pack_mm(x.to(torch.bfloat16), self._weight, ones).float().mul_(self._scale)


def rounded(x: Float[Tensor, "*rows width"]) -> tuple[Float[Tensor, "*rows width"], Float[Tensor, "*rows one"]]:
    """Return integers up to `MAX_ACTIVATION`, and the scales by which they are x again."""
    most = _largest(x)
    return (x * (MAX_ACTIVATION / most)).round_(), most / MAX_ACTIVATION


def _largest(x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows one"]:
    """Return the largest magnitude of each row; torch's own norm of that kind is ten times as slow on a CPU."""
    return x.abs().amax(-1, keepdim=True).clamp_min_(_LEAST)


_LEAST = torch.finfo(torch.float32).tiny * MAX_ACTIVATION  # of a row of zeros: nothing is divided by 0

_SQUARED = 2.0**20  # fp64 holds sums of so large integers' squares whole, up to a width of 2^13
_LEAST_SQUARED = 2.0**-100  # of a row of zeros: fp32 holds `_SQUARED` by that

Product = Callable[[Int8[Tensor, "rows in"]], Float[Tensor, "rows out"]]


def _plain(weight: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Product:
    transposed = weight.t()
    return lambda x: torch._int_mm(x, transposed).float().mul_(scale)


def _packed(weight: Int8[Tensor, "out in"], scale: Float[Tensor, " out"]) -> Product:
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def product(x: Int8[Tensor, "rows in"]) -> Float[Tensor, "rows out"]:
        x, num = filled(x, of_matrices(len(x))), len(x)
        found: Tensor = multiply(x, 1.0, 0, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return found[:num]

    return product


MATRICES: dict[Kind, Callable[[Float[Tensor, "out in"]], Matrix]] = {
    "fp32": Full,
    "bf16": Half,
    "w8a16": EightByHalf,
    "int8": Eight,
    "exact": partial(Eight, is_whole=True),
}


def normed(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], eps: float
) -> Float[Tensor, "*rows width"]:
    """Return x over its root mean square, whose sum is one of integers: the same to the bit in every order.

    Raises no error at widths up to 2^13: 2^13 squares of 20 bits are what fp64 holds whole.
    """
    most = _largest(x).clamp_min_(_LEAST_SQUARED).double()
    whole = (x * (_SQUARED / most).float()).round_().double()
    mean = whole.square_().mean(-1, keepdim=True).mul_((most / _SQUARED).square_())
    found: Tensor = x * mean.add_(eps).rsqrt_().float() * weight
    return found


def product_s(kind: Kind) -> float:
    """Return the CPU time that a CPU takes for the product of one row and a matrix of eight million numbers, seconds:
    the median of five."""
    x, weight = torch.ones(1, 2048), torch.ones(4096, 2048)
    matrix, took_s = MATRICES[kind](weight), list[float]()
    for _ in range(6):
        began_s = cpu_s()
        matrix(x)
        took_s.append(cpu_s() - began_s)
    return median(took_s[1:])  # the first allocates


def can_multiply(kind: Kind, device: torch.device) -> bool:
    """Return whether a device computes products of a kind, and rightly."""
    if kind == "w8a16":
        return has_w8a16(device)
    return kind not in {"int8", "exact"} or probe(device)


def has_w8a16(device: torch.device) -> bool:
    """Return whether weights of eight bits are multiplied by halves on this device, and rightly."""
    if device.type != "cpu":
        return False
    draws = rng.stream(0, "probe of products by halves")
    for num_rows in (1, 8, 33):
        x = torch.from_numpy(draws.integers(-128, 129, (num_rows, 256))).float()  # which bf16 holds whole
        weight = torch.from_numpy(draws.integers(-MAX_ACTIVATION, MAX_ACTIVATION + 1, (64, 256))).float()
        weight[:, 0] = MAX_ACTIVATION
        try:
            found = EightByHalf(weight)(x)
        except (RuntimeError, AttributeError):  # a torch without such a product
            return False
        expected = x @ weight.t()
        if not torch.allclose(found, expected, rtol=0.01, atol=0.01 * float(expected.abs().max())):
            return False
    return True


def probe(device: torch.device) -> bool:
    """Return whether products of eight bits are right on this device, at the largest numbers that occur."""
    draws = rng.stream(0, "probe of products")
    for num_rows in (1, 8, 33):
        x = torch.from_numpy(draws.integers(-MAX_ACTIVATION, MAX_ACTIVATION + 1, (num_rows, 256), np.int8))
        weight = torch.from_numpy(draws.integers(-MAX_WEIGHT, MAX_WEIGHT + 1, (64, 256), np.int8))
        x[0], weight[0] = MAX_ACTIVATION, MAX_WEIGHT
        make = _packed if device.type == "cpu" else _plain
        try:
            found = make(weight.to(device), torch.ones(64, device=device))(x.to(device)).cpu()
        except (RuntimeError, AttributeError):  # a torch without such a matmul, or one not of so few rows
            return False
        if not torch.equal(found.long(), x.long() @ weight.long().t()):
            return False
    return True
