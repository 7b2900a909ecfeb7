from itertools import pairwise

import torch

from weft.engine.numbers import Eight
from weft.engine.sizes import filled, of_attention, of_matrices

NUMS = range(1, 1025)


def test_rows_come_in_few_sizes_and_little_is_added() -> None:
    for sized, num_sizes, most, mean in ((of_matrices, 100, 4 / 3, 1.02), (of_attention, 30, 2, 1.07)):
        sizes = [sized(num) for num in NUMS]
        assert all(num <= size <= most * num for num, size in zip(NUMS, sizes, strict=True))
        assert all(a <= b for a, b in pairwise(sizes))
        assert len(set(sizes)) < num_sizes
        assert sum(sizes) < mean * sum(NUMS)


def test_what_is_added_is_zeros_and_changes_no_row() -> None:
    x = torch.randn(2, 9, 16)
    more = filled(x, 12)
    assert more.shape == (2, 12, 16)
    assert torch.equal(more[:, :9], x)
    assert not more[:, 9:].any()
    assert filled(more, 12) is more
    matrix = Eight(torch.randn(8, 16))
    assert torch.equal(matrix(x[0]), matrix(more[0])[:9])
