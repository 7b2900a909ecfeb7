"""The transport of simulations and tests: peers of one process, joined by links that a scenario can script.

A `MemoryNetwork` is the whole network; `memory_link` says what a link does with bytes. Every wait is a timer or a
future of the event loop: on a `VirtualClock` a scenario takes no time, and two runs do the same in the same order.

Faults: `partition` makes a link swallow time (bytes wait as TCP would retransmit them, dials time out), `heal`
lets them pass, `kill` resets every stream of a peer as a dead process does.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context

from weft import rng
from weft.errors import DialError
from weft.ids import PeerId, short
from weft.net.transport.base import Accept, Lane, accepted
from weft.net.transport.memory_link import Line, Link, Pipe
from weft.tasks import Tasks
from weft.wire import Buffer

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
        self._listening: dict[PeerId, MemoryTransport] = {}

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
            delay_s: one way, as are jitter and loss: those of `set_link`.
        """
        for line, bandwidth_bps in zip(self.lines(peer), (up_bps, down_bps), strict=True):
            line.bandwidth_bps, line.delay_s, line.jitter_s, line.loss = bandwidth_bps, delay_s, jitter_s, loss

    def set_link(
        self,
        a: PeerId,
        b: PeerId,
        *,
        delay_s: float = 0.0,
        bandwidth_bps: float | None = None,
        jitter_s: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        """Change the link between `a` and `b` in both directions, for what is sent from now on.

        Args:
            jitter_s: what is sent is late by up to so much.
            loss: share of the packets, 0 to 1, that have to be sent again.
        """
        for one_way in (self.link(a, b), self.link(b, a)):
            own = one_way.own
            own.bandwidth_bps, own.delay_s, own.jitter_s, own.loss = bandwidth_bps, delay_s, jitter_s, loss

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
        transport = self._listening.pop(peer, None)
        if transport is not None:
            transport.reset()

    def _listener(self, peer: PeerId) -> "MemoryTransport | None":
        return self._listening.get(peer)

    def _listen(self, transport: "MemoryTransport") -> None:
        self._listening[transport.peer] = transport

    def _forget(self, transport: "MemoryTransport") -> None:
        if self._listening.get(transport.peer) is transport:
            del self._listening[transport.peer]


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
        self._network._listen(self)
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
        listener = self._network._listener(target)
        if listener is None:
            raise DialError(f"nothing listens at {address}")
        if target != peer:
            raise DialError(f"{address} is {short(target)}, not {short(peer)}")
        there, back = Pipe(outward), Pipe(homeward)
        listener._take(MemoryStream(self.peer, back, there, listener, source=self.peer), lane)
        mine = MemoryStream(target, there, back, self)
        self._streams[mine] = None
        return mine

    async def aclose(self) -> None:
        self._end = self._end or "this transport is closed"
        self._network._forget(self)
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
        self._context.run(self._tasks.spawn, accepted(self._accept, stream, lane))


class MemoryStream:
    """One end of a stream: writes to `outgoing`, reads from `incoming`."""

    def __init__(self, peer: PeerId, outgoing: Pipe, incoming: Pipe, owner: MemoryTransport, source: str = "") -> None:
        self.source = source
        self._peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._owner = owner
        self._sending = asyncio.Lock()

    @property
    def peer(self) -> PeerId:
        return self._peer

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
            closed_here = f"stream to {short(self._peer)} was closed on this side"
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
