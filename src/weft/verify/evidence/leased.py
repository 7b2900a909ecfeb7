"""Which words of the run's data a training step is of: a lease, the run's shuffle, and where shards begin.

    lease ──► position ──shuffle──► window ──► words of a shard

What a position and a window are is the part of `weft.data.assign`. A shard is named by its digest, so pieces of it
open.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from weft.data.assign import Lease, num_windows, windows_at
from weft.data.store import DataIndex, ShardInfo
from weft.ids import PeerId
from weft.verify.evidence.shown import Unproven


@dataclass(frozen=True)
class Sampled:
    """The samples of a step.

    Args:
        first: samples of the lease before them.
        tokens: of a sample.
        seed: the run's.
    """

    leases: tuple[Lease, ...]
    holder: PeerId
    first: int
    tokens: int
    data: DataIndex
    seed: int

    def place(self, at: int) -> tuple[ShardInfo, range]:
        """Return in which shard a word of the step lies, and at which bytes.

        Raises:
            Unproven: the lease, or the data, has no such word.
        """
        sample, token = divmod(at, self.tokens + 1)
        position = position_of(self.leases, self.holder, self.first + sample)
        num = num_windows(self.data.num_tokens("train"), self.tokens)
        if not num or self.data.has_rows:
            raise Unproven("no training step is of such data")
        word = int(windows_at(np.array([position]), num, self.seed)[0]) * self.tokens + token
        for info in self.data.train:
            if word < info.num_tokens:
                size = info.nbytes // info.num_tokens
                return info, range(word * size, (word + 1) * size)
            word -= info.num_tokens
        raise AssertionError("a window lies within the stream")


def position_of(leases: Iterable[Lease], holder: PeerId, number: int) -> int:
    """Return the position of a sample of what is leased to a peer, in order.

    Raises:
        Unproven: there is none.
    """
    for lease in leases:
        if lease.peer == holder:
            if number < lease.num_windows:
                return lease.start + number
            number -= lease.num_windows
    raise Unproven("the lease has no such sample")
