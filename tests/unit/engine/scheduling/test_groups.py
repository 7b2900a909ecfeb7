"""Which texts look at their keys and values together."""

from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from weft.engine.scheduling.groups import GROUP, least_padded


def taken(nums: list[int], stops: list[int]) -> int:
    return sum(GROUP + (stop - start) * nums[stop - 1] for start, stop in pairwise((0, *stops)))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9).map(sorted))
def test_no_other_cuts_take_less(nums: list[int]) -> None:
    cuts = product((False, True), repeat=len(nums) - 1)
    all_stops = ([*(at for at, is_cut in enumerate(each, 1) if is_cut), len(nums)] for each in cuts)
    assert taken(nums, least_padded(nums)) == min(taken(nums, stops) for stops in all_stops)


def test_texts_as_long_are_one_group() -> None:
    assert least_padded([7] * 32) == [32]


def test_a_long_text_keeps_short_ones_from_being_padded() -> None:
    assert least_padded([3, 3, 4, 97]) == [3, 4]


def test_no_texts_make_no_group() -> None:
    assert least_padded([]) == []
