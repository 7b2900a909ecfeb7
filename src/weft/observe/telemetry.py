"""What a peer tells whoever watches: its events, condensed, in signed pieces of two seconds.

    events ──► window of two seconds ──public──► Bulletin ──► those of the last minutes, for who asks

Inner steps of a window are one: the mean loss of all their tokens. A window has the newest word of each
member that is heard. What is of members and has no room waits for the next piece; all else without room is counted and
dropped.

Pieces are written and signed once somebody asks for them; while nobody does, this is a list that forgets its oldest.
What a bulletin says of others is its signer's word. Who watches is told this peer's own bulletins, and those of others
that it is linked to.

    observer ──BulletinRequest(of = C)──► this peer ──BulletinRequest──► C
             ◄────── signed by C ────────            ◄──── signed by C ──

So a few links show a whole run. What is handed on is signed by its author, so nobody believes this peer for it. C is
asked only because somebody asks, a few at a time, and one answer serves all who ask the same within two seconds:
watchers that have heard as much of C as each other.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.clock import Clock
from weft.errors import NetError, PeerError, Refused, WireError
from weft.events import Entry, Event, MemberProgress, StepDone
from weft.ids import PeerId, RunId
from weft.keys import verify
from weft.net.node import Node
from weft.observe.redact import public
from weft.wire import Record, Signed, Signer, seal, unseal

WINDOW_S = 2.0
MAX_NBYTES = 16 << 10  # of the lines of one bulletin
MAX_LINES = 256
MAX_KEPT = 512  # bulletins: a quarter of an hour of a peer that always has something to say
MAX_TOLD = 16  # bulletins in one answer

Line = Annotated[bytes, Meta(max_length=MAX_NBYTES)]  # JSON: when, in wall seconds, and the event


class Bulletin(Record, frozen=True, kw_only=True, tag="Bulletin"):
    run: RunId
    began_ms: Annotated[int, Meta(ge=0)]  # when its process began, by its own clock: another process counts anew
    number: Annotated[int, Meta(ge=0)]
    lines: Annotated[tuple[Line, ...], Meta(max_length=MAX_LINES)]
    num_dropped: Annotated[int, Meta(ge=0)]  # events that had no room


class BulletinRequest(Record, frozen=True, kw_only=True, tag="BulletinRequest"):
    """A call, of anybody that is admitted: what happened after this bulletin of yours?"""

    run: RunId
    of: PeerId | None = None  # of this peer, which you are linked to; None: of yourself
    began_ms: Annotated[int, Meta(ge=0)] = 0  # of the process that it knows; of another one it is told all that is kept
    after: Annotated[int, Meta(ge=-1)] = -1


class BulletinAnswer(Record, frozen=True, kw_only=True, tag="BulletinAnswer"):
    """In order. Ask again at once where there are more."""

    bulletins: Annotated[tuple[Signed, ...], Meta(max_length=MAX_TOLD)]
    has_more: bool


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    event: Event


class Bulletins:
    def __init__(self, signer: Signer, run: RunId, clock: Clock) -> None:
        self._signer = signer
        self._run = run
        self._clock = clock
        self._began_ms = int(1000 * clock.wall())
        self._window = _Window()
        self._closed: deque[_Window | Signed] = deque(maxlen=MAX_KEPT)
        self._num_closed = 0
        self._members: dict[PeerId, Happened] = {}  # the newest word of each that was not told; who waits longest first

    def write(self, entry: Entry) -> None:
        self._turn(entry.at)
        happened = Happened(at=entry.at, event=entry.event)
        if isinstance(entry.event, MemberProgress):
            self._members[entry.event.member] = happened
            self._window.begin(entry.at)
        else:
            self._window.add(happened)

    def close(self) -> None:
        pass

    def told(self, request: BulletinRequest) -> BulletinAnswer:
        """Return what happened after a bulletin, as far as it is kept."""
        self._turn(self._clock.wall())
        first = self._num_closed - len(self._closed)
        start = max(first, request.after + 1) if request.began_ms == self._began_ms else first
        stop = min(start + MAX_TOLD, self._num_closed)
        return BulletinAnswer(
            bulletins=tuple(self._signed(number, number - first) for number in range(start, stop)),
            has_more=stop < self._num_closed,
        )

    def _turn(self, now: float) -> None:
        """Close the window, if its time is over and there is something to tell."""
        began = self._window.began
        if began is not None and not began <= now < began + WINDOW_S:  # also where the clock was set back
            self._closed.append(self._window)
            self._num_closed += 1
            self._window = _Window()

    def _signed(self, number: int, place: int) -> Signed:
        window = self._closed[place]
        if isinstance(window, Signed):
            return window
        room, num_dropped = _Room(), window.num_dropped
        for happened in window.told():
            num_dropped += not room.put(happened)
        for member, happened in list(self._members.items()):
            if not room.put(happened):
                break
            del self._members[member]
        bulletin = Bulletin(
            run=self._run, began_ms=self._began_ms, number=number, lines=tuple(room.lines), num_dropped=num_dropped
        )
        self._closed[place] = signed = seal(self._signer, bulletin)
        return signed


class _Window:
    """The events of two seconds."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.num_dropped = 0
        self._events: list[Happened] = []
        self._steps: Happened | None = None  # all of them, as one

    def begin(self, at: float) -> None:
        self.began = at if self.began is None else self.began

    def add(self, happened: Happened) -> None:
        self.begin(happened.at)
        if isinstance(happened.event, StepDone):
            self._steps = happened if self._steps is None else both(self._steps, happened)
        elif len(self._events) < MAX_LINES:
            self._events.append(happened)
        else:
            self.num_dropped += 1

    def told(self) -> list[Happened]:
        """Return what happened, what must have room first."""
        return ([] if self._steps is None else [self._steps]) + self._events


class _Room:
    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._nbytes = 0

    def put(self, happened: Happened) -> bool:
        """Write what others may know of an event; return whether it had room."""
        event = public(happened.event)
        if event is None:
            return True
        line = msgspec.json.encode(Happened(at=happened.at, event=event))
        if len(self.lines) == MAX_LINES or self._nbytes + len(line) > MAX_NBYTES:
            return False
        self.lines.append(line)
        self._nbytes += len(line)
        return True


def both(first: Happened, second: Happened) -> Happened:
    """Return two inner steps, or what stands for several, as one: the mean loss of all their tokens."""
    a, b = first.event, second.event
    assert isinstance(a, StepDone)
    assert isinstance(b, StepDone)
    num_tokens = a.num_tokens + b.num_tokens
    loss = (a.loss * a.num_tokens + b.loss * b.num_tokens) / num_tokens if num_tokens else b.loss
    whole = msgspec.structs.replace(b, loss=loss, num_tokens=num_tokens, duration_s=a.duration_s + b.duration_s)
    return Happened(at=second.at, event=whole)


MAX_ASKED = 8  # others at a time
MAX_ANSWERS = 64  # kept; of 256 KiB at most each
ASK_S = 5.0

NOTHING = BulletinAnswer(bulletins=(), has_more=False)


@dataclass
class _Asked:
    began: float
    answer: "asyncio.Task[BulletinAnswer]"


class Relaying:
    """Answers whoever asks `node` what happened, here or at others."""

    def __init__(self, own: Bulletins, node: Node, clock: Clock) -> None:
        self._own = own
        self._node = node
        self._clock = clock
        self._asked: dict[BulletinRequest, _Asked] = {}  # in the order in which it was
        node.serve(BulletinRequest, self.answer)

    async def answer(self, _peer: PeerId, request: BulletinRequest) -> BulletinAnswer:
        if request.of in (None, self._node.peer):
            return self._own.told(request)
        now = self._clock.now()
        for key, asked in list(self._asked.items()):
            if asked.answer.done() and (now - asked.began >= WINDOW_S or len(self._asked) >= MAX_ANSWERS):
                del self._asked[key]
        if request not in self._asked:
            num_under_way = sum(not asked.answer.done() for asked in self._asked.values())
            if not self._node.is_linked(request.of) or num_under_way >= MAX_ASKED:
                return NOTHING  # it is asked again
            self._asked[request] = _Asked(now, asyncio.ensure_future(self._ask(request.of, request)))
        return await asyncio.shield(self._asked[request].answer)

    async def _ask(self, peer: PeerId, request: BulletinRequest) -> BulletinAnswer:
        theirs = msgspec.structs.replace(request, of=None)
        try:
            answer = await self._node.call(peer, theirs, BulletinAnswer, deadline_s=ASK_S)
            for signed in answer.bulletins:  # whoever hands on what nobody signed is heard no more
                if signed.signer != peer or unseal(signed, Bulletin, verify).run != request.run:
                    return NOTHING
            return answer
        except (PeerError, NetError, Refused, WireError):
            return NOTHING
