"""Blocks by numpy alone against the codecs that members use."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.codec.build import build
from weft.codec.config import Bf16Config, CodecConfig, E3m0Config, Fp32Config, Int4Config, Int8Config, TopKConfig
from weft.verify.evidence.blocks import block_at, decoded, encoded, first_other, known, nbytes, place, spans, width
from weft.verify.evidence.shown import Unproven

CODECS = [Fp32Config(), Bf16Config(), Int8Config(), Int8Config(block=32), Int4Config(block=4096), Int4Config(block=32)]
SIZES = st.integers(1, 5000)


def vector(seed: int, num: int) -> torch.Tensor:
    """Return numbers of all sizes, zeros of both signs, and such as codecs round to nothing."""
    luck = np.random.default_rng(seed)
    found = luck.standard_normal(num) * 10.0 ** luck.integers(-42, 38, num)
    found[luck.random(num) < 0.2] *= 0
    if seed % 3 == 0:
        found = luck.standard_normal(num)
    return torch.from_numpy(np.clip(found, -3e38, 3e38).astype(np.float32))


@pytest.mark.parametrize("config", CODECS, ids=lambda each: type(each).__name__)
@given(seed=st.integers(0, 1 << 30), num=SIZES)
def test_blocks_are_the_codecs(config: CodecConfig, seed: int, num: int) -> None:
    codec, own, values = build(config, 1), known(config), vector(seed, num)
    data = bytes(codec.encode(values))
    assert len(data) == nbytes(own, num) == codec.nbytes(num)
    whole = codec.decode(data, num).numpy()
    last = (num - 1) // width(own)
    for block in {0, last // 2, last}:
        here = place(own, num, block)
        shown = [data[span.start : span.stop] for span in spans(own, num, here)]
        assert decoded(own, shown, len(here)).tobytes() == whole[here.start : here.stop].tobytes()
        assert list(encoded(own, values.numpy()[here.start : here.stop])) == shown
    with pytest.raises(Unproven, match="no such block"):
        place(own, num, last + 1)


@pytest.mark.parametrize("config", CODECS, ids=lambda each: type(each).__name__)
@given(num=SIZES, luck=st.randoms(use_true_random=False))
def test_a_byte_lies_in_the_block_that_it_is_of(config: CodecConfig, num: int, luck: object) -> None:
    own = known(config)
    offset = luck.randrange(nbytes(own, num))  # type: ignore[attr-defined]
    here = place(own, num, block_at(own, num, offset))
    assert any(offset in span for span in spans(own, num, here))


def test_the_first_block_that_differs_is_found() -> None:
    own, data = known(Int8Config(block=64)), bytes(build(Int8Config(block=64), 1).encode(vector(3, 1000)))
    assert first_other(own, 1000, data, data) is None
    for at, block in ((5, 1), (64 + 130, 2), (len(data) - 1, 15)):
        other = bytearray(data)
        other[at] ^= 1
        assert first_other(own, 1000, data, other) == block
    with pytest.raises(Unproven, match="length"):
        first_other(own, 1000, data, data[:-1])


@pytest.mark.parametrize("config", [TopKConfig(), E3m0Config()])
def test_of_other_codecs_no_block_is_shown(config: CodecConfig) -> None:
    with pytest.raises(Unproven, match="cannot be shown apart"):
        known(config)
