"""How fast a peer computes a stage, waiting apart: seconds of its device for each sample that goes all the way.

It does not know what is computed.
"""

from collections.abc import Callable
from typing import TypeVar

from weft.clock import Clock
from weft.peer.compute import Compute

T = TypeVar("T")

KEEPS = 0.98  # of what was measured before, at each piece of work: the last hundred or so count
PIECES = 3  # of a sample's way: forward pass, input gradient, weights' gradients


class Busy:
    """Runs a worker's pieces of work, and measures them. A piece is of one micro-batch."""

    def __init__(self, compute: Compute, clock: Clock, micro_batch: int) -> None:
        self._compute = compute
        self._clock = clock
        self._spent_s = 0.0
        self._num = 0.0
        self._micro_batch = micro_batch

    async def train(self, work: Callable[[], T]) -> T:
        """Run a piece of work where training runs."""
        began = 0.0

        def timed() -> T:
            nonlocal began
            began = self._clock.now()
            return work()

        found = await self._compute.train(timed)
        self._spent_s = KEEPS * self._spent_s + (self._clock.now() - began)
        self._num = KEEPS * self._num + 1
        return found

    @property
    def rate(self) -> float:
        """Samples a second that this peer would compute if it never waited; 0.0: nothing was measured."""
        return self._num * self._micro_batch / (PIECES * self._spent_s) if self._spent_s > 0 else 0.0
