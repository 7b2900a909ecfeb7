"""fp8 and e3m0: blocks of values, each value a number of few bits beneath a power of two that the block shares.

    codec   code                                                  decoded, under a factor of 1
    fp8     e4m3: sign, 4 bits of exponent, 3 of mantissa         +-2^(e-7) (1 + m/8); +-m/8 2^-6 where e = 0; to 448
    e3m0    sign, 3 bits of exponent, no mantissa                 +-2^(e-7); 0 where e = 0

A scale is one byte, the exponent field b of the block's largest magnitude in fp32, as it is after rounding for e3m0. A
factor is a power of two, so a decoded number is exact, and encoding is idempotent. b = 0: the block is zeros, as is one
in which the smallest code would be subnormal. What lies between two numbers goes to the nearer; a tie goes to the even
one in fp8, and up in e3m0, in which less than 3/4 of the smallest number is 0. Magnitudes beyond the largest number
become that. A zero has no sign.

fp8: Micikevicius et al., "FP8 Formats for Deep Learning" (2209.05433), table 1, e4m3, without its NaN. e3m0: the four
bits in which Streaming DiLoCo sends outer gradients (Douillard et al., 2501.18512, section 2.3); its paper does not
print the scale.
"""

import math
from math import ldexp
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from weft.codec import bounds
from weft.codec.blocks import NO_ENCODER, Codes, Scratch, Values, look_up, table
from weft.errors import PayloadError

_MANTISSA = 23  # stored bits of fp32
_EXPONENT = 0xFF << _MANTISSA


def _power(exponent: int) -> int:
    """Return the bits of 2^exponent in fp32."""
    return exponent + 127 << _MANTISSA


def _e4m3() -> NDArray[np.float32]:
    """Return what each byte stands for; NaN for those that no encoder makes."""
    magnitudes = [ldexp(m, -9) for m in range(8)]
    magnitudes += [ldexp(8 + m, e - 10) for e in range(1, 16) for m in range(8)]
    positive = np.array(magnitudes, np.float32)
    positive[127] = np.nan
    negative = -positive
    negative[0] = np.nan
    return table(np.concatenate([positive, negative]))


@final
class Fp8:
    num_bits = 8
    scale: np.dtype[np.generic] = np.dtype("u1")
    _TOP = 8  # exponent of the largest numbers: 256 to 448
    _LOWEST = 18  # smallest b: a subnormal of e4m3 lies 17 powers below the block's largest
    _MOST = 448.0

    _VALUES = _e4m3()

    def quantize(self, values: Values, codes: Codes, work: Scratch) -> NDArray[np.uint8]:
        y, other = work[0], work[1]
        torch.abs(values, out=y)
        top = y.amax(1)
        bounds.require_finite_vector(float(top.amax()))
        exponents = top.view(torch.int32) >> _MANTISSA
        is_kept = exponents >= self._LOWEST
        # y = |x| 2^(135 - b): below 512
        bits = (self._TOP + 127 + 127 - exponents).clamp(1, 254) << _MANTISSA
        y.mul_(torch.where(is_kept, bits, 0).view(torch.float32).unsqueeze(1))
        y.clamp_(max=self._MOST)
        # q = round(y / u) with u = 2^(e-3), the step at y: 2^23 u + y has q as its lowest bits
        found, magic = y.view(torch.int32), other.view(torch.int32)
        torch.bitwise_and(found, _EXPONENT, out=magic).clamp_(min=_power(-6)).add_(20 << _MANTISSA)
        y.add_(other)
        found.sub_(magic)
        # code = q + 8 (e + 6); q has the leading one but for numbers below 2^-6, and q = 16 is the next power
        found.add_(magic.bitwise_right_shift_(_MANTISSA - 3)).sub_((20 + 127 - 6) << 3)
        codes.copy_(found)
        signs = other.view(torch.int8).view(-1)[: codes.numel()].view(codes.shape)
        signs.copy_(torch.bitwise_right_shift(values.view(torch.int32), 24, out=found))
        signs.bitwise_and_(-128).bitwise_and_(codes.add_(127))  # none of a zero
        codes.sub_(127).bitwise_or_(signs)
        return torch.where(is_kept, exponents, 0).numpy().astype(np.uint8)

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._VALUES, packed, out)

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:
        _require_tops(scales, tops, self._LOWEST, 256.0, self._MOST)
        return _powers(scales, self._TOP)


@final
class E3m0:
    num_bits = 4
    scale: np.dtype[np.generic] = np.dtype("u1")
    _SEVEN = tuple(ldexp(1.0, e - 7) for e in range(1, 8))
    _LOWEST = 7  # smallest b: the smallest number lies 6 powers below the block's largest
    _VALUES = table(np.array([0, *_SEVEN, np.nan, *(-power for power in _SEVEN)], np.float32))

    def quantize(self, values: Values, codes: Codes, work: Scratch) -> NDArray[np.uint8]:
        # The upper half of a word tells its sign, its power, and whether it is 1.5 times that or more.
        words = torch.bitwise_right_shift(values.view(torch.int32), 16, out=work[0].view(torch.int32))
        halves = work[1].view(torch.int16).view(2, *values.shape)
        found, signs = halves[0], halves[1]
        tops = torch.bitwise_and(signs.copy_(words), 0x7FFF, out=found).amax(1).numpy()
        bounds.require_finite_vector(math.inf if int(tops.max()) >= 0x7F80 else 0.0)
        tops = np.minimum(tops + 0x40 >> 7, 254)  # 1.5 times a power is the next
        scales = np.where(tops >= self._LOWEST, tops, 0).astype(np.uint8)
        # Codes, and 7, so that a fourth bit tells those above 0: the power less that of which the code would be -7.
        below = np.where(scales > 0, tops - 14, 255).astype(np.int16)
        found.sub_(torch.from_numpy((below << 7) - 0x40).unsqueeze(1)).bitwise_right_shift_(7).clamp_(7, 14)
        signs.bitwise_right_shift_(12).bitwise_and_(8).bitwise_and_(found)  # a zero has none
        codes.copy_(signs.add_(found)).sub_(7)
        return scales

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._VALUES, packed, out)

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:
        _require_tops(scales, tops, self._LOWEST, 1.0, 1.0)
        return _powers(scales, 0)


def _require_tops(
    scales: NDArray[np.generic], tops: NDArray[np.float32], lowest: int, least: float, most: float
) -> None:
    """Raise PayloadError unless a block is zeros where its scale is 0, and else has its largest number in range."""
    found = scales.astype(np.int64)
    is_number = (found >= lowest) & (found < 255) & (tops >= least) & (tops <= most)  # NaN: neither
    if not np.where(found == 0, tops == 0, is_number).all():
        raise PayloadError(NO_ENCODER.format("codes do not fit their scale"))


def _powers(scales: NDArray[np.generic], top: int) -> NDArray[np.float32]:
    """Return 2^(b - 127 - top) for each scale b; 1 where b = 0."""
    exponents = scales.astype(np.int32)
    return np.where(exponents > 0, exponents - top << _MANTISSA, 127 << _MANTISSA).astype(np.int32).view(np.float32)
