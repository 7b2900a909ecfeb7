"""A codec turns a flat fp32 vector into canonical bytes, and bytes back into a vector.

Every codec keeps four promises, and one table-driven suite (tests/contract) holds all of them to it:

- *total*: every finite vector has an encoding; NaN and infinity are refused at both ends;
- *canonical*: `decode` accepts exactly the byte strings `encode` can produce, and encode(decode(b)) == b. So decoding
  after encoding changes nothing the second time, and no two payloads mean the same vector;
- *sized*: an encoding of `num` values has exactly `nbytes(num)` bytes, or of an elastic codec at most so many;
  little-endian, no header;
- *exact*: each step is one correctly rounded fp32 operation per element, a bit operation, or a maximum, which has no
  order. Hence the same bytes on every instruction set, thread count and library version.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float32
from torch import Tensor

from weft.wire import Buffer


@runtime_checkable  # the shape check that is on in tests asks
class Codec(Protocol):
    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        """Return the canonical bytes of `vector` (CPU, contiguous).

        The bytes may share the vector's memory: leave it unchanged while they are in use.

        Raises:
            NotFinite: the vector holds NaN or infinity.
        """
        ...

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        """Return the `num` values that `data` encodes, in memory of their own: in `out` where it is given.

        Nothing is allocated before the length is checked. After an error `out` holds unspecified values.

        Raises:
            PayloadError: another length than `nbytes(num)`, a value that is not finite, or bytes that no encoder makes.
        """
        ...

    def nbytes(self, num: int) -> int:
        """Return the size in bytes of an encoding of `num` values; of an elastic codec, the most that it can be."""
        ...


@runtime_checkable
class Elastic(Codec, Protocol):
    """A codec whose encodings are as long as what they hold asks for. Each says itself where it ends."""

    def length(self, data: Buffer, num: int) -> int:
        """Return of how many bytes of `data`, from the first on, an encoding of `num` values is.

        Raises:
            PayloadError: it holds none.
        """
        ...


@dataclass(frozen=True)
class Size:
    """How many bytes an encoding can have."""

    most: int
    is_exact: bool = True

    def fits(self, nbytes: int) -> bool:
        return nbytes == self.most or (not self.is_exact and 0 < nbytes < self.most)


def size_of(codec: Codec, num: int) -> Size:
    """Return how many bytes an encoding of `num` values can have."""
    return Size(codec.nbytes(num), is_exact=not isinstance(codec, Elastic))


@runtime_checkable
class Sectioned(Codec, Protocol):
    """A codec that can be used in pieces (`pieces`): all of weft's own."""

    def sections(self, num: int) -> tuple[int, ...]:
        """Return the bytes of each section of an encoding of `num` values, in order; `nbytes` is their sum."""
        ...
