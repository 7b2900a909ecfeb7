"""A codec from outside of weft, held to what can be seen of the promises that every codec keeps (`codec`).

Lengths are checked at both ends, what is decoded is finite, and whatever else a payload makes it raise is a payload's
fault: other peers send those bytes. That it is canonical and exact is for its author to see to, with the suite in
tests/contract.
"""

from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.codec import Codec
from weft.errors import ConfigError, PayloadError, WeftError
from weft.wire import Buffer


class Extension:
    """
    Args:
        name: that the run has it by.
        made: by its author, as the run's settings say.

    Raises:
        ConfigError: it is no codec.
    """

    def __init__(self, name: str, made: Any) -> None:
        if not isinstance(made, Codec):
            raise ConfigError(f"{name}: {type(made).__name__} is not a codec: it needs encode, decode and nbytes.")
        self._name = name
        self._made: Codec = made

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        """Return the bytes of `vector`, once what they decode to was looked at: a peer whose payloads nobody can read,
        itself included, would wait for ever for a round that has none.

        Raises:
            ConfigError: the codec breaks a promise on this vector; names it.
        """
        bounds.require_flat(vector)
        bounds.require_finite_vector(bounds.largest(vector) if vector.numel() else 0.0)
        num = vector.numel()
        try:
            data = self._made.encode(vector)
        except WeftError:
            raise
        except Exception as error:
            raise ConfigError(f"codec {self._name} cannot encode {num} numbers: {_said(error)}. Mend it.") from error
        if len(data) != (expected := self.nbytes(num)):
            raise ConfigError(f"codec {self._name} made {len(data)} bytes and says that they are {expected}. Mend it.")
        try:
            self.decode(data, num)
        except PayloadError as error:
            raise ConfigError(f"codec {self._name} cannot decode what it has made itself: {error}. Mend it.") from error
        return data

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        bounds.require_nbytes(data, self.nbytes(num))
        try:
            vector = self._made.decode(data, num, out)
        except Exception as error:  # of whatever kind: a peer has sent what caused it
            raise PayloadError(f"no payload of codec {self._name}: {_said(error)}") from error
        if not isinstance(vector, Tensor):
            raise PayloadError(f"codec {self._name} decodes a {type(vector).__name__}: a tensor of {num} is due")
        if vector.shape != (num,) or vector.dtype != torch.float32 or vector.device.type != "cpu":
            found = f"{tuple(vector.shape)} of {vector.dtype} on {vector.device}"
            raise PayloadError(f"codec {self._name} decodes {found}: {num} of fp32 are due, on the CPU")
        bounds.require_finite_payload(bounds.largest(vector) if num else 0.0)
        if out is None or vector.data_ptr() == out.data_ptr():
            return vector
        return out.copy_(vector)  # it has taken no notice of `out`, which is all that callers look at

    def nbytes(self, num: int) -> int:
        return self._made.nbytes(num)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
