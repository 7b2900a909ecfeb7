"""What a process stands on, member or anchor: identity, log, node, ticket, and the guard over what it may use."""

import platform
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weft.clock import SystemClock
from weft.errors import GenesisMismatch, KeyFileError, KeyLocked, TicketMismatch
from weft.events import ConnectionDropped, Emit, Event, EventLog, Sink
from weft.ids import PeerId, RunId, short
from weft.keys import Identity, open_free_identity, open_identity, read_peer
from weft.launch.control import Control
from weft.launch.guard import DayCount, Guard, Guarded, valve
from weft.log import JsonlSink
from weft.net.admission import Admission, ByTicket
from weft.net.link.handshake import Passport
from weft.net.link.links import VIA
from weft.net.node import Node
from weft.net.speed_test import SpeedTest
from weft.net.ticket import Ticket, issue
from weft.net.transport import tcp
from weft.net.transport.base import Transport
from weft.net.transport.iroh import IrohTransport
from weft.net.transport.rate_limit import Throttled
from weft.net.transport.tls import TlsTransport
from weft.observe import telemetry
from weft.observe.telemetry import Bulletins
from weft.run.machine import PeerConfig
from weft.store.home import Home, PeerFolder
from weft.store.tickets import drop_ticket, keep_addresses, keep_ticket, read_addresses
from weft.tasks import Tasks


def nobody(event: Event) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one machine brings."""

    home: Home
    key: Path | None  # None: the first identity of the home that is free
    settings: PeerConfig
    sinks: Sequence[Sink] = ()
    until: float | None = None  # wall seconds at which the peer leaves
    aside: Emit = nobody  # takes how far that has come which takes long before this peer has a name in the run


@dataclass(frozen=True, kw_only=True)
class Footing:
    """What one process of one run stands on, while it runs; `footing` makes it."""

    run: RunId
    options: Options
    identity: Identity
    folder: PeerFolder
    emit: Emit
    bulletins: Bulletins
    day: DayCount

    @asynccontextmanager
    async def node(self, admission: Admission) -> AsyncIterator[Node]:
        """Open the network; close it at the end, and keep the addresses of all who were met."""
        settings, folder = self.options.settings, self.folder
        if "tls" in settings.transports and settings.tls.host:  # what was asked for has no other transport in its place
            tcp.listen(settings.tls.host, 0).close()
        name = settings.name or f"{platform.node()[:40] or 'peer'}-{self.identity.peer[:4]}"
        passport = Passport(identity=self.identity, run=self.run, name=name, admission=admission)
        via = self.identity if VIA in settings.transports else None
        node = Node(passport, self._transports(), SystemClock(), self.emit, relay=settings.relay, via=via)
        SpeedTest(node, SystemClock())
        telemetry.serve(self.bulletins, node, SystemClock())
        for peer, addresses in read_addresses(folder).items():
            node.remember(peer, addresses)

        def keep() -> None:
            known = node.known_addresses().items()
            keep_addresses(folder, {peer: addresses for peer, addresses in known if peer != node.peer})

        node.on_contacts_settled(keep)  # a process that is killed finds its way back, too
        await node.start()
        try:
            yield node
        finally:
            keep()
            await node.aclose()

    def _transports(self) -> list[Transport]:
        settings = self.options.settings

        def on_drop(address: str, reason: str) -> None:
            self.emit(ConnectionDropped(address=address, remote=None, reason=reason))

        makers: dict[str, Callable[[], Transport]] = {
            "tls": lambda: TlsTransport(self.identity, settings.tls, on_drop=on_drop),
            "iroh": lambda: IrohTransport(self.identity, settings.iroh, on_drop=on_drop),
        }
        made = [makers[each]() for each in settings.transports if each != VIA]
        passed = valve(settings.caps, SystemClock(), self.day.ration)
        return made if passed is None else [Throttled(each, passed) for each in made]

    @contextmanager
    def ticket(
        self, node: Node, admission: Admission, is_anchor: Callable[[PeerId], bool] = lambda _peer: False
    ) -> Iterator[str]:
        """Keep a fresh ticket on disk as members come, so that `weft ticket` on any member prints one.

        Args:
            is_anchor: returns who stays for others to find: named before those that come and go, a ticket lasts longer.
        """
        secret = admission.secret if isinstance(admission, ByTicket) else None

        def renew() -> str:
            contacts = sorted(node.contacts(), key=lambda each: (each.peer != node.peer, not is_anchor(each.peer)))
            text = issue(self.identity, node.run, contacts, secret)
            keep_ticket(self.folder, text)
            return text

        node.on_contacts_settled(renew)
        try:
            yield renew()
        finally:
            drop_ticket(self.folder)

    @asynccontextmanager
    async def guarded(self, peer: Guarded) -> AsyncIterator[None]:
        """Hold `peer`, which runs inside, to this machine's caps and to what its person says; stop it at the end.

        Where it was cancelled, its thread ends with the step under way. Where one of the two breaks, `peer` fails: it
        would go on without caps.
        """
        guard = Guard(self.options.settings.caps, self.day, self.emit, peer, self.options.until)
        watching = Tasks(peer.fail)
        watching.spawn(guard.watch())
        watching.spawn(Control(self.folder, peer).watch())
        try:
            yield
        finally:
            peer.stop("it has ended")
            await watching.aclose()


@contextmanager
def footing(options: Options, run: RunId, identity: Identity) -> Iterator[Footing]:
    """Open the log and the day's count of `identity` in `run`; lets go of the identity at the end.

    Raises:
        ConfigError: nothing is left of the bytes that this machine may move today.
    """
    with identity:
        folder = options.home.folder(run, identity.peer)
        day = DayCount(folder.moved, options.settings.caps, SystemClock())
        day.require()
        bulletins = Bulletins(identity, run, SystemClock())
        log = EventLog(SystemClock(), identity.peer, [JsonlSink(folder.log), bulletins, *options.sinks])
        try:
            yield Footing(
                run=run,
                options=options,
                identity=identity,
                folder=folder,
                emit=log.emit,
                bulletins=bulletins,
                day=day,
            )
        finally:
            log.close()


def open_for(options: Options, run: RunId, *, is_maker: bool) -> Identity:
    """Return the identity asked for; else one of this home that keeps a checkpoint of `run`; else any that is free.

    Raises:
        KeyLocked: the maker's home has checkpoints of the run, and all of them are in use: to begin the same run again
            beside it, under another identity, is nobody's wish.
    """
    if options.key is not None:
        return open_identity(options.key, create=True)
    kept = who_keep(run, options.home)
    for path in kept:
        with suppress(KeyLocked):
            return open_identity(path)
    if kept and is_maker:
        raise KeyLocked(
            f"this run is being trained from {options.home.root} already (run {short(run)}). Take part in it with "
            f"another identity: weft join $(weft ticket {short(run)}). Or name one with --key to begin anew beside it."
        )
    return open_free_identity(options.home.keys)


def who_keep(run: RunId, home: Home) -> list[Path]:
    """Return the identities of a home that have a checkpoint of `run`."""
    found = []
    for path in sorted(home.keys.glob("peer-*.pem")):
        with suppress(KeyFileError):  # whoever opens it says what is wrong
            if home.folder(run, read_peer(path)).has_checkpoint:
                found.append(path)
    return found


async def connect(node: Node, ticket: Ticket, contacts: list[PeerId]) -> PeerId:
    """Return the first member that lets this peer in: of those on the ticket, which may be stale, and those met."""
    met = [peer for peer in node.known_addresses() if peer != node.peer]
    try:
        return await node.connect_any(list(dict.fromkeys([*contacts, *met])))
    except GenesisMismatch as error:
        raise TicketMismatch(
            f"this ticket is for run {short(ticket.run)}, which is not trained where it leads: {error}."
        ) from error
