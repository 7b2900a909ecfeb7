"""Where micro-batches come from: windows of a lease, or held-out ones, a few samples at a time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.data.batch import Batch, Batches
from weft.executor import Compute
from weft.pipeline.device import Given
from weft.pipeline.sender import Origin
from weft.pipeline.step import Step

LOOK_S = 0.5  # at whether what is measured should be broken off


class Source:
    """Of one member of the first stage.

    Args:
        micro_batch: samples at a time.
    """

    def __init__(self, origin: Origin, batches: Batches, micro_batch: int, compute: Compute) -> None:
        self._origin = origin
        self._batches = batches
        self._micro_batch = micro_batch
        self._compute = compute

    async def begin(self, positions: NDArray[np.int64], step: Step) -> None:
        """Have micro-batches of these samples computed and counted by all stages."""

        async def one(some: NDArray[np.int64]) -> None:
            batch = await self._compute.serve(lambda: self._batches.at(some))
            await self._origin.begin(Given(len(some), packed(batch), None, step))

        size = self._micro_batch
        await _all(*(one(positions[start : start + size]) for start in range(0, len(positions), size)))

    async def measured(
        self, heldout: Batches, num_windows: int, step: Step, between: Callable[[], None]
    ) -> tuple[float, int]:
        """Return the mean loss of held-out windows, by parameters as they are in `step`, and their tokens.

        Args:
            between: called now and then: other stages may be gone; what it raises ends this.
        """
        total, num_tokens = 0.0, 0

        async def one(batch: Batch) -> None:
            nonlocal total, num_tokens
            num = len(batch[0])
            returned = await self._origin.begin(Given(num, packed(batch), None, step, is_measured=True))
            total += returned.loss * batch[0].numel()
            num_tokens += batch[0].numel()

        batches = heldout.heldout_batches(num_windows, self._micro_batch)
        measuring = asyncio.ensure_future(_all(*(one(batch) for batch in batches)))
        try:
            while not measuring.done():
                between()
                await asyncio.wait([measuring], timeout=LOOK_S)
            measuring.result()
        finally:
            measuring.cancel()
            await asyncio.wait([measuring])
        return total / num_tokens, num_tokens


async def _all(*works: Coroutine[Any, Any, None]) -> None:
    """Do all of it at once; where one fails, or this is cancelled, none goes on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def packed(batch: Batch) -> bytes:
    """Return windows as a `Forward` has them: all tokens and the one after the last, four bytes each."""
    tokens, targets = batch
    data: bytes = torch.cat((tokens, targets[:, -1:]), dim=1).to(torch.int32).contiguous().numpy().tobytes()
    return data
