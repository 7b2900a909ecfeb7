"""Dense codecs: every value as fp32 (4 bytes) or as bf16 (2 bytes).

bf16 keeps the upper half of the fp32 word, rounded to nearest with ties to even by integer addition, never by a
conversion instruction (some flush subnormals). Magnitudes beyond the largest bf16 become the largest bf16: a finite
vector stays finite.
"""

import numpy as np
import torch
from jaxtyping import Float32, Int32
from torch import Tensor

from weft.codec import bounds
from weft.wire import Buffer

CHUNK = 1 << 16  # elements of fp32: so few stay in a core's own cache, and the calls are two
MAX_BF16 = float.fromhex("0x1.fep127")  # bits 7F7F


class Fp32:
    """Values as they are. `encode` is a view: it copies nothing."""

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        for start in range(0, vector.numel(), CHUNK):
            bounds.require_finite_vector(bounds.largest(vector[start : start + CHUNK]))
        return bounds.as_buffer(vector.detach().numpy().astype("<f4", copy=False))

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        words = np.frombuffer(bounds.require_nbytes(data, self.nbytes(num)), dtype="<f4")
        out = bounds.target(num, out)
        array = out.numpy()
        for start in range(0, num, CHUNK):
            here = slice(start, min(start + CHUNK, num))
            np.copyto(array[here], words[here])
            bounds.require_finite_payload(bounds.largest(out[here]))
        return out

    def nbytes(self, num: int) -> int:
        return 4 * num

    def sections(self, num: int) -> tuple[int, ...]:
        return (self.nbytes(num),)


class Bf16:
    """The upper 16 bits of each fp32 word, rounded to nearest even, saturating."""

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        vector = vector.detach()
        words = bounds.empty(vector.numel(), torch.int16)
        scratch = torch.empty(min(bounds.CHUNK, vector.numel()), dtype=torch.float32)
        for start in range(0, vector.numel(), bounds.CHUNK):
            values = vector[start : start + bounds.CHUNK]
            work = scratch[: values.numel()]
            magnitude = bounds.largest(values)
            bounds.require_finite_vector(magnitude)
            if magnitude > MAX_BF16:
                values = values.clamp(-MAX_BF16, MAX_BF16)
            _round_to_upper_half(values.view(torch.int32), work.view(torch.int32))
            words[start : start + bounds.CHUNK].copy_(work.view(torch.int32))
        return bounds.as_buffer(words.numpy().astype("<i2", copy=False))

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        halves = np.frombuffer(bounds.require_nbytes(data, self.nbytes(num)), dtype="<u2")
        out = bounds.target(num, out)
        words = out.numpy().view(np.uint32)
        for start in range(0, num, bounds.CHUNK):
            here = slice(start, min(start + bounds.CHUNK, num))
            np.copyto(words[here], halves[here])
            np.left_shift(words[here], 16, out=words[here])
            bounds.require_finite_payload(bounds.largest(out[here]))
        return out

    def nbytes(self, num: int) -> int:
        return 2 * num

    def sections(self, num: int) -> tuple[int, ...]:
        return (self.nbytes(num),)


def upper_half(vector: Float32[Tensor, " num"]) -> Int32[Tensor, " num"]:
    """Return the bf16 words that values are rounded to, as `Bf16` does. Two values of one word are the same in bf16."""
    words = torch.empty_like(vector, dtype=torch.int32)
    _round_to_upper_half(vector.view(torch.int32), words)
    return words


def _round_to_upper_half(bits: Tensor, out: Tensor) -> None:
    """out = (bits + 7FFF + lowest kept bit) >> 16 on int32 words: round to nearest, ties to even."""
    torch.bitwise_right_shift(bits, 16, out=out)
    out.bitwise_and_(1)
    out.add_(bits)
    out.add_(0x7FFF)
    out.bitwise_right_shift_(16)
