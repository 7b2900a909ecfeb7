"""Matrix products that come out the same on every machine, in any order of summation.

    a, b      rounded onto a grid: integers of `bits` bits times a power of two, per row of a and per column of b
    a @ b     in float64, where each product and each partial sum is an integer below 2^53: nothing is rounded
    result    times the two powers of two, rounded once to fp32

2 (bits - 1) + log2(k) <= 53 for a sum of k products, so 24 bits do for k = 64, as many as fp32 has. No thread, no
blocking, no fused multiply-add can change a bit. It costs float64 arithmetic, four to eight times that of fp32 on a
CPU.
"""

import torch
from jaxtyping import Float32, Float64, Int32
from torch import Tensor

_MANTISSA = 53  # bits of a float64
_BIAS = 1023  # of its exponent
_LEAST = -300  # exponent of the largest number: far below, the grid's reciprocal is no number


def matmul(a: Float32[Tensor, "*batch n k"], b: Float32[Tensor, "*batch k m"]) -> Float32[Tensor, "*batch n m"]:
    """Return a @ b, rounded once, of operands rounded onto their grids. Finite where they are and fp32 holds it.

    Raises:
        ValueError: so many products have no exact sum.
    """
    bits = grid_bits(a.shape[-1])
    left, left_scale = _on_grid(a, -1, bits)
    right, right_scale = _on_grid(b, -2, bits)
    # The powers of two go where there are fewer numbers: nothing is rounded by them, here or there.
    (n, k), m = a.shape[-2:], b.shape[-1]
    if k < m:
        left.mul_(left_scale)
    if k < n:
        right.mul_(right_scale)
    product = left @ right
    if k >= m:
        product.mul_(left_scale)
    if k >= n:
        product.mul_(right_scale)
    return product.float()


def grid_bits(num_products: int) -> int:
    """Return with how many signed bits sums of so many products are exact."""
    bits = (_MANTISSA - (num_products - 1).bit_length()) // 2 + 1
    if bits < 8:  # a product of less tells little; 2^39 products
        raise ValueError(f"{num_products} products have no exact sum")
    return bits


def _on_grid(
    x: Float32[Tensor, "*batch n m"], dim: int, bits: int
) -> tuple[Float64[Tensor, "*batch n m"], Float64[Tensor, "*batch n_or_1 m_or_1"]]:
    """Return the integers nearest to x / scale, and the scale: powers of two, one for all values along `dim`."""
    work = x.double()
    _, exponent = torch.frexp(work.abs().amax(dim=dim, keepdim=True))  # the largest is below 2^exponent
    exponent = exponent.clamp(min=_LEAST) - (bits - 1)
    scale = _power_of_two(exponent)
    return work.mul_(1.0 / scale).round_(), scale


def _power_of_two(exponent: Int32[Tensor, "*any"]) -> Float64[Tensor, "*any"]:
    """Return 2^exponent, by its bits: a library's power may be off by one."""
    return torch.bitwise_left_shift(exponent.long() + _BIAS, _MANTISSA - 1).view(torch.float64)
