"""What changed of a sample's activations since they were passed last, for runs that see samples again.

    here      d = encode(x - m)        m' = bf16(m + decode(d))       m: what both sides had of this sample, 0: nothing
    there     x' = m' = bf16(m + decode(d))

As training settles, x changes less from one time to the next, and so does what few bits make of the change.

A message says of each sample what it builds on, by the digest of m; the gradient that comes back says what is held now:

    activations    samples * [8 bytes: of m; zeros: of nothing]     | d, of all samples
    gradient       samples * [8 bytes: of m'; zeros: it has no room] | the gradient

Only what the other side has said to hold is built on, and once: until the gradient of that comes back, the sample is
passed alone. So a message that was lost, came twice, or came to a peer that has started anew is never decoded to other
numbers than were meant: it is refused, and what is encoded after it stands alone. A message that was decoded already
decodes to the same again, as long as no newer one of its samples came.

Samples are held, in bf16, as long as there is room, and then no others: of samples that come in turns, as epochs do,
those that came first stay, where the least recently seen would be dropped just before they come again.

Of a stage of several members each holds what came to it: a sample has another name for each of them, and gains where it
goes the same way again.

AQ-SGD: Wang et al., 2206.01299, algorithm 1. It passes a sample in full the first time; here in as few bits as later:
messages of equal lengths.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.codec import Codec
from weft.codec.dense import Bf16
from weft.errors import PayloadError
from weft.pipeline.codec.boundary import ActivationCodec, Activations, Boundary, Samples, Shape
from weft.wire import Buffer, digest

_TAG_NBYTES = 8  # that two states of a sample share them by chance happens to nobody
_ALONE = bytes(_TAG_NBYTES)


@dataclass
class _Sample:
    data: bytes  # bf16
    tag: bytes
    message: str  # digest of what it came in
    is_shared: bool = False  # the other side has said that it holds it


class Held:
    """What one side holds of the samples of one boundary.

    Args:
        nbytes: of all together, at most.
    """

    def __init__(self, nbytes: int) -> None:
        self._samples: dict[int, _Sample] = {}
        self._nbytes = nbytes
        self.used_nbytes = 0

    def get(self, name: int) -> _Sample | None:
        return self._samples.get(name)

    def put(self, name: int, data: bytes, message: str) -> None:
        """Hold this of a sample, if it was held before or there is room."""
        before = self._samples.get(name)
        used = self.used_nbytes + len(data) - (0 if before is None else len(before.data))
        if used <= self._nbytes:
            self._samples[name] = _Sample(data, _tag(data), message)
            self.used_nbytes = used

    def drop(self, name: int) -> None:
        self.used_nbytes -= len(self._samples.pop(name).data)


def aqsgd(values: Codec, held_nbytes: int, gradients: ActivationCodec, shape: Shape) -> Boundary:
    """Return one side of a boundary.

    Args:
        values: encodes changes.
        held_nbytes: of samples that are held, at most.
    """
    held = Held(held_nbytes)
    return Boundary(Changes(values, held, shape), Acknowledging(gradients, held), has_memory=True)


@final
class Changes:
    """Activations. A side encodes, or it decodes: `held` is of one direction."""

    def __init__(self, values: Codec, held: Held, shape: Shape) -> None:
        self._values = values
        self._held = held
        self._shape = shape

    def encode(self, x: Activations, samples: Samples) -> Buffer:
        bases, tags = self._empty(len(samples)), [_ALONE] * len(samples)
        for row, name in _first_rows(samples):
            sample = self._held.get(name)
            if sample is not None and sample.is_shared:
                bases[row], tags[row] = self._numbers(sample.data), sample.tag
        changes = self._values.encode((x.flatten(1) - bases).flatten())
        message = b"".join((*tags, changes))
        self._put(samples, self._halves(changes, bases), digest(message))
        return message

    def decode(self, data: Buffer, samples: Samples) -> Activations:
        shape, num = self._shape, len(samples)
        view = bounds.require_nbytes(data, self.nbytes(num))
        message = digest(view)
        bases, done = self._empty(num), dict[int, bytes]()
        tags = [bytes(view[start : start + _TAG_NBYTES]) for start in range(0, _TAG_NBYTES * num, _TAG_NBYTES)]
        firsts = dict(_first_rows(samples))
        for row, tag in enumerate(tags):
            sample = self._held.get(firsts[row]) if row in firsts else None
            if tag == _ALONE:
                continue
            if sample is not None and sample.message == message:
                done[row] = sample.data
            elif sample is not None and sample.tag == tag:
                bases[row] = self._numbers(sample.data)
            else:
                raise PayloadError("activations that build on what is not held here; to be sent alone")
        halves = self._halves(view[_TAG_NBYTES * num :], bases)
        halves = [done.get(row, each) for row, each in enumerate(halves)]
        self._put(samples, halves, message)
        return self._numbers(b"".join(halves)).view(num, shape.seq_len, shape.width)

    def nbytes(self, num_samples: int) -> int:
        return _TAG_NBYTES * num_samples + self._values.nbytes(num_samples * self._shape.num)

    def _halves(self, changes: Buffer, bases: Float32[Tensor, "samples num"]) -> list[bytes]:
        """Return what both sides hold of each sample after a message, in bf16."""
        numbers = self._values.decode(changes, bases.numel()).add_(bases.view(-1))
        bounds.require_finite_payload(bounds.largest(numbers))
        data = bytes(Bf16().encode(numbers))
        size = 2 * self._shape.num
        return [data[start : start + size] for start in range(0, len(data), size)]

    def _put(self, samples: Samples, halves: list[bytes], message: str) -> None:
        for row, name in _first_rows(samples):
            self._held.put(name, halves[row], message)

    def _numbers(self, data: bytes) -> Float32[Tensor, " num"]:
        return Bf16().decode(data, len(data) // 2)

    def _empty(self, num_samples: int) -> Float32[Tensor, "samples num"]:
        return torch.zeros(num_samples, self._shape.num)


@final
class Acknowledging:
    """Gradients, each after what its side holds of the activations that it is of."""

    def __init__(self, gradients: ActivationCodec, held: Held) -> None:
        self._gradients = gradients
        self._held = held

    def encode(self, x: Activations, samples: Samples) -> Buffer:
        held = [self._held.get(name) for name in samples.names]
        tags = [_ALONE if sample is None else sample.tag for sample in held]
        return b"".join((*tags, self._gradients.encode(x, samples)))

    def decode(self, data: Buffer, samples: Samples) -> Activations:
        view = bounds.require_nbytes(data, self.nbytes(len(samples)))
        found = self._gradients.decode(view[_TAG_NBYTES * len(samples) :], samples)
        for row, name in _first_rows(samples):
            tag, sample = bytes(view[_TAG_NBYTES * row : _TAG_NBYTES * (row + 1)]), self._held.get(name)
            if sample is not None and sample.tag == tag:
                sample.is_shared = True
            elif sample is not None and tag == _ALONE and not sample.is_shared:
                self._held.drop(name)  # it would be of no use
        return found

    def nbytes(self, num_samples: int) -> int:
        return _TAG_NBYTES * num_samples + self._gradients.nbytes(num_samples)


def _first_rows(samples: Samples) -> list[tuple[int, int]]:
    """Return where each sample lies, and its name: the first, where one is in a micro-batch twice."""
    seen: dict[int, int] = {}
    for row, name in enumerate(samples.names):
        seen.setdefault(name, row)
    return [(row, name) for name, row in seen.items()]


def _tag(data: bytes) -> bytes:
    return bytes.fromhex(digest(data)[: 2 * _TAG_NBYTES])
