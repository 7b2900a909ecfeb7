"""Begins micro-batches, and keeps so many on their way that no stage waits.

    origin = Origin(peer, sender, num_stages=3, first=...)
    returned = await origin.begin(given)       # as many at once as are asked; some of them wait

In a pipeline of S stages 1F1B has S micro-batches on their way for each peer of the first. Here one more each travels
between any two, for links take time, and queues level out what peers do not.

It does not know where tokens come from.
"""

import asyncio

from weft.ids import PeerId
from weft.pipeline.device import Given
from weft.pipeline.exactly_once import BatchId
from weft.pipeline.sender import Returned, Sender

PER_STAGE = 2  # micro-batches on their way


class Origin:
    """Of one member of the first stage.

    Args:
        sender: to the first stage.
        first: number of its first micro-batch: no process of this peer has begun one so high.
    """

    def __init__(self, me: PeerId, sender: Sender, num_stages: int, first: int) -> None:
        self._me = me
        self._sender = sender
        self._next = first
        self._room = asyncio.Semaphore(PER_STAGE * num_stages)

    async def begin(self, given: Given) -> Returned:
        """Have a micro-batch computed and counted by all stages; wait for room before."""
        async with self._room:
            batch, self._next = BatchId(self._me, self._next), self._next + 1
            return await self._sender.send(batch, given, 0, is_first=True)
