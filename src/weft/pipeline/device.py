"""What computes a section: the micro-batches of a stage go through it, and nothing else does.

passed = device.forward(given)             # its output is ready to be sent
gradient = passed.backward(of_output)      # of its input, ready to be sent
passed.count()                             # its weights' gradients are added to the section's
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from weft.data.store import TRAINED
from weft.ids import PeerId
from weft.pipeline.link import Parcel
from weft.wire import Buffer

TOKEN_NBYTES = 4


class Step(NamedTuple):
    """All stages make each together, as far as the first one's members begin micro-batches of it."""

    round: int  # of the first stage: the one that its members make this step for
    number: int  # of an inner step within it


FIRST = Step(0, 0)
ANY = Step(1 << 62, 0)  # after all others


@dataclass(frozen=True)
class Given:
    """A micro-batch before a section."""

    num_samples: int
    tokens: bytes  # as of a Forward
    activations: Parcel | None  # None: before the first section
    step: Step = FIRST
    is_measured: bool = False  # nothing but its loss is asked for
    sender: PeerId | None = None  # None: nobody else; of codecs that remember, who it was

    @cached_property
    def weight(self) -> float:
        """Return how many samples its loss counts for: of rows of whole texts, by how much is predicted in them."""
        words = np.frombuffer(self.tokens, "<i4")
        num_trained = int(np.count_nonzero(words & TRAINED))
        return num_trained * self.num_samples / (len(words) - self.num_samples) if num_trained else self.num_samples


Encode = Callable[[PeerId], Buffer]


class Forwarded(Protocol):
    """A micro-batch after the forward pass of a section."""

    @property
    def output(self) -> Buffer | Encode | None:
        """Activations, encoded, or what encodes them for a member; None: the section is the last one."""
        ...

    @property
    def loss(self) -> float | None:
        """Mean of the micro-batch, of the last section; None: another one."""
        ...

    def count(self) -> None:
        """Add the weights' gradients to those of the section. Once, after `backward`."""
        ...


class Passed(Forwarded, Protocol):
    """Whose way back a member computes alone."""

    def backward(self, gradient: Buffer | None, member: PeerId | None = None) -> Buffer | None:
        """Return the gradient of the input, encoded; None: the input is tokens. Once.

        Args:
            member: of the next stage, whose gradient it is.

        Raises:
            PayloadError: what another peer sent is no gradient.
            CallFailed: the weights have changed since the forward pass.
            NotFinite: a number became NaN or infinite.
        """
        ...


class PassedTogether(Forwarded, Protocol):
    """Whose way back takes others, too."""

    async def backward(self, gradient: Buffer | None, member: PeerId | None) -> Buffer | None: ...


class Ways(NamedTuple):
    """What a section makes of a micro-batch, encoded."""

    output: Buffer | None  # None: of the last section
    gradient: Buffer | None  # of the input; None: that is tokens


class Comparing(Protocol):
    """What tells how far apart two members came to, of one micro-batch."""

    def apart(self, given: Given, returned: Buffer | None, theirs: Ways, mine: Ways) -> tuple[float, float]:
        """Return the distance of the outputs and of the gradients, relative to what the section changes; -1: none.

        Args:
            returned: the gradient of the output.

        Raises:
            PayloadError: what another peer sent is none of these.
        """
        ...


class Together(Protocol):
    """What computes a section with other members of the stage."""

    async def forward(self, given: Given) -> PassedTogether | None:
        """Compute the forward pass; None: nobody helps with this one."""
        ...


def again(device: "Device", given: Given, returned: Buffer | None) -> tuple[Ways, float | None]:
    """Compute a micro-batch there and back, and count nothing; return what is made of it, and the last section's loss.

    Args:
        returned: the gradient of the output; None: the section is the last one.

    Raises:
        PayloadError, CallFailed, NotFinite: as `Device.forward` and `Passed.backward`.
    """
    passed = device.forward(given)
    assert not callable(passed.output), "of codecs that remember, nobody can compute again"
    return Ways(passed.output, passed.backward(returned)), passed.loss


class Device(Protocol):
    """Of one member of a stage. Not safe to use from two threads at a time."""

    @property
    def tokens_nbytes(self) -> int:
        """Bytes of a sample's tokens."""
        ...

    def input_nbytes(self, num_samples: int) -> int:
        """Return the bytes of encoded activations before this section; of their gradient, `gradient_nbytes` says."""
        ...

    def gradient_nbytes(self, num_samples: int) -> int:
        """Return the bytes of the encoded gradient of this section's output; 0: it is the last one."""
        ...

    def forward(self, given: Given) -> Passed:
        """Compute the forward pass.

        Raises:
            PayloadError: what another peer sent are no activations, or no tokens of the vocabulary.
            NotFinite: a number became NaN or infinite.
        """
        ...
