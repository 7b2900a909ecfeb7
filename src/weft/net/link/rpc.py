"""Calls and notes over one admitted control stream, both ways at once.

Each side numbers its calls; answers come in any order. A call carries its deadline: the callee's handler is
cancelled when it passes, and when the caller gives up (`Cancel`). Notes are handled one at a time in the order
they were sent. The read loop waits for nothing but bytes, so one slow handler delays no other answer; nor does a peer
whose bytes never cease delay other peers.

What a remote can make this peer hold is bounded: `MAX_IN_FLIGHT` calls, `MAX_QUEUED_NOTES` notes of together
`MAX_QUEUED_NOTES_NBYTES`, one frame of `MAX_FRAME_NBYTES`. Who exceeds a bound breaks the protocol, and `run` raises
`WireError`.

Handlers are registered before the node starts or at any time later. A call to a method that nobody serves fails at the
caller, a note that nobody takes is dropped.

One writer task sends, so a caller that gives up never cuts a frame in half, and small frames that wait together
leave in one `send`. The queue is bounded in bytes: whoever wants to add to a full one waits, or is told.

What passed between two peers is counted, control frames and blobs alike, as their bytes come, without the transport's
own overhead. Any byte received is proof of life, also a byte of a frame that is not whole yet, judged by this machine's
clock.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from weft.clock import Clock
from weft.errors import CallFailed, DeadlineExceeded, PayloadError, PeerError, WireError
from weft.events import Emit, Notice
from weft.ids import PeerId, short
from weft.net import messages
from weft.net.transport.base import Stream
from weft.net.transport.frame import FRAME_S, FrameReader, encode_frame
from weft.net.transport.limits import Burden, Burdens
from weft.tasks import within
from weft.wire import decode, encode, printable

MAX_COUNTED = 4096  # twice as many peers as members are known; keys are free to make


class LinkTraffic:
    """Counts for one remote peer, over all its connections."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self.heard_at: float | None = None  # on `clock`; None: never

    def sent(self, num_bytes: int) -> None:
        self.sent_nbytes += num_bytes

    def received(self, num_bytes: int) -> None:
        self.received_nbytes += num_bytes
        self.heard_at = self.clock.now()


class Traffic:
    """Counts of each peer, made when first asked for; one too many takes the place of the longest silent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.burdens = Burdens(clock)
        self._by_peer: dict[PeerId, LinkTraffic] = {}
        self._before = (0, 0)  # sent to and received from those who gave way

    def __getitem__(self, peer: PeerId) -> LinkTraffic:
        if peer not in self._by_peer:
            if len(self._by_peer) >= MAX_COUNTED:
                self._give_way()
            self._by_peer[peer] = LinkTraffic(self._clock)
        return self._by_peer[peer]

    @property
    def moved(self) -> tuple[int, int]:
        """Return the bytes sent and received in all."""
        sent, received = self._before
        for each in self._by_peer.values():
            sent, received = sent + each.sent_nbytes, received + each.received_nbytes
        return sent, received

    def now(self) -> float:
        return self._clock.now()

    def all(self) -> dict[PeerId, LinkTraffic]:
        return dict(self._by_peer)

    def last_heard(self, peer: PeerId) -> float | None:
        known = self._by_peer.get(peer)
        return None if known is None else known.heard_at

    def _give_way(self) -> None:
        now = self._clock.now()  # who was never heard is just being met

        def heard_at(peer: PeerId) -> float:
            at = self._by_peer[peer].heard_at
            return now if at is None else at

        gone = self._by_peer.pop(min(self._by_peer, key=heard_at))
        sent, received = self._before
        self._before = sent + gone.sent_nbytes, received + gone.received_nbytes


Q = TypeVar("Q", bound=msgspec.Struct)
CallHandler = Callable[[PeerId, Q], Awaitable[msgspec.Struct]]
NoteHandler = Callable[[PeerId, Q], Awaitable[None]]
_Handlers = dict[str, tuple[type[Any], Callable[[PeerId, Any], Awaitable[Any]]]]

MAX_QUEUED_NBYTES = 8 << 20  # eight of the largest frames; a peer that reads so slowly is no use
MAX_JOINED_NBYTES = 64 << 10  # small frames joined into one send


class Handlers:
    """What this peer answers: one handler for each record type, after which its method is named."""

    def __init__(self) -> None:
        self._calls: _Handlers = {}
        self._notes: _Handlers = {}

    def serve(self, kind: type[Q], handler: CallHandler[Q], method: str = "") -> None:
        """Answer calls of `kind` with the record that `handler(peer, request)` returns.

        Args:
            method: under another name than the type's.
        """
        _register(self._calls, method or kind.__name__, kind, handler)

    def on_note(self, kind: type[Q], handler: NoteHandler[Q], method: str = "") -> None:
        """Give notes of `kind` to `handler(peer, note)`, one at a time and in order for each peer."""
        _register(self._notes, method or kind.__name__, kind, handler)

    def ignore(self, method: str) -> None:
        """Take these notes no more, until there is another handler."""
        self._notes.pop(method, None)

    def forget(self, prefix: str) -> None:
        """Serve and take nothing whose name begins so."""
        for handlers in (self._calls, self._notes):
            for method in [each for each in handlers if each.startswith(prefix)]:
                del handlers[method]

    def answer(self, peer: PeerId, method: str, body: bytes) -> Callable[[], Awaitable[msgspec.Struct]] | None:
        """Return what computes the answer to a call, or None when nobody serves `method`.

        Raises:
            WireError: `body` is no such request.
        """
        return _bind(self._calls, peer, method, body)

    def take(self, peer: PeerId, method: str, body: bytes) -> Callable[[], Awaitable[None]] | None:
        """Return what handles a note, or None when nobody takes `method`.

        Raises:
            WireError: `body` is no such note.
        """
        return _bind(self._notes, peer, method, body)


def public_reason(error: Exception) -> str:
    """Return what a remote may learn of a handler's failure: the text of an error that is about peers, else its type.

    Other errors may name files of this machine.
    """
    if isinstance(error, (CallFailed, PayloadError)) or type(error) is PeerError:
        return str(error)[: messages.MAX_REASON_CHARS]
    return type(error).__name__


def _register(
    handlers: _Handlers, method: str, kind: type[Any], handler: Callable[[PeerId, Any], Awaitable[Any]]
) -> None:
    if method in handlers:
        raise ValueError(f"{method} has a handler already")
    handlers[method] = (kind, handler)


def _bind(handlers: _Handlers, peer: PeerId, method: str, body: bytes) -> Callable[[], Awaitable[Any]] | None:
    found = handlers.get(method)
    if found is None:
        return None
    kind, handler = found
    record = decode(body, kind, max_nbytes=messages.MAX_BODY_NBYTES)
    return lambda: handler(peer, record)


class SendQueue:
    def __init__(self, stream: Stream, traffic: LinkTraffic, burden: Burden) -> None:
        self._stream = stream
        self._traffic = traffic
        self._burden = burden
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
        self.add_frame(encode_frame(payload))

    def add_frame(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._queued_nbytes += len(frame)
        self._changed.set()

    async def flush(self) -> None:
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
            async with within(FRAME_S, self._overdue):
                await self._burden.metered(self._stream.send(data))
            self._traffic.sent(len(data))
            self._queued_nbytes -= len(data)
            self._changed.set()

    async def _change(self) -> None:
        # Whoever waits has just looked at the state, so clearing loses no news: `set` wakes all who wait by then.
        self._changed.clear()
        await self._changed.wait()

    def _overdue(self) -> PeerError:
        return PeerError(f"{short(self._stream.peer)} did not take a frame within {FRAME_S:g} s")

    def _take(self) -> bytes:
        joined = [self._frames.popleft()]
        num_bytes = len(joined[0])
        while self._frames and num_bytes + len(self._frames[0]) <= MAX_JOINED_NBYTES:
            joined.append(self._frames.popleft())
            num_bytes += len(joined[-1])
        return joined[0] if len(joined) == 1 else b"".join(joined)


MAX_IN_FLIGHT = 64  # calls one peer may have open at another: twice the members of a swarm
MAX_QUEUED_NOTES = 1024  # about a minute of what 16 busy peers send
MAX_QUEUED_NOTES_NBYTES = 16 << 20  # sixteen of the largest; nearly all are below 1 KiB
# What has come already is read without waiting. After so much of it all others get a turn, the notes' handlers too.
TURN_FRAMES = 32  # of the smallest, about a millisecond
TURN_NBYTES = 1 << 20  # one of the largest
FAILED_AGAIN_S = 10.0  # between two events of handlers that fail at what one link brings
TURN_NOTES = 2 * TURN_FRAMES  # handled in one turn: a backlog shrinks though more of it is read


class Flooded(WireError):
    """A peer sent more than this one can handle, and went on though it was read slowly."""


class Session:
    """One stream's calls. `run` it; the other methods work while it runs."""

    def __init__(
        self,
        stream: Stream,
        reader: FrameReader,
        handlers: Handlers,
        traffic: LinkTraffic,
        emit: Emit,
        burden: Burden | None = None,
    ) -> None:
        self.peer, self.source = stream.peer, stream.source
        self._stream = stream
        self._reader = reader
        self._handlers = handlers
        self._emit = emit
        self._burden = burden or Burdens(traffic.clock).of(stream.peer, stream.source)
        self._clock = traffic.clock
        self._is_throttled = False
        self._failed_at: float | None = None
        self._num_untold = 0
        self._num_frames = 0
        self._queue = SendQueue(stream, traffic, self._burden)
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}  # our calls
        self._next_number = 0
        self._serving: dict[int, asyncio.Task[None]] = {}  # their calls
        self._last_number = -1
        self._notes: asyncio.Queue[tuple[int, Callable[[], Awaitable[None]]]] = asyncio.Queue()
        self._notes_nbytes = 0  # including the one being handled
        self._stopping = asyncio.Event()
        self._ended: str | None = None

    async def run(self) -> None:
        """Carry calls until the stream ends or `stop`, then fail every call under way.

        Raises:
            WireError: the peer broke the protocol.
            PeerError: the stream ended or the peer is gone.
        """
        parts = (self._read(), self._queue.run(), self._handle_notes(), self._stopping.wait())
        workers = [asyncio.ensure_future(part) for part in parts]
        reason = "this side closed it"
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                if worker.done():
                    worker.result()
        except PeerError as error:
            reason = str(error)
            raise
        finally:
            self._end(reason)
            await self._stream.close()
            leftover = [*workers, *self._serving.values()]
            for task in leftover:
                task.cancel()
            await asyncio.gather(*leftover, return_exceptions=True)

    async def call(self, method: str, body: bytes, *, deadline_s: float) -> bytes:
        """Send a request and return the answer's bytes.

        Failure:
        - no answer in time: DeadlineExceeded, and the handler there is cancelled.
        - the handler failed, or nobody serves `method`: CallFailed.
        - the stream ended: PeerError; whether the handler ran is unknown.
        """
        _check_body(method, body)

        def overdue() -> DeadlineExceeded:
            return DeadlineExceeded(f"{short(self.peer)} did not answer {method} within {deadline_s:g} s")

        async with within(deadline_s, overdue) as limit, self._slots:
            await self._queue.room()
            self._check_open(method)
            number, future = self._next_number, asyncio.get_running_loop().create_future()
            self._next_number += 1
            self._burden.call()
            left_s = deadline_s if (when := limit.when()) is None else when - asyncio.get_running_loop().time()
            left_s = min(max(left_s, 1e-3), messages.MAX_DEADLINE_S)
            self._queue.add(encode(messages.Call(number=number, method=method, deadline_s=left_s, body=body)))
            self._waiting[number] = future
            try:
                answer: bytes = await future
                return answer
            finally:
                if self._waiting.pop(number, None) is not None and self._ended is None:
                    self._queue.add(encode(messages.Cancel(number=number)))

    async def note(self, method: str, body: bytes) -> None:
        """Queue a one-way message; waits while the queue is full.

        Raises:
            PeerError: the stream has ended.
        """
        _check_body(method, body)
        await self._queue.room()
        self._check_open(method)
        self._add_note(note_frame(method, body))

    def post(self, method: str, body: bytes) -> bool:
        """Queue a one-way message if there is room; return whether there was."""
        return self.post_frame(note_frame(method, body))

    def post_frame(self, frame: bytes) -> bool:
        """Do so with what `note_frame` has made of it: one message to many is encoded once."""
        if self._ended is not None or not self._queue.has_room:
            return False
        self._add_note(frame)
        return True

    def welcome(self) -> None:
        """A note of the peer's was one that this peer had agreed to take: it costs the peer nothing."""
        self._burden.note()

    def _add_note(self, frame: bytes) -> None:
        self._burden.note()
        self._queue.add_frame(frame)

    def stop(self) -> None:
        """Let `run` end; no call is sent any more."""
        self._ended = self._ended or "this side closed it"
        self._stopping.set()

    def open_with(self, payload: bytes) -> None:
        self._queue.add(payload)

    async def flush(self) -> None:
        await self._queue.flush()

    async def _read(self) -> None:
        while True:
            num_left, nbytes_left = 1 if self._burden.is_beyond else TURN_FRAMES, TURN_NBYTES
            while num_left > 0 and nbytes_left > 0:
                data = await self._burden.read(self._reader)
                if data is None:
                    raise PeerError(f"{short(self.peer)} closed the connection")
                num, nbytes = self._burden.do(partial(self._take_in, data, num_left, nbytes_left))
                num_left, nbytes_left = num_left - num, nbytes_left - nbytes
            await asyncio.sleep(self._pause_s())

    def _take_in(self, first: bytes, most: int, most_nbytes: int) -> tuple[int, int]:
        """Take in a frame and those behind it that have come whole; return how many these are, and their bytes."""
        data, num, num_bytes = first, 0, 0
        while True:
            self._num_frames += 1
            self._dispatch(decode(data, messages.RpcFrame))
            num, num_bytes = num + 1, num_bytes + len(data)
            if num >= most or num_bytes >= most_nbytes or (more := self._reader.at_hand()) is None:
                return num, num_bytes
            data = more

    def _pause_s(self) -> float:
        """Return for how long nothing is read, by what the peer has cost.

        Raises:
            Flooded: it has sent too much for too long.
        """
        pause_s = self._burden.pause_s()
        if pause_s and not self._is_throttled:
            self._is_throttled = True
            text = f"{short(self.peer)} takes more than its share of this machine's time, and is read more slowly"
            self._emit(Notice(text=text))
        if self._burden.is_flood:
            cost_s = self._burden.cost_s
            raise Flooded(f"it floods: {self._num_frames} frames, {cost_s:.1f} s of computing here, without a pause")
        return pause_s

    def _dispatch(self, frame: messages.RpcFrame) -> None:
        match frame:
            case messages.Call():
                self._begin(frame)
            case messages.Reply(number=number, body=body):
                if (future := self._answered(number)) is not None:
                    future.set_result(body)
            case messages.Failed(number=number, code=code, reason=reason):
                if (future := self._answered(number)) is not None:
                    kind = DeadlineExceeded if code == "deadline" else CallFailed
                    future.set_exception(kind(f"{short(self.peer)} answered: {printable(reason)}"))
            case messages.Cancel(number=number):
                if (task := self._serving.pop(number, None)) is not None:
                    task.cancel()
            case messages.Note(method=method, body=body):
                work = self._handlers.take(self.peer, method, body)
                if work is not None:
                    self._queue_note(len(body), work)

    def _queue_note(self, num_bytes: int, work: Callable[[], Awaitable[None]]) -> None:
        if self._notes.qsize() >= MAX_QUEUED_NOTES:
            raise WireError(f"more than {MAX_QUEUED_NOTES} notes wait here; sent faster than handled")
        if self._notes_nbytes + num_bytes > MAX_QUEUED_NOTES_NBYTES:
            raise WireError(f"notes of more than {MAX_QUEUED_NOTES_NBYTES} bytes wait here; sent faster than handled")
        self._notes_nbytes += num_bytes
        self._notes.put_nowait((num_bytes, work))

    def _answered(self, number: int) -> "asyncio.Future[bytes] | None":
        """Return who waits for this answer; None when nobody does any more."""
        if number >= self._next_number:
            raise WireError(f"answer to call {number}, which was never made")
        future = self._waiting.pop(number, None)
        return None if future is None or future.done() else future

    def _begin(self, call: messages.Call) -> None:
        if call.number <= self._last_number:
            raise WireError(f"call {call.number} after call {self._last_number}: numbers must count up")
        if len(self._serving) >= MAX_IN_FLIGHT:
            raise WireError(f"more than {MAX_IN_FLIGHT} calls in flight")
        if not 0 < call.deadline_s <= messages.MAX_DEADLINE_S:
            raise WireError(
                f"a call's deadline must be above 0 and at most {messages.MAX_DEADLINE_S:g} s, not {call.deadline_s}"
            )
        self._last_number = call.number
        work = self._handlers.answer(self.peer, call.method, call.body)
        self._serving[call.number] = asyncio.ensure_future(self._serve(call, work))

    async def _serve(self, call: messages.Call, work: Callable[[], Awaitable[msgspec.Struct]] | None) -> None:
        await self._burden.metered(self._answer(call, work))

    async def _answer(self, call: messages.Call, work: Callable[[], Awaitable[msgspec.Struct]] | None) -> None:
        answer = await self._compute(call, work)
        await self._queue.room()
        # Nobody waits for the answer to a call that was cancelled and is no longer ours.
        if self._serving.pop(call.number, None) is not None:
            self._queue.add(encode(answer))

    async def _compute(
        self, call: messages.Call, work: Callable[[], Awaitable[msgspec.Struct]] | None
    ) -> messages.Reply | messages.Failed:
        if work is None:
            return messages.Failed(number=call.number, code="unknown", reason=f"nobody here serves {call.method}")
        limit = asyncio.timeout(call.deadline_s)
        try:
            async with limit:
                body = encode(await work())
            if len(body) > messages.MAX_BODY_NBYTES:
                raise CallFailed(f"the answer to {call.method} has {len(body)} bytes, above {messages.MAX_BODY_NBYTES}")
        except Exception as error:  # a handler's failure is the caller's answer and ends nothing else
            if isinstance(error, TimeoutError) and limit.expired():
                return messages.Failed(number=call.number, code="deadline", reason=f"{call.method} took too long here")
            if not isinstance(error, PeerError):
                self._tell_failure(call.method, error)
            return messages.Failed(number=call.number, code="error", reason=public_reason(error))
        return messages.Reply(number=call.number, body=body)

    async def _handle_notes(self) -> None:
        while True:
            for _ in range(TURN_NOTES):
                num_bytes, work = await self._notes.get()
                try:
                    await self._burden.metered(work())
                except Exception as error:  # as for calls: one note's failure ends nothing else
                    self._tell_failure("a note", error)
                self._notes_nbytes -= num_bytes
            await asyncio.sleep(0)

    def _tell_failure(self, what: str, error: Exception) -> None:
        """Say what a handler failed at; what this peer makes it fail at again and again is counted."""
        now = self._clock.now()
        if self._failed_at is not None and now - self._failed_at < FAILED_AGAIN_S:
            self._num_untold += 1
            return
        more = f"; {self._num_untold} more like it before" if self._num_untold else ""
        self._failed_at, self._num_untold = now, 0
        self._emit(Notice(text=f"handler of {what} failed: {type(error).__name__}: {error}{more}"))

    def _check_open(self, method: str) -> None:
        if self._ended is not None:
            raise PeerError(f"link to {short(self.peer)} is down, {method} was not sent: {self._ended}")

    def _end(self, reason: str) -> None:
        self._ended = reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerError(f"link to {short(self.peer)} went down during a call: {reason}"))
        self._waiting.clear()
        self._queue.close()


def note_frame(method: str, body: bytes) -> bytes:
    """Return the frame of a one-way message."""
    _check_body(method, body)
    return encode_frame(encode(messages.Note(method=method, body=body)))


def _check_body(method: str, body: bytes) -> None:
    if len(body) > messages.MAX_BODY_NBYTES:
        raise ValueError(
            f"{method} of {len(body)} bytes exceeds the bound of {messages.MAX_BODY_NBYTES}; send it as a blob"
        )
