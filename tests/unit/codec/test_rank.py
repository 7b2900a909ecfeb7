"""Which k of n places are kept: every choice has one encoding, of the fewest bits, and every encoding is a choice."""

from itertools import combinations
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft.codec.sparse.rank import Bitmap, Choices, Others, Quarters, Ranks, build, decode, encode, nbytes
from weft.errors import PayloadError

SHAPES = [
    (4096, 64),
    (4096, 32),
    (4096, 128),
    (4096, 1),
    (256, 16),
    (100, 50),
    (10, 3),
    (10, 10),
    (10, 0),
    (4096, 4095),
    (4096, 256),
    (4096, 1024),
    (4096, 3500),
    (1640, 328),
    (2999, 300),
]


def drawn(num: int, kept: int, num_rows: int = 50) -> NDArray[np.int64]:
    luck = np.random.default_rng(num + kept)
    rows = [np.sort(luck.permutation(num)[:kept]) for _ in range(num_rows)]
    rows += [np.arange(kept), np.arange(num - kept, num)]  # the first number, and the last
    return np.array(rows, np.int64).reshape(len(rows), kept)


def rank_of(places: NDArray[np.int64]) -> int:
    return sum(comb(int(place), number + 1) for number, place in enumerate(places))


@pytest.mark.parametrize(("num", "kept"), SHAPES)
def test_places_survive_and_take_as_many_bytes_as_was_said(num: int, kept: int) -> None:
    choices, places = build(num, kept), drawn(num, kept)
    data = encode(choices, places)
    assert len(data) == nbytes(choices, len(places))
    np.testing.assert_array_equal(decode(choices, data, len(places)), places)


@pytest.mark.parametrize("kept", [32, 64, 128, 160])
def test_no_encoding_of_the_same_length_for_all_is_shorter(kept: int) -> None:
    bound = log2(comb(4096, kept))
    assert bound <= build(4096, kept).nbits < bound + 1


@pytest.mark.parametrize("kept", [8, 64, 160, 192, 256, 400, 512, 1000, 1500, 2048, 3000, 3900])
def test_the_bits_of_any_choice_are_within_two_percent_of_the_fewest(kept: int) -> None:
    bound = log2(comb(4096, kept))
    assert bound <= build(4096, kept).nbits <= 1.02 * bound


def test_the_number_is_that_of_the_combinatorial_number_system() -> None:
    choices, places = Ranks(4096, 64), drawn(4096, 64)
    for row in places:
        data = encode(choices, row[None])
        assert int.from_bytes(data.tobytes(), "little") == rank_of(row)


def test_all_choices_of_a_few_places_are_all_numbers_below_their_count() -> None:
    rows = np.array(list(combinations(range(9), 4)), np.int64)
    assert {int(encode(Ranks(9, 4), row[None])[0]) for row in rows} == set(range(comb(9, 4)))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=59, max_size=59))
def test_any_number_is_refused_or_is_a_choice(data: bytes) -> None:
    choices, given_bytes = Ranks(4096, 64), np.frombuffer(data, np.uint8)
    try:
        places = decode(choices, given_bytes, 1)
    except PayloadError:
        assert int.from_bytes(data, "little") >= comb(4096, 64)
        return
    assert (np.diff(places) > 0).all()
    np.testing.assert_array_equal(encode(choices, places), given_bytes)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=5, max_size=5))
def test_any_bits_are_refused_or_are_a_choice_of_quarters(data: bytes) -> None:
    choices, given_bytes = Quarters(20, 10), np.frombuffer(data, np.uint8)[: nbytes(Quarters(20, 10), 1)]
    try:
        places = decode(choices, given_bytes, 1)
    except PayloadError:
        return
    assert (np.diff(places) > 0).all()
    assert 0 <= places.min() <= places.max() < 20
    np.testing.assert_array_equal(encode(choices, places), given_bytes)


@pytest.mark.parametrize(("num", "kept"), [(12, 5), (11, 6), (9, 9), (10, 1), (8, 0)])
def test_each_choice_of_quarters_has_bits_of_its_own(num: int, kept: int) -> None:
    rows = np.array(list(combinations(range(num), kept)), np.int64).reshape(comb(num, kept), kept)
    bits = Quarters(num, kept).to_bits(rows)
    assert len({row.tobytes() for row in bits}) == len(rows)
    np.testing.assert_array_equal(Quarters(num, kept).to_places(bits), rows)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("place", [64, 700, 4000, 4095])
def test_numbers_beside_a_border_are_told_apart_though_floats_cannot(place: int, offset: int) -> None:
    number = comb(place, 64) + offset
    data = np.frombuffer(number.to_bytes(59, "little"), np.uint8)
    assert rank_of(decode(Ranks(4096, 64), data, 1)[0]) == number


@pytest.mark.parametrize(
    ("choices", "data"),
    [
        (Ranks(10, 3), [comb(10, 3)]),
        (Ranks(10, 3), [0x80]),
        (Bitmap(12, 3), [0x0F, 0]),
        (Bitmap(12, 3), [0x07, 0x80]),
        (Others(10, 9), [10]),
        (Quarters(16, 2), [10, 0]),  # of ten ways to deal two out the eleventh
        (Quarters(16, 2), [0, 0xFF]),  # beyond the ranks of its quarters
    ],
)
def test_bytes_that_no_encoder_makes_are_refused(choices: Choices, data: list[int]) -> None:
    with pytest.raises(PayloadError):
        decode(choices, np.array(data, np.uint8), 1)


def test_half_of_all_places_are_a_bitmap() -> None:
    choices, places = build(4096, 2048), drawn(4096, 2048)
    assert isinstance(choices, Bitmap)
    np.testing.assert_array_equal(decode(choices, encode(choices, places), len(places)), places)
