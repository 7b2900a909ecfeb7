"""Which values of a vector are sent, however many they are: each chunk's places in its own few bits.

A chunk of w values (4096, the last one fewer) sends k of them. With l = floor(log2(w / k)), a place p is its l lowest
bits, and p >> l, which rises from place to place: the j-th is a one at bit (p >> l) + j of the chunk's upper bits.

    upper   k + ((w - 1) >> l) bits a chunk, k of them ones
    lower   l bits a place, lowest first

So it takes about l + 2 bits a place, 0.6 more than the shortest code there is. Where more than a quarter is sent
(l < 2), the upper bits are one for each value, and there are no lower ones: it takes no more than a bit a value. All is
of a length that follows from the counts: places have one encoding.

Elias, "Efficient storage and retrieval by content and address of static files" (1974, J. ACM 21); Fano (1971).
"""

from dataclasses import dataclass

import numpy as np

from weft.codec.sparse.bits import Numbers, before, laid, nbytes, packed, read, total, unpacked
from weft.errors import PayloadError

CHUNK = 4096  # values

_POWERS = 1 << np.arange(13)  # of two, up to a chunk's values


@dataclass(frozen=True)
class Chunks:
    """How many values each chunk has, and how many of them it sends."""

    widths: Numbers
    counts: Numbers

    def __post_init__(self) -> None:
        if (self.counts > self.widths).any():
            raise PayloadError("payload that sends more values than there are; dropped")

    @property
    def num_sent(self) -> int:
        return total(self.counts)

    @property
    def lower(self) -> Numbers:
        """Bits of a place that are told as they are: l."""
        found = np.searchsorted(_POWERS, self.widths // np.maximum(self.counts, 1), side="right") - 1  # floor(log2)
        return np.where((found < 2) | (self.counts == 0), 0, found)

    @property
    def upper(self) -> Numbers:
        """Bits that tell the rest of a chunk's places."""
        lower = self.lower
        coded = np.where(lower > 0, self.counts + ((self.widths - 1) >> lower), self.widths)
        return np.where(self.counts > 0, coded, 0)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of all upper bits, and of all lower ones."""
        return nbytes(total(self.upper)), nbytes(total(self.lower * self.counts))


def chunks_of(num: int, counts: Numbers) -> Chunks:
    """Return the chunks of `num` values that send so many each.

    Raises:
        PayloadError: there are not so many.
    """
    widths = np.full(len(counts), CHUNK, np.int64)
    if num % CHUNK:
        widths[-1] = num % CHUNK
    return Chunks(widths, counts)


def encode(chunks: Chunks, places: Numbers) -> bytes:
    """Return the bytes of places, ascending, counted from the first value of the first chunk."""
    place = _Places(chunks)
    within = places - place.which * CHUNK
    upper = np.zeros(total(chunks.upper), np.uint8)
    upper[place.begins + (within >> place.lower) + place.shifts] = 1
    return packed(upper) + packed(laid(within, place.lower))


def decode(chunks: Chunks, data: memoryview) -> Numbers:
    """Return the places that `data` encodes, of as many bytes as `Chunks.nbytes` says in all.

    Raises:
        PayloadError: bytes that no encoder makes.
    """
    place, (num_upper, _) = _Places(chunks), chunks.nbytes
    upper = unpacked(data[:num_upper], total(chunks.upper))
    lower = unpacked(data[num_upper:], total(place.lower))
    ones = np.flatnonzero(upper)
    if len(ones) != chunks.num_sent:
        raise PayloadError("payload whose places are not as many as it says; dropped")
    within = ((ones - place.begins - place.shifts) << place.lower) | read(lower, place.lower)
    found = within + place.which * CHUNK
    is_inside = (within >= 0) & (within < chunks.widths[place.which])
    if not is_inside.all() or (found[1:] <= found[:-1]).any():
        raise PayloadError("payload whose places do not ascend within their chunks; dropped")
    return found


class _Places:
    """Of each place that is sent: its chunk, and where its bits lie."""

    def __init__(self, chunks: Chunks) -> None:
        counts, lower = chunks.counts, chunks.lower
        self.which = np.repeat(np.arange(len(counts)), counts)
        self.lower = lower[self.which]
        self.begins = before(chunks.upper)[self.which]
        number = np.arange(len(self.which)) - before(counts)[self.which]  # in its chunk
        self.shifts = np.where(self.lower > 0, number, 0)
