"""Codecs by blocks against scalar references, and against payloads no encoder makes."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from unit.codec import reference
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import CodecConfig, E3m0Config, Fp8Config, Int2Config, Int4Config, Int8Config, SignConfig
from weft.errors import PayloadError

CONFIGS: dict[str, Callable[..., CodecConfig]] = {
    "int8": Int8Config,
    "int4": Int4Config,
    "fp8": Fp8Config,
    "e3m0": E3m0Config,
    "int2": Int2Config,
    "sign": SignConfig,
}
VECTORS = {"heavy-tailed": reference.heavy_tailed, "normal": reference.normal, "few": reference.few_values}


def of(name: str, block: int = 32) -> Codec:
    return build(CONFIGS[name](block=block))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block", [32, 64, 256, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("numbers", VECTORS)
def test_encodes_like_the_scalar_reference(name: str, block: int, numbers: str) -> None:
    vector = VECTORS[numbers](4500 if block == 4096 else 1003)
    assert bytes(of(name, block).encode(vector)) == reference.encoded(name, vector.tolist(), block)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("top", [3.4028235e38, 2.0**127, 2.0**-126, 2.0**-121, 2.0**-109, 2.0**-110, 1e-40])
def test_encodes_the_ends_of_the_range_like_the_reference(name: str, top: float) -> None:
    vector = torch.tensor([top * share for share in (1, -1, 0.75, -0.5, 0.3, 0.01, 1e-4, 0)])
    assert bytes(of(name).encode(vector)) == reference.encoded(name, vector.tolist(), 32)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_error_is_at_most_half_a_step(name: str) -> None:
    vector, most = reference.normal(100_000), {"int8": 127, "int4": 7}[name]
    codec = of(name, 256)
    error = (codec.decode(codec.encode(vector), 100_000) - vector).abs()
    step = torch.stack([block.abs().max() for block in vector.split(256)]).repeat_interleave(256)[:100_000] / most
    assert bool((error <= step * (0.5001 if name == "int8" else 0.53)).all())
    assert float(error.max()) > 0.49 * float(step.min())  # the bound is used, so it was measured


def test_a_scale_on_the_grid_makes_products_exact() -> None:
    data = bytes(of("int8", 4096).encode(reference.normal(4096)))
    scale = struct.unpack("<f", data[:4])[0]
    exact = [float(code) * scale for code in np.frombuffer(data[4:], dtype=np.int8)]  # float64 holds any product
    assert of("int8", 4096).decode(data, 4096).tolist() == exact


@pytest.mark.parametrize("name", ["sign", "int2"])
def test_the_scale_of_few_bits_is_the_one_with_the_least_error(name: str) -> None:
    vector = reference.normal(4096)
    decoded = of(name, 4096).decode(of(name, 4096).encode(vector), 4096)
    squared = [float((decoded * factor - vector).square().sum()) for factor in (0.98, 1.0, 1.02)]
    assert squared[1] < min(squared[0], squared[2])


@pytest.mark.parametrize(("name", "share"), [("sign", 0.3634), ("int2", 0.128)])  # 1 - 2 / pi, and by its integrals
def test_few_bits_leave_as_much_of_normal_values_as_they_should(name: str, share: float) -> None:
    vector = torch.randn(1 << 20, generator=torch.Generator().manual_seed(6))
    codec = of(name, 4096)
    left = codec.decode(codec.encode(vector), len(vector)) - vector
    assert float(left.square().sum() / vector.square().sum()) == pytest.approx(share, rel=0.005)


ONE = 0x3F800000


def int8(scale_word: int, codes: list[int]) -> bytes:
    return struct.pack("<I", scale_word) + bytes(code & 0xFF for code in codes + [0] * (32 - len(codes)))


def by_halves(scale: bytes, codes: list[int]) -> bytes:
    return scale + reference.packed(codes + [0] * (32 - len(codes)), 4)


def int4(scale_word: int, codes: list[int]) -> bytes:
    return by_halves(struct.pack("<H", scale_word), codes)


def fp8(exponent: int, codes: list[int]) -> bytes:
    return bytes([exponent, *codes, *[0] * (32 - len(codes))])


def e3m0(exponent: int, codes: list[int]) -> bytes:
    return by_halves(bytes([exponent]), codes)


def int2(scale_word: int, codes: list[int]) -> bytes:
    return struct.pack("<H", scale_word) + reference.packed(codes + [0] * (32 - len(codes)), 2)


REFUSED = {
    "scale infinite": ("int8", int8(0x7F800000, [127])),
    "scale NaN": ("int8", int8(0x7FC00000, [127])),
    "scale negative NaN": ("int8", int8(0xFFC00000, [127])),
    "scale negative": ("int8", int8(ONE | 0x80000000, [127])),
    "scale negative zero": ("int8", int8(0x80000000, [])),
    "scale off the grid": ("int8", int8(ONE + 1, [127])),
    "scale subnormal": ("int8", int8(0x00000080, [127])),
    "127 times the scale overflows": ("int8", int8(0x7C010280, [127])),
    "code under a zero scale": ("int8", int8(0, [1])),
    "no code of magnitude 127": ("int8", int8(ONE, [126, -126])),
    "code -128": ("int8", int8(ONE, [127, -128])),
    "zeros under a scale": ("int8", int8(ONE, [])),
    "int4: scale infinite": ("int4", int4(0x7F80, [7])),
    "int4: scale negative": ("int4", int4(0xBF80, [7])),
    "int4: scale subnormal": ("int4", int4(0x0040, [7])),
    "int4: 7 times the scale overflows": ("int4", int4(0x7E13, [7])),
    "int4: code under a zero scale": ("int4", int4(0, [1])),
    "int4: no code of magnitude 7": ("int4", int4(0x3F80, [6, -6])),
    "int4: code -8": ("int4", int4(0x3F80, [7, -8])),
    "fp8: NaN": ("fp8", fp8(127, [120, 127])),
    "fp8: negative NaN": ("fp8", fp8(127, [120, 255])),
    "fp8: negative zero": ("fp8", fp8(127, [120, 128])),
    "fp8: largest too small": ("fp8", fp8(127, [119])),
    "fp8: scale too small": ("fp8", fp8(17, [120])),
    "fp8: scale infinite": ("fp8", fp8(255, [120])),
    "fp8: code under a zero scale": ("fp8", fp8(0, [1])),
    "fp8: zeros under a scale": ("fp8", fp8(127, [])),
    "e3m0: negative zero": ("e3m0", e3m0(127, [7, 8])),
    "e3m0: largest too small": ("e3m0", e3m0(127, [6])),
    "e3m0: scale too small": ("e3m0", e3m0(6, [7])),
    "e3m0: scale infinite": ("e3m0", e3m0(255, [7])),
    "e3m0: code under a zero scale": ("e3m0", e3m0(0, [1])),
    "int2: scale infinite": ("int2", int2(0x7F80, [1])),
    "int2: scale negative": ("int2", int2(0xBF80, [1])),
    "int2: scale subnormal": ("int2", int2(0x0040, [1])),
    "int2: 3 times the scale overflows": ("int2", int2(0x7EAB, [1])),
    "int2: no three under a scale": ("int2", int2(0x3F80, [2])),
    "int2: a three under a zero scale": ("int2", int2(0, [3])),
    "sign: scale infinite": ("sign", struct.pack("<H", 0x7F80) + bytes(4)),
    "sign: scale negative": ("sign", struct.pack("<H", 0xBF80) + bytes(4)),
    "sign: scale subnormal": ("sign", struct.pack("<H", 0x0001) + bytes(4)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_payload_no_encoder_makes_is_refused(case: str) -> None:
    name, payload = REFUSED[case]
    with pytest.raises(PayloadError, match="no encoder makes"):
        of(name).decode(payload, 32)


@pytest.mark.parametrize(
    ("name", "num"), [("int4", 33), ("sign", 33), ("int2", 33), ("int2", 34), ("int2", 35), ("e3m0", 1)]
)
def test_bits_beyond_the_last_code_are_refused(name: str, num: int) -> None:
    data = bytearray(of(name).encode(torch.ones(num)))
    data[-1] |= 0x80
    with pytest.raises(PayloadError, match="bits beyond"):
        of(name).decode(data, num)


ACCEPTED = {
    **{f"int8 {word:x}": ("int8", int8(word, [-127, 5])) for word in (ONE, 0x00800000, 0x7C010200, ONE + 0x80)},
    **{f"int4 {word:x}": ("int4", int4(word, [-7, 5])) for word in (0x3F80, 0x0080, 0x7E12)},
    **{f"fp8 {b}": ("fp8", fp8(b, [254, 1])) for b in (18, 127, 254)},
    **{f"e3m0 {b}": ("e3m0", e3m0(b, [15, 1])) for b in (7, 127, 254)},
    **{f"int2 {word:x}": ("int2", int2(word, [1, 0, 3, 2])) for word in (0x3F80, 0x0080, 0x7EAA)},
    "int2 without a scale": ("int2", int2(0, [0, 2])),
    **{f"sign {word:x}": ("sign", struct.pack("<H", word) + b"\x05\0\0\0") for word in (0, 0x80, 0x7F7F)},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_ends_of_the_grid_are_accepted(case: str) -> None:
    name, data = ACCEPTED[case]
    decoded = of(name).decode(data, 32)
    assert torch.isfinite(decoded).all()
    assert bytes(of(name).encode(decoded)) == data


def test_largest_finite_vector_reaches_the_highest_scale() -> None:
    largest = torch.full((32,), torch.finfo(torch.float32).max)
    assert struct.unpack("<I", bytes(of("int8").encode(largest))[:4])[0] == 0x7C010200
    assert struct.unpack("<H", bytes(of("int4").encode(largest))[:2])[0] == 0x7E12
    assert struct.unpack("<H", bytes(of("int2").encode(largest))[:2])[0] == 0x7EAA
