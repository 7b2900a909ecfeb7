"""Bulk streams to each peer: opened, kept for the next blob, opened the other way round behind a NAT; and who may send.

The side that fetches opens a stream as the control link was opened, because that way works. When the other side
dialled the link, it is asked to dial the bulk stream too (`BulkPlease`, answered by a stream that begins with
`BulkOffer`), and only if that fails its addresses are tried.

A kept stream may have died unnoticed: what is asked on it first then fails as `StaleStream`, and a fresh one may work.

What a round waits for is sent first, what a newcomer fetches in between (`Priority`):

    urgent     payloads and results of the present round: sent at once
    patient    states, data, results of rounds long decided: a few at a time; and while something urgent is under way,
               and a moment longer, or an exchange has just begun or ended, one byte for every `SHARE - 1` urgent ones

Not none: a swarm whose rounds exchange all the time would otherwise never let anybody in. Shares are of bytes, because
what a line can carry is not known: what urgent blobs get through is what it carries. And not too few: a slice leaves at
the latest after `STARVED_S`. What stays on this machine takes no line, and is never held back.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

from weft.errors import DeadlineExceeded, NetError, PeerError, WireError
from weft.ids import Digest, PeerId, short
from weft.net import messages
from weft.net.link.dialer import Dialer
from weft.net.link.links import Link, Links
from weft.net.link.rpc import Handlers, LinkTraffic, Traffic
from weft.net.transport.base import Stream
from weft.net.transport.frame import FRAME_S, FrameReader, encode_frame, write_frame
from weft.net.transport.limits import Burden, Streams
from weft.rng import fresh_secret
from weft.tasks import Tasks, within
from weft.wire import Buffer, decode, encode

MAX_OPEN = 4  # per peer and direction: several connections get past lost packets, more gain nothing on one path
MAX_DIALLED_BACK = 2 * MAX_OPEN  # for one peer to fetch on, while those it has closed are still noticed
MAX_ACCEPTED = 4 * MAX_OPEN  # from one peer: both directions, while those it has closed are still noticed
OFFER_S = 10.0  # for the other side to dial back
# The slowest uplink that rounds wait for, 1 Mbit/s, over 31 members that each fetch a payload's part and a result:
# 1e6 / 62 = 16 kbit/s for a stream. A slice then takes 262 s, and who takes none in 292 s is given up.
SLOWEST_STREAM_BPS = 16e3
GONE_S = 1.0  # without a link, before a peer's streams are closed: one that is replaced comes up in less
STALL_S = 15.0  # no byte for so long means that the holder is gone

# Answers requests for blobs until the stream ends, or its peer asks for something else, which is returned.
Serve = Callable[["Bulk"], Awaitable[messages.RelayPlease | messages.Relayed | None]]
# The stream is its own from then on.
TakeOver = Callable[["Bulk", messages.RelayPlease | messages.Relayed], Awaitable[None]]


class StaleStream(PeerError):
    """A kept stream had died before it was used again; a fresh one may work."""


class Bulk:
    """One bulk stream, its bytes counted, and the reader that keeps its place. It is a `Stream` itself."""

    def __init__(self, stream: Stream, traffic: LinkTraffic, burden: Burden, open_streams: "OpenStreams") -> None:
        self.peer, self.source, self.is_here = stream.peer, stream.source, stream.is_here
        self.stream = stream
        self.burden = burden
        self.serving: asyncio.Task[Any] | None = None  # who answers its requests, where this side does
        self._open_streams = open_streams
        self.traffic = traffic
        self.reader = FrameReader(
            stream, max_nbytes=messages.MAX_BLOB_RECORD_NBYTES, finish_s=FRAME_S, on_bytes=traffic.received
        )
        self.is_fresh = True  # no blob has passed yet

    async def send(self, data: Buffer) -> None:
        await self.stream.send(data)
        self.traffic.sent(memoryview(data).nbytes)

    async def recv_into(self, buffer: memoryview) -> int:
        return await self.reader.recv_into(buffer)

    async def close(self) -> None:
        self._open_streams.leave(self)
        await self.stream.close()

    # --- a blob, or a range of one: the request, the header, the bytes ---

    async def send_slice(self, data: Buffer) -> None:
        """Send bytes that the other side has to take in time.

        Raises:
            DeadlineExceeded: the other side takes them too slowly.
            PeerError: the stream broke.
        """
        limit_s = FRAME_S + 8 * len(data) / SLOWEST_STREAM_BPS
        async with within(limit_s, lambda: self._overdue(f"took no slice of a blob within {limit_s:.0f} s")):
            await self.stream.send(data)
        self.traffic.sent(len(data))

    async def ask(self, request: messages.BlobRequest | messages.RangeRequest, stall_s: float) -> messages.BlobHeader:
        """Send a request and return the header that answers it."""
        try:
            await self.send_slice(encode_frame(encode(request)))
            return await self.header(request.digest, stall_s)
        except (DeadlineExceeded, WireError):
            raise
        except PeerError as error:
            if self.is_fresh:
                raise
            raise StaleStream(str(error)) from None

    async def header(self, digest: Digest, stall_s: float) -> messages.BlobHeader:
        """Return the next header."""
        async with within(
            stall_s, lambda: self._overdue(f"sent no header of blob {short(digest)} within {stall_s:g} s")
        ):
            data = await self.reader.read()
        if data is None:
            raise PeerError(f"{short(self.peer)} closed the bulk stream before blob {short(digest)}")
        header: messages.BlobHeader = decode(data, messages.BlobHeader)
        return header

    async def read(self, kind: Any, deadline_s: float, what: str) -> Any:
        """Return the next record of `kind`, or None where the stream ends.

        Raises:
            DeadlineExceeded: it did not begin within `deadline_s`.
            WireError: it is no such record.
        """
        async with within(deadline_s, lambda: self._overdue(f"sent no {what} within {deadline_s:g} s")):
            data = await self.burden.read(self.reader)
        return None if data is None else self.burden.do(lambda: decode(data, kind))

    async def fill(
        self, piece: memoryview, stall_s: float, on_bytes: Callable[[int], None] = lambda _num: None
    ) -> None:
        """Fill `piece` with the next bytes; tell of each few of them."""
        filled = 0
        while filled < len(piece):
            async with within(stall_s, lambda: self._overdue(f"sent nothing of a blob for {stall_s:g} s")):
                num_bytes = await self.reader.recv_into(piece[filled:])
            if num_bytes == 0:
                raise WireError(f"{short(self.peer)} ended the stream in the middle of a blob")
            filled += num_bytes
            on_bytes(num_bytes)

    def _overdue(self, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"{short(self.peer)} {what}")


class OpenStreams:
    """All bulk streams of one peer, both directions: bounded over all keys, and ended with the peer at the other end.

    Whose link is down for `GONE_S`, or who comes back as another process, holds none any more, whatever they wait for.

    Args:
        most: over all.
    """

    def __init__(self, links: Links, traffic: Traffic, most: int) -> None:
        self._links = links
        self._traffic = traffic
        self._held: Streams[Bulk] = Streams(most)
        self._instances: dict[PeerId, bytes] = {}  # the process that a peer's streams lead to
        self._tasks = Tasks()
        links.on_link(self._on_link)

    def take(self, stream: Stream) -> Bulk:
        """Count a stream until it is closed; one of whoever holds most may have to make room.

        Raises:
            WireError: there is no room.
        """
        burden = self._traffic.burdens.of(stream.peer, stream.source)
        bulk = Bulk(stream, self._traffic[stream.peer], burden, self)
        while not self._held.enter(bulk.peer, bulk):
            victim = self._held.victim(bulk.peer)
            if victim is None:
                raise WireError(f"{len(self._held)} bulk streams are open, and this machine can hold no more")
            self.end(victim[1])
        return bulk

    def leave(self, bulk: Bulk) -> None:
        self._held.leave(bulk.peer, bulk)

    def rest(self, bulk: Bulk, rests: bool) -> None:
        """Note that a stream waits for its next request, or does so no more: such ones make room first."""
        self._held.rest(bulk.peer, bulk, rests)

    def end(self, bulk: Bulk) -> None:
        """Close a stream, and whatever is done on it."""
        self.leave(bulk)
        if bulk.serving is not None:
            bulk.serving.cancel()
        self._tasks.spawn(bulk.close())

    async def aclose(self) -> None:
        await self._tasks.aclose()

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:
            asyncio.get_running_loop().call_later(GONE_S, self._end_if_gone, peer)
            return
        link = self._links.get(peer)
        instance = b"" if link is None else link.instance
        if self._instances.setdefault(peer, instance) != instance:
            self._end_all(peer)
            self._instances[peer] = instance

    def _end_if_gone(self, peer: PeerId) -> None:
        if self._links.get(peer) is None:
            self._instances.pop(peer, None)
            self._end_all(peer)

    def _end_all(self, peer: PeerId) -> None:
        for bulk in self._held.of(peer):
            self.end(bulk)


class BulkStreams:
    """The streams this peer fetches on. `serve` runs on those it opens for others to fetch from."""

    def __init__(
        self, links: Links, dialer: Dialer, handlers: Handlers, open_streams: OpenStreams, serve: Serve
    ) -> None:
        self._links = links
        self._open_streams = open_streams
        self._dialer = dialer
        self._serve = serve
        self._take_over: TakeOver = _refuse
        self._idle: dict[PeerId, list[Bulk]] = {}
        self._slots: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()  # of those who hold or wait
        self._opening: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        self._num_dialled_back: Counter[PeerId] = Counter()
        self._offers: dict[bytes, tuple[PeerId, asyncio.Future[Bulk]]] = {}
        self._tasks = Tasks()
        handlers.serve(messages.BulkPlease, self._dial_back)
        links.on_link(self._on_link)

    @asynccontextmanager
    async def borrow(self, peer: PeerId) -> AsyncIterator[Bulk]:
        """Give a stream to `peer` for one exchange; it is kept if the exchange ends well, else closed.

        Raises:
            NetError, PeerError, Refused: no stream could be opened.
        """
        async with self._slots.setdefault(peer, asyncio.Semaphore(MAX_OPEN)):
            # One opens at a time: a crowd of handshakes looks like an attack, and meanwhile others may finish.
            async with self._opening.setdefault(peer, asyncio.Lock()):
                idle = self._idle.get(peer)
                bulk = idle.pop() if idle else await self._open(peer)
                self._open_streams.rest(bulk, False)
            is_whole = False
            try:
                yield bulk
                is_whole = True
            finally:
                if is_whole:
                    bulk.is_fresh = False
                    self._idle.setdefault(peer, []).append(bulk)
                    self._open_streams.rest(bulk, True)
                else:
                    await bulk.close()

    async def open(self, peer: PeerId) -> Bulk:
        """Return a fresh stream to `peer` that is the caller's own.

        Raises:
            NetError, PeerError, Refused: no stream could be opened.
        """
        async with self._opening.setdefault(peer, asyncio.Lock()):
            return await self._open(peer)

    def on_relay(self, take_over: TakeOver) -> None:
        """Give streams whose peers want them relayed, or have, to `take_over`."""
        self._take_over = take_over

    async def hand_over(self, bulk: Bulk, request: messages.RelayPlease | messages.Relayed | None) -> None:
        """Let a stream go on as its peer asked after the last blob; None: it has ended."""
        if request is None:
            await bulk.close()
        else:
            await self._take_over(bulk, request)

    def discard_idle(self, peer: PeerId) -> None:
        """Close the streams kept for `peer`: they may be dead."""
        for bulk in self._idle.pop(peer, []):
            self.close_soon(bulk)

    def close_soon(self, bulk: Bulk) -> None:
        self._tasks.spawn(bulk.close())

    def take_offer(self, offer: messages.BulkOffer, bulk: Bulk) -> None:
        """Accept a stream that this peer asked for.

        Raises:
            WireError: it did not.
        """
        peer, waiting = self._offers.pop(offer.offer, (None, None))
        if peer != bulk.peer or waiting is None or waiting.done():
            raise WireError("a bulk stream was offered that nobody asked for")
        waiting.set_result(bulk)

    async def aclose(self) -> None:
        for peer in list(self._idle):
            for bulk in self._idle.pop(peer):
                await bulk.close()
        await self._tasks.aclose()

    async def _open(self, peer: PeerId) -> Bulk:
        link = await self._dialer.reach(peer)
        if not link.is_dialler:
            with suppress(PeerError):
                return await self._ask(link)
        return await self._taken(await self._dialer.dial_bulk(link))

    async def _ask(self, link: Link) -> Bulk:
        offer = fresh_secret(8)
        waiting: asyncio.Future[Bulk] = asyncio.get_running_loop().create_future()
        self._offers[offer] = (link.peer, waiting)

        def overdue() -> DeadlineExceeded:
            return DeadlineExceeded(f"{short(link.peer)} did not open a bulk stream within {OFFER_S:g} s")

        try:
            async with within(OFFER_S, overdue):
                await link.session.call(
                    messages.BulkPlease.__name__, encode(messages.BulkPlease(offer=offer)), deadline_s=OFFER_S
                )
                await asyncio.wait([waiting])
            return waiting.result()
        finally:
            self._offers.pop(offer, None)

    async def _dial_back(self, peer: PeerId, request: messages.BulkPlease) -> messages.BulkDialled:
        link = self._links.get(peer)
        if link is None or not link.is_dialler:
            raise PeerError("this side did not dial the link, so it cannot dial a bulk stream either")
        if self._num_dialled_back[peer] >= MAX_DIALLED_BACK:
            raise PeerError(f"{MAX_DIALLED_BACK} bulk streams were opened to you already")
        self._num_dialled_back[peer] += 1
        try:
            bulk = await self._offer(link, request)
        except BaseException:
            self._ended(peer)
            raise
        bulk.serving = self._tasks.spawn(self._run(bulk))
        return messages.BulkDialled()

    async def _offer(self, link: Link, request: messages.BulkPlease) -> Bulk:
        try:
            stream = await self._dialer.dial_bulk(link)
        except NetError as error:
            raise PeerError(f"cannot dial back: {type(error).__name__}") from error
        try:
            await write_frame(stream, encode(messages.BulkOffer(offer=request.offer)))
        except BaseException:
            await stream.close()
            raise
        return await self._taken(stream)

    async def _taken(self, stream: Stream) -> Bulk:
        try:
            return self._open_streams.take(stream)
        except BaseException:
            await stream.close()
            raise

    async def _run(self, bulk: Bulk) -> None:
        try:
            try:
                request = await self._serve(bulk)
            finally:
                self._ended(bulk.peer)
            await self.hand_over(bulk, request)
        except BaseException:
            await bulk.close()
            raise

    def _ended(self, peer: PeerId) -> None:
        self._num_dialled_back[peer] -= 1
        if not self._num_dialled_back[peer]:
            del self._num_dialled_back[peer]

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:
            self.discard_idle(peer)


async def _refuse(bulk: Bulk, _request: messages.RelayPlease | messages.Relayed) -> None:
    await bulk.close()


SHARE = 4  # of what is sent while rounds want the line, patient blobs are one part: four donors fill a line like theirs
MAX_PATIENT = 2  # blobs at a time to one peer: what a socket has taken before a round began cannot be taken back
PATIENT_NBYTES = 128 << 10  # of a patient blob: 50 ms of 20 Mbit/s
QUIET_S = 1.0  # from one urgent blob to the next of the same exchange: an answer, a merge, a request over an ocean
# A slice waits no longer, however little rounds send: where models are small and rounds follow at once, a quarter of
# that is next to nothing, though the line is free. It makes 1 Mbit/s of each donor.
STARVED_S = 1.0
STUCK_S = 5.0  # where no urgent byte has left for so long, nobody is held back


class Priority:
    """Of one peer's line, as far as it sends blobs."""

    def __init__(self) -> None:
        self._num_urgent = 0
        self._is_exchanging = False
        self._moved_at = -STUCK_S  # when an urgent byte last left
        self._credit = 0.0  # patient bytes that may leave though a round wants the line
        self._slots: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()
        self._in_order = asyncio.Lock()
        self._news = asyncio.Event()

    def exchange(self, is_going_on: bool) -> None:
        """Note that a round's exchange begins or has ended."""
        if is_going_on and not self._is_exchanging:
            self._begin()
        elif self._is_exchanging and not is_going_on:
            self._moved_at = _now()
        self._is_exchanging = is_going_on
        self._news.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Send a blob that others wait for, and tell of each slice with `moved`."""
        self._begin()
        self._num_urgent += 1
        try:
            yield
        finally:
            self._num_urgent -= 1
            self._moved_at = _now()
            self._news.set()

    def moved(self, nbytes: int) -> None:
        """Note that so much of an urgent blob has left."""
        self._moved_at = _now()
        self._credit = min(self._credit + nbytes / (SHARE - 1), 2.0 * PATIENT_NBYTES)
        self._news.set()

    @asynccontextmanager
    async def patient(self, peer: PeerId) -> AsyncIterator[None]:
        """Send a blob to `peer` that can wait, once it is its turn; before each slice wait for `may_send`."""
        async with self._slots.setdefault(peer, asyncio.Semaphore(MAX_PATIENT)):
            yield

    async def may_send(self, nbytes: int) -> None:
        """Return when so much of a patient blob may leave."""
        async with self._in_order:
            until = _now() + STARVED_S
            while (busy_s := min(self._busy_s(), until - _now())) > 0 and self._credit < nbytes:
                self._news.clear()
                try:
                    async with asyncio.timeout(busy_s):
                        await self._news.wait()
                except TimeoutError:
                    continue
            self._credit = max(self._credit - nbytes, 0.0)

    def _begin(self) -> None:
        if self._busy_s() <= 0:
            self._credit = 0.0  # what was left over of the last exchange
            self._moved_at = _now()

    def _busy_s(self) -> float:
        """Return for how long patient blobs hold back if nothing urgent moves."""
        return self._moved_at + (STUCK_S if self._num_urgent else QUIET_S) - _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
