"""What waits for threads."""

import asyncio
import threading

import pytest

from weft.tasks import Threads, to_the_end


def test_who_is_cancelled_goes_once_the_thread_is_done() -> None:
    async def scenario() -> None:
        compute, may_end, ended = Threads(), threading.Event(), list[str]()

        def work() -> None:
            may_end.wait(10.0)
            ended.append("thread")

        async def waits() -> None:
            try:
                await to_the_end(compute.train(work))
            finally:
                ended.append("who waits")

        task = asyncio.create_task(waits())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        assert ended == []
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["thread", "who waits"]
        await compute.aclose()

    asyncio.run(scenario())


def test_what_it_comes_to_and_how_it_fails_are_told() -> None:
    async def fails() -> None:
        raise ValueError("told")

    assert asyncio.run(to_the_end(asyncio.sleep(0.0, "found"))) == "found"
    with pytest.raises(ValueError, match="told"):
        asyncio.run(to_the_end(fails()))
