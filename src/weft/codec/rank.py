"""Which k of n places are kept, as one number: the shortest bytes that all such choices can have, and of fixed length.

    rank = C(p_1, 1) + C(p_2, 2) + ... + C(p_k, k)        places p_1 < p_2 < ... < p_k, counted from 0

runs over 0 ... C(n, k) - 1, each once, whatever the choice: the combinatorial number system (Cover, "Enumerative source
encoding", 1973, IEEE Trans. Inf. Theory 19, eq. 8). So a choice has exactly one encoding, of ceil(log2 C(n, k)) bits,
and every number below C(n, k) is one. 64 of 4096 take 472 bits, 7.375 a place; sorted gaps in bytes, packed by zstd,
take 7.45, of a length that depends on the data and bytes that depend on the library.

Numbers of hundreds of bits are rows of 32-bit limbs, lowest first, worked on for many chunks at once. Float64 holds up
to 2^1023 with 53 significant bits: it finds each place to within one, and limbs decide where it may be wrong. Where
C(n, k) has more bits than that, places are a bitmap of n bits.

It does not know what is kept at the places.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import comb
from typing import Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from weft.errors import PayloadError

MAX_BITS = 960  # of a rank: float64 ends at 2^1023
_BASE = float(1 << 32)
_LIMB = np.uint64(32)
_MASK = np.uint64(0xFFFFFFFF)
_NEAR = 1 / (1 << 40)  # relative: float64 sums of limbs err by far less

Places = NDArray[np.int64]


@runtime_checkable  # the shape check that is on in tests asks
class Choices(Protocol):
    """How rows of places are encoded, `nbits` each, without gaps between rows."""

    nbits: int

    def encode(self, places: Places) -> NDArray[np.uint8]:
        """Return the bytes of rows of places, which ascend."""
        ...

    def decode(self, data: NDArray[np.uint8], num_rows: int) -> Places:
        """Return so many rows of places, ascending.

        Raises:
            PayloadError: bytes that no encoder makes.
        """
        ...


def build(num: int, kept: int) -> Choices:
    """Return how `kept` of `num` places are encoded."""
    if comb(num, kept).bit_length() > MAX_BITS:
        return Bitmap(num, kept)
    return Ranks(num, kept) if 2 * kept <= num else Others(num, kept)


def nbytes(choices: Choices, num_rows: int) -> int:
    return -(-choices.nbits * num_rows // 8)


@final
class Bitmap:
    def __init__(self, num: int, kept: int) -> None:
        self._kept = kept
        self.nbits = num

    def encode(self, places: Places) -> NDArray[np.uint8]:
        bits = np.zeros((len(places), self.nbits), np.uint8)
        np.put_along_axis(bits, places, 1, axis=1)
        return _pack(bits)

    def decode(self, data: NDArray[np.uint8], num_rows: int) -> Places:
        bits = _unpack(data, num_rows, self.nbits)
        if (np.count_nonzero(bits, axis=1) != self._kept).any():
            raise PayloadError(f"payload whose bitmap does not keep {self._kept} of {self.nbits} places; dropped")
        return np.nonzero(bits)[1].reshape(num_rows, self._kept)


@final
class Others:
    """More than half are kept: those that are not are named."""

    def __init__(self, num: int, kept: int) -> None:
        self._num = num
        self._left_out = Ranks(num, num - kept)
        self.nbits = self._left_out.nbits

    def encode(self, places: Places) -> NDArray[np.uint8]:
        return self._left_out.encode(_others(places, self._num))

    def decode(self, data: NDArray[np.uint8], num_rows: int) -> Places:
        return _others(self._left_out.decode(data, num_rows), self._num)


@final
class Ranks:
    def __init__(self, num: int, kept: int) -> None:
        self.num = num
        self.kept = kept
        self._limit = comb(num, kept)
        self.nbits = (self._limit - 1).bit_length()
        self._num_limbs = max(1, -(-self._limit.bit_length() // 32))

    def encode(self, places: Places) -> NDArray[np.uint8]:
        sums = np.zeros((len(places), self._num_limbs + 1), np.uint64)
        for number, table in enumerate(_tables(self.num, self.kept)):
            sums[:, : table.limbs.shape[1]] += table.limbs[places[:, number]]  # at most 2^44: carried below
        for limb in range(self._num_limbs):
            sums[:, limb + 1] += sums[:, limb] >> _LIMB
        data = sums[:, : self._num_limbs].astype("<u4").view(np.uint8)
        return _pack(np.unpackbits(data, axis=1, count=self.nbits, bitorder="little"))

    def decode(self, data: NDArray[np.uint8], num_rows: int) -> Places:
        whole = np.zeros((num_rows, 32 * self._num_limbs), np.uint8)
        whole[:, : self.nbits] = _unpack(data, num_rows, self.nbits)
        rest = np.packbits(whole, axis=1, bitorder="little").view("<u4").astype(np.int64)
        limit = np.broadcast_to(_limbs([self._limit], self._num_limbs).astype(np.int64), rest.shape)
        if not _is_less(rest, limit).all():
            raise PayloadError(f"payload whose places are none of the {self.kept} of {self.num}; dropped")
        places = np.empty((num_rows, self.kept), np.int64)
        for number, table in reversed([*enumerate(_tables(self.num, self.kept))]):
            width = table.limbs.shape[1]
            found = table.last_up_to(rest[:, :width])
            _subtract(rest[:, :width], table.limbs[found])
            places[:, number] = found
        return places


def _pack(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.packbits(bits.reshape(-1), bitorder="little")


def _unpack(data: NDArray[np.uint8], num_rows: int, nbits: int) -> NDArray[np.uint8]:
    bits = np.unpackbits(data, bitorder="little")
    if bits[num_rows * nbits :].any():
        raise PayloadError("payload with bits beyond its end; dropped")
    return bits[: num_rows * nbits].reshape(num_rows, nbits)


def _others(places: Places, num: int) -> Places:
    is_left = np.ones((len(places), num), np.bool_)
    np.put_along_axis(is_left, places, False, axis=1)
    return np.nonzero(is_left)[1].reshape(len(places), num - places.shape[1])


class _Table:
    """C(p, i) for p = 0 ... n, of one i."""

    def __init__(self, values: Sequence[int]) -> None:
        self.limbs = _limbs(values, max(1, -(-values[-1].bit_length() // 32)))
        self._floats = np.array([float(value) for value in values])

    def last_up_to(self, numbers: NDArray[np.int64]) -> Places:
        """Return for each row the largest p < n with C(p, i) <= the number that its limbs are."""
        about = np.zeros(len(numbers))
        for limb in reversed(range(numbers.shape[1])):
            about = about * _BASE + numbers[:, limb]
        found = np.searchsorted(self._floats, about, side="right") - 1
        last = len(self._floats) - 2
        near = np.abs(self._floats[np.minimum(found + 1, last + 1)] - about) <= _NEAR * about
        near |= np.abs(self._floats[found] - about) <= _NEAR * about
        rows = np.flatnonzero(near)
        if len(rows):
            exact, mine = numbers[rows], found[rows]
            mine -= _is_less(exact, self.limbs[mine].astype(np.int64))
            above = np.minimum(mine + 1, last + 1)
            mine += ~_is_less(exact, self.limbs[above].astype(np.int64))
            found[rows] = mine
        return np.minimum(found, last)


@lru_cache(16)  # pure; 8 MB for 64 of 4096
def _tables(num: int, kept: int) -> tuple[_Table, ...]:
    """Return the tables of C(p, 1) ... C(p, kept)."""
    tables, column = [], [1] * (num + 1)
    for _ in range(kept):
        column = [0, *accumulate(column[:-1])]  # C(p + 1, i) = C(p, i) + C(p, i - 1)
        tables.append(_Table(column))
    return tuple(tables)


def _limbs(values: Sequence[int], width: int) -> NDArray[np.uint64]:
    data = b"".join(value.to_bytes(4 * width, "little") for value in values)
    return np.frombuffer(data, "<u4").reshape(len(values), width).astype(np.uint64)


def _is_less(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each row of limbs whether `one` is less than `other`."""
    is_less = np.zeros(len(one), np.bool_)
    for limb in range(one.shape[1]):  # the highest, which decides where it differs, comes last
        is_less = np.where(one[:, limb] == other[:, limb], is_less, one[:, limb] < other[:, limb])
    return is_less


def _subtract(numbers: NDArray[np.int64], less: NDArray[np.uint64]) -> None:
    """numbers -= less, row by row; no result is negative."""
    numbers -= less.astype(np.int64)
    for limb in range(numbers.shape[1] - 1):
        borrow = numbers[:, limb] >> 32  # -1 or 0
        numbers[:, limb] -= borrow << 32
        numbers[:, limb + 1] += borrow
