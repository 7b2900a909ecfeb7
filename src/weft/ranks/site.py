"""Rank 0's hold on its site: tells all ranks what to do, one thing at a time, and does its own part.

    site = Site(line, settings)             rank 0
    site.open(num, folder)
    vector = spread(site, plain)            a tensor on no device: arithmetic on it is done by all ranks
    serve(line, settings)                   the others, until rank 0 ends

It may be used from several threads, which have their turns.

Failure:
- a rank ends: all others fail in what they do together, and end.
- an order fails on one rank alone: the others wait for it in vain, and end when it does. Nothing is told any more.
"""

import threading
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec
from torch import Tensor

from weft.errors import OutOfMemory, SiteBroken
from weft.ranks.line import Line, is_lost
from weft.ranks.orders import Close, Order, Size, Still, Told
from weft.ranks.worker import Worker
from weft.run.machine import PeerConfig
from weft.store.pool import Pool
from weft.training.device import first_line, is_out_of_memory

STILL_S = 60.0  # at most between two orders: ranks wait ten times as long before they take rank 0 for lost
BROKEN = (
    "the processes of this site no longer agree what to do, because one of them failed. Start all of them again: they "
    "go on from the last checkpoint."
)


class Number:
    """A vector's number, which is dropped on all ranks once nobody has it."""

    def __init__(self, number: int, dropped: "deque[int]") -> None:
        self.number = number
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)


class Site:
    """
    Args:
        settings: what rank 0's machine gives.
    """

    num: int  # numbers of a vector
    pool: Pool  # of what would take too much of rank 0's memory

    def __init__(self, line: Line, settings: PeerConfig) -> None:
        self.num_ranks = line.num_ranks
        self._line = line
        self._worker = Worker(line, settings)
        self._numbers = count(1)
        self._dropped: deque[int] = deque()
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._is_whole = True  # no order has failed half way
        self._has_ended = threading.Event()
        self._watch = threading.Thread(target=self._be_heard, name="site", daemon=True)
        self._watch.start()

    def open(self, num: int, folder: Path) -> None:
        """Let vectors have `num` numbers, and `folder` hold what is too much for memory."""
        self.num, self.pool = num, Pool(4 * num, folder)
        self.order(Size(num=num))

    def order(self, order: Order, *data: Tensor) -> object:
        """Let all ranks do `order`, and return what comes of it.

        Args:
            data: where to read to, what to write, or a batch.

        Raises:
            SiteBroken: a rank has ended, or an order has failed before.
            OutOfMemory: this rank has not enough.
        """
        with self._turn:  # who waits is next: who gives one order after the other would leave others none
            self._lock.acquire()
        try:
            if not self._is_whole:
                raise SiteBroken(BROKEN)
            self._is_whole = False
            dropped = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
            self._line.tell(msgspec.msgpack.encode(Told(order=order, dropped=dropped)))
            self._worker.forget(dropped)
            result = _done(self._worker, order, data)
            self._is_whole = True
            return result
        finally:
            self._lock.release()

    def number(self) -> Number:
        """Return a number for a vector to be made."""
        return Number(next(self._numbers), self._dropped)

    def close(self) -> None:
        """Let the other ranks end. Where an order has failed half way, they end because this one does."""
        self._has_ended.set()
        self._watch.join()
        with suppress(SiteBroken):
            self.order(Close())
        self._line.close()

    def _be_heard(self) -> None:
        with suppress(SiteBroken):  # whoever gives the next order is told
            while not self._has_ended.wait(STILL_S):
                self.order(Still())


def serve(line: Line, settings: PeerConfig) -> None:
    """Do what rank 0 tells, until it ends.

    Raises:
        SiteBroken: rank 0, or another, has ended without a word.
        OutOfMemory: this rank has not enough.
    """
    worker, order = Worker(line, settings), None
    while not isinstance(order, Close):
        told = msgspec.msgpack.decode(line.hear(), type=Told)
        worker.forget(told.dropped)
        order = told.order
        _done(worker, order)
    line.close()


def _done(worker: Worker, order: Order, data: tuple[Tensor, ...] = ()) -> object:
    try:
        return worker.do(order, data)
    except (MemoryError, RuntimeError) as error:
        if is_lost(error):
            raise SiteBroken(BROKEN) from error
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"rank {worker.rank} of this site has not enough memory: {first_line(error)}. Set peer.micro_batch or "
            "has_recompute = true, close other programs, or start more ranks."
        ) from error
