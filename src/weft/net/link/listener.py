"""Who knocks: the handshake's other side, and bulk streams of peers to which a link stands.

Strangers are bounded in number, bytes and time: a key proves nothing but itself, so until it is admitted a connection
is under a `Gate` as before its key was proven, and a crowd turns out its own oldest, not newcomers. A refused peer
learns why; the log does too (`AdmissionRefused`, or `ConnectionDropped` when it did not speak the protocol).
"""

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice

from weft.errors import PeerError, WireError
from weft.events import AdmissionRefused, ConnectionDropped, Emit
from weft.ids import PeerId
from weft.net.link.address_book import AddressBook
from weft.net.link.dialer import Dialer
from weft.net.link.handshake import Passport, handshake_reader, hear, judge, turn_away
from weft.net.link.links import Link, Links
from weft.net.messages import MAX_ADDRESSES, MAX_TOLD_CONTACTS, Admitted, Contact, Hello, Rejected
from weft.net.transport.base import Accept, Lane, Stream, Transport
from weft.net.transport.frame import FrameReader
from weft.net.transport.gate import Gate
from weft.wire import encode

MAX_STRANGERS = 64  # control connections that have not been admitted yet, over all transports
MAX_STRANGERS_PER_IP = 16  # of them from one address; half a swarm behind one router that returns at once

AcceptBulk = Callable[[Stream], Awaitable[None]]


class Listener:
    def __init__(
        self, passport: Passport, links: Links, dialer: Dialer, book: AddressBook, emit: Emit, accept_bulk: AcceptBulk
    ) -> None:
        self._passport = passport
        self._links = links
        self._dialer = dialer
        self._book = book
        self._emit = emit
        self._accept_bulk = accept_bulk
        self.max_told = MAX_TOLD_CONTACTS  # to whom is admitted
        self._strangers: Gate[tuple[Transport, Stream]] = Gate(MAX_STRANGERS, MAX_STRANGERS_PER_IP, "are not admitted")

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
        except PeerError as error:
            await stream.close()
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
        await self._dialer.settled(stream.peer)
        if (transport, stream) not in self._strangers:  # turned out meanwhile
            return
        if self._is_duplicate(stream.peer, verdict):
            await turn_away(stream, Rejected(code="duplicate", reason="a link to you stands"))
            return
        self._admit(transport, stream, reader, verdict)

    def _verdict(self, peer: PeerId, heard: Hello | Rejected) -> Hello | Rejected:
        if isinstance(heard, Rejected):
            return heard
        if (rejected := judge(self._passport, peer, heard)) is not None:
            return rejected
        if self._links.is_barred(peer):
            return Rejected(code="busy", reason="you broke the protocol again and again; come back in a minute")
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
            addresses=self._dialer.addresses[:MAX_ADDRESSES],
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
