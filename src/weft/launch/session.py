"""One process in one run, member or anchor: identity, log, node, ticket, and the guard over what it may use.

async with session(options, run, identity, ticket.admission()) as s:
    await s.start()
    members = await s.meet(ticket)
    s.admit(outline, ticket.secret)
    with s.ticket() as fresh:
        async with s.guarded(peer): ...
"""

import asyncio
import platform
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from weft.clock import Clock, SystemClock
from weft.errors import GenesisMismatch, KeyFileError, KeyLocked, TicketMismatch, Unreachable, WeftError
from weft.events import ConnectionDropped, Emit, EventLog, Notice, Sink
from weft.ids import PeerId, RunId, is_named, name_of, short, with_names
from weft.keys import Identity, open_free_identity, open_identity, read_peer, take_lock
from weft.launch.control import Control
from weft.launch.guard import DayCount, Guard, Guarded, valve
from weft.log import JsonlSink
from weft.net.admission import Admission, ByKeys, secret_of
from weft.net.lan import Lan
from weft.net.link.handshake import Passport
from weft.net.link.links import VIA
from weft.net.node import Node
from weft.net.speed_test import SpeedTest
from weft.net.ticket import Ticket, best_first, issue
from weft.net.transport import tcp
from weft.net.transport.base import OnDrop, ignore_drop
from weft.net.transport.iroh import IrohTransport
from weft.net.transport.limits import Budget, budget_of
from weft.net.transport.rate_limit import Throttled
from weft.net.transport.tls import TlsTransport
from weft.observe.pace import PaceTeller, RoundPace
from weft.observe.telemetry import Bulletins, Relaying
from weft.observe.unsaved import last_entries, of_killed, told
from weft.run.host import max_files
from weft.run.machine import PeerConfig
from weft.run.outline import Outline, admission_of, public
from weft.store.home import Home, PeerFolder
from weft.store.tickets import (
    drop_ticket,
    keep_addresses,
    keep_name,
    keep_ports,
    keep_secret,
    keep_ticket,
    last_name,
    read_addresses,
    read_name,
    read_ports,
)
from weft.tasks import Compute, Tasks, Threads

if TYPE_CHECKING:
    from weft.run.config import Genesis  # which loads torch

_MOVED = (
    "{name}: this peer could not listen on its last port, {last}. It listens on port {port} now. Old tickets no longer "
    "lead here; `weft ticket` prints a new one"
)
RENEW_S = 3.0  # a ticket that names somebody else is kept so soon at the latest
NOBODY = ByKeys(allowed=())
OPENS_S = 10.0  # that a process takes at most to open its identity


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a message calls that which a person may give: options of the shell, or arguments of Python."""

    go_on: str = "--go-on"
    new: str = "--new"
    after: str = "--after"  # empty: there is none
    train: str = ""  # a command that these options are added to; empty: the same that was given
    key: str = "--key"
    key_file: str = "--key FILE"
    data: str = "--data"


IN_PYTHON = Names(
    go_on='wish="go on"',
    new='wish="new"',
    after="",
    key="the key of weft.Machine",
    key_file="weft.Machine(key=FILE)",
    data="data=[...]",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one machine brings."""

    home: Home
    key: Path | None  # None: the first identity of the home that is free
    settings: PeerConfig
    sinks: Sequence[Sink] = ()
    until: float | None = None  # wall seconds at which the peer leaves
    aside: Emit = lambda _event: (
        None
    )  # takes how far that has come which takes long before this peer has a name in the run
    names: Names = Names()
    moved: Path | None = None  # where the day's bytes are counted; None: in the peer's folder


@dataclass(frozen=True, kw_only=True)
class Session:
    """What one process of one run works with, while it runs; `session` makes it, or a scenario in its world."""

    options: Options
    identity: Identity
    folder: PeerFolder
    node: Node
    emit: Emit
    clock: Clock
    compute: Compute
    day: DayCount
    lan: Lan | None = None  # where members of the local network are looked for
    listening: Sequence[TlsTransport | IrohTransport] = ()  # once the network is open

    async def start(self) -> None:
        """Open the network."""
        tls = self.options.settings.tls
        if "tls" in self.options.settings.transports and tls.host:  # nothing takes the place of what was asked for
            tcp.listen(tls.host, 0).close()
        await self.node.start()
        up = [each for each in self.listening if each.port]
        keep_ports(self.folder, {each.name: each.port for each in up})
        for each in up:
            if each.last_port not in (0, each.port) and not getattr(self.options.settings, each.name).port:
                self.emit(Notice(text=_MOVED.format(name=each.name, last=each.last_port, port=each.port)))
        if self.lan is not None:
            await self.lan.start()

    async def meet(self, ticket: Ticket) -> list[PeerId]:
        """Link to a member and return who let this in: one of this local network where those are looked for, one that
        the ticket names, which may be stale, or one met before.

        Raises:
            Unreachable, Refused: nobody answered, or let this peer in; TicketMismatch: they train another run.
        """
        node = self.node
        contacts = [contact for contact in ticket.contacts if not is_named(node.peer, contact.peer)]
        for contact in contacts:
            node.remember(contact.peer, contact.addresses, contact.name)
        near = () if self.lan is None else await self.lan.listen()
        met = [peer for peer in node.known_addresses() if peer != node.peer]
        if not contacts and not met:
            raise Unreachable(
                f"this ticket leads only to this peer itself ({short(node.peer)}): this home holds the key of the "
                "machine that made it. If that machine runs, start this one with another key: --key other.pem. If it "
                "was this one, go on with `weft train` and its run file."
            )
        try:
            first = await node.connect_any(list(dict.fromkeys([*near, *(contact.peer for contact in contacts), *met])))
        except GenesisMismatch as error:
            raise TicketMismatch(
                f"this ticket is for run {short(ticket.run)}, and the members it leads to do not train that: {error}."
            ) from error
        return [first, *(peer for peer in node.peers if peer != first)]

    def admit(self, run: "Genesis | Outline", secret: bytes | None) -> None:
        """Let in whom the run admits, and let them fetch what it names; keep the secret of its tickets."""
        node = self.node
        admission = admission_of(run.admission, run.stewards, secret)
        node.admit(admission, run.predecessor)
        keep_secret(self.folder, admission)
        node.serve_blobs(public(run, node.run, self.options.home), is_patient=True)

    @contextmanager
    def ticket(self, standing: Callable[[PeerId], int | None] = lambda _peer: 1) -> Iterator[str]:
        """Keep a fresh ticket on disk as members come, so that `weft ticket` on any member prints one.

        Args:
            standing: what each that is linked is to whoever looks for the run, as `Membership.standing` has it: who
                stays for others to find comes before those that come and go, and no watcher has a member's place.
        """
        node, admission = self.node, self.node.passport.admission
        secret = secret_of(admission)

        def renew() -> str:
            text = issue(node.run, best_first(node.contacts(), node.peer, standing), secret)
            if kept != [text] and keep_ticket(self.folder, text):
                kept[:] = [text]
            return text

        async def watch() -> None:  # who is an anchor is heard later than where it is, and whoever is named may leave
            while True:
                await asyncio.sleep(RENEW_S)
                renew()

        kept: list[str] = []
        node.on_contacts_settled(renew)
        watching = asyncio.ensure_future(watch())
        try:
            yield renew()
        finally:
            watching.cancel()
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


@asynccontextmanager
async def session(
    options: Options, run: RunId, identity: Identity, admission: Admission = NOBODY, *, is_listed: bool = True
) -> AsyncIterator[Session]:
    """Open what `identity` needs in `run`, but for the network, which `start` opens; close it all at the end.

    Args:
        admission: whom this peer lets in, and how others let it in, until `admit` is told the run's own rule.
        is_listed: as of `Node`.

    Raises:
        ConfigError: nothing is left of the bytes that this machine may move today.
    """
    with ExitStack() as stack:
        stack.enter_context(identity)
        clock, settings, folder = SystemClock(), options.settings, options.home.folder(run, identity.peer)
        day = DayCount(options.moved or folder.moved, settings.caps, clock)
        day.require()
        stack.callback(day.keep)
        bulletins, pace = Bulletins(identity, run, clock), RoundPace(clock)
        unsaved = of_killed(last_entries(folder.log))
        log = stack.enter_context(
            closing(EventLog(clock, identity.peer, [JsonlSink(folder.log), bulletins, pace, *options.sinks]))
        )
        name = _own_name(settings.name, folder, options.home, log.emit)
        if unsaved is not None:
            log.emit(Notice(text=told(unsaved)))
        passport = Passport(identity=identity, run=run, name=name, admission=admission)
        via = identity if VIA in settings.transports else None

        def on_drop(address: str, reason: str) -> None:
            log.emit(ConnectionDropped(address=address, remote=None, reason=reason))

        budget = budget_of(max_files())
        listening = make_transports(identity, settings, on_drop, budget, read_ports(folder))
        passed = valve(settings.caps, clock, day.ration)
        transports = listening if passed is None else [Throttled(each, passed) for each in listening]
        node = Node(
            passport, transports, clock, log.emit, relay=settings.relay, via=via, budget=budget, is_listed=is_listed
        )
        lan = Lan(node, clock, log.emit) if settings.has_lan else None
        SpeedTest(node, clock)
        Relaying(bulletins, node, clock)
        PaceTeller(pace, node)
        for peer, addresses in read_addresses(folder).items():
            node.remember(peer, addresses)

        def keep() -> None:
            known = node.known_addresses().items()  # who only visits has no address
            keep_addresses(folder, {peer: found for peer, found in known if found and peer != node.peer})

        node.on_contacts_settled(keep)  # a process that is killed finds its way back, too
        async with aclosing(Threads()) as compute:
            try:
                yield Session(
                    options=options,
                    identity=identity,
                    folder=folder,
                    node=node,
                    emit=log.emit,
                    clock=clock,
                    compute=compute,
                    day=day,
                    lan=lan,
                    listening=listening,
                )
            except WeftError as error:
                if len(error.args) == 1:
                    error.args = (with_names(str(error), partial(_name_of_part, node)),)
                raise
            finally:
                keep()
                if lan is not None:
                    await lan.aclose()
                await node.aclose()


def _own_name(given: str, folder: PeerFolder, home: Home, emit: Emit) -> str:
    """Return what others call this peer: by the name given, else by the one given before in this run, or else in
    another, else by its machine."""
    if given:
        keep_name(folder, given)
        return given
    peer = folder.root.name
    if kept := read_name(folder) or last_name(home, peer):
        emit(Notice(text=f"this peer is called {kept}, as before; --name gives it another name"))
        return kept
    return usual_name(peer)


def usual_name(peer: str) -> str:
    """Return what a peer of this machine is called that nobody gave a name."""
    return f"{platform.node()[:40] or 'peer'}-{peer[:4]}"


def _name_of_part(node: Node, part: str) -> str | None:
    """Return what a person calls the peer whose key begins so, and that part; None: its name is not known here."""
    found = (node.contact(peer) for peer in (node.peer, *node.known_addresses()) if peer.startswith(part))
    return next((name_of(each.peer, each.name, is_shared=True) for each in found if each.name), None)


def make_transports(
    identity: Identity,
    settings: PeerConfig,
    on_drop: OnDrop = ignore_drop,
    budget: Budget = Budget(),  # noqa: B008  # frozen
    last_ports: Mapping[str, int] = MappingProxyType({}),
) -> list[TlsTransport | IrohTransport]:
    """Return the ways that a machine has to others, best first, but for the one that leads through them.

    Args:
        last_ports: where each listened last, by its name.
    """
    return [
        TlsTransport(identity, settings.tls, on_drop=on_drop, budget=budget, last_port=last_ports.get(name, 0))
        if name == "tls"
        else IrohTransport(identity, settings.iroh, on_drop=on_drop, last_port=last_ports.get(name, 0))
        for name in settings.transports
        if name != VIA
    ]


@contextmanager
def present(options: Options, run: RunId, *, is_maker: bool) -> Iterator[Identity]:
    """Yield the identity that takes part in `run` from this home, and let others of this home know that one does.

    Raises:
        KeyLocked: a peer of this home takes part already, and no key was given: nobody wishes for a second one
            unasked, which takes memory and device once more. Or as `open_for`.
    """
    with ExitStack() as stack:
        with opening(options.home):
            if options.key is None:
                _require_none_here(options.home, run)
            identity = stack.enter_context(open_for(options, run, is_maker=is_maker))
            lock = take_lock(options.home.folder(run, identity.peer).lock)
        if lock is not None:  # else another process has a copy of the key
            stack.callback(lock.release)
        yield identity


@contextmanager
def opening(home: Home) -> Iterator[None]:
    """Be the only process of a home that opens an identity, or asks who takes part: who begins sees the other."""
    lock = take_lock(home.keys / "opening.lock", OPENS_S)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _require_none_here(home: Home, run: RunId) -> None:
    if (peer := at_work(home, run)) is not None:
        raise KeyLocked(
            f"peer {short(peer)} already trains run {short(run)} from {home.root}. A second peer needs as much memory "
            "again and shares the device. If you want one, give it a key of its own: --key second.pem (made if "
            "missing)."
        )


def at_work(home: Home, run: RunId) -> PeerId | None:
    """Return a peer of this home that takes part in `run` now; None: there is none. Asked while `opening`."""
    for path in sorted((home.root / "runs" / run).glob("*/lock")):
        lock = take_lock(path)
        if lock is None:
            return PeerId(path.parent.name)
        lock.release()
    return None


def open_for(options: Options, run: RunId, *, is_maker: bool) -> Identity:
    """Return the identity asked for; else one of this home that keeps a checkpoint of `run`; else any that is free.

    Raises:
        KeyLocked: the maker's home has checkpoints of the run, and all their identities are in use: to begin the same
            run again, under another identity, is nobody's wish.
    """
    if options.key is not None:
        return open_identity(options.key, create=True)
    kept = who_keep(run, options.home)
    for path in kept:
        with suppress(KeyLocked):
            return open_identity(path)
    if kept and is_maker:
        raise KeyLocked(
            f"{kept[0]}, which has trained run {short(run)} already, is in use by another process. Start again once "
            "that has ended: the run goes on where it stood. With another identity (--key) it would start over."
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
