"""What a peer does once a run is complete, while all members stay: they are told that it is under way.

It does not know what is done.
"""

from collections.abc import Awaitable, Callable

from weft.tasks import Tasks


class Ending:
    """
    Args:
        tell: tells everybody whether it is under way.
    """

    def __init__(self, tasks: Tasks, tell: Callable[[], None]) -> None:
        self.work: Callable[[], Awaitable[object]] | None = None  # what is to be done; None: nothing, or it has begun
        self.is_under_way = False
        self._tasks = tasks
        self._tell = tell

    def begin(self) -> None:
        """Begin it, once."""
        if self.work is None:
            return
        work, self.work, self.is_under_way = self.work, None, True

        async def do() -> None:
            try:
                await work()
            finally:
                self.is_under_way = False
                self._tell()

        self._tasks.spawn(do())
        self._tell()
