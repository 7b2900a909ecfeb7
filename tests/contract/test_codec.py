"""What every codec promises: total, canonical, sized, exact, and deaf to malformed bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from example import example
from weft.codec import pieces
from weft.codec.bounds import CHUNK
from weft.codec.build import build
from weft.codec.codec import Codec, Elastic, Sectioned, size_of
from weft.codec.config import (
    Bf16Config,
    CodecConfig,
    E3m0Config,
    ExtensionCodecConfig,
    Fp8Config,
    Fp32Config,
    Int4Config,
    Int8Config,
    NonzeroConfig,
    RandomKConfig,
    SignConfig,
    TopKConfig,
)
from weft.errors import NotFinite, PayloadError, PeerError

BY_BLOCKS = (Fp8Config, Int8Config, Int4Config, E3m0Config, SignConfig)
CONFIGS: list[CodecConfig] = [Fp32Config(), Bf16Config()]
CONFIGS += [kind(block=block) for kind in BY_BLOCKS for block in (32, 4096)]
CONFIGS += [TopKConfig(), TopKConfig(kept=100, values="int8"), TopKConfig(kept=4096, values="fp32")]
CONFIGS += [TopKConfig(kept=1, values="e3m0"), TopKConfig(kept=3000, values="bf16"), TopKConfig(kept=7, values="int4")]
CONFIGS += [RandomKConfig(), RandomKConfig(kept=410, largest=82, values="int4"), RandomKConfig(kept=9, values="fp8")]

CONFIGS += [NonzeroConfig(), NonzeroConfig(values="fp32")]

CONFIGS += [weft.extend("example.bits12", example("extension_codec").Bits12).codec()]

PIECE = 1 << 15  # numbers: of eight chunks each section is whole bytes

# The largest error, as a share of the largest magnitude in sight.
ERRORS = {
    Fp32Config: 0,
    Bf16Config: 1 / 256,
    Int8Config: 1 / 250,
    Fp8Config: 1 / 8,  # what lies between 1.75 and 2 becomes 1.75
    Int4Config: 1 / 13,
    E3m0Config: 1 / 3,  # 1.5 becomes 2
    SignConfig: 1,
    ExtensionCodecConfig: 1 / 16,
    TopKConfig: 1,
    RandomKConfig: 1,
    NonzeroConfig: 1 / 256,
}

every_config = pytest.mark.parametrize("config", CONFIGS, ids=repr)
every_codec = pytest.mark.parametrize("codec", [build(config) for config in CONFIGS], ids=[repr(c) for c in CONFIGS])
finite_words = st.integers(0, 0xFFFFFFFF).filter(lambda word: word & 0x7F800000 != 0x7F800000)


def from_words(words: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.float32))


def bits(vector: torch.Tensor) -> bytes:
    return vector.numpy().tobytes()


@every_config
@pytest.mark.parametrize("num", [0, 1, 31, 32, 33, 255, 256, 4095, 4097, CHUNK, CHUNK + 1, 2 * CHUNK + 4099])
def test_size_is_what_nbytes_says_and_decoding_is_close(config: CodecConfig, num: int) -> None:
    codec = build(config)
    vector = torch.randn(num, generator=torch.Generator().manual_seed(num))
    data = codec.encode(vector)
    assert size_of(codec, num).fits(len(data))
    decoded = codec.decode(data, num)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (num,)
    largest = float(vector.abs().max()) if num else 0.0
    assert torch.allclose(decoded, vector, rtol=0, atol=ERRORS[type(config)] * largest)


@every_codec
@settings(max_examples=20, deadline=None)
@given(words=st.lists(finite_words, max_size=70))
def test_any_finite_vector_has_one_encoding_which_survives_decoding(codec: Codec, words: list[int]) -> None:
    vector = from_words(words)
    data = bytes(codec.encode(vector))
    decoded = codec.decode(data, len(words))
    assert torch.isfinite(decoded).all()
    assert bytes(codec.encode(decoded)) == data
    assert bits(codec.decode(codec.encode(decoded), len(words))) == bits(decoded)


@every_codec
@settings(max_examples=40, deadline=None)
@given(num=st.integers(0, 70), data=st.data())
def test_arbitrary_bytes_are_refused_or_canonical(codec: Codec, num: int, data: st.DataObject) -> None:
    most = codec.nbytes(num)
    payload = data.draw(st.binary(max_size=300) | st.binary(min_size=most, max_size=most))
    try:
        decoded = codec.decode(payload, num)
    except PayloadError:
        return
    assert torch.isfinite(decoded).all()
    assert bytes(codec.encode(decoded)) == payload


@every_codec
@pytest.mark.parametrize("num", [4095, 4096, 3 * 4096 + 100])
def test_random_bytes_of_whole_chunks_are_refused_or_canonical(codec: Codec, num: int) -> None:
    luck, num_bytes = np.random.default_rng(num), codec.nbytes(num)
    for _ in range(4):
        payload = luck.bytes(num_bytes)
        try:
            decoded = codec.decode(payload, num)
        except PayloadError:
            continue
        assert torch.isfinite(decoded).all()
        assert bytes(codec.encode(decoded)) == payload


@every_codec
@settings(max_examples=30, deadline=None)
@given(words=st.lists(finite_words, min_size=1, max_size=70), data=st.data())
def test_one_changed_byte_is_refused_or_means_another_vector(
    codec: Codec, words: list[int], data: st.DataObject
) -> None:
    payload = bytearray(codec.encode(from_words(words)))
    before = bits(codec.decode(payload, len(words)))
    index = data.draw(st.integers(0, len(payload) - 1))
    payload[index] ^= data.draw(st.integers(1, 255))
    try:
        after = codec.decode(payload, len(words))
    except PayloadError:
        return
    assert bits(after) != before


@every_codec
@pytest.mark.parametrize("change", [-1, 1, 4, 1000])
def test_another_length_is_refused_before_anything_is_allocated(codec: Codec, change: int) -> None:
    data = bytes(max(0, codec.nbytes(1000) + change))
    if not isinstance(codec, Elastic):
        with pytest.raises(PayloadError, match="bytes where"):
            codec.decode(data, 1000)
    whole = bytes(codec.encode(torch.linspace(-1, 1, 1000)))
    with pytest.raises(PayloadError, match="bytes where"):
        codec.decode(whole[:change] if change < 0 else whole + bytes(change), 1000)
    with pytest.raises(PayloadError, match="bytes where"):
        codec.decode(b"", 10**15)  # an allocation of this size would fail with a MemoryError


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 299, CHUNK + 3, -1])
def test_nan_and_infinity_are_refused_at_encode(codec: Codec, bad: float, where: int) -> None:
    vector = torch.zeros(2 * CHUNK + 5)
    vector[where] = bad
    with pytest.raises(NotFinite):
        codec.encode(vector)


@every_codec
def test_largest_and_smallest_values_stay_finite(codec: Codec) -> None:
    limits = torch.finfo(torch.float32)
    vector = torch.tensor([limits.max, -limits.max, limits.tiny, limits.smallest_normal / 4, -0.0, 0.0])
    assert torch.isfinite(codec.decode(codec.encode(vector), 6)).all()


@every_codec
def test_decode_writes_into_the_given_memory_and_never_shares_the_payload(codec: Codec) -> None:
    vector = torch.linspace(-1, 1, 500)
    data = bytearray(codec.encode(vector))
    out = torch.empty(700)
    decoded = codec.decode(data, 500, out[100:600])
    assert decoded.data_ptr() == out[100:].data_ptr()
    before = bits(decoded)
    data[:] = bytes(len(data))
    assert bits(decoded) == before


@every_codec
def test_reads_bytes_from_any_buffer(codec: Codec) -> None:
    data = codec.encode(torch.linspace(-3, 2, 100))
    expected = bits(codec.decode(data, 100))
    for form in (bytes(data), bytearray(data), memoryview(bytes(data)), memoryview(b"xyz" + bytes(data))[3:]):
        assert bits(codec.decode(form, 100)) == expected


@every_codec
@pytest.mark.parametrize("vector", [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]])
def test_a_vector_of_another_kind_is_the_callers_mistake(codec: Codec, vector: torch.Tensor) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:  # TypeError: the shape check that is on in tests
        codec.encode(vector)
    assert not isinstance(caught.value, PeerError)


@every_codec
def test_encoding_by_aligned_parts_is_encoding_the_whole(codec: Codec) -> None:
    vector = torch.randn(3 * 4096 + 100, generator=torch.Generator().manual_seed(1))
    whole = codec.decode(codec.encode(vector), vector.numel())
    parts = [codec.decode(codec.encode(part), part.numel()) for part in vector.split(4096)]
    assert bits(torch.cat(parts)) == bits(whole)


@every_codec
@pytest.mark.parametrize("num", [0, 1, 4095, PIECE + 4096, 2 * PIECE + 5000])
def test_what_is_encoded_and_decoded_in_pieces_is_what_it_is_at_once(
    codec: Codec, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE", PIECE)
    vector = torch.randn(num, generator=torch.Generator().manual_seed(1))
    whole = codec.encode(vector)
    data = bytearray(codec.nbytes(num))
    assert bytes(pieces.encode(codec, num, lambda here: vector[here.start : here.stop], data)) == bytes(whole)
    found = torch.full((num,), float("nan"))

    def write(here: range, values: torch.Tensor) -> None:
        found[here.start : here.stop] = values

    pieces.decode(codec, whole, num, write)
    assert bits(found) == bits(codec.decode(whole, num))
    assert len(list(pieces.pieces(codec, num))) == (-(-num // PIECE) if isinstance(codec, Sectioned) else num > 0)
