"""Fetching many blobs at once."""

import asyncio

import pytest

from weft.errors import PeerError
from weft.peer.fetch import _all


async def test_the_first_job_that_fails_ends_the_others() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("the other")

    async def fail() -> None:
        raise PeerError("the donor is gone")

    with pytest.raises(PeerError, match="donor"):
        await _all([wait(), fail()])
    assert ended == ["the other"]


async def test_who_is_cancelled_as_a_job_fails_stays_cancelled() -> None:
    is_gone = asyncio.Event()

    async def fail() -> None:
        await is_gone.wait()
        raise PeerError("the donor is gone")

    fetching = asyncio.ensure_future(_all([fail(), asyncio.Event().wait()]))  # type: ignore[list-item]
    await asyncio.sleep(0.01)
    is_gone.set()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
