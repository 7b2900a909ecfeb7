"""The mean of a group, as its sponsor makes it: one whole payload after the other, in the order in which they come.

    a ward's payload    the parts of the round's base, each encoded, one after the other
    the mean            the same parts, encoded anew: the sponsor's own payload

One accumulator and one decoded vector, whatever the number of peers. What is no payload is found before it changes the
sum. The order of float64 sums is part of the result; a `GroupRecord` lists it.

It does not know who the peers are.
"""

from collections.abc import Sequence

import torch

from weft.codec import bounds
from weft.codec.codec import Codec
from weft.errors import PayloadError
from weft.sync.reduce import MAX_WEIGHT, EncodedPart, accumulate, decode_parts, divide, encode_parts, named
from weft.wire import Buffer


def payload_nbytes(codec: Codec, parts: Sequence[range]) -> int:
    """Return how long a payload is, all parts together."""
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
        parts: how the vector is cut in the round.
        quota: as of `reduce.Merger`.
    """

    def __init__(self, codec: Codec, parts: Sequence[range], quota: int | None) -> None:
        self._codec = codec
        self._parts = tuple(parts)
        self._quota = quota
        num = self._parts[-1].stop
        self._decoded = bounds.empty(num, torch.float32)
        self._sum = bounds.empty(num, torch.float64)
        self._is_begun = False
        self.tokens = 0  # of all that was added

    def add(self, tokens: int, payload: Sequence[Buffer]) -> None:
        """Add one peer's payload, as its encoded parts.

        Raises:
            PayloadError: tokens out of range, or bytes that are no finite vector. Nothing has changed.
        """
        if not 0 < tokens <= MAX_WEIGHT - self.tokens:
            raise PayloadError(f"a contribution of {tokens} tokens: allowed are 1 to {MAX_WEIGHT - self.tokens}")
        decode_parts(self._codec, payload, self._parts, self._decoded)
        counted = tokens if self._quota is None else min(tokens, self._quota)
        accumulate(self._sum, counted, self._decoded, is_first=not self._is_begun)
        self._is_begun = True
        self.tokens += tokens

    def result(self) -> tuple[EncodedPart, ...]:
        """Return the mean of what was added, part by part.

        Raises:
            PayloadError: nothing was.
        """
        if not self.tokens:
            raise PayloadError("no contribution with tokens: there is nothing to merge")
        divide(self._sum, self.tokens, self._decoded)
        return tuple(map(named, encode_parts(self._codec, self._decoded, self._parts)))
