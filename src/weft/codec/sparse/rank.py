"""Which k of n places are kept, as one number: the shortest bytes that all such choices can have, and of fixed length.

    rank = C(p_1, 1) + C(p_2, 2) + ... + C(p_k, k)        places p_1 < p_2 < ... < p_k, counted from 0

runs over 0 ... C(n, k) - 1, each once, whatever the choice: the combinatorial number system (Cover, "Enumerative source
encoding", 1973, IEEE Trans. Inf. Theory 19, eq. 8). So a choice has exactly one encoding, of ceil(log2 C(n, k)) bits,
and every number below C(n, k) is one. 64 of 4096 take 472 bits, 7.375 a place; sorted gaps in bytes, packed by zstd,
take 7.45, of a length that depends on the data and bytes that depend on the library.

Numbers of hundreds of bits are rows of 32-bit limbs, lowest first, worked on for many chunks at once. Float64 holds up
to 2^1023 with 53 significant bits: it finds each place to within one, and limbs decide where it may be wrong.

Where C(n, k) has more bits than that, the places are cut into quarters. How many of each are kept is a number, too, of
all ways to deal k out; then follows a rank for each quarter, of as many bits as its count asks for, and zeros up to the
length of the longest. 256 of 4096 take 1390 bits, 1 % more than one number would. Where a bitmap of n bits is no longer
than that, it is taken.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import comb
from threading import Lock
from typing import Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from weft.errors import PayloadError

MAX_BITS = 1020  # of a rank: float64 ends at 2^1023. All choices among 1024 places have less.
_NUM_QUARTERS = 4
_ROWS = 256
_LIMB_BITS = 32
_BASE = float(1 << _LIMB_BITS)
_LIMB = np.uint64(_LIMB_BITS)
_MASK = np.uint64(0xFFFFFFFF)
_NEAR = 1 / (1 << 40)  # relative: float64 sums of limbs err by far less

Places = NDArray[np.int64]
Bits = NDArray[np.uint8]  # 0 or 1 each


@runtime_checkable  # the shape check that is on in tests asks
class Choices(Protocol):
    """How rows of places are encoded, in `nbits` bits each."""

    num: int
    kept: int
    nbits: int

    def to_bits(self, places: Places) -> Bits:
        """Return the bits of rows of places, which ascend."""
        ...

    def to_places(self, bits: Bits) -> Places:
        """Return rows of places, ascending.

        Raises:
            PayloadError: bits that no encoder makes.
        """
        ...


@lru_cache(64)
def build(num: int, kept: int) -> Choices:
    """Return how `kept` of `num` places are encoded: in the fewest bits."""
    if comb(num, kept).bit_length() <= MAX_BITS:
        return Ranks(num, kept) if 2 * kept <= num else Others(num, kept)
    quarters = Quarters(num, kept)
    return quarters if quarters.nbits < num else Bitmap(num, kept)


def nbytes(choices: Choices, num_rows: int) -> int:
    return -(-choices.nbits * num_rows // 8)


def encode(choices: Choices, places: Places) -> NDArray[np.uint8]:
    """Return the bytes of rows of places, which ascend, without gaps between rows."""
    return np.packbits(choices.to_bits(places).reshape(-1), bitorder="little")


def decode(choices: Choices, data: NDArray[np.uint8], num_rows: int) -> Places:
    """Return so many rows of places, ascending.

    Raises:
        PayloadError: bytes that no encoder makes.
    """
    bits = np.unpackbits(data, bitorder="little")
    if bits[num_rows * choices.nbits :].any():
        raise PayloadError("payload with bits beyond its end; dropped")
    return choices.to_places(bits[: num_rows * choices.nbits].reshape(num_rows, choices.nbits))


@final
class Bitmap:
    def __init__(self, num: int, kept: int) -> None:
        self.num = self.nbits = num
        self.kept = kept

    def to_bits(self, places: Places) -> Bits:
        bits = np.zeros((len(places), self.nbits), np.uint8)
        np.put_along_axis(bits, places, 1, axis=1)
        return bits

    def to_places(self, bits: Bits) -> Places:
        if (np.count_nonzero(bits, axis=1) != self.kept).any():
            raise PayloadError(f"payload whose bitmap does not keep {self.kept} of {self.num} places; dropped")
        return np.nonzero(bits)[1].reshape(len(bits), self.kept)


@final
class Others:
    """More than half are kept: those that are not are named."""

    def __init__(self, num: int, kept: int) -> None:
        self.num = num
        self.kept = kept
        self._left_out = Ranks(num, num - kept)
        self.nbits = self._left_out.nbits

    def to_bits(self, places: Places) -> Bits:
        return self._left_out.to_bits(_others(places, self.num))

    def to_places(self, bits: Bits) -> Places:
        return _others(self._left_out.to_places(bits), self.num)


@final
class Quarters:
    """How many are kept of each quarter of the places, which ones of it, and zeros up to a length that all have."""

    def __init__(self, num: int, kept: int) -> None:
        self.num = num
        self.kept = kept
        self._width = width = -(-num // _NUM_QUARTERS)
        self._counts = _Counts(kept, width)
        limits = [comb(width, count) for count in range(width + 1)]
        self._lengths = np.array([(limit - 1).bit_length() for limit in limits])
        self._num_limbs = max(1, -(-max(limits).bit_length() // _LIMB_BITS))
        self._limits = _limbs(limits, self._num_limbs).astype(np.int64)
        self.nbits = self._counts.nbits + self._most_bits()

    def to_bits(self, places: Places) -> Bits:
        return np.concatenate([self._to_bits(places[rows]) for rows in _some(len(places))])

    def to_places(self, bits: Bits) -> Places:
        return np.concatenate([self._to_places(bits[rows]) for rows in _some(len(bits))])

    def _to_bits(self, places: Places) -> Bits:
        is_kept = np.zeros((len(places), _NUM_QUARTERS * self._width), np.bool_)
        np.put_along_axis(is_kept, places, True, axis=1)
        counts, fewer, is_named = self._named(is_kept.reshape(-1, self._width))
        rows, found = np.nonzero(is_named)
        named = np.zeros((len(fewer), fewer.max(initial=0)), np.int64)
        named[rows, np.arange(len(rows)) - (np.cumsum(fewer) - fewer)[rows]] = found
        counts = counts.reshape(-1, _NUM_QUARTERS)
        bits = np.zeros((len(places), self.nbits), np.uint8)
        bits[:, : self._counts.nbits] = self._counts.to_bits(counts)
        where = self._where(counts)
        ranks = _bits(_ranked(self._width, named, self._num_limbs), self._num_limbs * _LIMB_BITS)
        bits[where[0], where[1]] = ranks.reshape(len(places), _NUM_QUARTERS, -1)[where[0], where[2], where[3]]
        return bits

    def _to_places(self, bits: Bits) -> Places:
        counts = self._counts.to_counts(bits[:, : self._counts.nbits])
        where = self._where(counts)
        ranks = np.zeros((len(bits), _NUM_QUARTERS, self._num_limbs * _LIMB_BITS), np.uint8)
        ranks[where[0], where[2], where[3]] = bits[where[0], where[1]]
        is_used = np.zeros(bits.shape, np.bool_)
        is_used[:, : self._counts.nbits] = True
        is_used[where[0], where[1]] = True
        counts = counts.reshape(-1)
        is_most = 2 * counts > self._width
        fewer = np.where(is_most, self._width - counts, counts)
        rest = _numbers(ranks.reshape(len(counts), -1))
        is_kept = np.zeros((len(counts), self._width), np.bool_)
        if (bits & ~is_used).any() or not _is_less(rest, self._limits[fewer]).all():
            raise PayloadError(f"payload whose quarters are none of the {self.kept} of {self.num}; dropped")
        named = _unranked(self._width, rest, fewer)
        rows, order = np.nonzero(np.arange(named.shape[1]) < fewer[:, None])
        is_kept[rows, named[rows, order]] = True
        is_kept = (is_kept ^ is_most[:, None]).reshape(len(bits), -1)
        if is_kept[:, self.num :].any():
            raise PayloadError(f"payload that keeps places beyond {self.num}; dropped")
        return np.nonzero(is_kept)[1].reshape(len(bits), self.kept)

    def _named(self, is_kept: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return how many each quarter keeps, how many it names, and which: those left out where they are fewer."""
        counts = np.count_nonzero(is_kept, axis=1)
        is_most = 2 * counts > self._width
        return counts, np.where(is_most, self._width - counts, counts), is_kept ^ is_most[:, None]

    def _where(self, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return of each bit of a rank its row, its place there, its quarter, and its place in the rank."""
        lengths = self._lengths[counts]
        begins = self._counts.nbits + np.cumsum(lengths, axis=1) - lengths
        rows, quarters, bits = np.nonzero(np.arange(lengths.max(initial=0)) < lengths[:, :, None])
        return rows, begins[rows, quarters] + bits, quarters, bits

    def _most_bits(self) -> int:
        """Return how many bits ranks of quarters take at most, together."""
        own = self._lengths[: self.kept + 1]
        most = np.where(np.arange(self.kept + 1) == 0, 0, -(1 << 30))
        for _ in range(_NUM_QUARTERS):
            longer = np.full(self.kept + 1, -(1 << 30))
            for count, nbits in enumerate(own.tolist()):
                longer[count:] = np.maximum(longer[count:], most[: self.kept + 1 - count] + nbits)
            most = longer
        return int(most[-1])


def _some(num_rows: int) -> list[slice]:
    """Return rows that are worked on together: each bit of them is an index of eight bytes or more for a while."""
    return [slice(start, start + _ROWS) for start in range(0, max(num_rows, 1), _ROWS)]


class _Counts:
    """The ways to deal `total` out to quarters of `width` places, numbered in the order of their counts."""

    def __init__(self, total: int, width: int) -> None:
        self._total = total
        self._width = width
        ways = np.zeros(total + 1, np.int64)  # to deal 0, 1, ... out to so many quarters
        ways[0] = 1
        self._up_to = []  # sums of them
        for _ in range(_NUM_QUARTERS):
            sums = np.cumsum(ways)
            self._up_to.append(sums)
            ways = sums.copy()
            ways[width + 1 :] -= sums[: max(0, total - width)]
        self._num = int(ways[total])
        self.nbits = (self._num - 1).bit_length()

    def to_bits(self, counts: NDArray[np.int64]) -> Bits:
        number, left = np.zeros(len(counts), np.int64), np.full(len(counts), self._total)
        for quarter in range(_NUM_QUARTERS - 1):
            up_to, count = self._up_to[_NUM_QUARTERS - 1 - quarter], counts[:, quarter]
            number += up_to[left] - up_to[left - count]
            left -= count
        return (number[:, None] >> np.arange(self.nbits) & 1).astype(np.uint8)

    def to_counts(self, bits: Bits) -> NDArray[np.int64]:
        number = np.add.reduce(bits.astype(np.int64) << np.arange(self.nbits), axis=1)
        if (number >= self._num).any():
            raise PayloadError(f"payload that deals {self._total} places out in no way; dropped")
        counts, left = np.zeros((len(bits), _NUM_QUARTERS), np.int64), np.full(len(bits), self._total)
        for quarter in range(_NUM_QUARTERS - 1):
            up_to = self._up_to[_NUM_QUARTERS - 1 - quarter]
            rest = np.searchsorted(up_to, up_to[left] - number)  # the fewest left for which no fewer ways come before
            number -= up_to[left] - up_to[rest]
            counts[:, quarter], left = left - rest, rest
        counts[:, -1] = left
        return counts


@final
class Ranks:
    def __init__(self, num: int, kept: int) -> None:
        self.num = num
        self.kept = kept
        self._limit = comb(num, kept)
        self.nbits = (self._limit - 1).bit_length()
        self._num_limbs = max(1, -(-self._limit.bit_length() // _LIMB_BITS))

    def to_bits(self, places: Places) -> Bits:
        return _bits(_ranked(self.num, places, self._num_limbs), self.nbits)

    def to_places(self, bits: Bits) -> Places:
        whole = np.zeros((len(bits), _LIMB_BITS * self._num_limbs), np.uint8)
        whole[:, : self.nbits] = bits
        rest = _numbers(whole)
        limit = np.broadcast_to(_limbs([self._limit], self._num_limbs).astype(np.int64), rest.shape)
        if not _is_less(rest, limit).all():
            raise PayloadError(f"payload whose places are none of the {self.kept} of {self.num}; dropped")
        return _unranked(self.num, rest, np.full(len(bits), self.kept))


def _ranked(num: int, places: Places, num_limbs: int) -> NDArray[np.uint64]:
    """Return the ranks of rows of places, in limbs; a place 0 that stands behind others counts for nothing."""
    sums = np.zeros((len(places), num_limbs + 1), np.uint64)
    for number, table in enumerate(_tables(num).up_to(places.shape[1])):
        width = min(table.limbs.shape[1], num_limbs)
        sums[:, :width] += table.limbs[places[:, number], :width]  # at most 2^44: carried below
    for limb in range(num_limbs):
        sums[:, limb + 1] += sums[:, limb] >> _LIMB
    return sums[:, :num_limbs]


def _unranked(num: int, rest: NDArray[np.int64], counts: NDArray[np.int64]) -> Places:
    """Return rows of so many places, by their ranks in limbs, which it uses up; behind them 0."""
    places = np.zeros((len(rest), counts.max(initial=0)), np.int64)
    for number, table in reversed([*enumerate(_tables(num).up_to(places.shape[1]))]):
        width = min(table.limbs.shape[1], rest.shape[1])
        found = np.where(counts > number, table.last_up_to(rest[:, :width]), 0)
        _subtract(rest[:, :width], table.limbs[found, :width])
        places[:, number] = found
    return places


def _bits(limbs: NDArray[np.uint64], nbits: int) -> Bits:
    return np.unpackbits(limbs.astype("<u4").view(np.uint8), axis=1, count=nbits, bitorder="little")


def _numbers(bits: Bits) -> NDArray[np.int64]:
    """Return the limbs of rows of bits, as many as fill them."""
    return np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.int64)


def _others(places: Places, num: int) -> Places:
    is_left = np.ones((len(places), num), np.bool_)
    np.put_along_axis(is_left, places, False, axis=1)
    return np.nonzero(is_left)[1].reshape(len(places), num - places.shape[1])


class _Table:
    """C(p, i) for p = 0 ... n, of one i."""

    def __init__(self, values: Sequence[int]) -> None:
        self.limbs = _limbs(values, max(1, -(-values[-1].bit_length() // _LIMB_BITS)))
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


class _Tables:
    """Those of C(p, 1), C(p, 2), ... of one n, as far as they were asked for; 8 MB for 64 of 4096."""

    def __init__(self, num: int) -> None:
        self._lock = Lock()
        self._column = [1] * (num + 1)
        self._made = list[_Table]()

    def up_to(self, kept: int) -> list[_Table]:
        with self._lock:
            while len(self._made) < kept:
                column = [0, *accumulate(self._column[:-1])]  # C(p + 1, i) = C(p, i) + C(p, i - 1)
                self._made.append(_Table(column))
                self._column = column
            return self._made[:kept]


@lru_cache(16)
def _tables(num: int) -> _Tables:
    return _Tables(num)


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
