"""How fast one machine sends and receives over all its connections, and how much in all: a wrapper of transports.

    valve = Valve(clock, upload_bps=20e6)
    transports = [Throttled(transport, valve) for transport in transports]

A bucket fills at the rate that is allowed and may be overdrawn by what passes last: a control frame, which stays whole,
or a slice of a blob, which is a twentieth of a second long. Whoever comes next waits until it is full again, control
before bulk, so heartbeats and votes pass beside any number of blobs. What is received is slowed by reading later: the
transport's own flow control slows the sender. Control is read at once, and counts.

Bytes are those that a stream takes and gives. What the transport adds around them, some 5 %, is not seen.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from weft.clock import Clock
from weft.errors import PeerError
from weft.ids import PeerId
from weft.net.transport.base import Accept, Lane, Stream, Transport
from weft.wire import Buffer

# Of bulk at a time: so long a control frame waits at most, and so short a pause no peer takes for an end.
SLICE_S = 0.05
MIN_SLICE_NBYTES, MAX_SLICE_NBYTES = 512, 64 << 10
BURST_S = 0.1  # of silence is saved up


class Bucket:
    """A rate that all streams of one machine share.

    Args:
        rate_bps: bits per second; above 0.
    """

    def __init__(self, rate_bps: float, clock: Clock) -> None:
        self._clock = clock
        self._bytes_per_s = rate_bps / 8
        self.slice_nbytes = int(min(max(self._bytes_per_s * SLICE_S, MIN_SLICE_NBYTES), MAX_SLICE_NBYTES))
        self._level, self._filled_at = 0.0, clock.now()
        self._waiting: dict[Lane, deque[tuple[int, asyncio.Future[None]]]] = {"control": deque(), "bulk": deque()}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, nbytes: int, lane: Lane) -> None:
        """Wait for this call's turn, and take `nbytes` out."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append((nbytes, turn))
        self._let_pass()
        await turn

    def drain(self, nbytes: int) -> None:
        """Take out what has passed already."""
        self._fill()
        self._level -= nbytes

    def _fill(self) -> None:
        now = self._clock.now()
        most = self._bytes_per_s * BURST_S
        self._level, self._filled_at = min(most, self._level + self._bytes_per_s * (now - self._filled_at)), now

    def _let_pass(self) -> None:
        self._fill()
        while self._level >= 0 and (queue := self._waiting["control"] or self._waiting["bulk"]):
            nbytes, turn = queue.popleft()
            if not turn.done():  # else who waited was cancelled
                self._level -= nbytes
                turn.set_result(None)
        if self._timer is None and any(self._waiting.values()):
            # Never 0: on a virtual clock the same moment would come again and again.
            wait_s = max(-self._level / self._bytes_per_s, 1e-5)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._let_pass()


class Ration:
    """Bytes that may still be moved, both ways together, until somebody grants more.

    Args:
        left_nbytes: None: any number.
        on_spent: called once when nothing is left.
    """

    def __init__(self, left_nbytes: int | None, on_spent: Callable[[], None]) -> None:
        self.left_nbytes = left_nbytes
        self.moved_nbytes = 0
        self._on_spent = on_spent
        self._is_told = False

    @property
    def is_spent(self) -> bool:
        return self.left_nbytes is not None and self.left_nbytes <= 0

    def grant(self, left_nbytes: int | None) -> None:
        self.left_nbytes, self._is_told = left_nbytes, False

    def spend(self, nbytes: int) -> None:
        self.moved_nbytes += nbytes
        if self.left_nbytes is not None:
            self.left_nbytes -= nbytes
            if self.is_spent and not self._is_told:
                self._is_told = True
                self._on_spent()


class Valve:
    """What all streams of one machine pass.

    Args:
        upload_bps, download_bps: bits per second; None: any.
        ration: when it is spent, no blob passes any more; control does, so that a peer can say goodbye.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        upload_bps: float | None = None,
        download_bps: float | None = None,
        ration: Ration | None = None,
    ) -> None:
        self._up = None if upload_bps is None else Bucket(upload_bps, clock)
        self._down = None if download_bps is None else Bucket(download_bps, clock)
        self._ration = ration

    @property
    def slice_nbytes(self) -> int | None:
        """Return how much of a blob is sent at a time; None: all of it."""
        if self._up is not None:
            return self._up.slice_nbytes
        return None if self._ration is None else MAX_SLICE_NBYTES

    async def before_send(self, nbytes: int, lane: Lane) -> None:
        """Wait until so many bytes may be sent.

        Raises:
            PeerError: none may.
        """
        self._check(lane)
        if self._up is not None:
            await self._up.take(nbytes, lane)
        if self._ration is not None:
            self._ration.spend(nbytes)

    async def before_receive(self, lane: Lane) -> int | None:
        """Wait until a piece of a blob may be read; return how large a piece, None: any.

        Raises:
            PeerError: none may.
        """
        self._check(lane)
        if self._down is None or lane == "control":
            return None
        await self._down.take(0, lane)
        return self._down.slice_nbytes

    def received(self, nbytes: int) -> None:
        if self._down is not None:
            self._down.drain(nbytes)
        if self._ration is not None:
            self._ration.spend(nbytes)

    def _check(self, lane: Lane) -> None:
        if lane == "bulk" and self._ration is not None and self._ration.is_spent:
            raise PeerError("this machine has moved as many bytes as it may in a day")


class ThrottledStream:
    def __init__(self, stream: Stream, lane: Lane, valve: Valve) -> None:
        self.peer, self.source, self.is_here = stream.peer, stream.source, False
        self._stream = stream
        self._lane: Lane = lane
        self._valve = valve
        self._sending = asyncio.Lock()  # what one call sends stays in one piece

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        step = self._valve.slice_nbytes if self._lane == "bulk" else None
        async with self._sending:
            for start in range(0, len(view), step or max(len(view), 1)):
                piece = view[start : start + step] if step else view
                await self._valve.before_send(len(piece), self._lane)
                await self._stream.send(piece)

    async def recv_into(self, buffer: memoryview) -> int:
        most = await self._valve.before_receive(self._lane)
        num_bytes = await self._stream.recv_into(buffer if most is None else buffer[:most])
        self._valve.received(num_bytes)
        return num_bytes

    async def close(self) -> None:
        await self._stream.close()


class Throttled:
    """A transport all of whose streams pass a valve, which several transports may share."""

    def __init__(self, transport: Transport, valve: Valve) -> None:
        self.name = transport.name
        self._transport = transport
        self._valve = valve

    async def start(self, accept: Accept) -> tuple[str, ...]:
        async def throttled(stream: Stream, lane: Lane) -> None:
            await accept(ThrottledStream(stream, lane, self._valve), lane)

        return await self._transport.start(throttled)

    async def dial(self, peer: PeerId, address: str, lane: Lane) -> Stream:
        return ThrottledStream(await self._transport.dial(peer, address, lane), lane, self._valve)

    async def aclose(self) -> None:
        await self._transport.aclose()
