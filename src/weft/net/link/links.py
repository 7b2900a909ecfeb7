"""The control connections that stand, at most one to each peer, and those that others open here.

`Dialer` and `Listener` hand over connections whose handshake is done; the table of `Links` runs their sessions, says
who came and went, and counts their bytes.

Two peers may dial each other at once. Whoever has said hello and hears the other's hello holds it back if its own
key is the lower (`settled`): the connection dialled by the lower key wins, and the other is turned away
as a duplicate before anything was sent on it. So no call is ever lost to a race.

Strangers that knock are bounded in number, bytes and time: a key proves nothing but itself, so until it is admitted a
connection is under a `Gate` as before its key was proven, and a crowd turns out its own oldest, not newcomers. A
refused peer learns why; the log does too (`AdmissionRefused`, or `ConnectionDropped` when it did not speak the
protocol).

Failure:
- a peer breaks the protocol: its link is closed, `ConnectionDropped` says why; it may come back. Who does so again and
  again is barred for a while: a link that never lasts costs others more than none. Who floods is barred at once.
- one key is in two places: whoever comes second is refused with the reason, as long as the first one answers.
- the path dies silently: nothing here notices; membership does, and calls `drop`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

from weft.errors import CallFailed, PeerError, WireError
from weft.events import AdmissionRefused, ConnectionDropped, Emit, LinkDown, LinkUp
from weft.ids import PeerId, short
from weft.net.link.address_book import AddressBook
from weft.net.link.handshake import Passport, handshake_reader, hear, judge, turn_away
from weft.net.link.rpc import Flooded, Handlers, Session, Traffic
from weft.net.messages import MAX_ADDRESSES, MAX_ENDED_LINKS, MAX_TOLD_CONTACTS, Admitted, Contact, Hello, Rejected
from weft.net.transport.base import Accept, Lane, Stream, Transport
from weft.net.transport.frame import FRAME_S, MAX_FRAME_NBYTES, FrameReader
from weft.net.transport.limits import MAX_LINKS, Gate
from weft.tasks import Tasks
from weft.wire import encode

VIA = "via"  # the transport through another peer
MAX_FORMER = 1024  # peers whose lost links are remembered: keys are free to make

ANSWERS_S = 2.0  # a process that holds a link; the dialler waits for `HANDSHAKE_S`
_ANY = "IsThere"  # a method that nobody serves
_IN_TWO_PLACES = (
    "another process takes part in this run with the same key, perhaps on a machine to which this home was copied. A "
    "key works in one place at a time. Stop that process, or start this one with a key of its own: --key second.pem"
)

MAX_VIOLATIONS = 3  # of one peer within `BARRED_S`: one may be a mishap
BARRED_S = 60.0

OnLink = Callable[[PeerId, bool, str], None]


@dataclass(eq=False, kw_only=True)
class Link:
    """A control connection on which both sides have admitted each other."""

    session: Session
    transport: Transport
    address: str  # the dialled one; empty when the other side dialled
    link_id: bytes
    instance: bytes  # of the remote process
    tried: tuple[str, ...] = ()  # addresses that failed before, and why
    task: "asyncio.Task[None] | None" = None

    @property
    def peer(self) -> PeerId:
        return self.session.peer

    @property
    def is_dialler(self) -> bool:
        return bool(self.address)

    @property
    def is_relayed(self) -> bool:
        """Return whether a third peer passes on what is said here."""
        return self.transport.name == VIA

    @property
    def shown_address(self) -> str:
        return self.address or f"{self.transport.name} (incoming)"


class Links:
    def __init__(self, handlers: Handlers, traffic: Traffic, emit: Emit, most: int = MAX_LINKS) -> None:
        self.most = most
        self._handlers = handlers
        self._traffic = traffic
        self._emit = emit
        self._standing: dict[PeerId, Link] = {}
        self._ended: dict[PeerId, deque[bytes]] = {}  # who lost one last stands last
        self._violated_at: dict[PeerId, deque[float]] = {}
        self._arrived = asyncio.Event()  # another each time
        self._greeting: dict[PeerId, asyncio.Event] = {}
        self._callbacks: list[OnLink] = []
        self._tasks = Tasks()

    def on_link(self, callback: OnLink) -> None:
        """Call `callback(peer, is_up, reason)` at once whenever a link comes up or goes down."""
        self._callbacks.append(callback)

    def get(self, peer: PeerId) -> Link | None:
        return self._standing.get(peer)

    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self._standing)

    def direct(self) -> tuple[Link, ...]:
        """Return the links that no third peer carries."""
        return tuple(link for link in self._standing.values() if not link.is_relayed)

    @property
    def has_relayed(self) -> bool:
        return any(link.is_relayed for link in self._standing.values())

    def is_full_for(self, peer: PeerId) -> bool:
        return peer not in self._standing and len(self._standing) >= self.most

    def may_fetch(self, peer: PeerId) -> bool:
        """Return whether `peer` may open bulk streams: a link to it stands, and it is not barred."""
        return peer in self._standing and not self.is_barred(peer)

    def is_barred(self, peer: PeerId) -> bool:
        """Return whether `peer` has broken the protocol so often just now that no link to it may stand."""
        violated_at = self._violated_at.get(peer)
        if violated_at is None or len(violated_at) < MAX_VIOLATIONS:
            return False
        return self._traffic.now() - violated_at[0] < BARRED_S

    def ended(self, peer: PeerId) -> tuple[bytes, ...]:
        """Return the ids of the last links to `peer` that this side has lost or given up."""
        return tuple(self._ended.get(peer, ()))

    def give_up(self, peer: PeerId, link_id: bytes) -> None:
        """Note that a connection never stood here, though the other side may believe that it does."""
        ended = self._ended.pop(peer, deque(maxlen=MAX_ENDED_LINKS))
        ended.append(link_id)
        if len(self._ended) >= MAX_FORMER:
            del self._ended[next(iter(self._ended))]
        self._ended[peer] = ended

    async def arrival(self, peer: PeerId) -> Link:
        """Wait for a link to `peer`."""
        while (link := self._standing.get(peer)) is None:
            await self._arrived.wait()
        return link

    @contextmanager
    def greeting(self, peer: PeerId) -> Iterator[None]:
        """Note that this side's own hello to `peer` is unanswered meanwhile."""
        settled = self._greeting[peer] = asyncio.Event()
        try:
            yield
        finally:
            del self._greeting[peer]
            settled.set()

    async def settled(self, peer: PeerId) -> None:
        """Wait while this side's own hello to `peer` is unanswered."""
        if (greeting := self._greeting.get(peer)) is not None:
            await greeting.wait()

    async def is_held_by_another(self, peer: PeerId, instance: bytes) -> bool:
        """Return whether another process than `instance` has `peer`'s key and is linked here: it answers a call.

        Failure:
        - it is gone, or its path is dead: no answer in time, and whoever comes takes its place.
        """
        link = self._standing.get(peer)
        if link is None or link.instance == instance:
            return False
        try:
            await link.session.call(_ANY, b"", deadline_s=ANSWERS_S)
        except CallFailed:  # nobody serves that, which is an answer
            return True
        except PeerError:
            return False
        return True

    def session(self, stream: Stream, reader: FrameReader) -> Session:
        traffic = self._traffic[stream.peer]
        reader.admit(MAX_FRAME_NBYTES, FRAME_S, traffic.received)
        burden = self._traffic.burdens.of(stream.peer, stream.source)
        return Session(stream, reader, self._handlers, traffic, self._emit, burden)

    def install(self, link: Link) -> None:
        """Let `link` stand, in the place of any before it, and run its session."""
        self.drop(link.peer, "replaced by a newer connection")
        self._standing[link.peer] = link
        self._traffic[link.peer].received(0)
        link.task = self._tasks.spawn(self._carry(link))
        self._emit(
            LinkUp(remote=link.peer, transport=link.transport.name, address=link.shown_address, tried=link.tried)
        )
        self._tell(link.peer, True, "")
        self._arrived.set()
        self._arrived = asyncio.Event()

    def drop(self, peer: PeerId, reason: str) -> None:
        """Close the link to `peer`, if there is one; calls under way on it fail."""
        link = self._standing.get(peer)
        if link is not None:
            self._finish(link, reason)
            link.session.stop()

    def violation(self, link: Link, reason: str) -> None:
        """Close `link` because its peer broke the protocol, and say so."""
        self._note_violation(link, reason)
        if self._standing.get(link.peer) is link:
            self.drop(link.peer, reason)

    async def aclose(self) -> None:
        running = [link.task for link in self._standing.values() if link.task is not None]
        for peer in self.peers():
            self.drop(peer, "this peer stops")
        await asyncio.gather(*running, return_exceptions=True)
        await self._tasks.aclose()

    async def _carry(self, link: Link) -> None:
        reason = f"{short(link.peer)} is gone"
        try:
            await link.session.run()
        except WireError as error:
            reason = str(error)
            self._note_violation(link, reason, MAX_VIOLATIONS if isinstance(error, Flooded) else 1)
        except PeerError as error:
            reason = str(error)
        finally:
            self._finish(link, reason)

    def _note_violation(self, link: Link, reason: str, num: int = 1) -> None:
        now = self._traffic.now()
        self._violated_at = {peer: at for peer, at in self._violated_at.items() if now - at[-1] < BARRED_S}
        self._violated_at.setdefault(link.peer, deque(maxlen=MAX_VIOLATIONS)).extend([now] * num)
        self._emit(ConnectionDropped(address=link.shown_address, remote=link.peer, reason=reason))

    def _finish(self, link: Link, reason: str) -> None:
        if self._standing.get(link.peer) is not link:
            return
        del self._standing[link.peer]
        self.give_up(link.peer, link.link_id)
        self._emit(LinkDown(remote=link.peer, reason=reason))
        self._tell(link.peer, False, reason)

    def _tell(self, peer: PeerId, is_up: bool, reason: str) -> None:
        for callback in list(self._callbacks):
            callback(peer, is_up, reason)


MAX_STRANGERS = 64  # control connections that have not been admitted yet, over all transports
MAX_STRANGERS_PER_IP = 16  # of them from one address; half a swarm behind one router that returns at once

AcceptBulk = Callable[[Stream], Awaitable[None]]


class Listener:
    def __init__(
        self,
        passport: Passport,
        links: Links,
        book: AddressBook,
        emit: Emit,
        accept_bulk: AcceptBulk,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        self._passport = passport
        self._links = links
        self._book = book
        self._emit = emit
        self._accept_bulk = accept_bulk
        self.max_told = MAX_TOLD_CONTACTS  # to whom is admitted
        self._strangers: Gate[tuple[Transport, Stream]] = Gate(
            min(MAX_STRANGERS, max_strangers), MAX_STRANGERS_PER_IP, "are not admitted"
        )

    def accept(self, transport: Transport) -> Accept:
        """Return what `transport` calls with each incoming stream."""
        return partial(self._accept, transport)

    async def _accept(self, transport: Transport, stream: Stream, lane: Lane) -> None:
        try:
            if lane == "control":
                await self._knock(transport, stream)
            elif self._links.may_fetch(stream.peer):
                await self._accept_bulk(stream)
            else:
                raise WireError("a bulk stream was opened before admission, or after its link went down")
        except BaseException as error:
            await stream.close()
            if not isinstance(error, PeerError):
                raise
            if isinstance(error, WireError):
                self._drop(transport, stream.peer, str(error))

    async def _knock(self, transport: Transport, stream: Stream) -> None:
        evicted = self._strangers.enter((transport, stream), stream.source)
        try:
            if evicted is not None:
                (its_transport, victim), reason = evicted
                self._drop(its_transport, victim.peer, reason)
                await victim.close()
            await self._judge(transport, stream)
        finally:
            self._strangers.leave((transport, stream))

    async def _judge(self, transport: Transport, stream: Stream) -> None:
        reader = handshake_reader(stream)
        heard = await hear(reader)
        if heard is None:  # the dialler found another way meanwhile
            await stream.close()
            return
        verdict = self._verdict(stream.peer, heard)
        if isinstance(verdict, Rejected):
            self._emit(AdmissionRefused(remote=stream.peer, reason=verdict.reason))
            await turn_away(stream, verdict)
            return
        if await self._links.is_held_by_another(stream.peer, verdict.instance):
            rejected = Rejected(code="admission", reason=_IN_TWO_PLACES)
            self._emit(AdmissionRefused(remote=stream.peer, reason=rejected.reason))
            await turn_away(stream, rejected)
            return
        if self._passport.peer < stream.peer:
            await self._links.settled(stream.peer)
        if (transport, stream) not in self._strangers:  # turned out meanwhile
            return
        if self._is_duplicate(stream.peer, verdict):
            await turn_away(stream, Rejected(code="duplicate", reason="you are linked already"))
            return
        self._admit(transport, stream, reader, verdict)

    def _verdict(self, peer: PeerId, heard: Hello | Rejected) -> Hello | Rejected:
        if isinstance(heard, Rejected):
            return heard
        if (rejected := judge(self._passport, peer, heard)) is not None:
            return rejected
        if self._links.is_barred(peer):
            return Rejected(code="busy", reason="you broke the protocol repeatedly; come back in a minute")
        if self._links.is_full_for(peer):
            return Rejected(code="busy", reason="this peer has as many links as it can serve; ask another member")
        return heard

    def _is_duplicate(self, peer: PeerId, hello: Hello) -> bool:
        link = self._links.get(peer)
        return link is not None and link.instance == hello.instance and link.link_id not in hello.ended

    def _admit(self, transport: Transport, stream: Stream, reader: FrameReader, hello: Hello) -> None:
        others = (self._book.contact(peer) for peer in self._links.peers() if peer != stream.peer)
        contacts = islice((contact for contact in others if contact.addresses), self.max_told)  # few of many are told
        welcome = Admitted(
            name=self._passport.name,
            proof=self._passport.proof_for(stream.peer),
            addresses=self._book.own[:MAX_ADDRESSES],
            instance=self._passport.instance,
            contacts=tuple(contacts),
        )
        session = self._links.session(stream, reader)
        session.open_with(encode(welcome))
        link = Link(session=session, transport=transport, address="", link_id=hello.link, instance=hello.instance)
        self._book.announce(Contact(peer=stream.peer, name=hello.name, addresses=hello.addresses))
        self._links.install(link)

    def _drop(self, transport: Transport, peer: PeerId, reason: str) -> None:
        self._emit(ConnectionDropped(address=f"{transport.name} (incoming)", remote=peer, reason=reason))
