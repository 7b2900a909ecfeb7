import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.codec.blocks import Blocks
from weft.codec.codec import Codec
from weft.codec.dense import Bf16, Fp32
from weft.codec.quantize import Int8
from weft.errors import PayloadError
from weft.sync.merge.mean import MAX_WEIGHT, merge
from weft.sync.merge.reduce import Coding, Merger, decode_parts, encode_parts
from weft.sync.records.parts import ALIGNMENT, cut
from weft.wire import digest


def randn(num: int, seed: int) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


# --- cut ---


@given(num=st.integers(0, 10**12), uplinks=st.lists(st.integers(0, 10**12), min_size=1, max_size=64))
def test_parts_cover_exactly_at_aligned_borders_in_proportion(num: int, uplinks: list[int]) -> None:
    parts = cut(num, uplinks)
    assert len(parts) == len(uplinks)
    assert parts[0].start == 0
    assert parts[-1].stop == num
    assert all(left.stop == right.start for left, right in itertools.pairwise(parts))
    assert all(part.start % ALIGNMENT == 0 or part.start == num for part in parts)
    if any(uplinks):
        for part, uplink in zip(parts, uplinks, strict=True):
            assert abs(len(part) - Fraction(num * uplink, sum(uplinks))) <= 2 * ALIGNMENT
            assert uplink or not part


def test_equal_uplinks_give_equal_parts_and_none_measured_counts_as_equal() -> None:
    assert cut(4 * ALIGNMENT, [5, 5]) == (range(0, 2 * ALIGNMENT), range(2 * ALIGNMENT, 4 * ALIGNMENT))
    assert cut(4 * ALIGNMENT, [0, 0]) == cut(4 * ALIGNMENT, [1, 1])


def test_a_peer_behind_a_relay_owns_nothing() -> None:
    assert [len(part) for part in cut(10 * ALIGNMENT, [3, 0, 7])] == [3 * ALIGNMENT, 0, 7 * ALIGNMENT]


@pytest.mark.parametrize("uplinks", [[], [1, -1]])
def test_cut_refuses_what_is_no_uplink(uplinks: list[int]) -> None:
    with pytest.raises(ValueError, match="uplinks"):
        cut(100, uplinks)


# --- merge ---

weights = st.integers(0, 1 << 29)
small_floats = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60)


@settings(deadline=None)
@given(contributions=st.lists(st.tuples(weights, st.lists(small_floats, min_size=3, max_size=3)), max_size=8))
def test_merge_is_the_weighted_mean_to_the_last_bit_or_nearly(contributions: list[tuple[int, list[float]]]) -> None:
    total = sum(weight for weight, _ in contributions)
    inputs = [(weight, torch.tensor(values)) for weight, values in contributions]
    if not total:
        with pytest.raises(ValueError, match="tokens"):
            merge(inputs)
        return
    merged = merge(inputs).tolist()
    for i, value in enumerate(merged):
        exact = sum(weight * Fraction(values[i]) for weight, values in contributions) / total
        scale = max(weight * abs(Fraction(values[i])) for weight, values in contributions) / total
        assert abs(Fraction(value) - exact) <= abs(exact) / 2**24 + scale / 2**48 + Fraction(1, 2**149)


def test_merge_against_a_scalar_reference() -> None:
    vectors, tokens = [randn(100, seed) for seed in range(5)], [1000, 24, 0, 333, 77_777]
    expected = []
    for i in range(100):
        accumulator = 0.0
        for weight, vector in zip(tokens, vectors, strict=True):
            accumulator += float(weight) * float(vector[i])  # Python floats: one rounding per operation
        expected.append(np.float32(accumulator / float(sum(tokens))))
    assert merge(zip(tokens, vectors, strict=True)).numpy().tobytes() == np.array(expected).tobytes()


@settings(deadline=None)
@given(tokens=st.lists(st.integers(1, 1 << 29), min_size=1, max_size=16), seed=st.integers(0, 100))
def test_mean_of_equal_vectors_is_that_vector_bit_for_bit(tokens: list[int], seed: int) -> None:
    vector = randn(50, seed) * torch.finfo(torch.float32).max / 8
    assert torch.equal(merge((weight, vector) for weight in tokens), vector)


def test_a_newcomers_zero_weight_changes_no_bit() -> None:
    a, b, newcomer = randn(100, 1), randn(100, 2), randn(100, 3) * 1e30
    assert torch.equal(merge([(5, a), (0, newcomer), (7, b)]), merge([(5, a), (7, b)]))


def test_largest_values_do_not_overflow() -> None:
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    assert torch.equal(merge([(MAX_WEIGHT // 2, largest), (MAX_WEIGHT // 2, largest)]), largest)


# --- parts, merged by their owners ---

CODECS: list[Codec] = [Fp32(), Bf16(), Blocks(Int8(), 256)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("reply", CODECS, ids=lambda codec: type(codec).__name__)
def test_owners_of_parts_compute_the_mean_of_what_was_decoded(codec: Codec, reply: Codec) -> None:
    num, tokens = 5 * ALIGNMENT + 123, [100, 250, 50]
    parts = cut(num, [2, 0, 3])
    payloads = [encode_parts(codec, randn(num, seed), parts) for seed in range(3)]
    results = []
    for i, part in enumerate(parts):
        merger = Merger(len(part), Coding(codec, reply))
        for weight, payload in zip(tokens, payloads, strict=True):
            merger.add(weight, payload[i])
        merged = merger.result()
        assert merged.digest == digest(merged.encoded)
        results.append(merged.encoded)
    whole = merge((w, decode_parts(codec, payload, parts)) for w, payload in zip(tokens, payloads, strict=True))
    expected = reply.decode(reply.encode(whole), num)
    assert torch.equal(decode_parts(reply, results, parts), expected)
    out = torch.empty(num)
    assert decode_parts(reply, results, parts, out) is out
    assert torch.equal(out, expected)


def test_result_does_not_depend_on_how_many_parts_there_are() -> None:
    num, codec = 7 * ALIGNMENT + 5, Blocks(Int8(), 256)
    whole = []
    for uplinks in ([1], [1, 1, 1], [9, 1]):
        parts = cut(num, uplinks)
        results = []
        for part in parts:
            merger = Merger(len(part), Coding(codec, codec))
            for seed in range(3):
                merger.add(10 + seed, codec.encode(randn(num, seed)[part.start : part.stop]))
            results.append(merger.result().encoded)
        whole.append(decode_parts(codec, results, parts))
    assert torch.equal(whole[0], whole[1])
    assert torch.equal(whole[0], whole[2])


@pytest.mark.parametrize(
    ("weight", "payload"),
    [
        pytest.param(5, bytes(399), id="too short"),
        pytest.param(5, bytes(404), id="too long"),
        pytest.param(5, bytes(396) + b"\x00\x00\xc0\x7f", id="NaN in the last value"),
        pytest.param(0, bytes(396) + b"\x00\x00\xc0\x7f", id="NaN with weight 0"),
        pytest.param(-1, bytes(400), id="negative weight"),
        pytest.param(MAX_WEIGHT, bytes(400), id="weights that float64 cannot add"),
    ],
)
def test_a_bad_contribution_is_refused_and_leaves_the_sum_alone(weight: int, payload: bytes) -> None:
    a, b = randn(100, 1), randn(100, 2)
    merger = Merger(100, Coding(Fp32(), Fp32()))
    merger.add(3, Fp32().encode(a))
    with pytest.raises(PayloadError):
        merger.add(weight, payload)
    merger.add(4, Fp32().encode(b))
    assert bytes(merger.result().encoded) == bytes(Fp32().encode(merge([(3, a), (4, b)])))


def test_without_a_token_there_is_no_mean() -> None:
    merger = Merger(4, Coding(Fp32(), Fp32()))
    merger.add(0, bytes(16))
    with pytest.raises(PayloadError, match="no contribution"):
        merger.result()


def test_what_is_late_shortens_the_mean_by_its_weight() -> None:
    delta = torch.linspace(-1, 1, 8)
    merger = Merger(8, Coding(Fp32(), Fp32()), awaited=30)
    merger.add(10, Fp32().encode(delta))
    assert torch.equal(Fp32().decode(merger.result().encoded, 8), delta / 4)


def test_what_is_late_alone_is_no_mean() -> None:
    merger = Merger(4, Coding(Fp32(), Fp32()), awaited=30)
    merger.add(0, bytes(16))
    with pytest.raises(PayloadError, match="no contribution"):
        merger.result()
