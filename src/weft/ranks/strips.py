"""Which rank holds which numbers of a flat vector: of what is exchanged, whole chunks; of the model, rows.

    vector     |chunk|chunk|chunk|chunk|chunk|rest|
    strips     |---- rank 0 ----|- rank 1 --|- 2 -|      no chunk lies in two
    rows       of each tensor, as FSDP deals them: the first rows are rank 0's, and so on

Pure arithmetic, equal on all ranks.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from weft.model.flat import Span
from weft.sync.records.index import CHUNK_NBYTES

CHUNK = CHUNK_NBYTES // 4  # numbers


def strips(num: int, num_ranks: int) -> tuple[range, ...]:
    """Return the strip of each rank: whole chunks, but for the end of the vector, as even as they go."""
    num_chunks = -(-num // CHUNK)
    borders = [min(num_chunks * rank // num_ranks * CHUNK, num) for rank in range(num_ranks + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def rows(span: Span, rank: int, num_ranks: int) -> range:
    """Return where a rank's rows of a tensor lie in the vector: as `torch.chunk` cuts them."""
    height, width = span.shape[0], span.num // span.shape[0]
    size = -(-height // num_ranks)
    start, stop = (span.offset + min(number * size, height) * width for number in (rank, rank + 1))
    return range(start, stop)


def overlap(a: range, b: range) -> range:
    """Return what two ranges have in common; empty where that is nothing."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def overlaps(held: Sequence[range], wanted: range) -> Iterator[tuple[int, range]]:
    """Yield the ranks that hold something of `wanted`, and what."""
    for rank, here in enumerate(held):
        if common := overlap(here, wanted):
            yield rank, common
