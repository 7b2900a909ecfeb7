"""Frames: how records follow one another on a stream.

    4 bytes   number of payload bytes, big-endian
    1 byte    version of this layout
    payload   one record's canonical bytes (`wire.encode`)

The bound on a frame is checked before a byte of its payload is read or stored. After any error the position
in the stream is lost, so close it.
"""

import struct
from collections.abc import Callable

from weft.errors import WireError
from weft.net.transport.base import Stream
from weft.tasks import within
from weft.wire import Buffer

FRAME_VERSION = 1
# Control frames hold records, and a record that grows with the run (a plan of 32 contributors with 32 parts, a page of
# membership) stays below 1 MiB. Anything larger is a blob and travels as raw bytes. 4 KiB for the record around it.
MAX_FRAME_NBYTES = (1 << 20) + 4096
FRAME_S = 30.0  # from a frame's first byte to its last, sent or received: 1 MiB at 300 kbit/s takes 28 s

_HEADER = struct.Struct(">IB")
# One receive may bring many small frames; larger pieces go straight to the caller's buffer.
_READ_NBYTES = 64 << 10


async def write_frame(stream: Stream, payload: Buffer) -> None:
    """Send `payload` as one frame, in one `send`. Senders that share a stream take turns around this call.

    Raises:
        WireError: the payload exceeds `MAX_FRAME_NBYTES`; nothing was sent.
        PeerError: the other side is gone.
    """
    await stream.send(encode_frame(payload))


def encode_frame(payload: Buffer) -> bytes:
    """Return the bytes of the frame that holds `payload`.

    Raises:
        WireError: the payload exceeds `MAX_FRAME_NBYTES`.
    """
    num_bytes = memoryview(payload).nbytes
    if num_bytes > MAX_FRAME_NBYTES:
        raise WireError(f"frame of {num_bytes} bytes exceeds the bound of {MAX_FRAME_NBYTES}; send it as a blob")
    return b"".join((_HEADER.pack(num_bytes, FRAME_VERSION), payload))


class FrameReader:
    """Reads frames from `stream`, and raw bytes between them, through a small buffer.

    A bulk stream is read the same way: `read` the header record, then `recv_into` for the body that follows.
    One call at a time; a cancelled call leaves the stream unusable. Silence between frames is nobody's fault; once a
    frame has begun it must end within `finish_s` seconds.

    Args:
        max_nbytes: bound on the next frame's payload.
        finish_s: seconds between a frame's first byte and its last; None: unbounded.
        on_bytes: told how many bytes have come, whenever some do.
        read_ahead_nbytes: size of the buffer; with 0 nothing behind a frame is taken from the stream.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        max_nbytes: int = MAX_FRAME_NBYTES,
        finish_s: float | None = None,
        on_bytes: Callable[[int], None] | None = None,
        read_ahead_nbytes: int = _READ_NBYTES,
    ) -> None:
        self._stream = stream
        self.max_nbytes = max_nbytes
        self.finish_s = finish_s
        self.on_bytes = on_bytes
        self._buffer = memoryview(bytearray(read_ahead_nbytes))
        self._start = 0
        self._stop = 0
        self.num_refills = 0  # of the buffer

    def admit(self, max_nbytes: int, finish_s: float, on_bytes: Callable[[int], None]) -> None:
        """Read with these bounds from now on; called between frames, once a stranger is none."""
        self.max_nbytes, self.finish_s, self.on_bytes = max_nbytes, finish_s, on_bytes

    async def read(self) -> bytes | None:
        """Return the next frame's payload, or None where the stream ends between frames.

        Raises:
            WireError: the frame is too long, of another version, not finished in time, or the stream ends inside it.
            PeerError: the other side is gone.
        """
        if self._start == self._stop and len(self._buffer):
            self._start, self._stop = 0, await self._receive(self._buffer)
            self.num_refills += 1
            if not self._stop:
                return None
        if (payload := self.at_hand()) is not None:
            return payload
        header = memoryview(bytearray(_HEADER.size))
        num_bytes = await self.recv_into(header)
        if num_bytes == 0:
            return None
        async with within(self.finish_s, self._overdue):
            return await self._finish(header, num_bytes)

    def at_hand(self) -> bytes | None:
        """Return the next frame's payload if all of it has come; None: `read` waits for it, or says what is wrong."""
        begin = self._start + _HEADER.size
        if begin > self._stop:
            return None
        length, version = _HEADER.unpack_from(self._buffer, self._start)
        if version != FRAME_VERSION or length > self.max_nbytes or begin + length > self._stop:
            return None
        self._start = begin + length
        return bytes(self._buffer[begin : self._start])

    def _overdue(self) -> WireError:
        return WireError(f"a frame was begun and not finished within {self.finish_s:g} s")

    async def _finish(self, header: memoryview, num_bytes: int) -> bytes:
        num_bytes += await self._fill(header[num_bytes:])
        if num_bytes < _HEADER.size:
            raise WireError(f"stream ended after {num_bytes} of the {_HEADER.size} bytes of a frame header")
        length, version = _HEADER.unpack(header)
        if version != FRAME_VERSION:
            raise WireError(
                f"frame of version {version}; this software reads version {FRAME_VERSION}. Update the older one"
            )
        if length > self.max_nbytes:
            raise WireError(f"frame of {length} bytes exceeds the bound of {self.max_nbytes}; dropped unread")
        payload = bytearray(length)
        num_bytes = await self._fill(memoryview(payload))
        if num_bytes < length:
            raise WireError(f"stream ended after {num_bytes} of the {length} bytes of a frame")
        return bytes(payload)

    def has_ready(self, num: int) -> bool:
        """Return whether so many frames, or as much as fits, came together with the one that was read last."""
        start = self._start
        for _ in range(num):
            if start + _HEADER.size > self._stop:
                return self._stop == len(self._buffer)
            start += _HEADER.size + _HEADER.unpack_from(self._buffer, start)[0]
        return start <= self._stop or self._stop == len(self._buffer)

    async def recv_into(self, buffer: memoryview) -> int:
        """Receive 1 to len(buffer) of the raw bytes that come next; return how many, or 0 at the orderly end."""
        if not len(buffer):
            return 0
        if self._start == self._stop:
            if len(buffer) >= len(self._buffer):
                return await self._receive(buffer)
            self._start, self._stop = 0, await self._receive(self._buffer)
            self.num_refills += 1
        num_bytes = min(len(buffer), self._stop - self._start)
        buffer[:num_bytes] = self._buffer[self._start : self._start + num_bytes]
        self._start += num_bytes
        return num_bytes

    async def _receive(self, buffer: memoryview) -> int:
        num_bytes = await self._stream.recv_into(buffer)
        if num_bytes and self.on_bytes is not None:
            self.on_bytes(num_bytes)
        return num_bytes

    async def _fill(self, buffer: memoryview) -> int:
        filled = 0
        while filled < len(buffer):
            num_bytes = await self.recv_into(buffer[filled:])
            if num_bytes == 0:
                break
            filled += num_bytes
        return filled
