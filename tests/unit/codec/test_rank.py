"""Which k of n places are kept: every choice has one encoding, of the fewest bits, and every encoding is a choice."""

from itertools import combinations
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft.codec.rank import Bitmap, Choices, Others, Ranks, build, nbytes
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
    data = choices.encode(places)
    assert len(data) == nbytes(choices, len(places))
    np.testing.assert_array_equal(choices.decode(data, len(places)), places)


@pytest.mark.parametrize("kept", [32, 64, 128])
def test_no_encoding_of_the_same_length_for_all_is_shorter(kept: int) -> None:
    bound = log2(comb(4096, kept))
    assert bound <= build(4096, kept).nbits < bound + 1
    assert build(4096, kept).nbits / kept <= 1.02 * bound / kept


def test_the_number_is_that_of_the_combinatorial_number_system() -> None:
    choices, places = Ranks(4096, 64), drawn(4096, 64)
    for row in places:
        data = choices.encode(row[None])
        assert int.from_bytes(data.tobytes(), "little") == rank_of(row)


def test_all_choices_of_a_few_places_are_all_numbers_below_their_count() -> None:
    rows = np.array(list(combinations(range(9), 4)), np.int64)
    assert {int(Ranks(9, 4).encode(row[None])[0]) for row in rows} == set(range(comb(9, 4)))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=59, max_size=59))
def test_any_number_is_refused_or_is_a_choice(data: bytes) -> None:
    choices, given_bytes = Ranks(4096, 64), np.frombuffer(data, np.uint8)
    try:
        places = choices.decode(given_bytes, 1)
    except PayloadError:
        assert int.from_bytes(data, "little") >= comb(4096, 64)
        return
    assert (np.diff(places) > 0).all()
    np.testing.assert_array_equal(choices.encode(places), given_bytes)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("place", [64, 700, 4000, 4095])
def test_numbers_beside_a_border_are_told_apart_though_floats_cannot(place: int, offset: int) -> None:
    number = comb(place, 64) + offset
    data = np.frombuffer(number.to_bytes(59, "little"), np.uint8)
    assert rank_of(Ranks(4096, 64).decode(data, 1)[0]) == number


@pytest.mark.parametrize(
    ("choices", "data"),
    [
        (Ranks(10, 3), [comb(10, 3)]),
        (Ranks(10, 3), [0x80]),
        (Bitmap(12, 3), [0x0F, 0]),
        (Bitmap(12, 3), [0x07, 0x80]),
        (Others(10, 9), [10]),
    ],
)
def test_bytes_that_no_encoder_makes_are_refused(choices: Choices, data: list[int]) -> None:
    with pytest.raises(PayloadError):
        choices.decode(np.array(data, np.uint8), 1)


def test_where_a_number_would_be_too_long_places_are_a_bitmap() -> None:
    choices, places = build(4096, 256), drawn(4096, 256)
    assert isinstance(choices, Bitmap)
    np.testing.assert_array_equal(choices.decode(choices.encode(places), len(places)), places)
