"""sign and int2: one or two bits a value, and a scale as bf16, the least squared error given the codes.

    m = mean |x| over the block

    codec   code                                            scale                           decoded
    sign    the sign                                        m                               +-s
    int2    the sign, and c = 3 where |x| >= m, else 1      sum c |x| / sum c^2             +-s, +-3 s

The sign of 0 is +1, that of -0 is -1. Sums are of integers, exact in any order:

    t = floor(|x| 2^(30 - e)) in the place of |x|, with 2^e <= max |x| < 2^(e + 1)

A quotient is rounded to float64, to fp32 and to bf16. Encoding is idempotent: equal magnitudes are their own mean, and
the mean of some s and some 3 s lies above s and not above 3 s. Where s would be subnormal it is 0, and c is 1.

One bit with a scale per block: Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014), section 3; the
mean as its scale: Karimireddy et al., "Error feedback fixes SignSGD" (1901.09847), algorithm 1. Two bits leave 0.13 of
the squares of normally distributed values, the best four levels 0.12 (Max, "Quantizing for minimum distortion", 1960,
table I), and one bit 0.36; two bits of deltas, with feedback: Therien et al., "MuLoCo" (2505.23725), whose levels are
multiples of a standard deviation.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Float32, Int32
from numpy.typing import NDArray
from torch import Tensor

from weft.codec import bounds
from weft.codec.blocks import NO_ENCODER, Codes, Scratch, Values, look_up, table
from weft.codec.dense import Bf16
from weft.errors import PayloadError

_LOWEST_BITS, _HIGHEST_BITS = 0x0080, 0x7F7F  # of a normal bf16
_HIGHEST_THIRD_BITS = 0x7EAA  # largest bf16 of which fp32 holds three times as much
_POINT = 30  # binary digits of t after that of the largest


@final
class Sign:
    num_bits = 1
    scale: np.dtype[np.generic] = np.dtype("<u2")  # the upper half of the fp32 word
    _VALUES = table(np.array([1, -1], np.float32))

    def quantize(self, values: Values, codes: Codes, work: Scratch) -> NDArray[np.uint16]:
        fixed, units = _fixed(values, work)
        sums = np.add.reduce(fixed.numpy(), axis=1, dtype=np.int64)
        codes.copy_(torch.bitwise_right_shift(values.view(torch.int32), 31, out=work[0].view(torch.int32)))  # -1, or 0
        return _scales(sums, np.full(len(sums), fixed.shape[1]), units, _HIGHEST_BITS)

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._VALUES, packed, out)

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:  # noqa: ARG002
        return _factors(scales, _HIGHEST_BITS)


@final
class Int2:
    num_bits = 2
    scale: np.dtype[np.generic] = np.dtype("<u2")
    _VALUES = table(np.array([1, 3, -1, -3], np.float32))

    def quantize(self, values: Values, codes: Codes, work: Scratch) -> NDArray[np.uint16]:
        fixed, units = _fixed(values, work)
        scratch, width = work[0].view(torch.int32), fixed.shape[1]
        sums = np.add.reduce(fixed.numpy(), axis=1, dtype=np.int64)
        means = (-(-sums // width)).astype(np.int32)  # t is as large as their mean where it is as large as this
        codes.copy_(fixed >= torch.from_numpy(means).unsqueeze(1))
        large = np.add.reduce(torch.mul(fixed, codes, out=scratch).numpy(), axis=1, dtype=np.int64)
        num_large = np.add.reduce(codes.numpy(), axis=1, dtype=np.int64)
        scales = _scales(sums + 2 * large, width + 8 * num_large, units, _HIGHEST_THIRD_BITS)
        codes.mul_(torch.from_numpy((scales > 0).astype(np.int8)).unsqueeze(1))
        codes.add_(torch.bitwise_right_shift(values.view(torch.int32), 30, out=scratch).bitwise_and_(2))
        return scales

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._VALUES, packed, out)

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:
        found = _factors(scales, _HIGHEST_THIRD_BITS)
        if not np.array_equal(tops, np.where(found > 0, np.float32(3), np.float32(1))):
            raise PayloadError(NO_ENCODER.format("codes do not fit their scale"))
        return found


def _fixed(values: Values, work: Scratch) -> tuple[Int32[Tensor, "blocks width"], NDArray[np.float64]]:
    """Return t of each value, which lies in `work[1]`, and what a unit of it is in each block: 2^(e - 30)."""
    magnitudes, fixed = work[0], work[1].view(torch.int32)
    torch.abs(values, out=magnitudes)
    top = magnitudes.amax(1).numpy()
    bounds.require_finite_vector(float(top.max()))
    exponents = (top.view(np.uint32) >> np.uint32(23)).astype(np.int64) - 127
    # 2^(30 - e), which fp32 holds up to 2^127: what is smaller gets 2^64 of it before
    lifts = np.where(exponents < _POINT - 127, 64, 0)
    if lifts.any():
        magnitudes.mul_(_powers(lifts))
    fixed.copy_(magnitudes.mul_(_powers(_POINT - exponents - lifts)))
    return fixed, (exponents - _POINT + 1023 << 52).view(np.float64)  # a normal number in float64


def _scales(
    sums: NDArray[np.int64], weights: NDArray[np.int64], units: NDArray[np.float64], highest: int
) -> NDArray[np.uint16]:
    """Return the quotients in bf16, at most `highest`, and 0 where one is no normal number."""
    quotients = sums.astype(np.float64) / weights.astype(np.float64) * units
    scales = np.frombuffer(Bf16().encode(torch.from_numpy(quotients.astype(np.float32))), "<u2")
    return np.where(scales < _LOWEST_BITS, 0, np.minimum(scales, highest)).astype(np.uint16)


def _factors(scales: NDArray[np.generic], highest: int) -> NDArray[np.float32]:
    found = scales.astype(np.uint32)
    if not ((found == 0) | ((found >= _LOWEST_BITS) & (found <= highest))).all():
        raise PayloadError(NO_ENCODER.format("a scale is not finite, negative, subnormal or too large"))
    return (found << np.uint32(16)).view(np.float32)


def _powers(exponents: NDArray[np.int64]) -> Float32[Tensor, "blocks 1"]:
    """Return 2^e for each, a normal number."""
    return torch.from_numpy((exponents + 127 << 23).astype(np.int32)).view(torch.float32).unsqueeze(1)
