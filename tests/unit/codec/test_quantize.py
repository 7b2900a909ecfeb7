"""Against a scalar reference in Python floats, and against payloads no encoder makes."""

import struct

import numpy as np
import pytest
import torch

from weft.codec.quantize import Int8
from weft.errors import PayloadError
from weft.rng import integers64, stream


def fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def int8_reference(values: list[float], block: int) -> bytes:
    scales, codes = b"", b""
    for start in range(0, len(values), block):
        chunk = values[start : start + block]
        word = struct.unpack("<I", struct.pack("<f", fp32(max(map(abs, chunk)) / 127)))[0] & ~0x7F
        scale = struct.unpack("<f", struct.pack("<I", word))[0] if word >= 0x00800000 else 0.0
        scales += struct.pack("<f", scale)
        codes += bytes(round(fp32(value / scale)) & 0xFF if scale else 0 for value in chunk)
    return scales + codes


def heavy_tailed(num: int) -> torch.Tensor:
    """Return values spread over 40 binary orders of magnitude, with whole subnormal and zero blocks."""
    words = integers64(stream(2, "values"), num)
    exponents = (100 + (words % 40)).astype(np.uint32) << 23
    exponents[64:128] = 0
    values = (exponents | (words >> 40).astype(np.uint32) & 0x807FFFFF).view(np.float32)
    values[128:192] = 0
    return torch.from_numpy(values)


@pytest.mark.parametrize("block", [32, 64, 256, 4096])
def test_encodes_like_the_scalar_reference(block: int) -> None:
    vector = heavy_tailed(10_000)
    assert bytes(Int8(block).encode(vector)) == int8_reference(vector.tolist(), block)


def test_ties_round_to_even() -> None:
    vector = torch.zeros(32)
    vector[:6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert bytes(Int8(32).encode(vector))[4:10] == bytes([127, 0, 2, 2, 0, 0xFE])


def test_error_is_at_most_half_a_step() -> None:
    vector = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    codec = Int8(256)
    error = (codec.decode(codec.encode(vector), 100_000) - vector).abs()
    step = torch.stack([block.abs().max() for block in vector.split(256)]).repeat_interleave(256)[:100_000] / 127
    assert bool((error <= step * 0.5001).all())
    assert float(error.max()) > 0.49 * float(step.min())  # the bound is used, so it was measured


def test_a_scale_on_the_grid_makes_products_exact() -> None:
    vector = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    data = bytes(Int8(4096).encode(vector))
    scale = struct.unpack("<f", data[:4])[0]
    exact = [float(code) * scale for code in np.frombuffer(data[4:], dtype=np.int8)]  # float64 holds any product
    assert Int8(4096).decode(data, 4096).tolist() == exact


def payload(scale_word: int, codes: list[int]) -> bytes:
    return struct.pack("<I", scale_word) + bytes(code & 0xFF for code in codes + [0] * (32 - len(codes)))


ONE = 0x3F800000


@pytest.mark.parametrize(
    ("scale_word", "codes"),
    [
        pytest.param(0x7F800000, [127], id="scale infinite"),
        pytest.param(0x7FC00000, [127], id="scale NaN"),
        pytest.param(0xFFC00000, [127], id="scale negative NaN"),
        pytest.param(ONE | 0x80000000, [127], id="scale negative"),
        pytest.param(0x80000000, [], id="scale negative zero"),
        pytest.param(ONE + 1, [127], id="scale off the grid"),
        pytest.param(0x00000080, [127], id="scale subnormal"),
        pytest.param(0x7C010280, [127], id="127 times the scale overflows"),
        pytest.param(0, [1], id="code under a zero scale"),
        pytest.param(ONE, [126, -126], id="no code of magnitude 127"),
        pytest.param(ONE, [127, -128], id="code -128"),
        pytest.param(ONE, [], id="zeros under a scale"),
    ],
)
def test_a_payload_no_encoder_makes_is_refused(scale_word: int, codes: list[int]) -> None:
    with pytest.raises(PayloadError, match="no encoder makes"):
        Int8(32).decode(payload(scale_word, codes), 32)


@pytest.mark.parametrize("scale_word", [ONE, 0x00800000, 0x7C010200, ONE + 0x80])
def test_the_ends_of_the_grid_are_accepted(scale_word: int) -> None:
    data = payload(scale_word, [-127, 5])
    decoded = Int8(32).decode(data, 32)
    assert torch.isfinite(decoded).all()
    assert bytes(Int8(32).encode(decoded)) == data


def test_largest_finite_vector_reaches_the_highest_scale() -> None:
    data = bytes(Int8(32).encode(torch.full((32,), torch.finfo(torch.float32).max)))
    assert struct.unpack("<I", data[:4])[0] == 0x7C010200
