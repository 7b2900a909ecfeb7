"""A `Compute` that says how long the device was at work, waiting apart.

It does not know what is computed.
"""

from collections.abc import Callable
from typing import TypeVar

from weft.clock import Clock
from weft.executor import Compute

T = TypeVar("T")


class Timed:
    """
    Args:
        on_spent: called with the seconds of each piece of training.
    """

    def __init__(self, compute: Compute, clock: Clock, on_spent: Callable[[float], None]) -> None:
        self._compute = compute
        self._clock = clock
        self._on_spent = on_spent

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        began, ended = 0.0, None  # type: tuple[float, float | None]

        def timed() -> T:
            nonlocal began, ended
            began = self._clock.now()
            try:
                return work()
            finally:
                ended = self._clock.now()

        try:
            return await self._compute.train(timed, num_tokens)
        finally:
            if ended is not None:  # else it goes on, though nobody waits for it any more
                self._on_spent(ended - began)

    async def serve(self, work: Callable[[], T]) -> T:
        return await self._compute.serve(work)

    async def aclose(self) -> None:
        """Do nothing: others compute there, too."""
