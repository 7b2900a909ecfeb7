"""Large blocks of memory, used again as soon as nobody refers to them any more.

    pool = Pool(max_free_nbytes)
    vector = pool.empty(num)            # as bounds.empty, but maybe in memory that was touched before
    data = pool.block(nbytes)

The first touch of new memory costs more than encrypting what is put there (measured, docs/log.md), and every round
needs as much as the round before it. There is no call to give a block back: it returns when the last tensor, array or
view of it is gone.

Where there is little memory beside what is trained, blocks lie in files without a name: the system keeps in
memory as much of them as there is room for.
"""

import os
import weakref
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from torch import Tensor

from weft.errors import DiskFull
from weft.wire import Buffer

LEAST_NBYTES = 1 << 18  # smaller blocks come from the process's heap, which is used again anyhow
_WASTE = 8  # a block may be larger than asked by one part in so many
_STEP_BITS = 6  # sizes keep so many leading bits, rounded up: parts differ by a little and fit the same blocks


class Pool:
    """Blocks of one peer; safe to use from several threads.

    Args:
        max_free_nbytes: how much of it may lie unused; what comes back beyond goes to the system.
        folder: where blocks lie in files; None: they lie in memory.
    """

    def __init__(self, max_free_nbytes: int, folder: Path | None = None) -> None:
        self._max_free_nbytes = max_free_nbytes
        self._folder = folder
        self._free: dict[int, np.ndarray] = {}  # by identity, oldest first

    def empty(self, num: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return CPU memory for `num` values, holding anything."""
        return torch.from_numpy(self._take(max(num, 1) * dtype.itemsize)).view(dtype)[:num]

    def block(self, nbytes: int) -> memoryview:
        """Return writable memory of `nbytes` bytes, holding anything."""
        return self._take(max(nbytes, 1)).data[:nbytes]

    def moved(self, data: Buffer) -> Buffer:
        """Return `data`, in a file where blocks lie in files."""
        if self._folder is None:
            return data
        block = self.block(memoryview(data).nbytes)
        block[:] = memoryview(data)
        return block

    def _take(self, nbytes: int) -> np.ndarray:
        if nbytes < LEAST_NBYTES:
            return np.empty(nbytes, dtype=np.uint8)
        memory = self._fitting(nbytes)
        if memory is None:
            step = 1 << max(nbytes.bit_length() - _STEP_BITS, 0)
            memory = self._new(-(-nbytes // step) * step)
        # Over a memoryview, not an array: numpy would let views of `lent` refer to `memory` instead, and `lent` die.
        lent = np.frombuffer(memory.data, dtype=np.uint8, count=nbytes)
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _new(self, nbytes: int) -> np.ndarray:
        if self._folder is None:
            return np.empty(nbytes, dtype=np.uint8)
        self._folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=self._folder) as file:
            try:
                if hasattr(os, "posix_fallocate"):  # a hole that cannot be filled would end the process
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                else:
                    file.truncate(nbytes)
            except OSError as error:
                raise DiskFull(
                    f"{self._folder} has no room for {nbytes:,} bytes that weft keeps out of memory: {error.strerror}. "
                    "Make room, or choose a folder on another disk with --home."
                ) from error
            return np.frombuffer(mmap(file.fileno(), nbytes), dtype=np.uint8)

    def _fitting(self, nbytes: int) -> np.ndarray | None:
        # Blocks come back at any moment, even while this runs: each step below is one operation of the interpreter.
        for identity, memory in list(self._free.items()):
            if nbytes <= memory.nbytes <= nbytes + nbytes // _WASTE and self._free.pop(identity, None) is not None:
                return memory
        return None

    def _take_back(self, memory: np.ndarray) -> None:
        self._free[id(memory)] = memory
        free = list(self._free.items())
        surplus = sum(each.nbytes for _, each in free) - self._max_free_nbytes
        for identity, each in free:
            if surplus <= 0:
                break
            if self._free.pop(identity, None) is not None:
                surplus -= each.nbytes
