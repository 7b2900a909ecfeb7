"""What the ranks of a site say to each other: torch.distributed's collectives, under plain names.

    rank 0   tell ──────► all: hear          bytes
    all      answer ────► rank 0             bytes
    any      send ──────► any: receive       numbers
    all      add                             numbers, equal on all afterwards
    rank 0   passed ◄───► all                a piece of a vector, dealt out among the ranks

Numbers go through the CPU's memory, whatever the ranks compute on. A rank that has ended is an error on all others.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from weft.errors import SiteBroken
from weft.ranks.strips import overlaps

TIMEOUT_S = 600.0  # a rank that says nothing for so long has ended, or hangs


class Line:
    """
    Args:
        backend: of torch.distributed: gloo, or one that has gloo for the CPU.
        meet: where the ranks meet, as torch.distributed says it; torchrun says it in the environment.
    """

    def __init__(self, backend: str, rank: int, num_ranks: int, meet: str = "env://") -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        with _breaking():
            dist.init_process_group(backend, init_method=meet, rank=rank, world_size=num_ranks, timeout=timeout)
        self.rank = rank
        self.num_ranks = num_ranks

    def close(self) -> None:
        dist.destroy_process_group()

    def tell(self, data: bytes) -> None:
        """Tell all other ranks, which `hear` it."""
        with _breaking():
            dist.broadcast(torch.tensor([len(data)]), 0)
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)

    def hear(self) -> bytes:
        """Wait for what rank 0 tells: something every minute (`site`)."""
        length = torch.zeros(1, dtype=torch.int64)
        with _breaking():
            dist.broadcast(length, 0)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, 0)
        return data.numpy().tobytes()

    def share(self, numbers: Tensor) -> None:
        """Let `numbers` be what they are on rank 0."""
        with _breaking():
            dist.broadcast(numbers, 0)

    def answer(self, data: bytes) -> list[bytes]:
        """Return what each rank answers, on rank 0; on others nothing."""
        found = [data]
        with _breaking():
            if self.rank:
                dist.send(torch.tensor([len(data)]), 0)
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
                return []
            for rank in range(1, self.num_ranks):
                length = torch.zeros(1, dtype=torch.int64)
                dist.recv(length, rank)
                heard = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(heard, rank)
                found.append(heard.numpy().tobytes())
        return found

    def send(self, numbers: Tensor, rank: int) -> dist.Work:
        """Begin to send contiguous numbers on the CPU; the result's `wait` ends it."""
        with _breaking():
            work = dist.isend(numbers, rank)
        assert work is not None
        return work

    def receive(self, numbers: Tensor, rank: int) -> dist.Work:
        """Begin to receive into contiguous numbers on the CPU; the result's `wait` ends it."""
        with _breaking():
            work = dist.irecv(numbers, rank)
        assert work is not None
        return work

    def wait(self, works: list[dist.Work]) -> None:
        with _breaking():
            for work in works:
                work.wait()

    def add(self, numbers: Tensor) -> None:
        """Add what all ranks have, number by number."""
        with _breaking():
            dist.all_reduce(numbers)


def is_lost(error: BaseException) -> bool:
    """Tell whether `error` is torch's way of saying that another rank is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@contextmanager
def _breaking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        reason = str(error).strip().split("\n")[0].split(". ")[0][:300]  # what follows is advice about other programs
        raise SiteBroken(
            f"the processes of this site have lost each other: {reason}. One has ended, or the network between them is "
            "down. Start all of them again: they go on from the last checkpoint."
        ) from error


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
