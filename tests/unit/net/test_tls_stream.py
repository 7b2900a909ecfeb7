"""Jobs in threads: what a cancelled call may leave behind."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from weft.net.tls_stream import InThreads


@pytest.fixture
async def threads() -> AsyncIterator[InThreads]:
    threads = InThreads(1)
    yield threads
    threads.close()


async def test_a_cancelled_call_returns_after_its_job(threads: InThreads) -> None:
    begun, may_end, buffer = threading.Event(), threading.Event(), bytearray(1)

    def job(view: memoryview) -> int:
        begun.set()
        assert may_end.wait(10)
        view[0] = 1
        return 1

    call = asyncio.ensure_future(threads.run(job, memoryview(buffer)))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):  # however often it is told
        call.cancel()
        await asyncio.sleep(0.01)
    assert not call.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert buffer == b"\x01"  # the job is over: from here on the buffer is the caller's alone


async def test_a_cancelled_call_takes_its_waiting_job_along(threads: InThreads) -> None:
    may_end, ran = threading.Event(), []

    def block(_: memoryview) -> int:
        assert may_end.wait(10)
        return 0

    def job(_: memoryview) -> int:
        ran.append(True)
        return 0

    blocking = asyncio.ensure_future(threads.run(block, memoryview(b"")))
    call = asyncio.ensure_future(threads.run(job, memoryview(b"")))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    may_end.set()
    await blocking
    assert await threads.run(lambda _: 7, memoryview(b"")) == 7
    assert ran == []
