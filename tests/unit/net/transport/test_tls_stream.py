"""Jobs in threads: what a cancelled call may leave behind."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator

import pytest

from weft.net.transport.tls_stream import InLoop, InThreads, TlsStream
from weft.tasks import Tasks


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


async def test_a_farewell_that_is_cancelled_before_it_begins_leaves_no_socket_open() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tls = context.wrap_socket(here, do_handshake_on_connect=False)
    tasks = Tasks()
    stream = TlsStream(tls, InLoop(), tasks, lambda _stream: None)
    await stream.close()
    for farewell in tasks.cancel():  # as when the event loop ends just now
        with pytest.raises(asyncio.CancelledError):
            await farewell
    await asyncio.sleep(0)
    assert tls.fileno() == -1
    there.close()
