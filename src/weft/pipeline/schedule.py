"""What a member computes next: input gradients, for which others wait; then forward passes; then weights' gradients.

Weights' gradients fill the time in which nothing else can be done. What they are made of takes memory until then: where
many are owed, or a round waits for them, they go before forward passes.

It does not know what the work is.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.tasks import Tasks

T = TypeVar("T")

MAX_OWED = 4  # micro-batches whose weights' gradients wait while there are forward passes to make


class Run(Protocol):
    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class _Asked(NamedTuple):
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class Schedule:
    """Of one member: one piece of work at a time.

    Args:
        run: does a piece of work, on a thread or inline.
        tasks: in one of which this runs while there is work.
    """

    def __init__(self, run: Run, tasks: Tasks) -> None:
        self._run = run
        self._tasks = tasks
        self._backward: deque[_Asked] = deque()
        self._forward: deque[_Asked] = deque()
        self._weights: deque[_Asked] = deque()
        self._is_running = False
        self.is_settling = False  # somebody waits for weights' gradients: they go before forward passes

    @property
    def num_waiting(self) -> int:
        """Return how many forward passes wait."""
        return len(self._forward)

    @property
    def num_back(self) -> int:
        """Return how many input gradients wait."""
        return len(self._backward)

    async def backward(self, work: Callable[[], T]) -> T:
        return await self._ask(self._backward, work)

    async def forward(self, work: Callable[[], T]) -> T:
        return await self._ask(self._forward, work)

    async def weights(self, work: Callable[[], T]) -> T:
        return await self._ask(self._weights, work)

    async def _ask(self, queue: deque[_Asked], work: Callable[[], T]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue.append(_Asked(work, done))
        if not self._is_running:
            self._is_running = True
            self._tasks.spawn(self._go_on())
        return await done

    async def _go_on(self) -> None:
        try:
            while (asked := self._next()) is not None:
                if asked.done.done():  # whoever asked waits no longer
                    continue
                try:
                    found = await self._run(asked.work)
                except Exception as error:  # whoever asked is told
                    if not asked.done.done():
                        asked.done.set_exception(error)
                else:
                    if not asked.done.done():
                        asked.done.set_result(found)
        finally:
            self._is_running = False

    def _next(self) -> _Asked | None:
        is_owing = self.is_settling or len(self._weights) >= MAX_OWED
        last = (self._weights, self._forward) if is_owing else (self._forward, self._weights)
        return next((queue.popleft() for queue in (self._backward, *last) if queue), None)
