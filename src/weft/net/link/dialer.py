"""How this peer dials others: each at its addresses, and again after a loss.

Of several addresses the best goes first. Each further one begins when one before it has failed, or after
`HEAD_START_S`, with those before it still under way (as RFC 8305 does with addresses of one name). Streams are handed
out as they open; what is still under way at the end is given up.

Kept links (`keep`) are redialled when they go down: at once, then after doubling pauses with jitter, of at most 30 s in
the first ten minutes and 5 min later, until they are released or their peer has not been met for `EXPIRE_S`.

Where no address leads to a peer, those to which direct links stand are asked who of them reaches it, and it is dialled
through one (net/blobs/relay.py). Such a link is replaced by a direct one as soon as an address works: that is tried now
and then.

Failure:
- an address black-holes: the next one gets its turn a second later; `LinkUp.tried` says which failed and why.
- another run, version or no admission: definite, so no other address is tried. Nobody waits for a redial, so a `Notice`
  says once why members refuse this peer: it may come to stand alone for it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from weft.errors import DialError, GenesisMismatch, PeerError, Refused, Unreachable, WeftError
from weft.events import Emit, Notice
from weft.ids import PeerId, is_start, short
from weft.net import messages
from weft.net.link.address_book import AddressBook
from weft.net.link.handshake import Passport, greet, handshake_reader
from weft.net.link.links import VIA, Link, Links
from weft.net.link.trial import failed, one
from weft.net.transport.base import Lane, Stream, Transport
from weft.net.transport.frame import FrameReader
from weft.rng import stream as random_stream
from weft.tasks import Tasks, within
from weft.wire import decode, digest, encode

HEAD_START_S = 1.0  # five round trips of 200 ms: what the handshake over TLS takes between continents


class _Dial(NamedTuple):
    address: str
    began: float  # the loop's time


class HappyEyeballs:
    """One dial over several addresses.

    Args:
        addresses: best first.
        dial: opens a stream to one; raises `DialError`.
        stop: ends it when it is done; None: nothing does.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        dial: Callable[[str], Awaitable[Stream]],
        stop: "asyncio.Future[Any] | None" = None,
    ) -> None:
        self._waiting = deque(addresses)
        self._dial = dial
        self._stop = stop
        self._running: dict[asyncio.Task[Stream], _Dial] = {}

    async def __aenter__(self) -> "HappyEyeballs":
        return self

    async def __aexit__(self, *_: object) -> None:
        losers = list(self._running)
        for loser in losers:
            loser.cancel()
        for outcome in await asyncio.gather(*losers, return_exceptions=True):
            if not isinstance(outcome, BaseException):  # it opened too late
                await outcome.close()

    async def next(self) -> tuple[str, Stream | DialError] | None:
        """Return the next address that opened or failed, and how; None when none is left or it was stopped."""
        while self._waiting or self._running:
            if self._stop is not None and self._stop.done():
                return None
            if self._waiting:
                address = self._waiting.popleft()
                began = asyncio.get_running_loop().time()
                self._running[asyncio.ensure_future(self._dial(address))] = _Dial(address, began)
            awaited = [*self._running, *([] if self._stop is None else [self._stop])]
            head_start_s = HEAD_START_S if self._waiting else None
            await asyncio.wait(awaited, timeout=head_start_s, return_when=asyncio.FIRST_COMPLETED)
            ended = next((task for task in self._running if task.done()), None)
            if ended is not None:
                return self._running.pop(ended).address, _outcome(ended)
        return None

    def unanswered(self) -> list[tuple[str, DialError]]:
        """Return the addresses that had their turn and have neither opened nor failed: they may swallow packets."""
        now = asyncio.get_running_loop().time()
        waited = [(dial.address, now - dial.began) for dial in self._running.values()]
        return [(address, DialError(f"no answer in {s:.1f} s")) for address, s in waited if s >= HEAD_START_S]


def _outcome(task: "asyncio.Task[Stream]") -> Stream | DialError:
    try:
        return task.result()
    except DialError as error:
        return error


DIAL_S = 8.0  # for one address: a hole punched through two home routers takes up to 5 s
ARRIVAL_S = 5.0  # after a duplicate was turned away the other connection is about to stand
REDIAL_BASE_S = 0.5
REDIAL_MAX_S = 30.0  # in the first `REDIAL_SOON_S`; later it goes up to `REDIAL_LATE_S`
REDIAL_SOON_S = 600.0
REDIAL_LATE_S = 300.0  # who was cut off for hours is back five minutes after its network
EXPIRE_S = 7 * 86400.0  # without a link: nobody comes back at addresses of a week ago
DIRECT_AGAIN_S = 60.0  # after a link through another peer came up, its addresses are tried again; then ever less often
DIRECT_AGAIN_MAX_S = 600.0
ASK_RELAYS_S = 2.0  # for those that may reach a peer to say so
MAX_RELAYS_TRIED = 2
MAX_REFUSALS = 8  # that are told: others write them

Tried = tuple[str, DialError]  # an address, and what came of it


class Dialer:
    """Connects on demand; one dial per peer at a time, shared by all who wait for it."""

    def __init__(
        self, passport: Passport, transports: Sequence[Transport], links: Links, book: AddressBook, emit: Emit
    ) -> None:
        self._passport = passport
        self._emit = emit
        self._refusals: set[str] = set()  # that were told
        self._transports = {transport.name: transport for transport in transports}
        self._links = links
        self._book = book
        self._dials: dict[PeerId, asyncio.Task[Link]] = {}
        self._kept: dict[PeerId, None] = {}
        self._keepers: dict[PeerId, asyncio.Task[None]] = {}
        self._num_dials = 0
        self._tasks = Tasks()
        links.on_link(self._on_link)

    def add(self, transport: Transport) -> None:
        self._transports[transport.name] = transport

    async def connect(self, peer: PeerId) -> Link:
        """Return the link to `peer`, dialling if there is none.

        Args:
            peer: its key, or the first digits of it, as a ticket has them.

        Raises:
            Unreachable: no address led there; the message says what each did.
            Refused, GenesisMismatch, WireError, PeerError: see `handshake.greet`.
        """
        if (link := self._links.get(peer)) is not None:
            return link
        if self._links.is_barred(peer):
            raise PeerError(f"{short(peer)} broke the protocol repeatedly; this peer does not dial it for a minute")
        return await asyncio.shield(self._dials.get(peer) or self._begin(peer))

    def _begin(self, peer: PeerId, worse: Link | None = None) -> "asyncio.Task[Link]":
        dial = self._dials[peer] = asyncio.ensure_future(self._dial(peer, worse))
        dial.add_done_callback(lambda done: self._forget(peer, done))
        return dial

    async def reach(self, peer: PeerId) -> Link:
        """Return the link to `peer` as `connect` does, for a call, a note or a blob.

        Raises:
            PeerError: as for `connect`, and where `peer` trains another run by now, which is no concern of this one.
            Unreachable, Refused: see `connect`.
        """
        try:
            return await self.connect(peer)
        except GenesisMismatch as error:
            raise PeerError(str(error)) from error

    async def dial_bulk(self, link: Link) -> Stream:
        """Open a bulk stream the way `link` was dialled, or else at any address of its peer.

        Raises:
            Unreachable: no address led there.
        """
        routes = (link.address,) if link.is_dialler else self._book.routes(link.peer)
        tried: list[Tried] = []
        for address in routes:
            try:
                return await self._open(link.peer, address, "bulk")
            except DialError as error:
                tried.append((address, error))
        raise self._unreachable(link.peer, tried)

    def keep(self, peer: PeerId) -> None:
        """Keep a link to `peer` up from now on."""
        if peer not in self._kept and peer != self._passport.peer:
            self._kept[peer] = None
            self._redial(peer)

    @property
    def kept(self) -> tuple[PeerId, ...]:
        return tuple(self._kept)

    def release(self, peer: PeerId) -> None:
        """Redial `peer` no more."""
        self._kept.pop(peer, None)
        if (keeper := self._keepers.pop(peer, None)) is not None:
            keeper.cancel()

    async def aclose(self) -> None:
        self._kept.clear()
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        await self._tasks.aclose()

    async def _dial(self, peer: PeerId, worse: Link | None = None) -> Link:
        """Return a link to `peer` other than `worse`, which stands until then and is as good as any through others."""
        tried: list[Tried] = []
        link = await self._dial_any(peer, self._book.routes(peer), tried, worse)
        if link is None and worse is None:
            link = await self._dial_any(peer, await self._relayed(peer), tried)
        if link is None:
            raise self._unreachable(peer, tried)
        return link

    def _unreachable(self, peer: PeerId, tried: Sequence[Tried]) -> Unreachable:
        contact = self._book.contact(peer)
        trials = [failed(contact, address, str(error)) for address, error in tried]
        return Unreachable(one(contact.name, peer, trials), tuple(tried))

    async def _dial_any(
        self, peer: PeerId, addresses: Sequence[str], tried: list[Tried], worse: Link | None = None
    ) -> Link | None:
        """Return the first link that `addresses` lead to, or that `peer` dials meanwhile; `tried` gets what failed."""
        arrival = None if worse is not None else asyncio.ensure_future(self._links.arrival(peer))
        try:
            streams = HappyEyeballs(addresses, lambda address: self._open(peer, address, "control"), arrival)
            async with streams:
                while (outcome := await streams.next()) is not None:
                    address, opened = outcome
                    try:
                        if isinstance(opened, DialError):
                            raise opened
                        failures = tuple(_failure(*each) for each in [*tried, *streams.unanswered()])
                        return await self._greet(opened, address, failures, worse)
                    except DialError as error:
                        tried.append((address, error))
        finally:
            if arrival is not None:
                arrival.cancel()
        return self._other(peer, worse)

    def _other(self, peer: PeerId, worse: Link | None) -> Link | None:
        link = self._links.get(peer)
        return None if link is worse else link

    async def _relayed(self, peer: PeerId) -> tuple[str, ...]:
        """Return the addresses through those that say they reach `peer`, in an order that spreads pairs over them."""
        if VIA not in self._transports or is_start(peer):
            return ()
        direct = [link for link in self._links.direct() if link.peer != peer]
        answers = await asyncio.gather(*(self._reaches(link, peer) for link in direct))
        pair = " ".join(sorted((self._passport.peer, peer)))
        relays = [link.peer for link, reaches in zip(direct, answers, strict=True) if reaches]
        relays.sort(key=lambda relay: digest(f"{pair} {relay}".encode()))
        return tuple(f"{VIA}://{relay}" for relay in relays[:MAX_RELAYS_TRIED])

    async def _reaches(self, link: Link, peer: PeerId) -> bool:
        try:
            question = encode(messages.WhoReaches(peer=peer))
            answer = await link.session.call(messages.WhoReaches.__name__, question, deadline_s=ASK_RELAYS_S)
            reaches: messages.Reaches = decode(answer, messages.Reaches)
        except PeerError:
            return False
        return reaches.is_reached

    async def _greet(self, stream: Stream, address: str, tried: tuple[str, ...], worse: Link | None) -> Link:
        peer = stream.peer
        if (link := self._other(peer, worse)) is not None:
            await stream.close()
            return link
        hello = self._hello(peer, worse)
        reader = handshake_reader(stream)
        with self._links.greeting(peer):
            try:
                welcome = await greet(stream, reader, hello, self._passport)
                if welcome is not None:
                    return self._install(stream, reader, address, hello, welcome, tried)
            except BaseException:
                self._links.give_up(peer, hello.link)
                await stream.close()
                raise
        return await self._await_arrival(peer, stream)

    def _install(
        self,
        stream: Stream,
        reader: FrameReader,
        address: str,
        hello: messages.Hello,
        welcome: messages.Admitted,
        tried: tuple[str, ...],
    ) -> Link:
        peer, session = stream.peer, self._links.session(stream, reader)
        link = Link(
            session=session,
            transport=self._transport(address),
            address=address,
            link_id=hello.link,
            instance=welcome.instance,
            tried=tried,
        )
        self._book.keep(peer, () if link.is_relayed else (address,), welcome.name)
        self._book.announce(messages.Contact(peer=peer, name=welcome.name, addresses=welcome.addresses))
        self._links.install(link)
        self._book.hear(welcome.contacts)
        return link

    async def _await_arrival(self, peer: PeerId, duplicate: Stream) -> Link:
        await duplicate.close()
        try:
            async with asyncio.timeout(ARRIVAL_S):
                return await self._links.arrival(peer)
        except TimeoutError:
            raise DialError(f"{short(peer)} says that it is linked, but no link came within {ARRIVAL_S:g} s") from None

    async def _open(self, peer: PeerId, address: str, lane: Lane) -> Stream:
        try:
            async with within(DIAL_S, lambda: DialError(f"no answer within {DIAL_S:g} s")):
                return await self._transport(address).dial(peer, address, lane)
        except PeerError as error:
            raise DialError(str(error)) from None

    def _transport(self, address: str) -> Transport:
        return self._transports[address.partition("://")[0]]

    def _hello(self, peer: PeerId, worse: Link | None) -> messages.Hello:
        """Return what this peer says first. The link that this one is to replace counts as ended."""
        self._num_dials += 1
        ended = (*self._links.ended(peer), *(() if worse is None else (worse.link_id,)))
        return messages.Hello(
            version=messages.PROTOCOL,
            run=self._passport.run,
            name=self._passport.name,
            proof=self._passport.proof_for(peer),
            addresses=self._book.own[: messages.MAX_ADDRESSES],
            link=self._passport.instance[:4] + self._num_dials.to_bytes(4, "big"),
            instance=self._passport.instance,
            ended=ended[-messages.MAX_ENDED_LINKS :],
        )

    def _forget(self, peer: PeerId, dial: "asyncio.Task[Link]") -> None:
        del self._dials[peer]
        if not dial.cancelled():
            dial.exception()  # whoever waited has it; nobody may have

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        link = self._links.get(peer)
        if is_up and link is not None and link.is_relayed:
            self._tasks.spawn(self._improve(link))
        if not is_up and peer in self._kept:
            self._redial(peer)

    async def _improve(self, relayed: Link) -> None:
        """Try the addresses of a peer now and then while it is reached through another."""
        peer = relayed.peer
        jitter = random_stream(0, "direct again", self._passport.peer, peer, self._num_dials)
        pause_s = DIRECT_AGAIN_S
        while True:
            await asyncio.sleep(pause_s * (0.5 + 0.5 * float(jitter.random())))
            pause_s = min(2 * pause_s, DIRECT_AGAIN_MAX_S)
            if self._links.get(peer) is not relayed:
                return
            if peer not in self._dials:
                with suppress(WeftError):  # the way there is stays
                    await self._begin(peer, worse=relayed)

    def _redial(self, peer: PeerId) -> None:
        if peer not in self._keepers:
            keeper = self._tasks.spawn(self._keep_up(peer))
            self._keepers[peer] = keeper
            keeper.add_done_callback(lambda _: self._keepers.pop(peer, None))

    async def _keep_up(self, peer: PeerId) -> None:
        jitter = random_stream(0, "redial", self._passport.peer, peer, self._num_dials)
        loop = asyncio.get_running_loop()
        pause_s, began = REDIAL_BASE_S, loop.time()
        while peer in self._kept and self._links.get(peer) is None:
            try:
                await self.connect(peer)
            except WeftError as error:  # every reason may pass: a restarted member has another run, version or rule
                if isinstance(error, Refused):
                    self._tell(error)
                if loop.time() - began >= EXPIRE_S:
                    self._kept.pop(peer, None)
                await asyncio.sleep(pause_s * (0.5 + 0.5 * float(jitter.random())))
                pause_s = min(2 * pause_s, REDIAL_MAX_S if loop.time() - began < REDIAL_SOON_S else REDIAL_LATE_S)

    def _tell(self, refusal: Refused) -> None:
        """Say why members refuse this peer, once: who refuses stands before the colon."""
        reason = str(refusal).partition(": ")[2]
        if reason not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(reason)
            self._emit(Notice(text=str(refusal)))


def _failure(address: str, error: DialError) -> str:
    return str(error) if str(error).startswith(address) else f"{address}: {error}"
