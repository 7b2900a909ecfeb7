"""What an adapter goes beside, in as few bytes as a machine has for it: nobody trains it, so it need not be exact.

    matrix = held(weight, "nf4")
    product(x, matrix, bias)        # x W^T, and back: W is made for it, and let go again

    bf16    as it is, rounded; of weights that came so, exact              2 bytes a number
    int8    codes -127..127, times each row's largest / 127                1
    nf4     the nearest of 16 values, times the largest of 64 numbers      0.56

The 16 values have as many numbers of a normal distribution to each (QLoRA, arXiv:2305.14314, appendix E). Members may
hold a base each in its own way: what they train is beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

Numbers = Literal["fp32", "bf16", "int8", "nf4"]
GROUP = 64  # numbers of nf4 that share a scale
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class Matrix:
    """
    Args:
        dense: returns it in a kind of number.
        shape: rows, columns.
        nbytes: that it takes.
    """

    dense: Callable[[torch.dtype], Tensor]
    shape: torch.Size
    nbytes: int


def held(weight: Float32[Tensor, "rows columns"], numbers: Numbers) -> Matrix:
    """Return a matrix in as many bytes as such numbers take, on the device that it is on."""
    return _HELD[numbers](weight)


def matrix_nbytes(shape: tuple[int, ...], numbers: Numbers) -> int:
    """Return the bytes that a matrix takes, in closed form."""
    num, rows = prod(shape), shape[0]
    match numbers:
        case "fp32":
            return 4 * num
        case "bf16":
            return 2 * num
        case "int8":
            return num + 4 * rows
        case "nf4":
            return -(-num // GROUP) * (GROUP // 2 + 4)


def product(x: Float[Tensor, "*dims columns"], matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias. Going back, W is made again: nothing of it is kept."""
    found: Tensor = _Product.apply(x, matrix, bias)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        device = x.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        ctx.matrix, ctx.kind, ctx.given = matrix, kind, x.dtype
        return linear(x.to(kind), matrix.dense(kind), None if bias is None else bias.to(kind))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.to(ctx.kind).matmul(ctx.matrix.dense(ctx.kind)).to(ctx.given), None, None


# --- kinds of numbers ---


def _bf16(weight: Tensor) -> Matrix:
    held = weight.bfloat16()
    return Matrix(held.to, held.shape, held.nbytes)


def _int8(weight: Tensor) -> Matrix:
    scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    codes = (weight / scales).round().to(torch.int8)

    def dense(kind: torch.dtype) -> Tensor:
        return codes.to(kind) * scales.to(kind)

    return Matrix(dense, codes.shape, codes.nbytes + scales.nbytes)


def _nf4(weight: Tensor) -> Matrix:
    values = torch.tensor(_NF4, device=weight.device)
    flat = weight.flatten()
    groups = pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)
    scales = groups.abs().amax(1, keepdim=True).clamp(min=1e-30)
    borders = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(groups / scales, borders).to(torch.uint8).view(-1, 2)
    packed = codes[:, 0] << 4 | codes[:, 1]
    return Matrix(
        partial(_nf4_dense, packed, scales, values, weight.shape), weight.shape, packed.nbytes + scales.nbytes
    )


def _nf4_dense(packed: Tensor, scales: Tensor, values: Tensor, shape: torch.Size, kind: torch.dtype) -> Tensor:
    codes = torch.stack((packed >> 4, packed & 15), 1).int()
    return (values.to(kind)[codes].view(-1, GROUP) * scales.to(kind)).flatten()[: shape.numel()].view(shape)


_HELD: dict[Numbers, Callable[[Tensor], Matrix]] = {"bf16": _bf16, "int8": _int8, "nf4": _nf4}
