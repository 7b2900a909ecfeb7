"""What changed between two arrays of numbers of one kind, to the bit, in as few bytes as change.

    counts    of each chunk of 4096 words how many differ: two bytes each
    places    which, `elias_fano`
    steps     by how many a word moves in the order of numbers: each n >= 1 as the bits of n, of which all but
              the first follow one another at the end; how many there are, a one behind as many zeros
              (Elias's gamma code)

for each run of 256 chunks, one behind the other, with the number of bits that tell lengths before them. A step to the
next larger number is 1, to the next smaller 2, then 3, 4, and so on: most weights move by a few in training, if at all.
The order of floating-point numbers of 16 and 32 bits is that of their bits, those of negative ones turned round.

Every pair of arrays has one encoding, and nothing else decodes.

Elias, "Universal codeword sets and representations of the integers" (1975, IEEE Transactions on Information Theory 21).
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from weft.codec.sparse import elias_fano
from weft.codec.sparse.bits import Bits, Numbers, laid, nbytes, packed, read, total, unpacked
from weft.codec.sparse.elias_fano import CHUNK, Chunks, chunks_of
from weft.errors import PayloadError

_RUN = 256 * CHUNK  # words encoded together
_COUNT, _LENGTH = 2, 4  # bytes of a count, and of how many bits tell lengths

Words = NDArray[np.uint16] | NDArray[np.uint32]


def encode(old: Words, new: Words) -> bytes:
    """Return what makes `new` of `old`, of the same kind and length."""
    assert old.dtype == new.dtype
    assert old.shape == new.shape
    return b"".join(_encoded(old[start : start + _RUN], new[start : start + _RUN]) for start in _starts(old))


def decode(old: Words, data: memoryview) -> Words:
    """Return `new`.

    Raises:
        PayloadError: bytes that no encoder makes of this array.
    """
    new, reader = old.copy(), _Reader(data)
    for start in _starts(old):
        _decode(new[start : start + _RUN], reader)
    reader.end()
    return new


def _starts(words: Words) -> Iterator[int]:
    return iter(range(0, len(words), _RUN))


def _encoded(old: Words, new: Words) -> bytes:
    places = np.flatnonzero(old != new)
    counts = np.bincount(places // CHUNK, minlength=-(-len(old) // CHUNK))
    bits = 8 * old.itemsize
    steps = _steps(_ranks(old[places], bits), _ranks(new[places], bits))
    lengths, lower = _gamma(steps)
    return b"".join(
        (
            counts.astype("<u2").tobytes(),
            elias_fano.encode(chunks_of(len(old), counts), places),
            len(lengths).to_bytes(_LENGTH, "little"),
            packed(lengths),
            packed(lower),
        )
    )


def _decode(words: Words, reader: "_Reader") -> None:
    """Change words in place."""
    counts = np.frombuffer(reader.take(_COUNT * -(-len(words) // CHUNK)), "<u2").astype(np.int64)
    chunks: Chunks = chunks_of(len(words), counts)
    places = elias_fano.decode(chunks, reader.take(sum(chunks.nbytes)))
    bits = 8 * words.itemsize
    num = int.from_bytes(reader.take(_LENGTH), "little")
    if not len(places) <= num <= len(places) * (bits + 1):
        raise PayloadError("patch whose steps are not as many as its places, or longer than all numbers")
    steps = _from_gamma(reader.bits(num), reader, len(places), bits + 1)
    words[places] = _from_ranks(_moved(_ranks(words[places], bits), steps, bits), bits).astype(words.dtype)


# --- numbers in their order ---


def _ranks(words: Words, bits: int) -> Numbers:
    """Return which in the order of all numbers each is, from 0."""
    found = words.astype(np.int64)
    return np.where(found >> (bits - 1) > 0, (1 << bits) - 1 - found, found + (1 << (bits - 1)))


def _from_ranks(ranks: Numbers, bits: int) -> Numbers:
    return np.where(ranks < 1 << (bits - 1), (1 << bits) - 1 - ranks, ranks - (1 << (bits - 1)))


def _steps(old: Numbers, new: Numbers) -> Numbers:
    moved = new - old
    found: Numbers = 2 * np.abs(moved) - (moved > 0)
    return found


def _moved(ranks: Numbers, steps: Numbers, bits: int) -> Numbers:
    found = ranks + np.where(steps & 1, (steps + 1) >> 1, -(steps >> 1))
    if ((found < 0) | (found >= 1 << bits)).any():
        raise PayloadError("patch that leads out of the numbers there are")
    return found


# --- Elias's gamma code, all lengths first ---


def _gamma(numbers: Numbers) -> tuple[Bits, Bits]:
    """Return the bits that tell lengths, and those behind the first of each number, lowest first."""
    more = _more(numbers)
    lengths = np.zeros(total(more) + len(numbers), np.uint8)
    lengths[np.cumsum(more + 1) - 1] = 1
    return lengths, laid(numbers, more)


def _from_gamma(lengths: Bits, reader: "_Reader", num: int, most: int) -> Numbers:
    """Return the numbers that these lengths are of, whose other bits are read.

    Args:
        num: how many.
        most: bits of one, at most.
    """
    ends = np.flatnonzero(lengths)
    if len(ends) != num or (num and ends[-1] != len(lengths) - 1) or (not num and len(lengths)):
        raise PayloadError("patch whose steps are not as many as its places")
    more = np.diff(ends, prepend=-1) - 1
    if more.max(initial=0) >= most:
        raise PayloadError("patch with a step longer than all numbers")
    return (np.int64(1) << more) | read(reader.bits(total(more)), more)


def _more(numbers: Numbers) -> Numbers:
    """Return how many bits each number has behind its first, without a logarithm that might round."""
    more = np.zeros(len(numbers), np.int64)
    rest = numbers >> 1
    while rest.any():
        more += rest > 0
        rest >>= 1
    return more


class _Reader:
    """Takes bytes one behind the other."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, num: int) -> memoryview:
        """
        Raises:
            PayloadError: there are not so many.
        """
        found = self._data[self._at : self._at + num]
        if len(found) < num:
            raise PayloadError("patch that is cut off")
        self._at += num
        return found

    def bits(self, num: int) -> Bits:
        """Return so many bits, of whole bytes whose other bits are zero."""
        return unpacked(self.take(nbytes(num)), num)

    def end(self) -> None:
        if self._at < len(self._data):
            raise PayloadError("patch with bytes behind its end")
