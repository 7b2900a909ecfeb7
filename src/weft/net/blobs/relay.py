"""Reaching a peer through another that reaches both: the member in the middle, and the transport of the two ends.

    via://<relay>

The relay is a member with a direct link to both. A bulk stream to it is asked to go on to the peer; it opens one
there, says for whom, and copies bytes both ways until either side ends (`Relay`). Inside that stream the two ends speak
TLS 1.3 and prove their keys as over a socket (`ViaTransport`; `tls_handshake`, with lane and certificate). So the relay
learns who speaks to whom, when and how much, and nothing else, and one that puts itself in the place of the other end
fails at the key.

What a relay gives is bounded: streams in all and of one peer, bytes per second over all of them together, seconds of
silence. It passes on to peers to which a direct link stands and to nobody else, so that no chain of relays can form.

It is no way to be found at: `start` returns no address, and nobody is told one. Who could be a relay is asked anew
whenever no direct way worked.

Failure:
- the relay or either of its links goes away, or what it passes on falls silent: the stream breaks, and the dialler
  looks for a way anew.
- a side does not read: nothing moves, and after `idle_s` the stream ends.
- a member asks to reach whom the relay does not reach, or for more than it gives: it is told why (`DialError`).
"""

import asyncio
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeVar

import msgspec

from weft.clock import Clock
from weft.config import Config
from weft.errors import CallFailed, DialError, NetError, PeerError, Refused, WireError
from weft.ids import PeerId, is_start, short
from weft.keys import Identity
from weft.net.blobs.bulk import Bulk, BulkStreams
from weft.net.link.links import VIA, Links
from weft.net.link.rpc import Handlers
from weft.net.messages import MAX_ANSWER_CHARS, Reaches, RelayAnswer, Relayed, RelayPlease, WhoReaches
from weft.net.transport.base import Accept, Lane, OnDrop, Stream, ignore_drop
from weft.net.transport.frame import write_frame
from weft.net.transport.limits import Gate, Handshakes
from weft.net.transport.rate_limit import Bucket
from weft.net.transport.tls_certificate import client_context, make_certificate, server_context
from weft.net.transport.tls_handshake import admit, introduce
from weft.tasks import Tasks, within
from weft.wire import Buffer, digest, encode

OPEN_S = 6.0  # for a stream to the target: below the time in which a dial is given up


class RelayConfig(Config, frozen=True, kw_only=True):
    """What this machine passes on between members that cannot reach each other."""

    is_on: Annotated[bool, msgspec.Meta(description="pass on for others; what passes is encrypted between the two")] = (
        True
    )
    max_streams: Annotated[int, msgspec.Meta(ge=1, le=4096, description="streams at a time, over all members")] = 64
    max_streams_per_peer: Annotated[int, msgspec.Meta(ge=1, le=4096, description="the same for one member")] = 24
    max_bps: Annotated[
        float, msgspec.Meta(ge=1e4, description="bits per second of all of them together; each is received and sent")
    ] = 20e6
    idle_s: Annotated[float, msgspec.Meta(ge=5, le=3600, description="seconds of silence that end a stream")] = 60.0


NO_RELAY = RelayConfig(is_on=False)


class Relay:
    """What one peer passes on."""

    def __init__(
        self, config: RelayConfig, links: Links, streams: BulkStreams, handlers: Handlers, clock: Clock
    ) -> None:
        self._config = config
        self._links = links
        self._streams = streams
        self._bucket = Bucket(config.max_bps, clock)  # of all streams together
        self._num_asked: Counter[PeerId] = Counter()
        self._passing: dict[asyncio.Task[None], tuple[PeerId, PeerId]] = {}
        self._tasks = Tasks()
        handlers.serve(WhoReaches, self._who_reaches)
        links.on_link(self._on_link)

    async def pass_on(self, bulk: Bulk, request: RelayPlease) -> None:
        """Pass on what comes on `bulk` to the peer it asks for, and back, until either ends."""
        source, target = bulk.peer, request.peer
        reason = self._objection(source, target)
        if reason:
            await _answer(bulk, reason)
            await bulk.close()
            return
        self._num_asked[source] += 1
        task = self._tasks.spawn(self._pass(bulk, request))
        self._passing[task] = (source, target)
        task.add_done_callback(lambda task: self._ended(task, source))
        await asyncio.wait([task])

    async def aclose(self) -> None:
        await self._tasks.aclose()

    async def _pass(self, bulk: Bulk, request: RelayPlease) -> None:
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    onward = await self._streams.open(request.peer)
            except (PeerError, NetError, Refused, TimeoutError) as error:
                why = f"no stream to {short(request.peer)} could be opened: {type(error).__name__}"
                await _answer(bulk, why)
                return
            try:
                await write_frame(onward, encode(Relayed(peer=bulk.peer, lane=request.lane)))
                await _answer(bulk, "")
                await self._copy_both(bulk, onward)
            finally:
                await onward.close()
        finally:
            await bulk.close()

    async def _copy_both(self, one: Bulk, other: Bulk) -> None:
        moved = asyncio.Event()
        ways = [self._copy(one, other, moved), self._copy(other, one, moved), self._until_idle(moved)]
        running = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in running:
                way.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _copy(self, source: Bulk, target: Bulk, moved: asyncio.Event) -> None:
        buffer = memoryview(bytearray(self._bucket.slice_nbytes))
        while num_bytes := await source.recv_into(buffer):
            moved.set()
            await self._bucket.take(num_bytes, "bulk")
            await target.send(buffer[:num_bytes])
            moved.set()

    async def _until_idle(self, moved: asyncio.Event) -> None:
        with suppress(TimeoutError):
            while True:
                moved.clear()
                async with asyncio.timeout(self._config.idle_s):
                    await moved.wait()

    def _objection(self, source: PeerId, target: PeerId) -> str:
        """Return why this peer does not pass on from `source` to `target`, or ''."""
        config = self._config
        if not config.is_on:
            return "it passes nothing on"
        if target == source or not self._is_direct(source):
            return "it passes on between two others only, each linked to it directly"
        if not self._is_direct(target):
            return f"it has no direct link to {short(target)}"
        if len(self._passing) >= config.max_streams:
            return f"it passes on {len(self._passing)} streams, as many as its owner allows"
        if self._num_asked[source] >= config.max_streams_per_peer:
            return f"it passes on {self._num_asked[source]} streams for you, as many as its owner allows for one peer"
        return ""

    def _is_direct(self, peer: PeerId) -> bool:
        link = self._links.get(peer)
        return link is not None and not link.is_relayed

    async def _who_reaches(self, peer: PeerId, question: WhoReaches) -> Reaches:
        return Reaches(is_reached=not self._objection(peer, question.peer))

    def _ended(self, task: "asyncio.Task[None]", source: PeerId) -> None:
        del self._passing[task]
        self._num_asked[source] -= 1
        if not self._num_asked[source]:
            del self._num_asked[source]

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:
            for task, ends in list(self._passing.items()):
                if peer in ends:
                    task.cancel()


async def _answer(bulk: Bulk, reason: str) -> None:
    with suppress(WireError, PeerError):
        await write_frame(bulk, encode(RelayAnswer(reason=reason[:MAX_ANSWER_CHARS])))


T = TypeVar("T")

PIECE_NBYTES = 128 << 10  # encrypted at a time: well below a millisecond
FAREWELL_TIMEOUT_S = 2.0
_CLOSED = "the stream was closed on this side"


class InnerStream:
    """One end of a TLS connection inside another stream, `carrier`. `peer` is set once it is proven.

    OpenSSL works on two buffers in memory here and never sees a socket, so the carrier may be any `Stream`, also one on
    a virtual clock. All of it runs in the event loop, in pieces small enough that others get their turn.

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
        self.is_here = False
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


SCHEME = VIA
ANSWER_S = 7.0  # for the relay, which opens a stream to the peer meanwhile
HANDSHAKE_S = 10.0
MAX_HALF_OPEN = 64
MAX_HALF_OPEN_PER_RELAY = 16
_CLOSE_TIMEOUT_S = 0.5  # how long `aclose` lets streams say farewell

OpenStream = Callable[[PeerId], Awaitable[Bulk]]


def relay_address(relay: PeerId) -> str:
    """Return the address of every peer that `relay` reaches."""
    return f"{SCHEME}://{relay}"


def relay_of(address: str) -> PeerId:
    """Return the relay that an address names.

    Raises:
        ValueError: it names none.
    """
    match = re.fullmatch(rf"{SCHEME}://([0-9a-f]{{64}})", address)
    if match is None:
        raise ValueError(f"{address[:200]!r} does not read {SCHEME}://<key of a peer>")
    return PeerId(match[1])


class ViaTransport:
    """The `via` transport of one peer.

    Args:
        open_stream: opens a bulk stream to a peer to which a direct link stands.
        on_drop: told (address, reason) of every relayed connection that proved no key.
    """

    name = SCHEME

    def __init__(self, identity: Identity, open_stream: OpenStream, on_drop: OnDrop = ignore_drop) -> None:
        self._identity = identity
        self._open_stream = open_stream
        self._tasks = Tasks()
        self._farewells = Tasks()
        gate: Gate[asyncio.Task[None]] = Gate(MAX_HALF_OPEN, MAX_HALF_OPEN_PER_RELAY)
        self._handshakes = Handshakes(self._tasks, gate, HANDSHAKE_S, on_drop)
        self._streams: dict[InnerStream, None] = {}
        self._accept: Accept | None = None
        self._certificate = b""
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None  # server's and client's, once needed

    async def start(self, accept: Accept) -> tuple[str, ...]:
        self._accept = accept
        return ()

    async def dial(self, peer: PeerId, address: str, lane: Lane) -> InnerStream:
        if self._accept is None:
            raise DialError(f"cannot dial {address}: this transport is not running")
        if is_start(peer):
            raise DialError(f"{address[:200]}: others are asked for a whole key, and {short(peer)} is the start of one")
        try:
            relay = relay_of(address)
            bulk = await self._open_stream(relay)
        except (PeerError, NetError, Refused, ValueError) as error:
            raise DialError(f"{address[:200]}: {error}") from None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await self._introduce(bulk, peer, lane)
        except TimeoutError:
            raise DialError(f"{short(peer)} did not answer through {short(relay)} within {HANDSHAKE_S:g} s") from None
        except (PeerError, OSError) as error:
            raise DialError(f"through {short(relay)}: {error}") from None

    def take(self, bulk: Bulk, arrival: Relayed) -> None:
        """Take a stream that a relay has opened to this peer for another."""
        if self._accept is None:
            raise PeerError("this peer takes no relayed streams")
        where = f"{SCHEME} {short(bulk.peer)}"
        verify = partial(self._verified, bulk, arrival.lane, where)
        self._handshakes.begin(relay_address(bulk.peer), where, verify, self._accept)

    async def aclose(self) -> None:
        self._accept = None
        await self._tasks.aclose()
        for stream in list(self._streams):
            await stream.close()
        await self._farewells.aclose(grace_s=_CLOSE_TIMEOUT_S)

    async def _introduce(self, bulk: Bulk, peer: PeerId, lane: Lane) -> InnerStream:
        """Ask the relay for `peer`, then do the client's half of the handshake with that."""
        try:
            await write_frame(bulk, encode(RelayPlease(peer=peer, lane=lane)))
            answer: RelayAnswer | None = await bulk.read(RelayAnswer, ANSWER_S, "answer")
            if answer is None:
                raise PeerError("the relay hung up")
            if answer.reason:
                raise CallFailed(answer.reason)
            stream = self._wrap(bulk, is_server=False)
        except BaseException:
            await bulk.close()
            raise
        await introduce(stream, peer, self._identity, lane)
        return stream

    async def _verified(self, bulk: Bulk, lane: Lane, where: str) -> tuple[InnerStream, Lane]:
        """Do the server's half of the handshake on a stream that a relay has opened."""
        stream = self._wrap(bulk, is_server=True)
        stream.source = where
        try:
            await admit(stream, digest(self._certificate), lane)
        except OSError as error:  # of TLS, or of this software
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"its TLS handshake failed: {error}") from None
        return stream, lane

    def _wrap(self, bulk: Bulk, *, is_server: bool) -> InnerStream:
        if self._contexts is None:
            self._certificate = make_certificate(self._identity)
            self._contexts = server_context(self._identity, self._certificate), client_context()
        context = self._contexts[0 if is_server else 1]
        stream = InnerStream(bulk, context, self._farewells, self._forget, is_server=is_server)
        self._streams[stream] = None
        return stream

    def _forget(self, stream: InnerStream) -> None:
        self._streams.pop(stream, None)
