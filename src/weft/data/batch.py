"""Token tensors for the inner loop: windows of a run's shards, by position.

`Batches` maps every shard of one split, checks each when it is first touched, and gathers whole batches at once; a
window may lie across shards.
"""

from collections.abc import Iterator

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray

from weft.data import assign
from weft.data.corpus import Split
from weft.data.rows import Batch, batch_of
from weft.data.store import NOTHING_HELD_OUT, DataIndex, ShardStore
from weft.errors import DataError
from weft.ids import Digest, several
from weft.wire import Buffer

# The shuffle of so many positions is computed at once, for hardly more than that of one batch: a batch then costs
# 0.2 ms instead of 1 ms, measured on two busy cores.
_BLOCK = 4096
_MAX_BLOCKS = 8  # kept; a batch touches one, rarely two


class Batches:
    """The windows of one split of a run's data, each `seq_len` tokens and their targets."""

    def __init__(self, store: ShardStore, index: DataIndex, split: Split, seq_len: int, seed: int) -> None:
        """
        Args:
            split: what is read; held-out windows are not shuffled, so `seed` matters for training only.
            seq_len: tokens per window.
            seed: the run's.

        Raises:
            DataError: shards are missing, or there is not one window.
        """
        absent = [info for info in store.missing(index) if info in index.shards(split)]
        if absent:
            raise DataError(
                f"{store.folder} lacks {len(absent)} of {several(len(index.shards(split)), f'{split} shard')}, the "
                f"first {absent[0].digest}. A member of the run has them: join it to fetch them."
            )
        check_windows(index, split, seq_len, at_least=1)
        self.num_windows = assign.num_windows(index.num_tokens(split), seq_len)
        self.seq_len = seq_len
        self._store = store
        self._index = index
        self._split = split
        self._infos = index.shards(split)
        self._seed = seed
        self._block_len = min(_BLOCK, self.num_windows)  # so that a block meets two epochs at most
        self._blocks: dict[int, NDArray[np.int64]] = {}
        # Shard s holds the stream's tokens from _borders[s] up to _borders[s + 1].
        self._borders = np.cumsum([0, *(info.num_tokens for info in self._infos)], dtype=np.int64)

    def resized(self, seq_len: int) -> "Batches":
        """Return the windows of `seq_len` tokens of the same data, shuffled anew.

        Raises:
            DataError: there is not one window so long.
        """
        return Batches(self._store, self._index, self._split, seq_len, self._seed)

    def at(self, positions: NDArray[np.int64]) -> Batch:
        """Return the training windows at `positions` of the run (see `weft.data.assign`), in their order.

        Raises:
            DataError: a shard touched for the first time is missing, corrupt or beyond the vocabulary.
        """
        blocks = positions // self._block_len
        numbers = np.empty_like(positions)
        for block in np.unique(blocks):
            here = blocks == block
            numbers[here] = self._block(int(block))[positions[here] - block * self._block_len]
        return self.windows(numbers)

    def windows(self, numbers: NDArray[np.int64]) -> Batch:
        """Return windows by their place in the stream, each below `num_windows`.

        Raises:
            DataError: as `at`.
        """
        # One token more than seq_len: the last is only a target.
        places = numbers[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        ids = torch.from_numpy(self._gather(places))
        return batch_of(ids, has_rows=self._index.has_rows, is_paired=self._index.is_paired)

    def shard(self, digest: Digest) -> Buffer | None:
        """Return the bytes of a shard; None: it is not here.

        Raises:
            DataError: it is corrupt.
        """
        return self._store.read(digest)

    def heldout_batches(self, num_windows: int, batch_size: int) -> Iterator[Batch]:
        """Yield windows as `spread` does.

        Raises:
            DataError: as `at`; or nothing in them is predicted.
        """
        num_predicted = 0
        for batch in self.spread(num_windows, batch_size):
            num_predicted += batch.num_predicted
            yield batch
        if not num_predicted:
            raise DataError(NOTHING_HELD_OUT)

    def spread(self, num_windows: int, batch_size: int) -> Iterator[Batch]:
        """Yield `num_windows` windows (all, if there are fewer) spread evenly over the stream; always the same ones.

        Raises:
            DataError: as `at`.
        """
        count = min(num_windows, self.num_windows)
        numbers = np.arange(count, dtype=np.int64) * self.num_windows // max(count, 1)
        for start in range(0, count, batch_size):
            yield self.windows(numbers[start : start + batch_size])

    def _block(self, block: int) -> NDArray[np.int64]:
        if block not in self._blocks:
            if len(self._blocks) == _MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]  # the oldest
            positions = np.arange(block * self._block_len, (block + 1) * self._block_len)
            self._blocks[block] = assign.windows_at(positions, self.num_windows, self._seed)
        return self._blocks[block]

    def _gather(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        first = np.searchsorted(self._borders, places[:, 0], side="right") - 1
        last = np.searchsorted(self._borders, places[:, -1], side="right") - 1
        ids = np.empty(places.shape, dtype=np.int64)
        for shard in np.unique(first):
            here = np.flatnonzero((first == shard) & (last == shard))
            if here.size:
                ids[here] = self._shard(int(shard))[places[here] - self._borders[shard]]
        for row in np.flatnonzero(first != last):
            parts = []
            for shard in range(int(first[row]), int(last[row]) + 1):
                start = max(0, int(places[row, 0] - self._borders[shard]))
                parts.append(self._shard(shard)[start : int(places[row, -1] - self._borders[shard]) + 1])
            ids[row] = np.concatenate(parts)
        return ids

    def _shard(self, number: int) -> NDArray[np.integer]:
        return self._store.open(self._index, self._infos[number])


def check_windows(index: DataIndex, split: Split, seq_len: int, at_least: int, why: str = "") -> None:
    """Accept a split that holds at least so many windows.

    Args:
        why: the run needs as many, and what else than the sequence length could be lowered.

    Raises:
        DataError: it holds fewer; says how much there is and how much is needed. Or it lies in rows of another length.
    """
    if index.rows is not UNSET and seq_len != index.rows.length:
        raise DataError(
            f"the {index.rows.what} lie in rows of {index.rows.length} tokens, so train.seq_len cannot be {seq_len}. "
            f"Set it to {index.rows.length}, or make another run."
        )
    num_tokens = index.num_tokens(split)
    found, needed = assign.num_windows(num_tokens, seq_len), at_least * seq_len + 1
    if found < at_least:
        kind = "training" if split == "train" else "held-out"
        more = "give more text" if split == "train" else "give more text or raise heldout_fraction"
        raise DataError(
            f"the corpus is too small: {num_tokens} {kind} tokens hold {several(found, 'window')} of {seq_len}, and "
            f"the run needs {at_least} ({needed} tokens){why}. Either {more}, or lower the sequence length."
        )
