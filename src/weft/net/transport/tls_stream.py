"""A stream over a TLS socket that never blocks, the same for both lanes.

OpenSSL does the work, the event loop does the waiting. A *job* reads or writes until the socket has no more to
give or take; then the loop watches the socket and the next job begins. On a `control` stream jobs are small and
run in the loop itself. On a `bulk` stream large ones run in a few threads, where encryption and copying release the
interpreter's lock and do not delay the loop. A waiting stream holds no thread, so a handful of threads serves any
number of streams and nobody can exhaust them by being slow.

OpenSSL permits one job at a time per socket; a lock sees to that. A cancelled call returns only after its job has
ended, so nothing touches the caller's buffer afterwards.

It needs an event loop that can watch sockets (`add_reader`): every loop but Windows' default one.
"""

import asyncio
import select
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, Protocol

from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.transport.address import is_loopback
from weft.tasks import Tasks
from weft.wire import Buffer

# Most one job moves: enough that changing threads costs little, little enough that jobs take turns within milliseconds.
JOB_NBYTES = 1 << 20
# A job that can move no more than this runs in the loop on any stream: it takes 30 us, a change of threads takes 100.
SMALL_NBYTES = 64 << 10
# A bulk job that has moved more than one TLS record is in a flow of bytes: until it has moved enough to be worth a
# change of threads, it waits a moment for more.
_FLOW_NBYTES = 16 << 10
_WORTHWHILE_NBYTES = 256 << 10
_MOMENT_S = 0.002
# After a farewell the socket stays until the other side has closed too, so that no byte of ours is lost to a reset.
FAREWELL_TIMEOUT_S = 2.0
MAX_FAREWELLS = 32  # at a time: a crowd that is turned out and reads nothing would hold its sockets so long
FAREWELL_NBYTES = 1 << 20  # and until this much has come in, unread: enough for what crossed our farewell on its way

Direction = Literal["read", "write"]
Job = Callable[[memoryview], int]


class Runner(Protocol):
    moment_s: float  # how long a job may wait for the socket

    async def run(self, job: Job, view: memoryview) -> int: ...


class InLoop:
    """Runs the jobs of control streams, and small ones of any stream."""

    moment_s = 0.0

    async def run(self, job: Job, view: memoryview) -> int:
        return job(view)


_IN_LOOP = InLoop()


class InThreads:
    """Runs the jobs of all bulk streams of a transport in at most `num_threads` threads."""

    moment_s = _MOMENT_S

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weft-bulk")

    async def run(self, job: Job, view: memoryview) -> int:
        future = self._pool.submit(job, view)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                await _ended(future)
            raise

    def close(self) -> None:
        self._pool.shutdown()


async def _ended(future: "Future[int]") -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    while not ended.is_set():
        with suppress(asyncio.CancelledError):  # the caller raises it once the job is over, in a few milliseconds
            await ended.wait()


class TlsStream:
    """One TLS connection. `peer` is set once it is proven.

    Args:
        tls: a connected socket that does not block, its handshake not begun.
        runner: where its jobs run.
        tasks: where the end of the connection is awaited in the background.
        on_close: called once with this stream.
    """

    def __init__(
        self, tls: ssl.SSLSocket, runner: Runner, tasks: Tasks, on_close: "Callable[[TlsStream], None]"
    ) -> None:
        self.peer = PeerId("")
        self.source = ""
        there = tls.getpeername()
        self.is_here = isinstance(there, str) or is_loopback(there[0])  # a name of the file system
        self._tls = tls
        self._runner = runner
        self._tasks = tasks
        self._on_close = on_close
        self._is_closed = False
        self._sending = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._watched: dict[Direction, list[asyncio.Future[None]]] = {}  # who waits for it
        self._poll_read, self._poll_write = _poller(tls, "read"), _poller(tls, "write")

    def set_runner(self, runner: Runner) -> None:
        self._runner = runner

    async def handshake(self) -> bytes | None:
        """Do the TLS handshake; return the other side's certificate (DER), if it showed one.

        Raises:
            OSError: it failed.
        """

        def job(_: memoryview) -> int:
            self._tls.do_handshake()
            return 0

        await self._until_done(job, memoryview(b""))
        return self._tls.getpeercert(binary_form=True)

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        async with self._sending:
            try:
                while view:
                    view = view[await self._until_done(self._write, view[:JOB_NBYTES]) :]
            except (OSError, ValueError) as error:
                raise self._broken(error) from None

    async def recv_into(self, buffer: memoryview) -> int:
        try:
            return await self._until_done(self._read, buffer[:JOB_NBYTES])
        except (OSError, ValueError) as error:
            raise self._broken(error) from None

    async def close(self) -> None:
        if self._end():
            farewell = self._tasks.spawn(self._say_farewell())
            farewell.add_done_callback(lambda _: self._tls.close())  # also where it was cancelled before it began

    def abort(self) -> None:
        """End the connection without a farewell. Only while no bulk job can be running."""
        if self._end():
            self._tls.close()

    async def _until_done(self, job: Job, view: memoryview) -> int:
        while True:
            direction: Direction
            self._check_open()  # before the lock, which a farewell may hold for a while
            async with self._turn:
                self._check_open()
                try:
                    return await self._runner_of(view).run(job, view)
                except ssl.SSLWantReadError:
                    direction = "read"
                except ssl.SSLWantWriteError:
                    direction = "write"
            await self._ready(direction)

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerError("the stream was closed on this side")

    def _read(self, view: memoryview) -> int:
        filled = 0
        while filled < len(view):
            try:
                num_bytes = self._tls.recv_into(view[filled:])
            except ssl.SSLWantReadError:
                if filled == 0:
                    raise
                if not (_is_flow(filled) and self._poll_read(self._runner_of(view).moment_s)):
                    break
                continue
            if num_bytes == 0:
                break
            filled += num_bytes
        return filled

    def _write(self, view: memoryview) -> int:
        sent = 0
        while sent < len(view):
            try:
                sent += self._tls.send(view[sent:])
            except ssl.SSLWantWriteError:
                if sent == 0:
                    raise
                if not (_is_flow(sent) and self._poll_write(self._runner_of(view).moment_s)):
                    break
        return sent

    def _runner_of(self, view: memoryview) -> Runner:
        return self._runner if len(view) > SMALL_NBYTES else _IN_LOOP

    async def _ready(self, direction: Direction) -> None:
        """Wait until the socket can be read or written, or the stream is closed."""
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        if direction not in self._watched:
            self._watched[direction] = []
            watch = loop.add_reader if direction == "read" else loop.add_writer
            watch(self._tls.fileno(), self._wake, direction)
        self._watched[direction].append(waiter)  # two calls may wait for the same
        await waiter

    def _wake(self, direction: Direction) -> None:
        waiters = self._watched.pop(direction, None)
        if waiters:
            loop = waiters[0].get_loop()
            (loop.remove_reader if direction == "read" else loop.remove_writer)(self._tls.fileno())
            for waiter in waiters:
                if not waiter.done():  # it was cancelled
                    waiter.set_result(None)

    def _end(self) -> bool:
        if self._is_closed:
            return False
        self._is_closed = True
        self._wake("read")
        self._wake("write")
        self._on_close(self)
        return True

    async def _say_farewell(self) -> None:
        """Send the orderly end, then wait until the other side has closed too, for a bounded time."""
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S), self._turn:
                if len(self._tasks) > MAX_FAREWELLS:
                    return
                loop = asyncio.get_running_loop()
                while not self._farewell_sent():
                    await _writable(loop, self._tls)
                with socket.socket(fileno=self._tls.detach()) as plain:
                    plain.shutdown(socket.SHUT_WR)
                    crossed = 0
                    while crossed < FAREWELL_NBYTES and (data := await loop.sock_recv(plain, 64 << 10)):
                        crossed += len(data)
        except (OSError, ValueError):  # TimeoutError among them: nobody is left to hear it
            pass
        finally:
            self._tls.close()

    def _farewell_sent(self) -> bool:
        try:
            self._tls.unwrap()
        except ssl.SSLWantWriteError:
            return False
        except ssl.SSLError:
            pass  # ours is sent; theirs is not here yet, or other bytes of theirs are
        return True

    def _broken(self, error: Exception) -> PeerError:
        if isinstance(error, PeerError):
            return error
        if isinstance(error, ssl.SSLEOFError):
            return PeerError("the connection ended without a farewell: the process or its network is gone")
        return PeerError(f"the connection broke: {error}")


def _is_flow(num_bytes: int) -> bool:
    return _FLOW_NBYTES <= num_bytes < _WORTHWHILE_NBYTES


async def _writable(loop: asyncio.AbstractEventLoop, tls: ssl.SSLSocket) -> None:
    ready = asyncio.Event()
    loop.add_writer(tls.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(tls.fileno())


def _poller(tls: ssl.SSLSocket, direction: Direction) -> Callable[[float], bool]:
    """Return a function that waits some seconds in the calling thread until `tls` is ready, and says whether it is."""
    if not hasattr(select, "poll"):  # Windows
        readers, writers = ([tls], []) if direction == "read" else ([], [tls])
        return lambda delay_s: any(select.select(readers, writers, [], delay_s))
    poll = select.poll()
    poll.register(tls, select.POLLIN if direction == "read" else select.POLLOUT)
    return lambda delay_s: bool(delay_s and poll.poll(1000 * delay_s))
