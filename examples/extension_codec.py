"""A codec from outside of weft: 12 bits a value, which are bf16 with four bits less.

    python examples/extension_codec.py                         # the loop of plain_loop.py, sent in 12 bits
    WEFT_TICKET=weft2... python examples/extension_codec.py    # every member runs the same file

What a codec owes to the others is in src/weft/codec/codec.py: every finite vector has one encoding, of a length known
beforehand; decoding refuses all else; and every machine computes the same bits, for which integers are a safe way.
"""

import numpy as np
import torch
from torch import Tensor

import weft
from weft.errors import PayloadError

LARGEST = 0x7F7  # of 12 bits without the sign: 8 of exponent, 3 of fraction


class Bits12:
    """Rounds the fp32 word to its upper 12 bits, ties to even, and packs two values into three bytes."""

    def encode(self, vector: Tensor) -> bytes:
        words = vector.numpy().view(np.uint32).astype(np.int64)
        sign, magnitude = words >> 31, words & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20
        codes = sign << 11 | np.minimum(rounded, LARGEST)
        codes = np.append(codes, np.zeros(len(codes) % 2, np.int64)).reshape(-1, 2)
        pairs = codes[:, 0] | codes[:, 1] << 12
        return np.stack([pairs & 0xFF, pairs >> 8 & 0xFF, pairs >> 16], axis=1).astype(np.uint8).tobytes()

    def decode(self, data: bytes, num: int, out: Tensor | None = None) -> Tensor:
        a, b, c = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.uint32).T
        codes = np.stack([a | (b & 0xF) << 8, b >> 4 | c << 4], axis=1).reshape(-1)
        if np.any((codes & 0x7FF) > LARGEST) or np.any(codes[num:]):
            raise PayloadError("a value that is not finite, or bits beyond the last value")
        values = torch.from_numpy((codes[:num] << 20).view(np.float32))
        return values if out is None else out.copy_(values)

    def nbytes(self, num: int) -> int:
        return (num + 1) // 2 * 3


bits12 = weft.extend("example.bits12", Bits12)

if __name__ == "__main__":
    import plain_loop

    from weft.sync.method.presets import FedAvgConfig

    plain_loop.main(FedAvgConfig(every=30, codec=bits12.codec()))
