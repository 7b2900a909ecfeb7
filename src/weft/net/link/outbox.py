"""Frames that wait for their turn on one stream.

One writer task sends, so a caller that gives up never cuts a frame in half, and small frames that wait together
leave in one `send`. The queue is bounded in bytes: whoever wants to add to a full one waits, or is told.

It does not know what a frame means.
"""

import asyncio
from collections import deque

from weft.errors import PeerError
from weft.ids import short
from weft.net.link.traffic import Meter
from weft.net.transport.base import Stream
from weft.net.transport.frame import FRAME_S, encode_frame

MAX_QUEUED_NBYTES = 8 << 20  # eight of the largest frames; a peer that reads so slowly is no use
MAX_JOINED_NBYTES = 64 << 10  # small frames joined into one send


class Outbox:
    def __init__(self, stream: Stream, meter: Meter) -> None:
        self._stream = stream
        self._meter = meter
        self._frames: deque[bytes] = deque()
        self._queued_nbytes = 0  # including what is being sent
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self._queued_nbytes < MAX_QUEUED_NBYTES

    async def room(self) -> None:
        """Wait until a frame may be added, or for the end. Add it before awaiting anything else."""
        while not (self.has_room or self._is_closed):
            await self._change()

    def add(self, payload: bytes) -> None:
        """Queue `payload` as one frame, to be sent after those before it."""
        frame = encode_frame(payload)
        self._frames.append(frame)
        self._queued_nbytes += len(frame)
        self._changed.set()

    async def flush(self) -> None:
        """Wait until the transport has taken everything queued."""
        while self._queued_nbytes and not self._is_closed:
            await self._change()

    def close(self) -> None:
        """Forget what is queued and let everybody who waits go on."""
        self._is_closed = True
        self._frames.clear()
        self._changed.set()

    async def run(self) -> None:
        """Send what is queued, for ever.

        Raises:
            PeerError: the other side is gone, or takes longer than `FRAME_S` for what is sent together.
        """
        while True:
            while not self._frames:
                await self._change()
            data = self._take()
            limit = asyncio.timeout(FRAME_S)
            try:
                async with limit:
                    await self._stream.send(data)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise PeerError(f"{short(self._stream.peer)} did not take a frame within {FRAME_S:g} s") from None
            self._meter.sent(len(data))
            self._queued_nbytes -= len(data)
            self._changed.set()

    async def _change(self) -> None:
        # Whoever waits has just looked at the state, so clearing loses no news: `set` wakes all who wait by then.
        self._changed.clear()
        await self._changed.wait()

    def _take(self) -> bytes:
        joined = [self._frames.popleft()]
        num_bytes = len(joined[0])
        while self._frames and num_bytes + len(self._frames[0]) <= MAX_JOINED_NBYTES:
            joined.append(self._frames.popleft())
            num_bytes += len(joined[-1])
        return joined[0] if len(joined) == 1 else b"".join(joined)
