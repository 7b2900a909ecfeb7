"""int8 and int4: blocks of values, each value a small signed integer times the block's scale.

    a = max |x| over the block          s = a / t, cut to fewer significant bits          q = round(x / s), ties to even

    codec   t     scale                       code
    int8    127   fp32, 17 significant bits   a signed byte
    int4    7     bf16 (8 significant bits)   4 bits, two's complement

|x - q s| <= s / 2, and a little more for the largest of int4, whose s is cut most.

Why s is cut: t q has few bits, so q s is exact in fp32. Then the decoded block's maximum is exactly t s, its scale is s
again, and encoding is idempotent. With s = a / t uncut it is not: fl(fl(127 s) / 127) differs from s for a share of all
s. Blocks whose s would be subnormal become zeros, so no step depends on how a machine treats subnormals.

A decoder accepts what an encoder makes and nothing else: s on the grid, t among the magnitudes of a block with s > 0,
zeros where s = 0, never -128 or -8. Scheme: absmax quantization by blocks, Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (2110.02861), section 2.1, with a linear code.
"""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from weft.codec import bounds
from weft.codec.blocks import NO_ENCODER, Codes, Scratch, Values, look_up, table
from weft.errors import PayloadError

_LOWEST_BITS = 0x00800000  # smallest normal fp32


@final
class Int8:
    num_bits = 8
    scale: np.dtype[np.generic] = np.dtype("<f4")
    _GRID = np.uint32(0xFFFFFF80)  # clears the 7 lowest of 23 stored bits: 17 significant bits stay
    _HIGHEST_BITS = 0x7C010200  # largest fp32 over 127, on the grid

    def quantize(self, values: Values, codes: Codes, work: Scratch) -> NDArray[np.float32]:
        return _quantize(values, codes, work, 127, self._GRID)

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        np.copyto(out, packed.view(np.int8))

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:
        found = scales.astype(np.float32)
        bits = found.view(np.uint32)
        _require(bits & ~self._GRID == 0, bits, self._HIGHEST_BITS)
        _require_tops(tops, found, 127)
        return found


@final
class Int4:
    num_bits = 4
    scale: np.dtype[np.generic] = np.dtype("<u2")  # the upper half of the fp32 word
    _GRID = np.uint32(0xFFFF0000)
    _HIGHEST_BITS = 0x7E120000  # largest fp32 over 7, on the grid
    _VALUES = table(np.array([0, 1, 2, 3, 4, 5, 6, 7, np.nan, -7, -6, -5, -4, -3, -2, -1], np.float32))

    def quantize(self, values: Values, codes: Codes, work: Scratch) -> NDArray[np.uint16]:
        scales = _quantize(values, codes, work, 7, self._GRID)
        codes.bitwise_and_(15)
        return (scales.view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._VALUES, packed, out)

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:
        bits = scales.astype(np.uint32) << np.uint32(16)
        found = bits.view(np.float32)
        _require(np.True_, bits, self._HIGHEST_BITS)
        _require_tops(tops, found, 7)
        return found


def _quantize(values: Values, codes: Codes, work: Scratch, most: int, grid: np.uint32) -> NDArray[np.float32]:
    work = work[0]
    torch.abs(values, out=work)
    top = work.amax(1)
    bounds.require_finite_vector(float(top.amax()))
    # s = a / t on the grid. numpy divides; torch on a GPU would multiply by a rounded 1/t.
    bits = (top.numpy() / np.float32(most)).view(np.uint32) & grid
    scales = np.where(bits < _LOWEST_BITS, np.uint32(0), bits).view(np.float32)
    # Where s = 0, dividing by one rounds every code to zero.
    divisor = torch.from_numpy(np.where(scales > 0, scales, np.float32(1)))
    torch.div(values, divisor.unsqueeze(1), out=work)
    torch.round(work, out=work)
    codes.copy_(work)
    return scales


def _require(is_on_grid: NDArray[np.bool_] | np.bool_, bits: NDArray[np.uint32], highest: int) -> None:
    """Raise PayloadError unless every scale is zero or a normal number on the grid that t times keeps finite."""
    if not (is_on_grid & ((bits == 0) | ((bits >= _LOWEST_BITS) & (bits <= highest)))).all():
        raise PayloadError(NO_ENCODER.format("a scale is not finite, negative or off the grid"))


def _require_tops(tops: NDArray[np.float32], scales: NDArray[np.float32], most: int) -> None:
    if not np.array_equal(tops, np.where(scales > 0, np.float32(most), np.float32(0))):
        raise PayloadError(NO_ENCODER.format("codes do not fit their scale"))
