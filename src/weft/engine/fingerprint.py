"""What a row of numbers was like, in few bytes: which of them are the largest, and these in bf16.

    places    of the `NUM` largest magnitudes, ascending, each as its distance to the one before (LEB128)
    values    these in bf16, in the order of places, the lowest byte first

Another machine that computes the row again finds almost the same, and other weights, other numbers, or other keys and
values something else (TOPLOC, arXiv:2501.16007). How far apart two are is one figure, in units of the row:

    d         told - here, at the places that were told; where a row is large and nothing was told, what is told can be
              no larger than the least that was
    distance  mean of |d - median d|, but for the largest eighth of them

What moves all numbers alike is left out: it changes no probability, and honest logits do it, by several units of bf16's
last bit. So is the largest eighth: in some models few numbers of a row are a hundred times as large as all others, and
so is their rounding.
"""

import numpy as np
from numpy.typing import NDArray

from weft.errors import PayloadError

NUM = 40  # with the rest of a receipt these are 12 bytes a token at most
MAX_NBYTES = NUM * (3 + 2)  # of rows of less than 2^21 numbers
_INFINITE = 0x7F80
_LEFT_OUT = 8  # the largest of so many differences

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]


def fingerprint(row: Floats) -> bytes:
    """Return the fingerprint of a row of finite numbers."""
    bits = _rounded(row)
    places = _largest(bits)
    gaps = np.diff(places, prepend=-1) - 1
    return b"".join(map(_varint, gaps.tolist())) + bits[places].astype("<u2").tobytes()


def distance(told: bytes, row: Floats) -> float:
    """Return how far a fingerprint is from a row.

    Raises:
        PayloadError: it is none of a row of so many numbers.
    """
    places, bits = parsed(told, len(row))
    values = _widened(bits)
    untold = np.setdiff1d(_largest(_rounded(row)), places)
    least = np.abs(values).min(initial=np.inf)
    apart = np.concatenate((values - row[places], np.clip(row[untold], -least, least) - row[untold])).astype(np.float64)
    apart = np.sort(np.abs(apart - np.median(apart)))
    return float(apart[: len(apart) - len(apart) // _LEFT_OUT].mean())


def parsed(told: bytes, num: int) -> tuple[NDArray[np.int64], Bits]:
    """Return the places and values of a fingerprint.

    Args:
        num: numbers of the row.

    Raises:
        PayloadError: no row of so many finite numbers has it.
    """
    places, at = list[int](), 0
    for _ in range(min(NUM, num)):
        gap, at = _read_varint(told, at)
        places.append(gap + 1 + (places[-1] if places else -1))
    values = np.frombuffer(told[at:], "<u2") if len(told) - at == 2 * len(places) else np.empty(0, "<u2")
    if len(values) != len(places) or (places and places[-1] >= num):
        raise PayloadError("a fingerprint has other places than a row of so many numbers")
    if ((values & 0x7FFF) >= _INFINITE).any():
        raise PayloadError("a fingerprint holds what is not finite")
    return np.array(places, dtype=np.int64), values.astype(np.uint16)


def _rounded(row: Floats) -> Bits:
    """Return bf16, rounded to nearest, ties to even; what would become infinite stays the largest."""
    words = np.ascontiguousarray(row, dtype=np.float32).view(np.uint32)
    upper = ((words + (0x7FFF + ((words >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where((upper & 0x7FFF) == _INFINITE, upper - np.uint16(1), upper)


def _widened(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _largest(bits: Bits) -> NDArray[np.int64]:
    """Return where the largest magnitudes are, ascending; of equal ones the first."""
    magnitude = bits & 0x7FFF
    if len(magnitude) <= NUM:
        return np.arange(len(magnitude))
    bound = np.partition(magnitude, len(magnitude) - NUM)[len(magnitude) - NUM]
    beyond = np.flatnonzero(magnitude > bound)
    return np.sort(np.concatenate((beyond, np.flatnonzero(magnitude == bound)[: NUM - len(beyond)])))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in (0, 7, 14):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if shift and not byte:
                break
            return number, at
    raise PayloadError("a fingerprint has a place that is none")
