"""A boundary between two sections, as a member on one side of it has it: activations one way, gradients the other.

    boundaries = Boundaries(Int8Config())            # `build`
    after = boundaries.boundary(shape)               # a member's own: what it remembers is of this boundary alone
    data = after.activations.encode(x, samples)      # here
    x = before.activations.decode(data, samples)     # there, by the next section; its gradient comes back alike

Every codec keeps four promises, to which one suite holds all:

- *sized*: a message of n samples has exactly `nbytes(n)` bytes: whoever receives makes room before;
- *checked*: what another peer sent is decoded to finite numbers, or refused, and what was refused changes nothing;
- *repeatable*: decoding a message once more, as work that is done again does, gives the same numbers;
- *alone*: what needs something from before says so in the message, and is refused where that is not at hand.

Tensors are fp32 and on the CPU.
"""

from dataclasses import dataclass
from typing import Protocol, final

from jaxtyping import Float32, Int64
from torch import Tensor

from weft.codec.codec import Codec
from weft.wire import Buffer

Activations = Float32[Tensor, "samples tokens width"]


@dataclass(frozen=True)
class Shape:
    """Of a sample's activations."""

    seq_len: int
    width: int
    vocab_size: int

    @property
    def num(self) -> int:
        """Numbers of a sample."""
        return self.seq_len * self.width


@dataclass(frozen=True)
class Samples:
    """What both sides know of a micro-batch."""

    tokens: Int64[Tensor, "samples tokens"]  # that the activations are of; of the vocabulary
    names: tuple[int, ...]  # of each sample: its position in the data, or another number

    def __len__(self) -> int:
        return len(self.names)


class ActivationCodec(Protocol):
    def encode(self, x: Activations, samples: Samples) -> Buffer:
        """Return the message that `x` is passed in.

        Raises:
            NotFinite: a number is NaN or infinite, or becomes it on the way.
        """
        ...

    def decode(self, data: Buffer, samples: Samples) -> Activations:
        """Return what was passed, in memory of its own.

        Raises:
            PayloadError: another length than `nbytes`, a number that is not finite, bytes that no encoder makes, or
                what they build on is not held here.
        """
        ...

    def nbytes(self, num_samples: int) -> int:
        """Return the exact size in bytes of a message of so many samples."""
        ...


@dataclass(frozen=True)
class Boundary:
    """One side's codecs of it."""

    activations: ActivationCodec
    gradients: ActivationCodec
    has_memory: bool = False
    """Whether messages build on earlier ones: a sample has a name for each member on the other side."""


@final
class Flat:
    """All numbers of a micro-batch, one behind the other, by a codec of vectors."""

    def __init__(self, codec: Codec, shape: Shape) -> None:
        self._codec = codec
        self._shape = shape

    def encode(self, x: Activations, samples: Samples) -> Buffer:  # noqa: ARG002  # the protocol's signature
        return self._codec.encode(x.flatten())

    def decode(self, data: Buffer, samples: Samples) -> Activations:
        shape = self._shape
        return self._codec.decode(data, len(samples) * shape.num).view(len(samples), shape.seq_len, shape.width)

    def nbytes(self, num_samples: int) -> int:
        return self._codec.nbytes(num_samples * self._shape.num)
