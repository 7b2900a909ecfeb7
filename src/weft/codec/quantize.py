"""int8: blocks of values, each value a signed byte times the block's scale.

    a = max |x| over the block          s = a / 127, cut to 17 significant bits          q = round(x / s), ties to even

Layout: the scales (fp32), then the codes (int8), both in order; the last block may be short. |x - q s| <= s / 2.

Why s is cut: a byte has 7 bits beside its sign, so q s has at most 24 significant bits and is exact in fp32. Then the
decoded block's maximum is exactly 127 s, its scale is s again, and encoding is idempotent. With s = a / 127 uncut it is
not: fl(fl(127 s) / 127) differs from s for a share of all s. Blocks whose s would be subnormal become zeros, so no
step depends on how a machine treats subnormals.

A decoder accepts what an encoder makes and nothing else: s on the grid, 127 among the magnitudes of a block with s > 0,
zeros where s = 0, never -128. Scheme: absmax quantization by blocks, Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (2110.02861), section 2.1, with a linear code.
"""

import numpy as np
import torch
from jaxtyping import Float32
from jaxtyping import Int8 as Int8Array
from torch import Tensor

from weft.codec import bounds
from weft.errors import PayloadError
from weft.wire import Buffer

_GRID = np.uint32(0xFFFFFF80)  # clears the 7 lowest of 23 stored bits: 17 significant bits stay
_LOWEST_BITS = 0x00800000  # smallest normal fp32
_HIGHEST_BITS = 0x7C010200  # largest fp32 over 127, on the grid


class Int8:
    def __init__(self, block: int) -> None:
        self._block = block

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        vector, num, block = vector.detach(), vector.numel(), self._block
        data = np.empty(self.nbytes(num), dtype=np.uint8)
        scales = data[: 4 * self._num_blocks(num)].view("<f4")
        codes = torch.from_numpy(data[scales.nbytes :].view(np.int8))
        scratch = torch.empty(min(bounds.CHUNK, num), dtype=torch.float32)
        for start, stop, width in _spans(num, block):
            shape = (-1, width)
            scales[start // block : -(-stop // block)] = _quantize(
                vector[start:stop].view(shape), codes[start:stop].view(shape), scratch[: stop - start].view(shape)
            )
        return bounds.as_buffer(data)

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        view, block = bounds.require_nbytes(data, self.nbytes(num)), self._block
        scales = np.frombuffer(view, dtype="<f4", count=self._num_blocks(num)).astype(np.float32)
        _require_on_grid(scales)
        codes = np.frombuffer(view, dtype=np.int8, offset=scales.nbytes)
        out = bounds.target(num, out)
        array = out.numpy()
        scratch = torch.empty(min(bounds.CHUNK, num), dtype=torch.float32)
        for start, stop, width in _spans(num, block):
            np.copyto(array[start:stop], codes[start:stop])
            values, work = out[start:stop].view(-1, width), scratch[: stop - start].view(-1, width)
            scale = torch.from_numpy(scales[start // block : -(-stop // block)])
            torch.abs(values, out=work)
            if not torch.equal(work.amax(1), torch.where(scale > 0, 127.0, 0.0)):
                raise PayloadError(
                    "payload of int8 blocks that no encoder makes: codes do not fit their scale; dropped"
                )
            values.mul_(scale.unsqueeze(1))
        return out

    def nbytes(self, num: int) -> int:
        return 4 * self._num_blocks(num) + num

    def _num_blocks(self, num: int) -> int:
        return -(-num // self._block)


def _spans(num: int, block: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, width of a block) of cache-sized runs of whole blocks, then of the short last block."""
    whole = num - num % block
    spans = [(start, min(start + bounds.CHUNK, whole), block) for start in range(0, whole, bounds.CHUNK)]
    return spans if whole == num else [*spans, (whole, num, num - whole)]


def _quantize(
    values: Float32[Tensor, "blocks width"],
    codes: Int8Array[Tensor, "blocks width"],
    work: Float32[Tensor, "blocks width"],
) -> np.ndarray:
    """Fill `codes` and return the scales; `work` is overwritten."""
    torch.abs(values, out=work)
    top = work.amax(1)
    bounds.require_finite_vector(float(top.amax()))
    # s = a / 127 on the grid. numpy divides; torch on a GPU would multiply by a rounded 1/127.
    bits = (top.numpy() / np.float32(127)).view(np.uint32) & _GRID
    scales = np.where(bits < _LOWEST_BITS, np.uint32(0), bits).view(np.float32)
    # Where s = 0, dividing by one rounds every code to zero.
    divisor = torch.from_numpy(np.where(scales > 0, scales, np.float32(1)))
    torch.div(values, divisor.unsqueeze(1), out=work)
    torch.round(work, out=work)
    codes.copy_(work)
    return scales


def _require_on_grid(scales: np.ndarray) -> None:
    """Raise PayloadError unless every scale is zero or a normal number on the grid that 127 times keeps finite."""
    bits = scales.view(np.uint32)
    fits = (bits & ~_GRID == 0) & ((bits == 0) | ((bits >= _LOWEST_BITS) & (bits <= _HIGHEST_BITS)))
    if not fits.all():
        raise PayloadError("payload of int8 blocks with a scale that no encoder makes (not finite, negative, off grid)")
