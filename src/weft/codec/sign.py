"""sign: a bit a value, and the mean magnitude of each block as bf16.

    x -> s sign(x)          s = mean |x| over the block: of all s, the one with the least squared error

sign(0) = +1, sign(-0) = -1. The mean is one of integers, exact in any order:

    t = floor(|x| 2^(30 - e)) with 2^e <= max |x| < 2^(e + 1)          s = sum t / n 2^(e - 30), rounded to bf16

Equal magnitudes have themselves as their mean, so encoding is idempotent. Where s would be subnormal it is 0.

One bit with a scale per block: Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014), section 3; the
mean as its scale: Karimireddy et al., "Error feedback fixes SignSGD" (1901.09847), algorithm 1.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Float32, Int8
from numpy.typing import NDArray
from torch import Tensor

from weft.codec import bounds
from weft.codec.blocks import NO_ENCODER, look_up, table
from weft.codec.dense import Bf16
from weft.errors import PayloadError

_LOWEST_BITS, _HIGHEST_BITS = 0x0080, 0x7F7F  # of a normal bf16
_POINT = 30  # binary digits of t after that of the largest


@final
class Sign:
    num_bits = 1
    scale: np.dtype[np.generic] = np.dtype("<u2")  # the upper half of the fp32 word
    _VALUES = table(np.array([1, -1], np.float32))

    def quantize(
        self,
        values: Float32[Tensor, "blocks width"],
        codes: Int8[Tensor, "blocks width"],
        work: Float32[Tensor, "2 blocks width"],
    ) -> NDArray[np.uint16]:
        magnitudes, fixed = work[0], work[1].view(torch.int32)
        codes.copy_(torch.bitwise_right_shift(values.view(torch.int32), 31, out=fixed))  # -1, or 0
        torch.abs(values, out=magnitudes)
        top = magnitudes.amax(1).numpy()
        bounds.require_finite_vector(float(top.max()))
        exponents = (top.view(np.uint32) >> np.uint32(23)).astype(np.int64) - 127
        # 2^(30 - e), which fp32 holds up to 2^127: what is smaller gets 2^64 of it before
        lifts = np.where(exponents < _POINT - 127, 64, 0)
        if lifts.any():
            magnitudes.mul_(_powers(lifts))
        fixed.copy_(magnitudes.mul_(_powers(_POINT - exponents - lifts)))
        down = (exponents - _POINT + 1023 << 52).view(np.float64)  # 2^(e - 30), a normal number in float64
        sums = np.add.reduce(fixed.numpy(), axis=1, dtype=np.int64)
        mean = sums.astype(np.float64) / np.float64(fixed.shape[1]) * down
        scales = np.frombuffer(Bf16().encode(torch.from_numpy(mean.astype(np.float32))), self.scale)
        return np.where(scales < _LOWEST_BITS, 0, scales).astype(np.uint16)

    def spread(self, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        look_up(self._VALUES, packed, out)

    def factors(self, scales: NDArray[np.generic], tops: NDArray[np.float32]) -> NDArray[np.float32]:  # noqa: ARG002
        found = scales.astype(np.uint32)
        if not ((found == 0) | ((found >= _LOWEST_BITS) & (found <= _HIGHEST_BITS))).all():
            raise PayloadError(NO_ENCODER.format("a scale is not finite, negative or subnormal"))
        return (found << np.uint32(16)).view(np.float32)


def _powers(exponents: NDArray[np.int64]) -> Float32[Tensor, "blocks 1"]:
    """Return 2^e for each, a normal number."""
    return torch.from_numpy((exponents + 127 << 23).astype(np.int32)).view(torch.float32).unsqueeze(1)
