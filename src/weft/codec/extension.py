"""A codec from outside of weft, held to what can be seen of the promises that every codec keeps (`codec`).

Lengths are checked at both ends, what is decoded is finite, and whatever else a payload makes it raise is a payload's
fault: other peers send those bytes. That it is canonical and exact is for its author to see to, with the suite in
tests/contract.
"""

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.wire import Buffer


class Extension:
    def __init__(self, name: str, made: Codec) -> None:
        self._name = name
        self._made = made

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        bounds.require_finite_vector(bounds.largest(vector) if vector.numel() else 0.0)
        data = self._made.encode(vector)
        if len(data) != (expected := self.nbytes(vector.numel())):
            raise ValueError(f"codec {self._name} made {len(data)} bytes and says that they are {expected}")
        return data

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        bounds.require_nbytes(data, self.nbytes(num))
        try:
            vector = self._made.decode(data, num, out)
        except Exception as error:  # of whatever kind: a peer has sent what caused it
            raise PayloadError(f"no payload of codec {self._name}: {type(error).__name__}: {error}") from error
        if vector.shape != (num,) or vector.dtype != torch.float32:
            raise ValueError(
                f"codec {self._name} decodes {tuple(vector.shape)} of {vector.dtype}: {num} of fp32 are due"
            )
        bounds.require_finite_payload(bounds.largest(vector) if num else 0.0)
        return vector

    def nbytes(self, num: int) -> int:
        return self._made.nbytes(num)
