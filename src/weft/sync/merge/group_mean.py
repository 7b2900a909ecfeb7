"""The mean of a group, as its aggregator makes it: one whole payload after the other, in the order in which they come.

    a leaf's payload    the parts of the round's base, each encoded, one after the other
    the mean            the same parts, encoded anew: the aggregator's own payload

One accumulator and one decoded vector, whatever the number of peers. What is no payload is found before it changes the
sum. The order of float64 sums is part of the result; a `GroupRecord` lists it.
"""

from collections.abc import Sequence

import torch

from weft.codec import bounds
from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.sync.merge.reduce import MAX_WEIGHT, EncodedPart, decode_parts, empty_mean, encode_parts, named
from weft.sync.method.choices import Rule
from weft.wire import Buffer


def payload_nbytes(codec: Codec, parts: Sequence[range]) -> int:
    return sum(codec.nbytes(len(part)) for part in parts)


def split(codec: Codec, payload: Buffer, parts: Sequence[range]) -> tuple[Buffer, ...]:
    """Return the encoded parts of a whole payload.

    Raises:
        PayloadError: it is of another length.
    """
    view, start, found = memoryview(payload), 0, list[Buffer]()
    if view.nbytes != payload_nbytes(codec, parts):
        raise PayloadError(
            f"a payload of {view.nbytes} bytes: {payload_nbytes(codec, parts)} were announced by its round"
        )
    for part in parts:
        stop = start + codec.nbytes(len(part))
        found.append(view[start:stop])
        start = stop
    return tuple(found)


class GroupMean:
    """Accumulates payloads of one round.

    Args:
        codec: of payloads.
        parts: how the vector is cut in the round.
    """

    def __init__(self, codec: Codec, parts: Sequence[range], rule: Rule = "peers_mean") -> None:
        self._codec = codec
        self._parts = tuple(parts)
        num = self._parts[-1].stop
        self._decoded = bounds.empty(num, torch.float32)
        self._mean = empty_mean(rule, num)
        self._weight = 0  # of all that was added

    def add(self, weight: int, payload: Sequence[Buffer]) -> None:
        """Add one peer's payload, as its encoded parts.

        Raises:
            PayloadError: a weight out of range, or bytes that are no finite vector. Nothing has changed.
        """
        if not 0 < weight <= MAX_WEIGHT - self._weight:
            raise PayloadError(f"a contribution of {weight} tokens: allowed are 1 to {MAX_WEIGHT - self._weight}")
        decode_parts(self._codec, payload, self._parts, self._decoded)
        self._mean.add(weight, self._decoded)
        self._weight += weight

    def result(self, codec: Codec) -> tuple[EncodedPart, ...]:
        """Return the mean of what was added, part by part, encoded by `codec`.

        Raises:
            PayloadError: nothing was.
        """
        if not self._weight:
            raise PayloadError("no contribution with tokens: there is nothing to merge")
        return tuple(map(named, encode_parts(codec, self._mean.result(), self._parts)))
