"""The copy that iroh 1.2.0 makes of every byte it sends, made fast.

Its Python binding (uniffi 0.31) lowers `bytes` in a loop over single bytes that holds the interpreter's lock: 139
CPU-seconds per GB, 4 MB/s. `mend` replaces that one function by a memmove. It does nothing where the loop is gone
(uniffi 0.32 has mended it) or the binding looks different, and it undoes itself should its self-test fail: then
iroh is slow, not wrong.

A stream over one iroh connection.
"""

import asyncio
import ctypes
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from weft.errors import PeerError
from weft.ids import PeerId
from weft.tasks import Tasks
from weft.wire import Buffer

_TEST_NBYTES = 1 << 20


def mend(binding: Any) -> bool:
    """Replace the loop in `binding` (the module `iroh.iroh_ffi`); return whether sending is fast now."""
    builder: Any = getattr(binding, "_UniffiRustBufferBuilder", None)
    original = getattr(builder, "write", None)
    if original is None or not hasattr(builder, "_reserve"):
        return False
    if not _is_loop(original):
        return True
    builder.write = _write
    if _is_right(builder):
        return True
    builder.write = original
    return False


def _is_loop(function: Any) -> bool:
    return "enumerate" in getattr(getattr(function, "__code__", None), "co_names", ())


def _write(self: Any, value: bytes | bytearray | memoryview) -> None:
    """Append `value` to the buffer that goes to Rust."""
    view = memoryview(value).cast("B")
    if not len(view):
        return
    with self._reserve(len(view)):
        target = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
        if isinstance(value, bytes):
            ctypes.memmove(target, value, len(view))
        elif view.readonly:  # ctypes cannot point into these
            ctypes.memmove(target, view.tobytes(), len(view))
        else:
            ctypes.memmove(target, (ctypes.c_char * len(view)).from_buffer(view), len(view))


def _is_right(builder_type: Any) -> bool:
    """Return whether what goes into the buffer comes out of it, for each kind of bytes."""
    sample = bytes(range(256)) * (_TEST_NBYTES // 256)
    kinds = (b"\x01", sample, bytearray(sample), memoryview(sample), memoryview(bytearray(sample))[3:-3], b"")
    builder = builder_type()
    for kind in kinds:
        builder.write(kind)
    buffer = builder.finalize()
    try:
        return bool(ctypes.string_at(buffer.data, buffer.len) == b"".join(kinds))
    finally:
        buffer.free()


# iroh copies what it sends and receives in the event loop; larger pieces would delay control frames.
_CHUNK_NBYTES = 256 << 10
# After a farewell the connection stays until its bytes have arrived: closing it drops those under way.
_FAREWELL_TIMEOUT_S = 2.0


class IrohStream:
    """The one stream of `connection`; `ends` are its sending and receiving halves.

    Args:
        tasks: where the end of the connection is awaited in the background.
        open_streams: the transport's, from which a closed stream removes itself.
    """

    def __init__(
        self,
        peer: PeerId,
        connection: Any,
        ends: tuple[Any, Any],
        tasks: Tasks,
        open_streams: "dict[IrohStream, None]",
    ) -> None:
        self.source = ""
        self._peer = peer
        self._connection = connection
        self._writer, self._reader = ends
        self._tasks = tasks
        self._open_streams = open_streams
        self._sending = asyncio.Lock()
        self._is_closed = False
        self._waiting: dict[asyncio.Timeout, None] = {}

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        async with self._sending:
            for start in range(0, len(view), _CHUNK_NBYTES):
                piece = view[start : start + _CHUNK_NBYTES]
                await self._unless_closed(partial(self._write, piece))

    async def recv_into(self, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        data = await self._unless_closed(lambda: self._reader.read(min(len(buffer), _CHUNK_NBYTES)))
        buffer[: len(data)] = data
        return len(data)

    async def _write(self, piece: memoryview) -> None:
        await self._writer.write_all(piece)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._open_streams.pop(self, None)
            for limit in self._waiting:
                limit.reschedule(0.0)  # now
            self._tasks.spawn(self._say_farewell())

    def abort(self) -> None:
        """End the connection without a farewell."""
        self._is_closed = True
        self._open_streams.pop(self, None)
        self._drop(1, b"aborted")

    async def _unless_closed(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await `call`, whose errors become `PeerError`; end it when the stream is closed here meanwhile."""
        if self._is_closed:
            raise PeerError("the stream was closed on this side")
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._waiting[limit] = None
                return await call()
        except TimeoutError:
            raise PeerError("the stream was closed on this side") from None
        except Exception as error:
            if not hasattr(error, "kind"):  # only an IrohError has one
                raise
            raise PeerError(f"the connection broke: {error.message()}") from None  # type: ignore[attr-defined]
        finally:
            self._waiting.pop(limit, None)

    async def _say_farewell(self) -> None:
        """Send the orderly end and refuse to read on; wait, for a bounded time, until all has arrived."""
        try:
            async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                await self._writer.finish()
                await self._reader.stop(0)
                await self._writer.stopped()  # or the last byte is acknowledged
        except Exception as error:
            if not isinstance(error, TimeoutError) and not hasattr(error, "kind"):
                raise
        finally:
            self._drop(0, b"")

    def _drop(self, code: int, reason: bytes) -> None:
        self._connection.close(code, reason)
        # An endpoint keeps its port as long as any object of it lives.
        self._connection = self._writer = self._reader = None
