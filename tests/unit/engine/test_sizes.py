import torch

from weft.engine.numbers import Eight
from weft.engine.sizes import filled, sized


def test_rows_of_all_numbers_come_in_few_sizes_and_little_is_added() -> None:
    sizes = [sized(num) for num in range(1, 1025)]
    assert all(num <= size for num, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 100
    assert sum(sizes) / sum(range(1, 1025)) < 1.02
    assert max(size / num for num, size in enumerate(sizes, 1)) <= 4 / 3


def test_what_is_added_is_zeros_and_changes_no_row() -> None:
    x = torch.randn(2, 9, 16)
    more = filled(x)
    assert more.shape == (2, 12, 16)
    assert torch.equal(more[:, :9], x)
    assert not more[:, 9:].any()
    assert filled(more) is more
    matrix = Eight(torch.randn(8, 16))
    assert torch.equal(matrix(x[0]), matrix(more[0])[:9])
