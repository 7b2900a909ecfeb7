"""The background tasks of one owner: started together, ended together.

A task that ends with an error of its own making tells its owner, or where that did not ask to be told, the event
loop's exception handler; a remote's fault (`PeerError`) ends the task and nothing else.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from weft.errors import PeerError


@asynccontextmanager
async def within(limit_s: float | None, overdue: Callable[[], Exception]) -> AsyncIterator[asyncio.Timeout]:
    """Raise what `overdue` returns if the body takes longer than `limit_s` seconds; None: it may take for ever."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise overdue() from None


class Tasks:
    def __init__(self, on_failure: Callable[[Exception], None] | None = None) -> None:
        self._on_failure = on_failure
        self._running: dict[asyncio.Task[None], None] = {}  # a dict keeps the order in which they began

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task that `aclose` will end."""
        task = asyncio.get_running_loop().create_task(work)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Cancel every task but the caller's after `grace_s` seconds, and wait until they have ended."""
        others = [task for task in self._running if task is not asyncio.current_task()]
        if others and grace_s:
            await asyncio.wait(others, timeout=grace_s)
        if others := self.cancel():
            await asyncio.wait(others)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ask every task but the caller's to end; return them."""
        others = [task for task in self._running if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        return others

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None or isinstance(error, PeerError):
            return
        if self._on_failure is not None and isinstance(error, Exception):
            self._on_failure(error)
        else:
            handler = {"message": "a background task of a transport failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(handler)
