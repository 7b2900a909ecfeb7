"""Against a scalar reference that handles one bit pattern at a time."""

import struct

import numpy as np
import pytest
import torch

from weft.codec.dense import Bf16, Fp32
from weft.errors import PayloadError
from weft.rng import integers64, stream


def finite_patterns(num: int) -> np.ndarray:
    words = integers64(stream(1, "patterns"), num).astype(np.uint32)
    words[(words & 0x7F800000) == 0x7F800000] &= 0x807FFFFF
    return words


def bf16_reference(word: int) -> int:
    """Round one fp32 bit pattern to the nearest bf16 pattern, ties to even, no infinity."""
    sign, magnitude = word & 0x80000000, word & 0x7FFFFFFF
    lower, upper = magnitude & 0xFFFF, magnitude >> 16
    if lower > 0x8000 or (lower == 0x8000 and upper & 1):
        upper += 1
    return sign >> 16 | min(upper, 0x7F7F)


def test_bf16_rounds_like_the_scalar_reference() -> None:
    words = finite_patterns(20_000)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F818001, 0xBF808000, 0x00008000, 0x00018000, 0x7F7FFFFF, 0xFF7F8000])
    words = np.concatenate([words, ties.astype(np.uint32)])
    expected = b"".join(struct.pack("<H", bf16_reference(int(word))) for word in words)
    assert bytes(Bf16().encode(torch.from_numpy(words.view(np.float32)))) == expected


def test_bf16_agrees_with_torchs_conversion_where_that_does_not_overflow() -> None:
    vector = torch.from_numpy(finite_patterns(20_000).view(np.float32)).clamp(-1e38, 1e38)
    assert torch.equal(Bf16().decode(Bf16().encode(vector), vector.numel()), vector.to(torch.bfloat16).float())


@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_bf16_refuses_nan_and_infinity(word: int) -> None:
    with pytest.raises(PayloadError, match="NaN or infinity"):
        Bf16().decode(struct.pack("<3H", 0x3F80, word, 0), 3)


@pytest.mark.parametrize("word", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_fp32_refuses_nan_and_infinity(word: int) -> None:
    with pytest.raises(PayloadError, match="NaN or infinity"):
        Fp32().decode(struct.pack("<3I", 0x3F800000, 0, word), 3)


def test_fp32_is_the_little_endian_words_and_copies_nothing() -> None:
    vector = torch.tensor([1.0, -2.5])
    data = Fp32().encode(vector)
    assert bytes(data) == struct.pack("<2f", 1.0, -2.5)
    vector[0] = 4.0
    assert bytes(data) == struct.pack("<2f", 4.0, -2.5)
