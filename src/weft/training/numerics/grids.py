"""Numbers that come out the same on every CPU: products, sums, powers of two, logarithms, roots, angles.

    on_grid     a row rounded to integers times a power of two: what is added afterwards is whole, and has no order
    product     of matrices whose rows and columns are on such grids: added in float64, rounded once
    total       a sum of numbers that are on a finer grid
    exp2_, log, roots, turns    elementwise, each step an operation that IEEE 754 rounds once

The definition is in `numerics`. How much is computed at a time, and what is added first, changes no bit.
"""

from collections.abc import Iterator
from math import pi

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from weft.codec.exact import grid_bits

MOST_BITS = 22  # of a product's numbers, without the sign: fp32 rounds to so many by one addition
SUM_BITS = 30
PIECE = 1 << 16  # numbers that are computed at a time: what is made of them on the way fits a core's second-level cache
OF_PRODUCTS = 4  # times as many, where most of the time goes into products

_FLOAT_BITS, _DOUBLE_BITS = 23, 52  # that a float32 and a float64 have behind the point
_INFINITE, _INFINITE64 = 0xFF, 0x7FF  # exponents
_WHOLE = 1.5 * 2.0**_FLOAT_BITS
_HALF64 = 1 << (_DOUBLE_BITS - 1)
_ONE = torch.ones(())


# --- products ---


def product_bits(num: int) -> int:
    """Return how many bits numbers have of which `num` products are added: 2 bits + log2(num) <= 53."""
    return min(MOST_BITS, grid_bits(num) - 1)


def step_of(x: Float32[Tensor, "*dims"], dim: int, num: int | None = None) -> Float32[Tensor, "*ones"]:
    """Return the steps of the grids of x's rows along `dim`: 2^-bits times the power of two above the largest, and at
    least 2^-126.

    Args:
        num: of products that are added; None: as long as a row is.
    """
    return _step_above(x.abs().amax(dim, keepdim=True), num or x.shape[dim])


def _step_above(most: Float32[Tensor, "*ones"], num: int) -> Float32[Tensor, "*ones"]:
    exponent = most.view(torch.int32).bitwise_and_(_INFINITE << _FLOAT_BITS)
    less = product_bits(num) - 1
    return exponent.sub_(less << _FLOAT_BITS).clamp_(min=1 << _FLOAT_BITS).view(torch.float32)


def large_of(step: Float32[Tensor, "*ones"]) -> Float32[Tensor, "*ones"]:
    """Return what rounds a number to whole steps where it is added and taken away: of numbers so large, fp32 holds
    whole steps and nothing between."""
    return step * _WHOLE


def on_grid(x: Float32[Tensor, "*dims"], step: Float32[Tensor, "*ones"]) -> Float64[Tensor, "*dims"]:
    """Return x rounded to whole steps, ties to even."""
    large = large_of(step)
    return torch.add(x, large).sub_(large).double()


def in_steps(x: Float32[Tensor, "*dims"], step: Float32[Tensor, "*ones"]) -> Float64[Tensor, "*dims"]:
    """Return how many steps x is, rounded alike."""
    return torch.mul(x, inverse(step)).round_().double()


def gridded(x: Float32[Tensor, "*dims"], dim: int, num: int | None = None) -> Float64[Tensor, "*dims"]:
    """Return x on the grids of its rows along `dim`; `num` as of `step_of`."""
    return on_grid(x, step_of(x, dim, num))


def inverse(step: Float32[Tensor, "*ones"]) -> Float32[Tensor, "*ones"]:
    """Return 1 by a power of two."""
    return torch.div(_ONE, step)


class Room:
    """Where some rows at a time are put on their grid. What is asked for anew each time comes from the system, which
    takes longer than to compute with it."""

    def __init__(self, num: int, width: int) -> None:
        self._single, self._double = torch.empty(num, width), torch.empty(num, width, dtype=torch.float64)

    def step_of(self, x: Float32[Tensor, "rows width"], num: int) -> Float32[Tensor, "rows one"]:
        """As `step_of` of rows, of which there may be more than room."""
        most = torch.empty(len(x), 1)
        for here in pieces(len(x), len(self._single)):
            single = torch.abs(x[here], out=self._single[: here.stop - here.start])
            torch.amax(single, 1, keepdim=True, out=most[here])
        return _step_above(most, num)

    def on_grid(self, x: Float32[Tensor, "n width"], large: Float32[Tensor, "*ones"]) -> Float64[Tensor, "n width"]:
        """As `on_grid`, until the next. `large` is `large_of` the step."""
        single = torch.add(x, large, out=self._single[: len(x)])
        return self._double[: len(x)].copy_(single.sub_(large))

    def in_steps(self, x: Float32[Tensor, "n width"], per_step: Float32[Tensor, "n one"]) -> Float64[Tensor, "n width"]:
        """As `in_steps`, until the next. `per_step` is 1 by the step."""
        single = torch.mul(x, per_step, out=self._single[: len(x)])
        return self._double[: len(x)].copy_(single.round_())


def product(a: Float32[Tensor, "n k"], b: Float32[Tensor, "m k"]) -> Float32[Tensor, "n m"]:
    """Return a b^T, rounded once, of rows on their grids."""
    (num, width), num_out = a.shape, len(b)
    right, found, size = gridded(b, 1).t(), torch.empty(num, num_out), at_a_time(num, (width + num_out) // OF_PRODUCTS)
    room, sums = Room(size, width), torch.empty(size, num_out, dtype=torch.float64)
    for here in pieces(num, size):
        large = large_of(room.step_of(a[here], width))
        found[here] = torch.mm(room.on_grid(a[here], large), right, out=sums[: here.stop - here.start])
    return found


def shared(
    step: Float32[Tensor, "*batch rows one"],
) -> tuple[Float32[Tensor, "*batch rows one"], Float64[Tensor, "*batch one one"]]:
    """Return the steps of rows relative to the largest, and that.

    Of rows that are whole numbers of steps, columns are added: what they are multiplied by takes the steps.
    """
    most = step.amax(-2, keepdim=True)
    return torch.div(step, most), most.double()


def at_a_time(num: int, width: int) -> int:
    """Return how many of so many rows are computed at a time."""
    return min(num, max(PIECE // max(width, 1), 1))


def pieces(num: int, size: int) -> Iterator[slice]:
    """Yield so many rows at a time."""
    for start in range(0, num, size):
        yield slice(start, min(start + size, num))


# --- sums ---


def on_sums(x: Float32[Tensor, "*dims"], dim: int) -> Float64[Tensor, "*dims"]:
    """Return x on the grid of its sums along `dim`: of 30 bits relative to the largest; of fewer, where more than 2^23
    are added."""
    bits = min(SUM_BITS, _DOUBLE_BITS + 1 - (x.shape[dim] - 1).bit_length())
    most = x.abs().amax(dim, keepdim=True).double()
    field = most.view(torch.int64).bitwise_and_(_INFINITE64 << _DOUBLE_BITS)
    field.add_(((_DOUBLE_BITS + 1 - bits) << _DOUBLE_BITS) + _HALF64)
    round_by = field.view(torch.float64)
    return x.double().add_(round_by).sub_(round_by)


def total(x: Float32[Tensor, "*dims"], dim: int) -> Float64[Tensor, "*ones"]:
    """Return the sums along `dim`, which is kept. Nothing is rounded but what is added."""
    return on_sums(x, dim).sum(dim, keepdim=True)


# --- functions ---

LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453  # of which float64 has no more
# 2^f = 1 + f (c1 + f (c2 + ...)) for |f| <= 1/2, off by at most 1.1e-7 of it; each is a float32.
_POWERS = tuple(
    map(float.fromhex, ("0x1.62e42ap-1", "0x1.ebf9bcp-3", "0x1.c6b752p-5", "0x1.3cea88p-7", "0x1.5bba14p-10"))
)
_LEAST_POWER, _NO_POWER = -126.0, -127.0
MOST_POWER = 126.0


def exp2_(x: Float32[Tensor, "*dims"]) -> Float32[Tensor, "*dims"]:
    """Make of contiguous x, at most `MOST_POWER`, 2^x in place, and return it; 0 where that is 2^-126 or less."""
    for y in torch.split(x.view(-1), PIECE):
        torch.threshold_(y, _LEAST_POWER, _NO_POWER)
        whole = y.round()
        y.sub_(whole)
        power = y * _POWERS[-1]
        for each in _POWERS[-2::-1]:
            power.add_(each).mul_(y)
        power.add_(1.0)
        # 2^n p: n is added to the exponent of p. Of what is 0 below, p is 1 and its exponent becomes that of 0.
        whole_bits = whole.to(torch.int32).bitwise_left_shift_(_FLOAT_BITS)
        torch.add(power.view(torch.int32), whole_bits, out=y.view(torch.int32))
    return x


def log(x: Float64[Tensor, "*dims"]) -> Float64[Tensor, "*dims"]:
    """Return the natural logarithm of numbers of at least 1."""
    part, exponent = torch.frexp(x)  # of [1/2, 1)
    is_low = part < 0.7071067811865476
    part, exponent = torch.where(is_low, part * 2, part), exponent - is_low.int()
    # log f = 2 (t + t^3 / 3 + t^5 / 5 ...), t = (f - 1) / (f + 1), at most 0.172
    t = torch.div(part - 1, part + 1)
    square, found = t * t, torch.full_like(t, 1 / 21)
    for odd in range(19, 0, -2):
        found.mul_(square).add_(1 / odd)
    return found.mul_(t).mul_(2).add_(exponent.double().mul_(_LN_2))


def roots(x: Float64[Tensor, "*dims"]) -> Float64[Tensor, "*dims"]:
    """Return square roots, each rounded once, as a processor has them; torch asks a library."""
    return torch.from_numpy(np.sqrt(x.numpy()))


# pi / 2 in parts of 33 bits, so that a whole number below 2^20 times the first two is held whole.
_QUARTER = tuple(map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")))
_SINE = tuple((-1) ** n / fact for n, fact in enumerate((1, 6, 120, 5040, 362880, 39916800, 6227020800, 1307674368000)))
_COSINE = tuple(
    (-1) ** n / fact for n, fact in enumerate((1, 2, 24, 720, 40320, 3628800, 479001600, 87178291200, 20922789888000))
)


def turns(angles: Float32[Tensor, "*dims"]) -> tuple[Float32[Tensor, "*dims"], Float32[Tensor, "*dims"]]:
    """Return cosines and sines of angles of at most 2^20 radians: in float64, and rounded."""
    angle = angles.double()
    quarters = (angle * (2 / pi)).round_()
    for part in _QUARTER:
        angle = angle - quarters * part
    square = angle * angle
    sine, cosine = torch.full_like(angle, _SINE[-1]), torch.full_like(angle, _COSINE[-1])
    for each in _SINE[-2::-1]:
        sine.mul_(square).add_(each)
    for each in _COSINE[-2::-1]:
        cosine.mul_(square).add_(each)
    sine.mul_(angle)
    place = quarters.long().bitwise_and_(3)
    is_swapped, has_minus = place % 2 == 1, place >= 2
    cos, sin = torch.where(is_swapped, sine, cosine), torch.where(is_swapped, cosine, sine)
    cos = torch.where(has_minus ^ is_swapped, -cos, cos)
    return cos.float(), torch.where(has_minus, -sin, sin).float()
