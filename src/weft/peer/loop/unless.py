"""Waiting that ends where this peer is told to stop.

It does not know what is waited for.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """This peer was told to stop while it waited."""


class Unless:
    """
    Args:
        stopping: set once it is.
    """

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping

    async def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, or end it when this peer is told to stop.

        Raises:
            Stopped: it was, and the work had not ended by itself.
        """
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Stopped
            return working.result()
        finally:
            for each in (working, stopping):
                each.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
