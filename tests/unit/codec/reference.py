"""Codecs by blocks in scalar Python, from their definitions: what the fast ones are compared with."""

import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch

from weft.rng import integers64, stream

TINY = 2.0**-126  # smallest normal fp32
MAX_BF16 = 0x7F7F


def fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def word_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def number_of(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def nearest(value: Fraction, numbers: list[Fraction], is_tie_up: bool = False) -> int:
    """Return the index of the number nearest to `value`, of two the even index, or the larger number."""
    order = sorted(range(len(numbers)), key=lambda i: (abs(numbers[i] - value), -i if is_tie_up else i % 2))
    return order[0]


def packed(codes: list[int], num_bits: int) -> bytes:
    bits = sum((code & (1 << num_bits) - 1) << num_bits * i for i, code in enumerate(codes))
    return bits.to_bytes(-(-len(codes) * num_bits // 8), "little")


def by_blocks(
    values: list[float], block: int, num_bits: int, encode: Callable[[list[float]], tuple[bytes, list[int]]]
) -> bytes:
    scales, codes = b"", list[int]()
    for start in range(0, len(values), block):
        scale, found = encode(values[start : start + block])
        scales += scale
        codes += found
    return scales + packed(codes, num_bits)


def linear(most: int, mask: int, num_scale_bytes: int) -> Callable[[list[float]], tuple[bytes, list[int]]]:
    """int8 and int4: absmax / most with the bits of `mask`."""

    def encode(chunk: list[float]) -> tuple[bytes, list[int]]:
        word = word_of(fp32(max(map(abs, chunk)) / most)) & mask
        scale = number_of(word) if word >= 0x00800000 else 0.0
        return struct.pack("<f", scale)[4 - num_scale_bytes :], [
            round(fp32(value / scale)) if scale else 0 for value in chunk
        ]

    return encode


E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)
][:-1]
E3M0 = [Fraction(0)] + [Fraction(2) ** (e - 7) for e in range(1, 8)]


def fp8(chunk: list[float]) -> tuple[bytes, list[int]]:
    exponent = word_of(max(map(abs, chunk))) >> 23
    if exponent < 18:
        return b"\0", [0] * len(chunk)
    unit = Fraction(2) ** (exponent - 127 - 8)
    codes = [nearest(abs(Fraction(value)) / unit, E4M3) for value in chunk]
    return bytes([exponent]), [c | 0x80 if c and value < 0 else c for c, value in zip(codes, chunk, strict=True)]


def e3m0(chunk: list[float]) -> tuple[bytes, list[int]]:
    exponent = min((word_of(max(map(abs, chunk))) + (1 << 22)) >> 23, 254)
    if exponent < 7:
        return b"\0", [0] * len(chunk)
    unit = Fraction(2) ** (exponent - 127)
    codes = []
    for value in chunk:
        share = abs(Fraction(value)) / unit
        code = nearest(share, E3M0, is_tie_up=True) if share >= Fraction(3, 4) * E3M0[1] else 0
        codes.append(code | 8 if code and value < 0 else code)
    return bytes([exponent]), codes


def sign(chunk: list[float]) -> tuple[bytes, list[int]]:
    top = max(map(abs, chunk))
    codes = [word_of(value) >> 31 for value in chunk]
    if not top:
        return b"\0\0", codes
    unit = Fraction(2) ** ((word_of(top) >> 23) - 127 - 30)  # the exponent of a subnormal is that of zero
    mean = float(sum(abs(Fraction(value)) // unit for value in chunk) / Fraction(len(chunk)) * unit)
    word = word_of(fp32(mean))
    word = min(word + (word >> 16 & 1) + 0x7FFF >> 16, MAX_BF16)
    return struct.pack("<H", word if word >= 0x80 else 0), codes


def int2(chunk: list[float]) -> tuple[bytes, list[int]]:
    top = max(map(abs, chunk))
    signs = [word_of(value) >> 31 for value in chunk]
    unit = Fraction(2) ** ((word_of(top) >> 23) - 127 - 30)
    whole = [abs(Fraction(value)) // unit for value in chunk]
    threes = [3 if number * len(chunk) >= sum(whole) else 1 for number in whole]
    weighed = sum(three * number for three, number in zip(threes, whole, strict=True))
    found = fp32(float(weighed) / sum(three * three for three in threes) * float(unit))
    word = min(word_of(found) + (word_of(found) >> 16 & 1) + 0x7FFF >> 16, 0x7EAA)
    if word < 0x80:
        return b"\0\0", [sign << 1 for sign in signs]
    return struct.pack("<H", word), [sign << 1 | three >> 1 for sign, three in zip(signs, threes, strict=True)]


SCHEMES = {
    "int8": (8, linear(127, 0xFFFFFF80, 4)),
    "int4": (4, linear(7, 0xFFFF0000, 2)),
    "fp8": (8, fp8),
    "e3m0": (4, e3m0),
    "int2": (2, int2),
    "sign": (1, sign),
}


def encoded(name: str, values: list[float], block: int) -> bytes:
    num_bits, encode = SCHEMES[name]
    return by_blocks(values, block, num_bits, encode)


def heavy_tailed(num: int) -> torch.Tensor:
    """Return values spread over 40 binary orders of magnitude, with whole subnormal and zero blocks."""
    words = integers64(stream(2, "values"), num)
    exponents = (100 + (words % 40)).astype(np.uint32) << 23
    exponents[64:128] = 0
    values = (exponents | (words >> 40).astype(np.uint32) & 0x807FFFFF).view(np.float32)
    values[128:192] = 0
    values[192:224] = 0
    values[200] = -0.0
    return torch.from_numpy(values)


def normal(num: int) -> torch.Tensor:
    """Return values near each other in size, as parameters are."""
    return torch.randn(num, generator=torch.Generator().manual_seed(5))


def few_values(num: int) -> torch.Tensor:
    """Return values with many ties: multiples of an eighth, as they round in every codec."""
    return torch.from_numpy((integers64(stream(3, "few"), num) % 257).astype(np.float32) / 8 - 16)
