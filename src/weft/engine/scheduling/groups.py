"""Which texts of a step look at their keys and values together.

Those of a group are padded to the pages of its longest; a group more is a dozen small operations a layer more.
"""

from bisect import bisect_right
from collections.abc import Sequence

GROUP = 28  # pages that take as long to gather and multiply as those operations, on a CPU


def least_padded(nums: Sequence[int]) -> list[int]:
    """Return where to cut texts into groups, so that all of them take least: the stop of each group.

    The shortest path through all places where a cut may be: between texts of unequal length.

    Args:
        nums: pages of each text, ascending.
    """
    places = [0, *(bisect_right(nums, num) for num in sorted(set(nums)))]
    least, begins = {0: 0}, dict[int, int]()  # of all texts before a place, and where the last group of them begins
    for number, stop in enumerate(places[1:], 1):
        taken = {start: least[start] + GROUP + (stop - start) * nums[stop - 1] for start in places[:number]}
        begins[stop] = min(taken, key=taken.__getitem__)
        least[stop] = taken[begins[stop]]
    found, stop = list[int](), len(nums)
    while stop:
        found.append(stop)
        stop = begins[stop]
    return found[::-1]
