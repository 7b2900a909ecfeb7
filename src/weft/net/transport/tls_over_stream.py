"""A TLS connection inside another stream: what a relay carries and cannot read.

    application ──► TLS of the two ends ──► carrier, encrypted by somebody else or not ──► ... ──► the other end

OpenSSL works on two buffers in memory here and never sees a socket, so the carrier may be any `Stream`, also one on a
virtual clock. All of it runs in the event loop, in pieces small enough that others get their turn.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.transport.base import Stream
from weft.tasks import Tasks, within
from weft.wire import Buffer

T = TypeVar("T")

PIECE_NBYTES = 128 << 10  # encrypted at a time: well below a millisecond
FAREWELL_TIMEOUT_S = 2.0
_CLOSED = "the stream was closed on this side"


class InnerStream:
    """One end of a TLS connection over `carrier`. `peer` is set once it is proven.

    Args:
        tasks: where the orderly end is sent in the background.
        on_close: called once with this stream.
    """

    def __init__(
        self,
        carrier: Stream,
        context: ssl.SSLContext,
        tasks: Tasks,
        on_close: "Callable[[InnerStream], None]",
        *,
        is_server: bool,
    ) -> None:
        self.peer = PeerId("")
        self.source = ""
        self._carrier = carrier
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=is_server)
        self._tasks = tasks
        self._on_close = on_close
        self._buffer = memoryview(bytearray(PIECE_NBYTES))
        self._sending = asyncio.Lock()
        self._is_closed = False
        self._waiting: dict[asyncio.Timeout, None] = {}

    async def handshake(self) -> bytes | None:
        """Do the TLS handshake; return the other side's certificate (DER), if it showed one.

        Raises:
            ssl.SSLError: it failed.
            PeerError: the carrier broke.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._feed()
                continue
            await self._flush()
            return self._tls.getpeercert(binary_form=True)

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        async with self._sending:
            for start in range(0, len(view), PIECE_NBYTES):
                self._check_open()
                try:
                    self._tls.write(view[start : start + PIECE_NBYTES])
                except ssl.SSLError as error:
                    raise PeerError(f"the connection broke: {error}") from None
                await self._flush()

    async def recv_into(self, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        while True:
            self._check_open()
            try:
                filled = self._read(buffer)
            except ssl.SSLWantReadError:
                await self._feed()
                continue
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLEOFError:
                raise PeerError("the connection ended without a farewell: the other end or its relay is gone") from None
            except ssl.SSLError as error:
                raise PeerError(f"the connection broke: {error}") from None
            return filled

    async def close(self) -> None:
        if self._end():
            self._tasks.spawn(self._say_farewell())

    def abort(self) -> None:
        """End the connection without a farewell."""
        if self._end():
            self._tasks.spawn(self._carrier.close())

    def _read(self, buffer: memoryview) -> int:
        filled = 0
        while filled < len(buffer):
            try:
                num_bytes: int = self._tls.read(len(buffer) - filled, buffer[filled:])  # type: ignore[assignment]
            except ssl.SSLError:
                if filled == 0:
                    raise
                break  # the next call finds it again
            if num_bytes == 0:
                break
            filled += num_bytes
        return filled

    async def _feed(self) -> None:
        """Wait for bytes of the other end."""
        num_bytes = await self._unless_closed(lambda: self._carrier.recv_into(self._buffer))
        if num_bytes:
            self._arrived.write(self._buffer[:num_bytes])
        else:
            self._arrived.write_eof()

    async def _flush(self) -> None:
        if self._leaving.pending:
            data = self._leaving.read()
            await self._unless_closed(lambda: self._carrier.send(data))

    async def _unless_closed(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call`; end it when the stream is closed here meanwhile."""
        self._check_open()
        async with within(None, lambda: PeerError(_CLOSED)) as limit:
            self._waiting[limit] = None
            try:
                return await call()
            finally:
                self._waiting.pop(limit, None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerError(_CLOSED)

    def _end(self) -> bool:
        if self._is_closed:
            return False
        self._is_closed = True
        for limit in self._waiting:
            limit.reschedule(0.0)  # now
        self._on_close(self)
        return True

    async def _say_farewell(self) -> None:
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S), self._sending:
                with suppress(ssl.SSLError):  # ours is written; theirs is not here yet, or other bytes of theirs are
                    self._tls.unwrap()
                await self._carrier.send(self._leaving.read())
        except (PeerError, TimeoutError):
            pass  # nobody is left to hear it
        finally:
            await self._carrier.close()
