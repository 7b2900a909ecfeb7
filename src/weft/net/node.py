"""A peer's place in the network: links to others, typed calls and notes, blobs.

    node = Node(passport, transports, clock, emit)
    node.serve(Question, answer)             # async (peer, question) -> record
    node.serve_blobs(lookup)                 # (peer, digest) -> buffer or None
    addresses = await node.start()
    node.remember(peer, ["tls://..."])
    record = await node.call(peer, Question(...), Answer, deadline_s=5)
    await node.fetch(peer, digest, into)

It dials on demand, trying transports in the order given; a link once lost is dialled again by the next call, or at
once where `keep` asks for it. Who links to several tells each of the others where it may be reached.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import msgspec

from weft import errors
from weft.clock import Clock
from weft.events import ConnectionDropped, Emit, FellBack, TransportUp
from weft.ids import Digest, PeerId, RunId, short
from weft.keys import Identity
from weft.net.admission import Admission
from weft.net.blobs.blobs import Blobs, Lookup, Offload, in_thread
from weft.net.blobs.bulk import STALL_S, Bulk, OpenStreams
from weft.net.blobs.relay import NO_RELAY, Relay, RelayConfig, ViaTransport
from weft.net.link.address_book import AddressBook, Directory, OnContact
from weft.net.link.dialer import Dialer
from weft.net.link.handshake import Passport
from weft.net.link.links import Link, Links, Listener, OnLink
from weft.net.link.rpc import CallHandler, Handlers, LinkTraffic, NoteHandler, Traffic, note_frame
from weft.net.link.trial import Trial, failed, nobody
from weft.net.messages import MAX_BODY_NBYTES, MAX_TOLD_CONTACTS, Acquaint, Contact, Relayed, RelayPlease
from weft.net.transport.base import Transport
from weft.net.transport.limits import Budget
from weft.tasks import within
from weft.wire import Buffer, decode, encode

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

BAN_GRACE_S = 2.0  # between a ban and the end of links to the key: it is told meanwhile
FEW_CONTACTS = 8  # told to a newcomer of a large swarm, which learns the others' from net/membership/gossip.py
SETTLE_S = 1.0  # contacts come in crowds, and whoever writes them down syncs a disk


class Node:
    """The network as the rooms above see it.

    Args:
        passport: identity, run, name and the rule of admission.
        transports: best first; each is started and stopped with the node.
        offload: where large blobs are hashed: `in_thread`, or `inline` on a virtual clock.
        relay: what this peer passes on between others.
        via: the key with which it reaches others through a third where no transport does; None: it does not.
        budget: how many links and streams this process holds.
        is_listed: others are told where it listens, dial it, and tell newcomers; False: it only visits.
    """

    def __init__(
        self,
        passport: Passport,
        transports: Sequence[Transport],
        clock: Clock,
        emit: Emit,
        *,
        offload: Offload = in_thread,
        relay: RelayConfig = NO_RELAY,
        via: Identity | None = None,
        budget: Budget = Budget(),  # noqa: B008  # frozen
        is_listed: bool = True,
    ) -> None:
        self.passport = passport
        self._is_listed = is_listed
        self._transports = tuple(transports)
        self._emit = emit
        self._handlers = Handlers()
        self._traffic = Traffic(clock)
        self._links = Links(self._handlers, self._traffic, emit, budget.links)
        self._book = AddressBook(passport.peer, [transport.name for transport in transports], self.is_linked)
        self._dialer = Dialer(passport, transports, self._links, self._book, emit)
        open_streams = OpenStreams(self._links, self._traffic, budget.streams)
        self._blobs = Blobs(self._links, self._dialer, self._handlers, open_streams, emit, offload)
        streams = self._blobs.streams
        self._relay = Relay(relay, self._links, streams, self._handlers, clock)
        self._via = None if via is None else ViaTransport(via, streams.open, self._tell_drop)
        streams.on_relay(self._take_over)
        self._listener = Listener(passport, self._links, self._book, emit, self._blobs.accept, budget.newcomers)
        self._started: list[Transport] = []
        self._is_to_all = True
        self._handlers.on_note(Acquaint, self._acquainted)
        self._book.on_announced(self._spread)
        self._book.on_forgotten(self._dialer.release)
        self._book.on_news(self._on_news)
        self._on_settled: list[Callable[[], object]] = []
        self._posted: tuple[msgspec.Struct, bytes] | None = None  # the last note, and its frame
        self._settling: asyncio.TimerHandle | None = None

    # --- life ---

    async def start(self) -> tuple[str, ...]:
        """Listen on every transport; return the addresses that others may dial, best first.

        Raises:
            PortInUse: a configured port is taken.
            NetError: this machine offers none of the transports. One that is missing is an event (`FellBack`).
        """
        missing = []
        for transport in self._transports:
            try:
                addresses = await transport.start(self._listener.accept(transport))
            except errors.PortInUse:
                await self.aclose()
                raise
            except errors.NetError as error:
                missing.append((transport.name, str(error)))
                continue
            self._started.append(transport)
            self._book.listen_at(addresses if self._is_listed else ())
            self._emit(TransportUp(transport=transport.name, addresses=addresses))
        if not self._started:
            raise errors.NetError(
                "no transport works here: " + "; ".join(f"{name}: {reason}" for name, reason in missing)
            )
        if self._via is not None:
            await self._via.start(self._listener.accept(self._via))
            self._dialer.add(self._via)
        for name, reason in missing:
            used = ", ".join(transport.name for transport in self._started)
            self._emit(FellBack(wanted=name, used=used, reason=reason))
        return self.addresses

    async def aclose(self) -> None:
        """Close every link and stop listening. Says no goodbye; `Membership` does."""
        if self._settling is not None:
            self._settling.cancel()
        await self._dialer.aclose()
        await self._relay.aclose()
        await self._links.aclose()
        if self._via is not None:
            await self._via.aclose()
        await self._blobs.aclose()
        for transport in self._started:
            await transport.aclose()
        self._started.clear()

    async def __aenter__(self) -> "Node":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- who and where ---

    @property
    def peer(self) -> PeerId:
        return self.passport.peer

    @property
    def run(self) -> RunId:
        return self.passport.run

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return where others may dial this peer, best first; empty before `start`, and of one that only visits."""
        return self._book.own

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Return the peers to which a link stands."""
        return self._links.peers()

    def admit(self, admission: Admission, predecessor: RunId | None = None) -> None:
        """Replace the rule of admission, and refer who comes for `predecessor`: a newcomer learns both from the run."""
        self.passport.admission, self.passport.predecessor = admission, predecessor

    def ban(self, peers: Iterable[PeerId]) -> None:
        """Refuse these keys from now on, and no others; links to them are closed soon, so that they hear why."""
        self.passport.banned = frozenset(peers)
        for peer in sorted(self.passport.banned):
            self.release(peer)
            if self.is_linked(peer):
                asyncio.get_running_loop().call_later(BAN_GRACE_S, self._drop_if_banned, peer)

    @property
    def banned_by(self) -> frozenset[PeerId]:
        """Return who has told this peer, when it last dialled them, that its key is banned."""
        return frozenset(self.passport.banned_by)

    def remember(self, peer: PeerId, addresses: Iterable[str], name: str = "") -> None:
        """Note where `peer` may be dialled; what others announce later does not displace it.

        Args:
            peer: its key, or the first digits of it, as a ticket has them.
        """
        self._book.keep(peer, addresses, name)

    def hear(self, contact: Contact) -> None:
        """Take what somebody says of where a peer may be reached; what it says itself comes before."""
        self._book.hear([contact])

    def is_hearsay(self, peer: PeerId) -> bool:
        """Return whether of `peer` only is known what others say: it never spoke for itself, and nobody named it."""
        return self._book.is_hearsay(peer)

    def consult(self, directory: Directory) -> None:
        """Ask `directory(peer)`, too, where a peer may be reached: it knows more than fit into the address book."""
        self._book.consult(directory)

    def introduce(self, is_to_all: bool) -> None:
        """Tell those linked of each other from now on, or, where there are too many, only newcomers of a few."""
        self._listener.max_told = MAX_TOLD_CONTACTS if is_to_all else FEW_CONTACTS
        self._is_to_all = is_to_all

    def known_addresses(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the address book, for the caller to keep on disk and `remember` at the next start."""
        return {peer: self._book.contact(peer).addresses for peer in self._book.peers()}

    def contact(self, peer: PeerId) -> Contact:
        """Return the name and addresses of `peer` (this peer's own, or as others announced them)."""
        if peer == self.peer:
            return Contact(peer=peer, name=self.passport.name, addresses=self.addresses)
        return self._book.contact(peer)

    def contacts(self) -> tuple[Contact, ...]:
        """Return this peer and those linked to it, as far as others may dial them: what goes into a ticket."""
        known = [self.contact(peer) for peer in (self.peer, *self.peers)]
        return tuple(contact for contact in known if contact.addresses)

    def last_heard(self, peer: PeerId) -> float | None:
        """Return when a byte of `peer` last arrived, on this node's clock."""
        return self._traffic.last_heard(peer)

    @property
    def traffic(self) -> dict[PeerId, LinkTraffic]:
        return self._traffic.all()

    @property
    def moved(self) -> tuple[int, int]:
        """Return the bytes sent and received so far."""
        return self._traffic.moved

    # --- links ---

    async def connect(self, peer: PeerId) -> None:
        """Return once a link to `peer` stands.

        Raises:
            Unreachable: no known address led to it.
            Refused: it does not admit this peer.
            GenesisMismatch: it trains another run.
            PeerError: it broke the protocol, speaks another version, or is not admitted itself.
        """
        await self._dialer.connect(peer)

    async def connect_any(self, peers: Iterable[PeerId]) -> PeerId:
        """Return the first of `peers` to which a link comes up: how a newcomer uses its ticket.

        Args:
            peers: their keys, or the first digits of them; the key that is returned is whole.

        Raises:
            Refused, GenesisMismatch, WireError: nobody let this peer in, and the first who answered said why.
            Unreachable: nobody answered; the message says what was tried, what that means and what to do.
        """
        verdict: errors.WeftError | None = None
        trials: list[Trial] = []
        others: list[str] = []
        for peer in dict.fromkeys(self._book.whole(each) for each in peers):
            try:
                link = await self._dialer.connect(peer)
            except (errors.Refused, errors.GenesisMismatch, errors.WireError) as error:
                verdict = verdict or error
            except errors.Unreachable as error:
                trials += [failed(self.contact(peer), address, str(each)) for address, each in error.tried]
                others += [] if error.tried else [str(error)]
            except (errors.NetError, errors.PeerError) as error:
                others.append(str(error))
            else:
                return link.peer
        raise verdict or errors.Unreachable(nobody(trials, others))

    def keep(self, peer: PeerId) -> None:
        """Keep a link to `peer` up, redialling with growing pauses, until `release`."""
        self._dialer.keep(peer)

    @property
    def kept(self) -> tuple[PeerId, ...]:
        return self._dialer.kept

    def release(self, peer: PeerId) -> None:
        """Let the link to `peer` stay down once it goes down."""
        self._dialer.release(peer)

    def drop(self, peer: PeerId, reason: str) -> None:
        """Close the link to `peer`, if any; calls under way fail with PeerError."""
        self._links.drop(peer, reason)

    def is_linked(self, peer: PeerId) -> bool:
        return self._links.get(peer) is not None

    def is_barred(self, peer: PeerId) -> bool:
        """Return whether `peer` broke the protocol so often just now that no link to it may stand."""
        return self._links.is_barred(peer)

    def link_name(self, peer: PeerId) -> str:
        """Return the transport that the link to `peer` runs on, or ''."""
        link = self._links.get(peer)
        return "" if link is None else link.transport.name

    def is_relayed(self, peer: PeerId) -> bool:
        """Return whether a third peer carries the link to `peer`."""
        link = self._links.get(peer)
        return link is not None and link.is_relayed

    @property
    def has_relayed_links(self) -> bool:
        """Return whether this peer reaches somebody through a third only."""
        return self._links.has_relayed

    def source_of(self, peer: PeerId) -> str:
        """Return the IP address that the link to `peer` comes from; '' if this side dialled it, or none stands."""
        link = self._links.get(peer)
        return "" if link is None else link.session.source

    def instance_of(self, peer: PeerId) -> bytes:
        """Return what names the remote process behind the link: it changes when the peer restarts."""
        link = self._links.get(peer)
        return b"" if link is None else link.instance

    def on_link(self, callback: OnLink) -> None:
        """Call `callback(peer, is_up, reason)` whenever a link comes up or goes down."""
        self._links.on_link(callback)

    def on_contact(self, callback: OnContact) -> None:
        """Call `callback(contact)` for each peer that connects or that others tell of, when its addresses are new."""
        self._book.on_news(callback)

    def on_contacts_settled(self, callback: Callable[[], object]) -> None:
        """Call `callback()` a second after contacts have changed, once for all changes meanwhile."""
        self._on_settled.append(callback)

    # --- calls and notes ---

    def serve(self, kind: type[Q], handler: CallHandler[Q]) -> None:
        """Answer calls of record type `kind` with what `handler(peer, request)` returns."""
        self._handlers.serve(kind, handler, self._method(kind))

    def on_note(self, kind: type[Q], handler: NoteHandler[Q]) -> None:
        """Give notes of `kind` to `handler(peer, note)`, one at a time and in the order sent by each peer."""
        self._handlers.on_note(kind, handler, self._method(kind))

    def ignore(self, kind: type[Q]) -> None:
        """Take notes of `kind` no more, so that another may ask for them."""
        self._handlers.ignore(self._method(kind))

    async def call(self, peer: PeerId, request: msgspec.Struct, response: type[R], *, deadline_s: float) -> R:
        """Ask `peer` and return its answer, dialling first if no link stands. Nothing is retried.

        Failure:
        - DeadlineExceeded: no answer within `deadline_s`; the handler there is cancelled.
        - CallFailed: nobody serves this there, or the handler failed.
        - PeerError: the link went down meanwhile, and whether the handler ran is unknown; or `peer` trains another run.
        - WireError: the answer is no `response`; the link is closed.
        - Unreachable, Refused: see `connect`.
        """
        method = self._method(type(request))
        overdue = f"no link to {short(peer)} within {deadline_s:g} s; {method} was not sent"
        async with within(deadline_s, lambda: errors.DeadlineExceeded(overdue)) as limit:
            link = await self._dialer.reach(peer)
        when = limit.when()
        left_s = deadline_s if when is None else when - asyncio.get_running_loop().time()
        body = await link.session.call(method, encode(request), deadline_s=left_s)
        return self._read_answer(link, body, response)

    async def ask(self, peer: PeerId, request: msgspec.Struct, response: type[R], *, deadline_s: float) -> R | None:
        """Return what `call` returns, or None where a call fails: for who goes on then, whatever the reason."""
        try:
            return await self.call(peer, request, response, deadline_s=deadline_s)
        except (errors.PeerError, errors.NetError, errors.Refused):
            return None

    async def note(self, peer: PeerId, record: msgspec.Struct) -> None:
        """Send `record` one way, dialling first if no link stands. Arrives at most once, in order.

        Raises:
            PeerError, NetError, Refused: no link stands or the link went down before it was queued.
        """
        link = await self._dialer.reach(peer)
        await link.session.note(self._method(type(record)), encode(record))

    def post(self, peer: PeerId, record: msgspec.Struct) -> bool:
        """Send `record` one way if a link stands and its queue has room; return whether it was queued."""
        link = self._links.get(peer)
        if link is None:
            return False
        if self._posted is None or self._posted[0] is not record:  # what goes to many is encoded once
            self._posted = record, note_frame(self._method(type(record)), encode(record))
        return link.session.post_frame(self._posted[1])

    def welcome(self, peer: PeerId) -> None:
        """Say that a note of `peer` was one that this peer had agreed to take: it costs the other nothing."""
        if (link := self._links.get(peer)) is not None:
            link.session.welcome()

    async def flush(self, peer: PeerId) -> None:
        """Wait until what is queued for `peer` has been handed to the transport."""
        if (link := self._links.get(peer)) is not None:
            await link.session.flush()

    # --- blobs ---

    def serve_blobs(self, lookup: Lookup, *, is_patient: bool = False) -> None:
        """Let others fetch what `lookup(peer, digest)` returns. May be called several times.

        Args:
            is_patient: nobody waits for it: it gives way to blobs that somebody waits for.
        """
        self._blobs.offer(lookup, is_patient=is_patient)

    def expect(self, digest: Digest) -> AbstractContextManager[None]:
        return self._blobs.expect(digest)

    def exchange(self, is_going_on: bool) -> None:
        """Note that a round's exchange begins or has ended: meanwhile patient blobs give way."""
        self._blobs.exchange(is_going_on)

    async def fetch(self, peer: PeerId, digest: Digest, into: Buffer, *, stall_s: float = STALL_S) -> None:
        """Fill `into` with a blob; see `Blobs.fetch`."""
        await self._blobs.fetch(peer, digest, into, stall_s=stall_s)

    async def fetch_within(
        self, peer: PeerId, digest: Digest, max_nbytes: int, room: Callable[[int], memoryview]
    ) -> memoryview:
        """Return a blob of unknown length in memory that `room` gives; see `Blobs.fetch_within`."""
        return await self._blobs.fetch_within(peer, digest, max_nbytes, room)

    async def fetch_small(self, peer: PeerId, digest: Digest, max_nbytes: int, *, stall_s: float = STALL_S) -> bytes:
        """Return a blob of unknown length; see `Blobs.fetch_small`."""
        return await self._blobs.fetch_small(peer, digest, max_nbytes, stall_s=stall_s)

    async def fetch_any(self, peers: Sequence[PeerId], digest: Digest, nbytes: int) -> Buffer:
        """Return a blob from the first of `peers` that delivers it; see `Blobs.fetch_any`."""
        return await self._blobs.fetch_any(peers, digest, nbytes)

    # --- inside ---

    def _method(self, kind: type[msgspec.Struct]) -> str:
        """Return how calls and notes of a record type are named."""
        return kind.__name__

    def _drop_if_banned(self, peer: PeerId) -> None:
        if peer in self.passport.banned:
            self.drop(peer, "its key is banned from the run")

    def _read_answer(self, link: Link, body: bytes, response: type[R]) -> R:
        try:
            answer: R = decode(body, response, max_nbytes=MAX_BODY_NBYTES)
        except errors.WireError as error:
            self._links.violation(link, f"an answer is no {response.__name__}: {error}")
            raise
        return answer

    async def _acquainted(self, _peer: PeerId, note: Acquaint) -> None:
        self._book.hear(note.contacts)

    async def _take_over(self, bulk: Bulk, request: RelayPlease | Relayed) -> None:
        if isinstance(request, RelayPlease):
            await self._relay.pass_on(bulk, request)
        elif self._via is not None:
            self._via.take(bulk, request)
        else:
            await bulk.close()

    def _tell_drop(self, address: str, reason: str) -> None:
        self._emit(ConnectionDropped(address=address, remote=None, reason=reason))

    def _spread(self, contact: Contact) -> None:
        for peer in self._links.peers() if self._is_to_all else ():
            if peer != contact.peer:
                self.post(peer, Acquaint(contacts=(contact,)))

    def _on_news(self, _contact: Contact) -> None:
        if self._settling is None and self._on_settled:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        self._settling = None
        for callback in list(self._on_settled):
            callback()
