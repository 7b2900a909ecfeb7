"""Where heavy work runs: on threads beside the event loop, or inline where time is virtual.

Training has one thread of its own, so inner steps never overlap; encoding, merging and hashing have another, so a
member serves a round in the middle of its inner steps.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


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
