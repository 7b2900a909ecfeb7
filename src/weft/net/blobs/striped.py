"""Fetches one large blob on one stream to its holder, and on more where one is held back.

Ranges are asked for ahead, so a stream never rests between two. They arrive in any order, each at its place in the
caller's buffer, and are hashed in the order of their places; the whole has the digest, or it was never fetched.

Failure:
- a stream breaks or falls silent: what was asked on it comes on the others; where none is left, the fetch fails as the
  first one did.
- the holder has no such blob, or one of another length: the fetch fails at once.

`Ranges` decides which range is fetched next and whether another stream would help; it is told the time:

    ranges    waiting ──take──► under way on one stream ──arrived──► done
                 ▲                       │
                 └──────── back ─────────┘      the stream broke

A path that loses packets holds each TCP connection to MSS / RTT * sqrt(3 / (2 p)), however wide it is (Mathis et al.,
1997): there, several are as much faster. Elsewhere they only take more than their share, so one more is opened where
the rest would take long, and no further one when the last one gained little.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from blake3 import blake3

from weft.errors import CallFailed, DeadlineExceeded, NetError, PayloadError, PeerError, Refused
from weft.ids import Digest, PeerId, short
from weft.net.blobs.bulk import Bulk, BulkStreams
from weft.net.messages import BlobHeader, RangeRequest
from weft.net.transport.frame import encode_frame
from weft.wire import encode

FIRST_NBYTES = 2 << 20  # of one range, as long as nothing is known of the path
LEAST_NBYTES, MOST_NBYTES = 256 << 10, 8 << 20  # worth a request; soon begun anew when a stream breaks
RANGE_S = 1.0  # a range takes about so long: no stream keeps the others waiting at the end
LOOK_S = 1.5  # between two looks at how fast it goes: some ten round trips over an ocean
NUM_STEADY = 2  # looks whose mean is compared
NUM_LOOKS = 6  # within which a stream must have brought something
WORTH_S = 4.0  # what is fetched sooner than that needs no help
MAX_STREAMS = 4  # more gain nothing on one path
GAIN = 1.15  # times as fast: what the last stream must have brought before another is tried

Span = tuple[int, int]  # begin and end


class Ranges:
    """Of one blob of `nbytes`."""

    def __init__(self, nbytes: int, now: float) -> None:
        self._nbytes = nbytes
        self._next = 0  # nobody has been asked for what lies behind it
        self._back: deque[Span] = deque()
        self._done: dict[int, int] = {}  # what has arrived beyond the front: begin -> end
        self.front = 0  # all before it has arrived
        self._looked_at = now
        self._looked_nbytes = 0
        self._usual_nbytes = FIRST_NBYTES
        self._rates: list[float] = []  # of each look since the last stream was opened
        self._before_bps = 0.0  # with one stream less
        self.is_enough = False  # the last stream that was opened gained little

    @property
    def is_done(self) -> bool:
        return self.front == self._nbytes

    def take(self, num_streams: int) -> Span | None:
        """Return what to ask for next, or None where all is under way. Towards the end ranges become shorter, so that
        streams end together."""
        if self._back:
            return self._back.popleft()
        left = self._nbytes - self._next
        if not left:
            return None
        share = left if num_streams == 1 else max(left // (2 * num_streams), LEAST_NBYTES)
        size = min(share, self._usual_nbytes, left)
        begin, self._next = self._next, self._next + size
        return begin, begin + size

    def back(self, span: Span) -> None:
        """Note that a range did not come."""
        self._back.append(span)

    def arrived(self, span: Span, took_s: float = RANGE_S) -> None:
        begin, end = span
        self._done[begin] = end
        if took_s < RANGE_S / 4 and end - begin >= self._usual_nbytes:  # on a fast line, sooner than by a look
            self._usual_nbytes = min(2 * self._usual_nbytes, MOST_NBYTES)
        while (reached := self._done.pop(self.front, None)) is not None:
            self.front = reached

    def wants_another(self, num_streams: int, come_nbytes: int, now: float) -> bool:
        """Return whether one more stream is worth it; asked every now and then.

        Args:
            come_nbytes: what has come so far, also of ranges that have not arrived whole.
        """
        passed_s = now - self._looked_at
        if passed_s < LOOK_S:
            return False
        self._rates.append(8 * (come_nbytes - self._looked_nbytes) / passed_s)
        self._looked_at, self._looked_nbytes = now, come_nbytes
        usual = int(self._rates[-1] / 8 / num_streams * RANGE_S)
        self._usual_nbytes = min(max(usual, LEAST_NBYTES), MOST_NBYTES)
        is_waiting = bool(self._back) or self._next < self._nbytes
        if not is_waiting or num_streams >= MAX_STREAMS or len(self._rates) < NUM_STEADY + 1:
            return False
        bps = sum(self._rates[-NUM_STEADY:]) / NUM_STEADY  # in the first moments a connection finds its pace
        if bps <= 0 or 8 * (self._nbytes - come_nbytes) / bps < WORTH_S:
            return False
        if bps < GAIN * self._before_bps:
            if len(self._rates) >= NUM_LOOKS:
                self.is_enough = True
            return False
        if self.is_enough:
            return False
        self._rates, self._before_bps = [], bps
        return True


NUM_LENT = 4  # ranges that a stream which helps is borrowed for
AHEAD = 2  # ranges asked for at a time on a stream: the next one's bytes follow without a round trip between
HASH_NBYTES = 4 << 20  # at a time, a millisecond: of less, thread hops take a tenth

Hash = Callable[[blake3, memoryview], Awaitable[None]]


class Striped:
    """One fetch of a blob into `view`, of its exact length.

    Args:
        num_streams: on how many it begins.
    """

    def __init__(
        self, streams: BulkStreams, peer: PeerId, digest: Digest, view: memoryview, stall_s: float, num_streams: int = 1
    ) -> None:
        self.num_streams = num_streams  # that were worth it, when it has ended
        self._streams = streams
        self._peer = peer
        self._digest = digest
        self._view = view
        self._stall_s = stall_s

    async def run(self, hash_: Hash) -> bool:
        """Fetch it; return False where the holder has none.

        Raises:
            StaleStream: a kept stream had died; nothing was fetched.
            PeerError, NetError, Refused: it cannot be had.
        """
        loop = asyncio.get_running_loop()
        self._ranges = Ranges(len(self._view), loop.time())
        self._come_nbytes = 0
        self._working: dict[asyncio.Task[None], None] = {}  # in the order in which they were begun
        self._failure: BaseException | None = None
        self.is_coming = False  # the holder has no such blob yet
        self._heard_at = loop.time()  # on any stream
        hashing = asyncio.ensure_future(self._hash_as_it_comes(hash_))
        self._news = asyncio.Event()
        try:
            for number in range(self.num_streams):
                self._begin(is_helper=number > 0)
            while not self._ranges.is_done:
                await asyncio.wait(self._working, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if not self._settle():
                    return False
                num = len(self._working)
                if num and self._ranges.wants_another(num, self._come_nbytes, loop.time()):
                    self._begin(is_helper=True)
                    self.num_streams = num + 1
            self.num_streams -= self._ranges.is_enough
            found = await hashing
        finally:
            hashing.cancel()
            for task in self._working:
                task.cancel()
            await asyncio.gather(hashing, *self._working, return_exceptions=True)
        if found != self._digest:
            self._streams.discard_idle(self._peer)
            raise PayloadError(f"{short(self._peer)} sent bytes of blob {short(found)} for {short(self._digest)}")
        return True

    def _begin(self, *, is_helper: bool) -> None:
        self._working[asyncio.ensure_future(self._help() if is_helper else self._fetch())] = None

    def _settle(self) -> bool:
        """Take up what tasks have come to; return False where the holder has no such blob."""
        loop = asyncio.get_running_loop()
        done = [task for task in self._working if task.done()]
        for task in done:
            self._working.pop(task, None)
            error = task.exception()
            if isinstance(error, CallFailed):
                return False
            if error is None:
                continue
            if isinstance(error, PayloadError) or not isinstance(error, NetError | PeerError | Refused):
                raise error
            self._failure = self._failure or error
            is_silent = isinstance(error, DeadlineExceeded) and loop.time() - self._heard_at >= self._stall_s
            if is_silent or not self._working:
                raise self._failure  # what came after it is seldom the reason
        if not self._working and not self._ranges.is_done:
            self._begin(is_helper=False)  # what a helper gave back came after the others had ended
        return True

    async def _fetch(self) -> None:
        async with self._streams.borrow(self._peer) as bulk:
            await self._work_on(bulk, None)

    async def _help(self) -> None:
        """Fetch a few ranges at a time, so that who waits for a stream gets one in between."""
        is_more = True
        while is_more:
            async with self._streams.borrow(self._peer) as bulk:
                is_more = await self._work_on(bulk, NUM_LENT)

    async def _work_on(self, bulk: Bulk, most: int | None) -> bool:
        """Fetch ranges, `most` of them if that is given; return whether any was left.

        Raises:
            CallFailed: the holder has no such blob.
        """
        asked: deque[Span] = deque()
        num = 0
        try:
            while most is None or num < most:
                # Not ahead of the first answer: where the holder has nothing, nothing must be left on the stream.
                ahead = 1 if num == 0 else AHEAD if most is None else min(AHEAD, most - num)
                while len(asked) < ahead and (span := self._ranges.take(len(self._working))):
                    asked.append(span)
                    request = RangeRequest(digest=self._digest, begin=span[0], end=span[1])
                    if num:
                        await bulk.send_slice(encode_frame(encode(request)))
                if not asked:
                    return False
                found = (
                    await bulk.header(self._digest, self._stall_s) if num else await bulk.ask(request, self._stall_s)
                )
                self._check(found)
                began = asyncio.get_running_loop().time()
                await self._receive(bulk, asked[0])
                self._ranges.arrived(asked.popleft(), asyncio.get_running_loop().time() - began)
                self._news.set()
                num += 1
        finally:
            for span in asked:
                self._ranges.back(span)
        return True

    def _check(self, header: BlobHeader) -> None:
        nbytes = header.nbytes
        if nbytes is None:
            self.is_coming = header.is_coming
            raise CallFailed(f"{short(self._peer)} holds no blob {short(self._digest)}")
        if nbytes != len(self._view):
            raise PayloadError(
                f"blob {short(self._digest)} has {nbytes} bytes at {short(self._peer)} and not {len(self._view)}"
            )

    async def _receive(self, bulk: Bulk, span: Span) -> None:
        loop, come = asyncio.get_running_loop(), 0

        def on_bytes(num: int) -> None:
            nonlocal come
            come += num
            self._come_nbytes += num
            self._heard_at = loop.time()

        try:
            await bulk.fill(self._view[slice(*span)], self._stall_s, on_bytes)
        except BaseException:
            self._come_nbytes -= come
            raise

    async def _hash_as_it_comes(self, hash_: Hash) -> Digest:
        hasher, hashed = blake3(), 0
        while hashed < len(self._view):
            self._news.clear()
            upto = min(self._ranges.front, hashed + HASH_NBYTES)
            if upto == hashed:
                await self._news.wait()
            else:
                await hash_(hasher, self._view[hashed:upto])
                hashed = upto
        return Digest(hasher.hexdigest())
