"""The one bulk primitive: fetch the bytes whose BLAKE3 digest is known, from whoever has them.

The holder answers a digest with a length, or none, and the raw bytes; they are received in pieces straight into
the caller's buffer and hashed while the next piece arrives. What does not have the digest was never fetched.

A holder that is itself fetching what it is asked for lets the asker wait (`expect`): so bytes go down a row of peers
whose last has only to ask the one before it.

Whoever hashes on another thread hands in an `offload`; on a virtual clock it runs inline.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from blake3 import blake3

from weft.errors import CallFailed, NetError, PayloadError, PeerError, Refused, WireError
from weft.events import ConnectionDropped, Emit
from weft.ids import Digest, PeerId, short
from weft.net import messages
from weft.net.blobs.bulk import (
    MAX_ACCEPTED,
    PATIENT_NBYTES,
    STALL_S,
    Bulk,
    BulkStreams,
    OpenStreams,
    Priority,
    StaleStream,
)
from weft.net.blobs.striped import Hash, Striped
from weft.net.link.dialer import Dialer
from weft.net.link.links import Links
from weft.net.link.rpc import Handlers
from weft.net.transport.base import Stream
from weft.net.transport.frame import encode_frame
from weft.wire import Buffer, encode

T = TypeVar("T")

PIECE_NBYTES = 1 << 20  # received and hashed at a time, as long as a frame: worth a thread hop, soon cancelled
SLICE_NBYTES = 512 << 10  # sent at a time: half of it costs a tenth of the throughput on loopback, twice gains nothing
SMALL_NBYTES = 64 << 10  # sent together with its header, and hashed inline
LARGE_NBYTES = 4 << 20  # worth several streams where one is held back
COMING_S = 5.0  # that an asker waits for what its holder expects, before it is told to ask again
IDLE_S = 120.0  # a holder keeps a silent stream this long for the next request

Lookup = Callable[[PeerId, Digest], Buffer | None]
Offload = Callable[[Callable[[], object]], Awaitable[None]]
Found = Literal["here", "coming", "nowhere"]


class StillComing(CallFailed):
    """The holder has no such blob yet, and is fetching it."""


async def inline(work: Callable[[], object]) -> None:
    """Do `work` here: for virtual time, where there are no threads."""
    work()


async def in_thread(work: Callable[[], object]) -> None:
    """Do `work` on a thread of the loop's pool."""
    await asyncio.to_thread(work)


class Blobs:
    """Both sides of every bulk stream of one peer."""

    def __init__(
        self, links: Links, dialer: Dialer, handlers: Handlers, open_streams: OpenStreams, emit: Emit, offload: Offload
    ) -> None:
        self._open_streams = open_streams
        self._emit = emit
        self._offload = offload
        self._lookups: list[tuple[Lookup, bool]] = []
        self._turns = Priority()
        self._links = links
        self._expected: dict[Digest, asyncio.Event] = {}
        self._num_accepted: Counter[PeerId] = Counter()
        self._num_worth: dict[PeerId, int] = {}  # streams that a large blob was fetched on with profit
        self._resting: dict[PeerId, set[Bulk]] = {}  # those that wait for the next request
        self.streams = BulkStreams(links, dialer, handlers, open_streams, self._serve)
        links.on_link(self._on_link)

    def offer(self, lookup: Lookup, *, is_patient: bool = False) -> None:
        """Serve what `lookup(peer, digest)` returns; several are asked in turn.

        Args:
            is_patient: what it returns gives way to what others return.
        """
        self._lookups.append((lookup, is_patient))

    @contextmanager
    def expect(self, digest: Digest) -> Iterator[None]:
        """Let who asks for a blob wait, while this peer fetches it."""
        if digest in self._expected:
            yield
            return
        ended = self._expected[digest] = asyncio.Event()
        try:
            yield
        finally:
            del self._expected[digest]
            ended.set()

    def exchange(self, is_going_on: bool) -> None:
        self._turns.exchange(is_going_on)

    async def accept(self, stream: Stream) -> None:
        """Serve an admitted peer's bulk stream to its end, or until its peer wants it relayed.

        Raises:
            WireError: the peer broke the protocol.
            PeerError: it fell silent or is gone.
        """
        with self._counted(stream.peer):
            bulk = self._open_streams.take(stream)
            bulk.serving = asyncio.current_task()
            try:
                opening = await self._rest(bulk, messages.BulkOpening)
                if isinstance(opening, messages.BulkOffer):
                    bulk.serving = None
                    self.streams.take_offer(opening, bulk)
                    return
                request = None if opening is None else await self._serve(bulk, opening)
            except BaseException:
                await bulk.close()
                raise
        await self.streams.hand_over(bulk, request)

    async def fetch(self, peer: PeerId, digest: Digest, into: Buffer, *, stall_s: float = STALL_S) -> None:
        """Fill `into` (writable, of the blob's exact length) with the blob `digest` from `peer`.

        Failure:
        - the peer holds no such blob: CallFailed; it is fetching it: StillComing.
        - another length, or bytes of another digest: PayloadError, the stream is closed, `ConnectionDropped` says so.
        - no byte for `stall_s` seconds: DeadlineExceeded; what is in `into` means nothing.
        - the stream breaks: PeerError. A kept stream that had died unnoticed is replaced once, silently.
        - nobody can be reached: NetError.
        """
        view = memoryview(into).cast("B")
        if len(view) >= LARGE_NBYTES:
            # One less than the last time: a path that has become better is noticed.
            num_streams = max(self._num_worth.get(peer, 1) - 1, 1)
            spread = Striped(self.streams, peer, digest, view, stall_s, num_streams)
            await self._told(peer, digest, lambda: _spread(spread, self._hash))
            self._num_worth[peer] = spread.num_streams
            return

        def room(num_bytes: int) -> memoryview:
            if num_bytes != len(view):
                raise PayloadError(f"blob {short(digest)} has {num_bytes} bytes at {short(peer)} and not {len(view)}")
            return view

        await self._told(peer, digest, lambda: self._exchange(peer, digest, room, stall_s))

    async def fetch_small(self, peer: PeerId, digest: Digest, max_nbytes: int, *, stall_s: float = STALL_S) -> bytes:
        """Return a blob of unknown length, at most `max_nbytes`. Fails as `fetch` does."""
        return bytes(await self.fetch_within(peer, digest, max_nbytes, _memory, stall_s=stall_s))

    async def fetch_within(
        self,
        peer: PeerId,
        digest: Digest,
        max_nbytes: int,
        room: Callable[[int], memoryview],
        *,
        stall_s: float = STALL_S,
    ) -> memoryview:
        """Return a blob of unknown length, at most `max_nbytes`, on one stream. Fails as `fetch` does.

        Args:
            room: gives memory of so many bytes, once the holder has said how many there are.
        """
        held = memoryview(b"")

        def bounded(num_bytes: int) -> memoryview:
            nonlocal held
            if num_bytes > max_nbytes:
                raise PayloadError(f"blob {short(digest)} has {num_bytes} bytes at {short(peer)}, above {max_nbytes}")
            held = room(num_bytes)
            return held

        await self._told(peer, digest, lambda: self._exchange(peer, digest, bounded, stall_s))
        return held

    async def fetch_any(self, peers: Sequence[PeerId], digest: Digest, nbytes: int) -> Buffer:
        """Return the blob from the first of `peers` that delivers it.

        Raises:
            PeerError: none did; the message says what each answered.
        """
        held = bytearray(nbytes)
        await first_of(peers, lambda peer: self.fetch(peer, digest, held), lambda: f"blob {short(digest)}")
        return held

    async def aclose(self) -> None:
        await self.streams.aclose()
        await self._open_streams.aclose()

    async def _told(self, peer: PeerId, digest: Digest, exchange: Callable[[], Awaitable[Found]]) -> None:
        """Carry out an exchange, again where a kept stream had died, and say in an event what went wrong."""
        try:
            try:
                found = await exchange()
            except StaleStream:
                self.streams.discard_idle(peer)
                found = await exchange()
        except PeerError as error:
            self._emit(ConnectionDropped(address="bulk stream", remote=peer, reason=str(error)))
            raise
        if found == "coming":
            raise StillComing(f"{short(peer)} is fetching blob {short(digest)} itself")
        if found == "nowhere":
            raise CallFailed(f"{short(peer)} holds no blob {short(digest)}")

    async def _exchange(self, peer: PeerId, digest: Digest, room: Callable[[int], memoryview], stall_s: float) -> Found:
        async with self.streams.borrow(peer) as bulk:
            header = await bulk.ask(messages.BlobRequest(digest=digest), stall_s)
            if header.nbytes is None:
                return "coming" if header.is_coming else "nowhere"
            await self._receive(bulk, digest, room(header.nbytes), stall_s)
            return "here"

    async def _receive(self, bulk: Bulk, digest: Digest, view: memoryview, stall_s: float) -> None:
        hasher = blake3()
        hashing: asyncio.Future[None] | None = None
        try:
            for start in range(0, len(view), PIECE_NBYTES):
                piece = view[start : start + PIECE_NBYTES]
                await bulk.fill(piece, stall_s)
                if hashing is not None:
                    await hashing
                hashing = asyncio.ensure_future(self._hash(hasher, piece))
        finally:
            if hashing is not None:
                await hashing
        if hasher.hexdigest() != digest:
            raise PayloadError(f"{short(bulk.peer)} sent bytes of blob {short(hasher.hexdigest())} for {short(digest)}")

    async def _hash(self, hasher: blake3, piece: memoryview) -> None:
        if len(piece) <= SMALL_NBYTES:
            hasher.update(piece)
        else:
            await self._offload(lambda: hasher.update(piece))

    async def _serve(
        self, bulk: Bulk, request: messages.BulkRequest | None = None
    ) -> messages.RelayPlease | messages.Relayed | None:
        """Answer requests until the stream ends, or its peer has lost the link that entitles it to one.

        Args:
            request: that has come already.

        Returns:
            what else the peer asks of the stream, if it does.
        """
        while request is not None or self._links.get(bulk.peer) is not None:
            request = request or await self._rest(bulk, messages.BulkRequest)
            if request is None or isinstance(request, messages.RelayPlease | messages.Relayed):
                return request
            await self._answer(bulk, request)
            # Who asks ahead for what is small would never let others have a turn.
            await asyncio.sleep(bulk.burden.pause_s())
            if bulk.burden.is_flood:
                raise WireError("it asks for more blobs than this machine can look up")
            request = None
        return None

    @contextmanager
    def _counted(self, peer: PeerId) -> Iterator[None]:
        """Hold the streams that `peer` fetches on to their bound."""
        if self._num_accepted[peer] >= MAX_ACCEPTED:
            raise WireError(f"more than {MAX_ACCEPTED} bulk streams are open")
        self._num_accepted[peer] += 1
        try:
            yield
        finally:
            self._num_accepted[peer] -= 1
            if not self._num_accepted[peer]:
                del self._num_accepted[peer]

    async def _rest(self, bulk: Bulk, kind: Any) -> Any:
        resting = self._resting.setdefault(bulk.peer, set())
        resting.add(bulk)
        self._open_streams.rest(bulk, True)
        try:
            return await bulk.read(kind, IDLE_S, "request")
        finally:
            resting.discard(bulk)
            self._open_streams.rest(bulk, False)
            if not resting:
                self._resting.pop(bulk.peer, None)

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:
            self._num_worth.pop(peer, None)
            for bulk in self._resting.get(peer, ()):
                self.streams.close_soon(bulk)

    async def _answer(self, bulk: Bulk, request: messages.BlobRequest | messages.RangeRequest) -> None:
        # A holder that reads a file for the first time checks it: that is no cost of who asks. A large blob costs what
        # its bytes do, which the lines bound.
        (data, is_patient), look_s = bulk.burden.timed(lambda: self._look(bulk.peer, request.digest))
        if data is None and (ended := self._expected.get(request.digest)) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(COMING_S):
                    await ended.wait()
            data, is_patient = self._look(bulk.peer, request.digest)
        if data is None:
            header = messages.BlobHeader(nbytes=None, is_coming=request.digest in self._expected)
            bulk.burden.charge(look_s)
            await bulk.burden.metered(bulk.send_slice(encode_frame(encode(header))))
            return
        view = memoryview(data).cast("B")
        head = encode_frame(encode(messages.BlobHeader(nbytes=len(view))))
        if isinstance(request, messages.RangeRequest):
            if request.end > len(view) or request.begin >= request.end:
                raise WireError(f"bytes {request.begin} to {request.end} were asked of a blob of {len(view)}")
            view = view[request.begin : request.end]
        if len(view) <= SMALL_NBYTES:
            bulk.burden.charge(look_s)
            await bulk.burden.metered(bulk.send_slice(head + view))
            if not is_patient:
                self._turns.moved(len(view))
        elif is_patient:
            await self._send_patiently(bulk, head, view)
        else:
            with self._turns.urgent():
                await bulk.send_slice(head)
                for start in range(0, len(view), SLICE_NBYTES):
                    await bulk.send_slice(view[start : start + SLICE_NBYTES])
                    self._turns.moved(len(view[start : start + SLICE_NBYTES]))

    def _look(self, peer: PeerId, digest: Digest) -> tuple[Buffer | None, bool]:
        found = ((look(peer, digest), is_patient) for look, is_patient in self._lookups)
        return next((each for each in found if each[0] is not None), (None, False))

    async def _send_patiently(self, bulk: Bulk, head: bytes, view: memoryview) -> None:
        async with self._turns.patient(bulk.peer):
            await bulk.send_slice(head)
            for start in range(0, len(view), PATIENT_NBYTES):
                piece = view[start : start + PATIENT_NBYTES]
                if not bulk.is_here:
                    await self._turns.may_send(len(piece))
                await bulk.send_slice(piece)


def _memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


async def _spread(spread: Striped, hash_: Hash) -> Found:
    if await spread.run(hash_):
        return "here"
    return "coming" if spread.is_coming else "nowhere"


async def first_of(peers: Iterable[PeerId], ask: Callable[[PeerId], Awaitable[T]], what: Callable[[], str]) -> T:
    """Return what `ask` returns of the first of `peers`, asked one after the other, that delivers it.

    Raises:
        PeerError: none did; says what each answered.
    """
    failures = []
    for peer in peers:
        try:
            return await ask(peer)
        except (PeerError, NetError, Refused) as error:
            failures.append(str(error))
    raise PeerError(f"nobody delivered {what()}: {'; '.join(failures) or 'nobody is linked that could'}")
