"""A piece of a vector, whole on rank 0 and dealt out among the ranks: from these to there, or back."""

from collections.abc import Sequence

import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from weft.ranks.line import Line
from weft.ranks.strips import overlaps


def passed(
    line: Line,
    dealt: Sequence[range],
    held: Float32[Tensor, " held"],
    piece: range,
    whole: Float32[Tensor, " piece"] | None,
    *,
    is_read: bool,
) -> list[dist.Work]:
    """Begin to bring what ranks hold of `piece` to rank 0, or back; return what is to be waited for.

    Args:
        dealt: where in the vector what each rank holds lies.
        held: what this one holds.
        whole: on rank 0, the piece; None on others.
        is_read: to rank 0.
    """
    mine, works = dealt[line.rank], list[dist.Work]()
    for rank, common in overlaps(dealt, piece):
        here = held[common.start - mine.start : common.stop - mine.start] if rank == line.rank else None
        if whole is None:
            if here is not None:
                works.append(line.send(here.cpu(), 0) if is_read else line.receive(here, 0))
            continue
        room = whole[common.start - piece.start : common.stop - piece.start]
        if here is None:
            works.append((line.receive if is_read else line.send)(room, rank))
        else:
            to, of = (room, here) if is_read else (here, room)
            to.copy_(of)
    return works
