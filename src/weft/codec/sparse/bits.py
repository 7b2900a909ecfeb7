"""Numbers of as many bits as each has, one behind the other, lowest bit first; the last byte is filled with zeros."""

import numpy as np
from numpy.typing import NDArray

from weft.errors import PayloadError

Bits = NDArray[np.uint8]  # 0 or 1 each
Numbers = NDArray[np.int64]


def laid(numbers: Numbers, widths: Numbers) -> Bits:
    """Return the lowest bits of each number, as many as its width says."""
    begins, bits = before(widths), np.zeros(total(widths), np.uint8)
    for bit in range(int(widths.max(initial=0))):
        has = widths > bit
        bits[begins[has] + bit] = (numbers[has] >> bit) & 1
    return bits


def read(bits: Bits, widths: Numbers) -> Numbers:
    """Return the numbers that were laid in these widths."""
    begins, numbers = before(widths), np.zeros(len(widths), np.int64)
    for bit in range(int(widths.max(initial=0))):
        has = widths > bit
        numbers[has] |= bits[begins[has] + bit].astype(np.int64) << bit
    return numbers


def packed(bits: Bits) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def unpacked(data: memoryview, num: int) -> Bits:
    """Return so many bits of `data`, which has `nbytes(num)` bytes.

    Raises:
        PayloadError: bits that no encoder makes.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[num:].any():
        raise PayloadError("payload with bits behind its end; dropped")
    return bits[:num]


def nbytes(num_bits: int) -> int:
    return -(-num_bits // 8)


def before(sizes: Numbers) -> Numbers:
    """Return where each begins if they lie one behind the other."""
    return np.cumsum(sizes) - sizes


def total(numbers: Numbers) -> int:
    return int(np.add.reduce(numbers))
