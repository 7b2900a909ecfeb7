"""Bulk streams to each peer: opened, kept for the next blob, opened the other way round behind a NAT.

The side that fetches opens a stream as the control link was opened, because that way works. When the other side
dialled the link, it is asked to dial the bulk stream too (`BulkPlease`, answered by a stream that begins with
`BulkOffer`), and only if that fails its addresses are tried.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

from weft.errors import DeadlineExceeded, NetError, PeerError, WireError
from weft.ids import PeerId, short
from weft.net.link.dialer import Dialer
from weft.net.link.handlers import Handlers
from weft.net.link.links import Link, Links
from weft.net.link.traffic import LinkTraffic, Traffic
from weft.net.messages import MAX_BLOB_RECORD_NBYTES, BulkDialled, BulkOffer, BulkPlease, Relayed, RelayPlease
from weft.net.transport.base import Stream
from weft.net.transport.frame import FRAME_S, FrameReader, write_frame
from weft.rng import fresh_secret
from weft.tasks import Tasks
from weft.wire import Buffer, decode, encode

MAX_OPEN = 4  # per peer and direction: several connections get past lost packets, more gain nothing on one path
MAX_DIALLED_BACK = 2 * MAX_OPEN  # for one peer to fetch on, while those it has closed are still noticed
MAX_ACCEPTED = 4 * MAX_OPEN  # from one peer: both directions, while those it has closed are still noticed
OFFER_S = 10.0  # for the other side to dial back

# Answers requests for blobs until the stream ends, or its peer asks for something else, which is returned.
Serve = Callable[["Bulk"], Awaitable[RelayPlease | Relayed | None]]
TakeOver = Callable[["Bulk", RelayPlease | Relayed], Awaitable[None]]  # the stream is its own from then on


class Bulk:
    """One bulk stream, metered, and the reader that keeps its place. It is a `Stream` itself."""

    def __init__(self, stream: Stream, meter: LinkTraffic) -> None:
        self.peer = stream.peer
        self.stream = stream
        self.meter = meter
        self.reader = FrameReader(stream, max_nbytes=MAX_BLOB_RECORD_NBYTES, finish_s=FRAME_S, on_bytes=meter.received)
        self.is_fresh = True  # no blob has passed yet

    @property
    def source(self) -> str:
        return self.stream.source

    async def send(self, data: Buffer) -> None:
        await self.stream.send(data)
        self.meter.sent(memoryview(data).nbytes)

    async def recv_into(self, buffer: memoryview) -> int:
        return await self.reader.recv_into(buffer)

    async def close(self) -> None:
        await self.stream.close()


class BulkStreams:
    """The streams this peer fetches on. `serve` runs on those it opens for others to fetch from."""

    def __init__(self, links: Links, dialer: Dialer, handlers: Handlers, meters: Traffic, serve: Serve) -> None:
        self._links = links
        self._dialer = dialer
        self._meters = meters
        self._serve = serve
        self._take_over: TakeOver = _refuse
        self._idle: dict[PeerId, list[Bulk]] = {}
        self._slots: WeakValueDictionary[PeerId, asyncio.Semaphore] = WeakValueDictionary()  # of those who hold or wait
        self._opening: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        self._num_dialled_back: Counter[PeerId] = Counter()
        self._offers: dict[bytes, tuple[PeerId, asyncio.Future[Bulk]]] = {}
        self._tasks = Tasks()
        handlers.serve(BulkPlease, self._dial_back)
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
            is_whole = False
            try:
                yield bulk
                is_whole = True
            finally:
                if is_whole:
                    bulk.is_fresh = False
                    self._idle.setdefault(peer, []).append(bulk)
                else:
                    await bulk.stream.close()

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

    async def hand_over(self, bulk: Bulk, request: RelayPlease | Relayed | None) -> None:
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
        """Close a stream in the background."""
        self._tasks.spawn(bulk.stream.close())

    def take_offer(self, offer: BulkOffer, bulk: Bulk) -> None:
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
                await bulk.stream.close()
        await self._tasks.aclose()

    async def _open(self, peer: PeerId) -> Bulk:
        link = await self._dialer.reach(peer)
        if not link.is_dialler:
            with suppress(PeerError):
                return await self._ask(link)
        return Bulk(await self._dialer.dial_bulk(link), self._meters[peer])

    async def _ask(self, link: Link) -> Bulk:
        offer = fresh_secret(8)
        waiting: asyncio.Future[Bulk] = asyncio.get_running_loop().create_future()
        self._offers[offer] = (link.peer, waiting)
        limit = asyncio.timeout(OFFER_S)
        try:
            async with limit:
                await link.session.call(BulkPlease.__name__, encode(BulkPlease(offer=offer)), deadline_s=OFFER_S)
                await asyncio.wait([waiting])
            return waiting.result()
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"{short(link.peer)} did not open a bulk stream within {OFFER_S:g} s") from None
        finally:
            self._offers.pop(offer, None)

    async def _dial_back(self, peer: PeerId, request: BulkPlease) -> BulkDialled:
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
        self._tasks.spawn(self._run(bulk))
        return BulkDialled()

    async def _offer(self, link: Link, request: BulkPlease) -> Bulk:
        try:
            stream = await self._dialer.dial_bulk(link)
        except NetError as error:
            raise PeerError(f"cannot dial back: {type(error).__name__}") from error
        try:
            await write_frame(stream, encode(BulkOffer(offer=request.offer)))
        except BaseException:
            await stream.close()
            raise
        return Bulk(stream, self._meters[link.peer])

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


async def _refuse(bulk: Bulk, _request: RelayPlease | Relayed) -> None:
    await bulk.close()


async def read_record(bulk: Bulk, kind: Any, deadline_s: float, what: str) -> Any:
    """Return the next record of `kind` on `bulk`, or None where the stream ends.

    Raises:
        DeadlineExceeded: it did not begin within `deadline_s`.
        WireError: it is no such record.
    """
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            data = await bulk.reader.read()
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"{short(bulk.peer)} sent no {what} within {deadline_s:g} s") from None
    return None if data is None else decode(data, kind)
