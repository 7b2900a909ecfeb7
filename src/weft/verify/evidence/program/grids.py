"""Grids, sums, powers and angles by numpy: the same bits as `weft.training.numerics.grids`, which says what they are.

Here all is of rows: what is on one grid, or is summed, lies side by side.
"""

from math import pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MOST_BITS, SUM_BITS = 22, 30
LOG2_E = 1.4426950408889634
MOST_POWER = 126.0
_FLOAT_BITS, _DOUBLE_BITS = 23, 52
_INFINITE, _INFINITE64 = 0xFF, 0x7FF
_WHOLE = np.float32(1.5 * 2.0**_FLOAT_BITS)
_POWERS = [
    np.float32(float.fromhex(each))
    for each in ("0x1.62e42ap-1", "0x1.ebf9bcp-3", "0x1.c6b752p-5", "0x1.3cea88p-7", "0x1.5bba14p-10")
]
_LEAST_POWER, _NO_POWER = np.float32(-126.0), np.float32(-127.0)
_QUARTER = tuple(map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")))
_SINE = tuple((-1) ** n / fact for n, fact in enumerate((1, 6, 120, 5040, 362880, 39916800, 6227020800, 1307674368000)))
_COSINE = tuple(
    (-1) ** n / fact for n, fact in enumerate((1, 2, 24, 720, 40320, 3628800, 479001600, 87178291200, 20922789888000))
)


def product_bits(num: int) -> int:
    """Return how many bits numbers have of which `num` products are added."""
    return min(MOST_BITS, (_DOUBLE_BITS + 1 - (num - 1).bit_length()) // 2)


def steps(x: Array, num: int) -> Array:
    """Return the step of the grid of each row, of which `num` products are added."""
    exponent = np.abs(x).max(-1).view(np.int32) & np.int32(_INFINITE << _FLOAT_BITS)
    less = np.int32((product_bits(num) - 1) << _FLOAT_BITS)
    found: Array = np.maximum(exponent - less, np.int32(1 << _FLOAT_BITS)).view(np.float32)
    return found


def gridded(x: Array, num: int) -> Array:
    """Return rows on their grids, in float64."""
    large = steps(x, num)[..., None] * _WHOLE
    return ((x + large) - large).astype(np.float64)


def whole(x: Array, step: Array) -> Array:
    """Return how many steps numbers are."""
    return np.rint(x * (np.float32(1) / step))


def on_grid(x: Array, bits: int) -> Array:
    """Return numbers from 0 to 1 on a grid of so many bits."""
    large = np.float32(1.5 * 2.0 ** (_FLOAT_BITS - bits))
    return (x + large) - large


def total(x: Array) -> Array:
    """Return the sums of rows, in float64."""
    summed: Array = on_sums(x).sum(-1)
    return summed + 0.0


def on_sums(x: Array) -> Array:
    """Return rows on the grids of their sums, in float64."""
    bits = min(SUM_BITS, _DOUBLE_BITS + 1 - (x.shape[-1] - 1).bit_length())
    field = np.abs(x).max(-1, keepdims=True).astype(np.float64).view(np.int64) & np.int64(_INFINITE64 << _DOUBLE_BITS)
    field += np.int64(((_DOUBLE_BITS + 1 - bits) << _DOUBLE_BITS) + (1 << (_DOUBLE_BITS - 1)))
    round_by = field.view(np.float64)
    found: Array = (x.astype(np.float64) + round_by) - round_by
    return found


def exp2(x: Array) -> Array:
    """Return 2^x of fp32 numbers of at most `MOST_POWER`; 0 where that is 2^-126 or less."""
    y = np.where(x <= _LEAST_POWER, _NO_POWER, x)
    n = np.rint(y)
    f = y - n
    power = f * _POWERS[-1]
    for each in _POWERS[-2::-1]:
        power = (power + each) * f
    power = power + np.float32(1)
    found: Array = (power.view(np.int32) + (n.astype(np.int32) << np.int32(_FLOAT_BITS))).view(np.float32)
    return found


def turns(angles: Array) -> tuple[Array, Array]:
    """Return cosines and sines of fp32 angles of at most 2^20 radians: in float64, and rounded."""
    angle = angles.astype(np.float64)
    quarters = np.rint(angle * (2 / pi))
    for part in _QUARTER:
        angle = angle - quarters * part
    square = angle * angle
    sine, cosine = np.full_like(angle, _SINE[-1]), np.full_like(angle, _COSINE[-1])
    for each in _SINE[-2::-1]:
        sine = sine * square + each
    for each in _COSINE[-2::-1]:
        cosine = cosine * square + each
    sine = sine * angle
    place = quarters.astype(np.int64) & 3
    is_swapped, has_minus = place % 2 == 1, place >= 2
    cos, sin = np.where(is_swapped, sine, cosine), np.where(is_swapped, cosine, sine)
    cos = np.where(has_minus ^ is_swapped, -cos, cos)
    return cos.astype(np.float32), np.where(has_minus, -sin, sin).astype(np.float32)
