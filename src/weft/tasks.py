"""What runs beside what: background tasks of one owner, and heavy work on threads beside the event loop.

`Tasks` are started together and ended together. One that ends with an error of its own making tells its owner, or
where that did not ask to be told, the event loop's exception handler; a remote's fault (`PeerError`) ends the task and
nothing else.

`Compute` is where heavy work runs: on threads, or inline where time is virtual. Training has one thread of its own, so
training steps never overlap; encoding, merging and hashing have another, so a member serves a round in the middle of
its training steps.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from weft.errors import PeerError

T = TypeVar("T")


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

    async def settled(self, most_s: float) -> None:
        """Wait until every task but the caller's that runs now has ended, for so many seconds at most."""
        if others := [task for task in self._running if task is not asyncio.current_task()]:
            await asyncio.wait(others, timeout=most_s)

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


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` comes to. Who is cancelled meanwhile goes once it is over: a thread goes on, whoever waits."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        running.cancelled() or running.exception()
        raise


class Compute(Protocol):
    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        """Run `work` in the training thread and return what it returns.

        Args:
            num_tokens: what it would take to train on so many: for clocks that are virtual.
        """
        ...

    async def serve(self, work: Callable[[], T]) -> T:
        """Run `work` beside training and return what it returns."""
        ...

    async def aclose(self) -> None:
        """Begin nothing more, and wait for what runs."""
        ...


class Threads:
    def __init__(self) -> None:
        self._training = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._serving = ThreadPoolExecutor(1, thread_name_prefix="serve")

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:  # noqa: ARG002  # time passes by itself
        return await asyncio.get_running_loop().run_in_executor(self._training, work)

    async def serve(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._serving, work)

    async def aclose(self) -> None:
        pools = (self._training, self._serving)
        await asyncio.gather(*(asyncio.to_thread(pool.shutdown, cancel_futures=True) for pool in pools))


class Inline:
    """For a virtual clock. `train_s` is the virtual time that one call of training takes; serving takes none."""

    def __init__(self, train_s: float = 0.0) -> None:
        self._train_s = train_s
        self._training = asyncio.Lock()  # as on one thread: what comes later waits

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:  # noqa: ARG002
        async with self._training:
            await asyncio.sleep(self._train_s)
            return work()

    async def serve(self, work: Callable[[], T]) -> T:
        return work()

    async def aclose(self) -> None:
        pass
