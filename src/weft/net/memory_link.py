"""What a link of the memory network does with bytes.

A `Link` is one direction between two peers. It sends one chunk at a time, taking turns among the streams that have
something to send; a chunk occupies it for its size over the bandwidth and arrives a delay later. A `Pipe` is one
direction of one stream: what it has queued, what is under way, what has arrived, and how it ended. Bytes sent and not
yet read are bounded, so a slow reader holds its sender back. A chunk of None is the orderly end.

It does not know who the peers are.
"""

import asyncio
from collections import deque

from weft.errors import PeerError

WINDOW_NBYTES = 1 << 20  # sent and not yet read, besides what the link itself holds
CHUNK_NBYTES = 64 << 10  # how much one stream sends before another on the same link gets its turn


class Link:
    """One direction between two peers.

    Args:
        delay_s: seconds from leaving the sender to arriving.
        bandwidth_bps: bits per second; None: instantaneous.
    """

    def __init__(self, delay_s: float = 0.0, bandwidth_bps: float | None = None) -> None:
        self.delay_s = delay_s
        self.bandwidth_bps = bandwidth_bps
        self.is_cut = False
        self.pipes: dict[Pipe, None] = {}
        self._rotation: deque[Pipe] = deque()
        self._is_busy = False

    @property
    def window_nbytes(self) -> int:
        return WINDOW_NBYTES + int((self.bandwidth_bps or 0.0) * self.delay_s / 8)

    def heal(self) -> None:
        """Let pass again, first what the cut has held."""
        self.is_cut = False
        for pipe in list(self.pipes):
            pipe.release()

    def carry(self, pipe: "Pipe", chunk: bytes | None) -> None:
        """Send `chunk` when it is the pipe's turn."""
        if self.bandwidth_bps is None and not self._is_busy:
            pipe.travel(chunk)
            return
        if not pipe.queued:
            self._rotation.append(pipe)
        pipe.queued.append(chunk)
        if not self._is_busy:
            self._send_next()

    def _send_next(self) -> None:
        while self._rotation and not self._rotation[0].queued:  # those that died in the queue
            self._rotation.popleft()
        self._is_busy = bool(self._rotation)
        if self._is_busy:
            pipe = self._rotation.popleft()
            chunk = pipe.queued.popleft()
            if pipe.queued:
                self._rotation.append(pipe)
            takes_s = 8 * len(chunk or b"") / self.bandwidth_bps if self.bandwidth_bps is not None else 0.0
            asyncio.get_running_loop().call_later(takes_s, self._sent, pipe, chunk)

    def _sent(self, pipe: "Pipe", chunk: bytes | None) -> None:
        pipe.travel(chunk)
        self._send_next()


class Pipe:
    """One direction of one stream: chunks under way, chunks arrived, and how it ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        link.pipes[self] = None
        self.queued: deque[bytes | None] = deque()  # not yet on the link
        self._under_way: deque[bytes | None] = deque()
        self._num_held = 0  # due, but the link is cut
        self._due_s = 0.0
        self._arrived: deque[memoryview] = deque()
        self._num_bytes = 0
        self._is_ended = False
        self._send_error: str | None = None
        self._recv_error: str | None = None
        self._farewell: str | None = None  # what the other end learns when the link lets it
        self._changed = asyncio.Event()

    async def put(self, chunk: bytes) -> None:
        """Send `chunk` once there is room."""
        while self._send_error is None and self._num_bytes and self._num_bytes + len(chunk) > self._link.window_nbytes:
            await self._change()
        if self._send_error is not None:
            raise PeerError(self._send_error)
        self._num_bytes += len(chunk)
        self._link.carry(self, chunk)

    async def take_into(self, buffer: memoryview) -> int:
        """Receive what has arrived; wait while nothing has."""
        while not (self._arrived or self._is_ended or self._recv_error):
            await self._change()
        if self._recv_error is not None:
            raise PeerError(self._recv_error)
        filled = 0
        while self._arrived and filled < len(buffer):
            chunk = self._arrived.popleft()
            num_bytes = min(len(chunk), len(buffer) - filled)
            buffer[filled : filled + num_bytes] = chunk[:num_bytes]
            if num_bytes < len(chunk):
                self._arrived.appendleft(chunk[num_bytes:])
            filled += num_bytes
        self._num_bytes -= filled
        self._changed.set()
        return filled

    def end(self, reason: str) -> None:
        """Close in order from the sending side: the reader gets 0 after the bytes under way."""
        if self._send_error is None:
            self._send_error = reason
            self._link.carry(self, None)
        self._changed.set()

    def abandon(self, reason: str, farewell: str) -> None:
        """Close from the reading side. The sender fails from now on, or once a cut link heals."""
        self._recv_error = self._recv_error or reason
        self._arrived.clear()
        self._tell(farewell)

    def reset(self, reason: str, farewell: str) -> None:
        """Die from the sending side. The reader fails at once, or once a cut link heals."""
        self._send_error = self._send_error or reason
        self.queued.clear()
        self._tell(farewell)

    def release(self) -> None:
        """Let arrive what the link's cut has held."""
        for _ in range(self._num_held):
            self._arrive()
        self._num_held = 0
        if self._farewell is not None:
            self._tell(self._farewell)

    def _tell(self, farewell: str) -> None:
        self._farewell = farewell
        if not self._link.is_cut:
            self._send_error = self._send_error or farewell
            self._recv_error = self._recv_error or farewell
            self._link.pipes.pop(self, None)
        self._changed.set()

    def travel(self, chunk: bytes | None) -> None:
        """Let `chunk`, which has left the sender, arrive after the link's delay."""
        loop = asyncio.get_running_loop()
        self._under_way.append(chunk)
        self._due_s = max(self._due_s, loop.time() + self._link.delay_s)  # order holds when a link becomes faster
        if self._due_s <= loop.time():
            self._due()
        else:
            loop.call_at(self._due_s, self._due)

    def _due(self) -> None:
        if self._link.is_cut:
            self._num_held += 1
        else:
            self._arrive()

    def _arrive(self) -> None:
        # Timers of equal time may fire in any order, so each lets the first chunk arrive, not its own.
        chunk = self._under_way.popleft()
        if chunk is None:
            self._is_ended = True
            self._link.pipes.pop(self, None)
        elif self._recv_error is None:
            self._arrived.append(memoryview(chunk))
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
