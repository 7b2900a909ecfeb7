"""The transport of simulations and tests: peers of one process, joined by links that a scenario can script.

    sender's line up -> the link's own line -> delay, jitter, loss -> receiver's line down

A `Line` is a bottleneck: it passes one chunk at a time, which occupies it for its size over the bandwidth, and the
streams that have something to send take turns. Where two peers' streams share a line, they share its bandwidth. A
`Link` is one direction between two peers; a `Pipe` is one direction of one stream over it. Bytes sent and not yet read
are bounded, so a slow reader holds its sender back. A chunk of None is the orderly end.

Streams lose nothing, as over TCP: a lost packet costs time. It is sent again after a round trip, or after RTO_S where
too few follow it to show the gap, and everything behind it in its stream waits. A stream over a lossy link is no faster
than MSS / RTT * sqrt(3 / (2 p)) (Mathis et al., "The macroscopic behavior of the TCP congestion avoidance algorithm",
1997, equation 3); another stream beside it is as fast again.

Every wait is a timer or a future of the event loop: on a `VirtualClock` a scenario takes no time, and two runs do the
same in the same order. What is under way belongs to nobody (each timer has an empty context), so it arrives also while
its sender is frozen.

Faults: `partition` makes a link swallow time (bytes wait as TCP would retransmit them, dials time out), `heal`
lets them pass, `kill` resets every stream of a peer as a dead process does.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context

import numpy as np

from weft import rng
from weft.errors import DialError, PeerError
from weft.ids import PeerId, is_named, short
from weft.net.transport.base import Accept, Lane
from weft.tasks import Tasks
from weft.wire import Buffer

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
        self._waiting: dict[object, deque[tuple[Chunk, Onward]]] = {}  # by stream, in the order of their turns
        self._is_busy = False

    def carry(self, pipe: object, chunk: Chunk, onward: Onward) -> None:
        """Pass `chunk` of a pipe, or of what else takes turns, on when it is its turn."""
        if self.bandwidth_bps is None and not self._is_busy:
            onward(chunk)
            return
        self._waiting.setdefault(pipe, deque()).append((chunk, onward))
        if not self._is_busy:
            self._pass_next()

    def drop(self, pipe: object) -> None:
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


SCHEME = "memory://"
DIAL_TIMEOUT_S = 5.0  # a dial into a partition takes this long to fail, as on a real network


class MemoryNetwork:
    """The peers of one simulation and the links between them.

    Args:
        delay_s: seconds from one peer to another, for every link not set otherwise.
        bandwidth_bps: bits per second of such a link in each direction; None: instantaneous.
        jitter_s: what is sent over such a link is late by up to so much.
        loss: share of the packets, 0 to 1, that have to be sent again.
        seed: of jitter and loss.
    """

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        bandwidth_bps: float | None = None,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._delay_s = delay_s
        self._bandwidth_bps = bandwidth_bps
        self._jitter_s = jitter_s
        self._loss = loss
        self._seed = seed
        self._lines: dict[PeerId, tuple[Line, Line]] = {}  # up, down
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self.listening: dict[PeerId, MemoryTransport] = {}

    def transport(self, peer: PeerId) -> "MemoryTransport":
        """Return a transport through which `peer` takes part, at first or after it was killed."""
        return MemoryTransport(self, peer)

    def lines(self, peer: PeerId) -> tuple[Line, Line]:
        """Return what all that `peer` sends passes, and all that it receives."""
        return self._lines.setdefault(peer, (Line(), Line()))

    def link(self, source: PeerId, target: PeerId) -> Link:
        """Return the link in that direction."""
        if (source, target) not in self._links:
            up, down = self.lines(source)[0], self.lines(target)[1]
            made = Link(up, down, lambda: rng.stream(self._seed, "link", source, target))
            made.own.delay_s, made.own.bandwidth_bps = self._delay_s, self._bandwidth_bps
            made.own.jitter_s, made.own.loss = self._jitter_s, self._loss
            self._links[source, target] = made
        return self._links[source, target]

    def set_line(
        self,
        peer: PeerId,
        *,
        up_bps: float | None,
        down_bps: float | None,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        """Change what all that `peer` sends or receives passes, besides each link's own line.

        Args:
            up_bps: bits per second that it can send; None: any.
            delay_s: one way, as are jitter and loss: those of a link.
        """
        for line, bandwidth_bps in zip(self.lines(peer), (up_bps, down_bps), strict=True):
            line.bandwidth_bps, line.delay_s, line.jitter_s, line.loss = bandwidth_bps, delay_s, jitter_s, loss

    def partition(self, a: PeerId, b: PeerId) -> None:
        """Let nothing pass between `a` and `b`: streams fall silent, dials time out."""
        self.link(a, b).is_cut = self.link(b, a).is_cut = True

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo `partition`: what was sent meanwhile arrives now."""
        for one_way in (self.link(a, b), self.link(b, a)):
            one_way.heal()

    def kill(self, peer: PeerId) -> None:
        """Reset every stream of `peer` and let no dial reach it, as when its process dies.

        Those behind a partition do not hear of it. The peer comes back with a new `transport`.
        """
        transport = self.listening.pop(peer, None)
        if transport is not None:
            transport.reset()

    def forget(self, transport: "MemoryTransport") -> None:
        """Let no dial reach `transport` any more."""
        if self.listening.get(transport.peer) is transport:
            del self.listening[transport.peer]


class MemoryTransport:
    name = "memory"

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        self._network = network
        self.peer = peer
        self._tasks = Tasks()
        self._streams: dict[MemoryStream, None] = {}
        self._accept: Accept | None = None
        self._context = Context()  # of the process that listens
        self._end: str | None = None  # why this transport takes no further part
        self.on_send: Callable[[bytes], bytes] = _as_it_is  # what is really sent: a scenario may damage it

    async def start(self, accept: Accept) -> tuple[str, ...]:
        self._accept = accept
        self._context = copy_context()
        self._network.listening[self.peer] = self
        return (SCHEME + self.peer,)

    async def dial(self, peer: PeerId, address: str, lane: Lane) -> "MemoryStream":
        if self._end is not None:
            raise DialError(f"cannot dial {address}: {self._end}")
        target = PeerId(address.removeprefix(SCHEME))
        outward, homeward = self._network.link(self.peer, target), self._network.link(target, self.peer)
        if outward.is_cut or homeward.is_cut:
            await asyncio.sleep(DIAL_TIMEOUT_S)
            raise DialError(f"{address} did not answer within {DIAL_TIMEOUT_S:g} s")
        await asyncio.sleep(outward.delay_s + homeward.delay_s)
        listener = self._network.listening.get(target)
        if listener is None:
            raise DialError(f"nothing listens at {address}")
        if not is_named(target, peer):
            raise DialError(f"{address} is {short(target)}, not {short(peer)}")
        there, back = Pipe(outward), Pipe(homeward)
        listener._take(MemoryStream(self.peer, back, there, listener, source=self.peer), lane)
        mine = MemoryStream(target, there, back, self)
        self._streams[mine] = None
        return mine

    async def aclose(self) -> None:
        self._end = self._end or "this transport is closed"
        self._network.forget(self)
        await self._tasks.aclose()
        for stream in list(self._streams):
            await stream.close()

    def reset(self) -> None:
        """Break every stream without a farewell, for good. `MemoryNetwork.kill` calls it."""
        self._end = "this peer was killed"
        self._tasks.cancel()
        for stream in list(self._streams):
            stream.abort()

    def _take(self, stream: "MemoryStream", lane: Lane) -> None:
        assert self._accept is not None  # only listening transports are found
        self._streams[stream] = None
        self._context.run(self._tasks.spawn, self._accept(stream, lane))


class MemoryStream:
    """One end of a stream: writes to `outgoing`, reads from `incoming`."""

    is_here = False

    def __init__(self, peer: PeerId, outgoing: Pipe, incoming: Pipe, owner: MemoryTransport, source: str = "") -> None:
        self.source = source
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._owner = owner
        self._sending = asyncio.Lock()

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        async with self._sending:
            size = self._outgoing.chunk_nbytes
            for start in range(0, len(view), size):
                await self._outgoing.put(self._owner.on_send(bytes(view[start : start + size])))

    async def recv_into(self, buffer: memoryview) -> int:
        return await self._incoming.take_into(buffer)

    async def close(self) -> None:
        if self._release():
            closed_here = f"stream to {short(self.peer)} was closed on this side"
            self._outgoing.end(closed_here)
            self._incoming.abandon(closed_here, farewell="stream was closed by the peer")

    def abort(self) -> None:
        """End the stream as a crash does."""
        if self._release():
            self._outgoing.reset("this peer was killed", farewell="connection reset by the peer")
            self._incoming.abandon("this peer was killed", farewell="connection reset by the peer")

    def _release(self) -> bool:
        return self._owner._streams.pop(self, False) is None


def _as_it_is(chunk: bytes) -> bytes:
    return chunk
