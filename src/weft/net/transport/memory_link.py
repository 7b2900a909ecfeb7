"""What the links of the memory network do with bytes.

    sender's line up -> the link's own line -> delay, jitter, loss -> receiver's line down

A `Line` is a bottleneck: it passes one chunk at a time, which occupies it for its size over the bandwidth, and the
streams that have something to send take turns. Where two peers' streams share a line, they share its bandwidth. A
`Link` is one direction between two peers; a `Pipe` is one direction of one stream over it. Bytes sent and not yet read
are bounded, so a slow reader holds its sender back. A chunk of None is the orderly end.

Streams lose nothing, as over TCP: a lost packet costs time. It is sent again after a round trip, or after RTO_S where
too few follow it to show the gap, and everything behind it in its stream waits. A stream over a lossy link is no faster
than MSS / RTT * sqrt(3 / (2 p)) (Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm",
1997, equation 3); another stream beside it is as fast again.

What is under way belongs to nobody (each timer has an empty context), so it arrives also while its sender is frozen.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context

import numpy as np

from weft.errors import PeerError

WINDOW_NBYTES = 256 << 10  # sent and not yet read, besides what the link itself holds
CHUNK_NBYTES = 64 << 10  # how much one stream sends at most before another on the same line gets its turn
TURN_S = 0.02  # and for how long: on a slow line a short message does not wait for long ones
MSS_NBYTES = 1448  # of a packet over Ethernet
RTO_S = 0.2  # Linux's least retransmission timeout
NUM_REPEATS = 3  # acknowledgements that show a gap at once

Chunk = bytes | None
Onward = Callable[[Chunk], None]


class Line:
    """A bottleneck that streams share.

    Args:
        bandwidth_bps: bits per second; None: instantaneous.
    """

    def __init__(self, bandwidth_bps: float | None = None) -> None:
        self.bandwidth_bps = bandwidth_bps
        self.delay_s = 0.0  # from one end to the other
        self.jitter_s = 0.0  # at most so much more, by chance
        self.loss = 0.0  # share of the packets that are lost
        self._waiting: dict[Pipe, deque[tuple[Chunk, Onward]]] = {}  # in the order of their turns
        self._is_busy = False

    def carry(self, pipe: "Pipe", chunk: Chunk, onward: Onward) -> None:
        """Pass `chunk` on when it is the pipe's turn."""
        if self.bandwidth_bps is None and not self._is_busy:
            onward(chunk)
            return
        self._waiting.setdefault(pipe, deque()).append((chunk, onward))
        if not self._is_busy:
            self._pass_next()

    def drop(self, pipe: "Pipe") -> None:
        """Forget what waits of a pipe."""
        self._waiting.pop(pipe, None)

    def _pass_next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            pipe = next(iter(self._waiting))
            queue = self._waiting.pop(pipe)
            chunk, onward = queue.popleft()
            if queue:
                self._waiting[pipe] = queue
            takes_s = 8 * len(chunk or b"") / self.bandwidth_bps if self.bandwidth_bps is not None else 0.0
            asyncio.get_running_loop().call_later(takes_s, self._passed, chunk, onward, context=Context())

    def _passed(self, chunk: Chunk, onward: Onward) -> None:
        onward(chunk)
        self._pass_next()


class Link:
    """One direction between two peers. Delays and jitters of its three lines add up; a packet must get past them all.

    Args:
        up: what leaves the sender to anybody passes it.
        down: what reaches the receiver from anybody passes it.
        make_luck: gives what decides jitter and loss, where there are any.
    """

    def __init__(self, up: Line, down: Line, make_luck: Callable[[], np.random.Generator]) -> None:
        self.up, self.own, self.down = up, Line(), down
        self.is_cut = False
        self.pipes: dict[Pipe, None] = {}
        self._make_luck = make_luck
        self._luck: np.random.Generator | None = None

    @property
    def delay_s(self) -> float:
        return self.up.delay_s + self.own.delay_s + self.down.delay_s

    @property
    def loss(self) -> float:
        return 1 - (1 - self.up.loss) * (1 - self.own.loss) * (1 - self.down.loss)

    @property
    def window_nbytes(self) -> int:
        return WINDOW_NBYTES + int(self._bandwidth_bps(0.0) * self.delay_s / 8)

    @property
    def chunk_nbytes(self) -> int:
        """How much a stream sends at a time."""
        return max(MSS_NBYTES, int(min(CHUNK_NBYTES, self._bandwidth_bps(math.inf) * TURN_S / 8)))

    def _bandwidth_bps(self, default: float) -> float:
        bounds = [line.bandwidth_bps for line in (self.up, self.own, self.down) if line.bandwidth_bps is not None]
        return min(bounds, default=default)

    def heal(self) -> None:
        """Let pass again, first what the cut has held."""
        self.is_cut = False
        for pipe in list(self.pipes):
            pipe.release()

    def stream_s(self, chunk: Chunk) -> float:
        """Return how long one stream takes to send `chunk`, however fast the lines are."""
        loss = self.loss
        if not loss or not chunk:
            return 0.0
        return len(chunk) / MSS_NBYTES * 2 * self.delay_s / math.sqrt(1.5 / loss)

    def travel_s(self, chunk: Chunk) -> float:
        """Return how long `chunk` is under way once it has left."""
        late_s, delay_s, loss = 0.0, self.delay_s, self.loss
        if jitter_s := self.up.jitter_s + self.own.jitter_s + self.down.jitter_s:
            late_s = jitter_s * self._draw()
        if loss:
            num_packets = math.ceil(len(chunk or b"") / MSS_NBYTES) or 1
            if self._draw() < 1 - (1 - loss) ** num_packets:
                late_s += 2 * delay_s if num_packets > NUM_REPEATS else max(RTO_S, 2 * delay_s)
        return delay_s + late_s

    def _draw(self) -> float:
        if self._luck is None:
            self._luck = self._make_luck()
        return self._luck.random()


class Pipe:
    """One direction of one stream: chunks under way, chunks arrived, and how it ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        link.pipes[self] = None
        self._under_way: deque[Chunk] = deque()
        self._num_held = 0  # due, but the link is cut
        self._sent_s = 0.0  # when the stream itself has sent what it was given
        self._due_s = 0.0
        self._arrived: deque[memoryview] = deque()
        self._num_bytes = 0
        self._is_ended = False
        self._send_error: str | None = None
        self._recv_error: str | None = None
        self._farewell: str | None = None  # what the other end learns when the link lets it
        self._changed = asyncio.Event()

    @property
    def chunk_nbytes(self) -> int:
        return self._link.chunk_nbytes

    async def put(self, chunk: bytes) -> None:
        """Send `chunk` once there is room."""
        while self._send_error is None and self._num_bytes and self._num_bytes + len(chunk) > self._link.window_nbytes:
            await self._change()
        if self._send_error is not None:
            raise PeerError(self._send_error)
        self._num_bytes += len(chunk)
        self._leave(chunk)

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
            self._leave(None)
        self._changed.set()

    def abandon(self, reason: str, farewell: str) -> None:
        """Close from the reading side. The sender fails from now on, or once a cut link heals."""
        self._recv_error = self._recv_error or reason
        self._arrived.clear()
        self._tell(farewell)

    def reset(self, reason: str, farewell: str) -> None:
        """Die from the sending side. The reader fails at once, or once a cut link heals."""
        self._send_error = self._send_error or reason
        for line in (self._link.up, self._link.own):
            line.drop(self)
        self._tell(farewell)

    def release(self) -> None:
        """Let arrive what the link's cut has held."""
        for _ in range(self._num_held):
            self._reach()
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

    # --- on the way ---

    def _leave(self, chunk: Chunk) -> None:
        link = self._link
        link.up.carry(self, chunk, lambda chunk: link.own.carry(self, chunk, self._travel))

    def _travel(self, chunk: Chunk) -> None:
        """The sender's side is passed: be there after the link's delay, in order."""
        loop = asyncio.get_running_loop()
        self._under_way.append(chunk)
        self._sent_s = max(self._sent_s, loop.time()) + self._link.stream_s(chunk)
        self._due_s = max(self._due_s, self._sent_s + self._link.travel_s(chunk))
        if self._due_s <= loop.time():
            self._due()
        else:
            loop.call_at(self._due_s, self._due, context=Context())

    def _due(self) -> None:
        if self._link.is_cut:
            self._num_held += 1
        else:
            self._reach()

    def _reach(self) -> None:
        # Timers of equal time may fire in any order, so each lets the first chunk arrive, not its own.
        self._link.down.carry(self, self._under_way.popleft(), self._arrive)

    def _arrive(self, chunk: Chunk) -> None:
        if chunk is None:
            self._is_ended = True
            self._link.pipes.pop(self, None)
        elif self._recv_error is None:
            self._arrived.append(memoryview(chunk))
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
