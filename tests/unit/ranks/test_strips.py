"""Who holds which numbers: all of them, once, and no chunk in two."""

import pytest
import torch

from unit.peer.tiny import MODEL
from weft.model.flat import Span, layout
from weft.ranks.strips import CHUNK, overlap, overlaps, rows, strips


@pytest.mark.parametrize("num", [0, 1, CHUNK, 5 * CHUNK + 3, 64 * CHUNK])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_strips_cover_a_vector_by_whole_chunks(num: int, num_ranks: int) -> None:
    found = strips(num, num_ranks)
    assert [number for here in found for number in (here.start, here.stop)] == sorted(
        number for here in found for number in (here.start, here.stop)
    )
    assert (found[0].start, found[-1].stop, sum(map(len, found))) == (0, num, num)
    assert all(here.start % CHUNK == 0 for here in found if here)
    most = -(-num // CHUNK) / num_ranks
    assert all(-(-len(here) // CHUNK) < most + 1 for here in found)


@pytest.mark.parametrize("shape", [(10, 3), (2, 5), (7,), (1, 4)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rows_are_those_of_torch_chunk(shape: tuple[int, ...], num_ranks: int) -> None:
    span = Span("any", shape, 100, has_decay=True)
    numbers = torch.arange(100, 100 + span.num).view(shape)
    dealt = [each.flatten().tolist() for each in torch.chunk(numbers, num_ranks)]
    assert [list(rows(span, rank, num_ranks)) for rank in range(num_ranks)] == dealt + [[]] * (num_ranks - len(dealt))


def test_rows_of_all_tensors_are_the_whole_vector() -> None:
    spans = layout(MODEL)
    found = [number for span in spans for rank in range(3) for number in rows(span, rank, 3)]
    assert found == list(range(spans.num_parameters))


def test_what_two_ranges_have_in_common() -> None:
    assert overlap(range(2, 6), range(4, 9)) == range(4, 6)
    assert not overlap(range(2, 4), range(4, 9))
    assert list(overlaps([range(4), range(4, 4), range(4, 8)], range(3, 6))) == [(0, range(3, 4)), (2, range(4, 6))]
