"""From a run file or a ticket to a running peer: opens the identity, the network, the files, and joins them.

    outcome = await found(run_file, base, options, wait_for=4, on_started=show_ticket)
    outcome = await join(ticket_text, options, agree=ask_person, on_started=...)

Both return when the run is complete or the peer was stopped. A run that this machine has kept before goes on where its
checkpoint stands. It does not know how anything is shown.
"""

import asyncio
import platform
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from torch import Tensor

from weft.clock import SystemClock
from weft.data import CorpusConfig, DataIndex, ShardStore, Tokenizer
from weft.errors import ConfigError, GenesisMismatch, KeyFileError, KeyLocked, TicketMismatch
from weft.events import ConnectionDropped, Emit, Event, EventLog, JsonlSink, Sink
from weft.ids import PeerId, RunId, short
from weft.keys import Identity, open_free_identity, open_identity, read_peer
from weft.model.config import num_parameters
from weft.net import tcp
from weft.net.admission import Admission, Anyone, ByKeys, ByTicket, new_secret
from weft.net.handshake import Passport
from weft.net.heartbeat import say_goodbye
from weft.net.iroh import IrohTransport
from weft.net.links import VIA
from weft.net.node import Node
from weft.net.ticket import Ticket, issue, read
from weft.net.tls import TlsTransport
from weft.net.transport import Transport
from weft.peer.checkpoint import NAME, Snapshot, load
from weft.peer.company import Company
from weft.peer.compute import Compute, Threads
from weft.peer.config import KeysAdmission, OpenAdmission, PeerConfig, RunConfig, RunFile, TicketAdmission
from weft.peer.device import check_fits, choose
from weft.peer.fetch import fetch_files, fetch_initial, fetch_run
from weft.peer.home import Home, PeerFolder
from weft.peer.kept import drop_ticket, keep_addresses, keep_secret, keep_ticket, read_addresses, read_secret
from weft.peer.peer import Outcome, Peer, Place
from weft.peer.seal import initial, pack_private, public, seal
from weft.peer.terms import Terms, terms


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one machine brings."""

    home: Home
    key: Path | None  # None: the first identity of the home that is free
    settings: PeerConfig
    sinks: Sequence[Sink] = ()


async def found(
    run_file: RunFile,
    base: Path,
    options: Options,
    *,
    wait_for: int = 1,
    on_started: Callable[[Peer, str], None],
) -> Outcome:
    """Make the run that `run_file` describes, or go on with it where this machine's checkpoint stands.

    Args:
        base: the folder that paths in the run file start from.
        wait_for: begin once so many peers are here, this one included.
        on_started: told the peer and a fresh ticket once others can join.
    """
    pending: list[Event] = []
    sealed = await asyncio.to_thread(
        seal, run_file, base, options.home, pending.append, max_parameters=options.settings.max_parameters
    )
    await asyncio.to_thread(check_fits, sealed.config, options.settings, choose(options.settings))
    with _identity(options, sealed.config.run, is_maker=True) as identity:
        folder = options.home.folder(sealed.config.run, identity.peer)
        with _log(identity, folder, options.sinks) as emit:
            for event in pending:
                emit(event)
            admission = _admission(sealed.config, read_secret(folder) or new_secret())
            keep_secret(folder, admission)
            async with (
                aclosing(Threads()) as compute,
                _node(identity, sealed.config.run, admission, options, folder, emit) as node,
            ):
                node.serve_blobs(public(sealed.config, options.home))
                vector = await asyncio.to_thread(initial, sealed.config, options.home)
                if vector is None:
                    raise ConfigError("the run's initial weights are not on this machine; start it anew.")
                snapshot = await _snapshot(folder, sealed.config, options.settings)
                place = _place(
                    node, identity, folder, options, sealed.tokenizer, sealed.store, sealed.index, vector, compute, emit
                )
                peer = Peer(sealed.config, place)
                with _keep_ticket(node, identity, folder, admission) as ticket, _stopped(peer):
                    on_started(peer, ticket)
                    return await peer.found(wait_for=wait_for, snapshot=snapshot)


async def join(
    ticket_text: str,
    options: Options,
    *,
    agree: Callable[[Terms], bool],
    on_started: Callable[[Peer, str], None],
    own_data: tuple[CorpusConfig, Path] | None = None,
) -> Outcome | None:
    """Join the run that the ticket names; return None when the person does not agree to the terms.

    A peer that was in the run before brings what its checkpoint holds: its inner optimizer and what it trained and
    nobody counted. The state itself it fetches where others have gone further.

    Args:
        agree: shown what it costs, in a thread of its own.
        own_data: what to train on in a private run, and the folder its paths start from.

    Raises:
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered, or let this peer in.
        GenesisMismatch: the run's first weights are others than its maker's.
        WeftError: as `Peer.join`, and what this machine cannot do.
    """
    ticket = read(ticket_text)
    with _identity(options, ticket.run, is_maker=False) as identity:
        folder = options.home.folder(ticket.run, identity.peer)
        with _log(identity, folder, options.sinks) as emit:
            async with (
                aclosing(Threads()) as compute,
                _node(identity, ticket.run, ticket.admission(), options, folder, emit) as node,
            ):
                contacts = [contact for contact in ticket.contacts if contact.peer != identity.peer]
                for contact in contacts:
                    node.remember(contact.peer, contact.addresses, contact.name)
                async with Company(node, SystemClock()) as company:
                    first = await _connect(node, ticket, [contact.peer for contact in contacts])
                    members = [first, *(peer for peer in node.peers if peer != first)]
                    run = await fetch_run(node, members, options.home, options.settings.max_parameters)
                    await asyncio.to_thread(check_fits, run, options.settings, choose(options.settings))
                    pace = await company.pace()
                asked = await asyncio.to_thread(terms, run, ticket, options.home, options.settings, SystemClock(), pace)
                if not await asyncio.to_thread(agree, asked):
                    await say_goodbye(node, "did not agree to the terms")
                    return None
                admission = _admission(run, ticket.secret)
                node.admit(admission)
                keep_secret(folder, admission)
                snapshot = await _snapshot(folder, run, options.settings)
                await fetch_initial(node, members, run, num_parameters(run.model), options.home)
                vector = await asyncio.to_thread(initial, run, options.home)
                if vector is None:
                    raise ConfigError("the run's initial weights could not be had. Ask a member for a fresh ticket.")
                tokenizer = await fetch_files(node, members, run, options.home, emit)
                store, index = options.home.shards, run.data
                if run.is_private:
                    store, index = options.home.private, await _own(run, tokenizer, options, own_data)
                node.serve_blobs(public(run, options.home))
                place = _place(node, identity, folder, options, tokenizer, store, index, vector, compute, emit)
                peer = Peer(run, place)
                with _keep_ticket(node, identity, folder, admission) as fresh, _stopped(peer):
                    on_started(peer, fresh)
                    return await peer.join(snapshot=snapshot)


# --- pieces ---


@contextmanager
def _identity(options: Options, run: RunId, *, is_maker: bool) -> Iterator[Identity]:
    with _open_identity(options, run, is_maker=is_maker) as identity:
        yield identity


def _open_identity(options: Options, run: RunId, *, is_maker: bool) -> Identity:
    """Return the identity asked for; else one of this home that keeps a checkpoint of `run`; else any that is free.

    Raises:
        KeyLocked: the maker's home has checkpoints of the run, and all of them are in use: to begin the same run again
            beside it, under another identity, is nobody's wish.
    """
    if options.key is not None:
        return open_identity(options.key, create=True)
    kept = _who_keep(run, options.home)
    for path in kept:
        with suppress(KeyLocked):
            return open_identity(path)
    if kept and is_maker:
        raise KeyLocked(
            f"this run is being trained from {options.home.root} already (run {short(run)}). Take part in it with "
            f"another identity: weft join $(weft ticket {short(run)}). Or name one with --key to begin anew beside it."
        )
    return open_free_identity(options.home.keys)


def _who_keep(run: RunId, home: Home) -> list[Path]:
    """Return the identities of a home that have a checkpoint of `run`."""
    found = []
    for path in sorted(home.keys.glob("peer-*.pem")):
        with suppress(KeyFileError):  # whoever opens it says what is wrong
            if (home.folder(run, read_peer(path)).checkpoint / NAME).exists():
                found.append(path)
    return found


@contextmanager
def _log(identity: Identity, folder: PeerFolder, sinks: Sequence[Sink]) -> Iterator[Emit]:
    log = EventLog(SystemClock(), identity.peer, [JsonlSink(folder.log), *sinks])
    try:
        yield log.emit
    finally:
        log.close()


@asynccontextmanager
async def _node(
    identity: Identity, run: RunId, admission: Admission, options: Options, folder: PeerFolder, emit: Emit
) -> AsyncIterator[Node]:
    settings = options.settings
    if "tls" in settings.transports and settings.tls.host:  # what was asked for has no other transport in its place
        tcp.listen(settings.tls.host, 0).close()

    def on_drop(address: str, reason: str) -> None:
        emit(ConnectionDropped(address=address, remote=None, reason=reason))

    transports: dict[str, Callable[[], Transport]] = {
        "tls": lambda: TlsTransport(identity, settings.tls, on_drop=on_drop),
        "iroh": lambda: IrohTransport(identity, settings.iroh, on_drop=on_drop),
    }
    name = settings.name or f"{platform.node()[:40] or 'peer'}-{identity.peer[:4]}"
    passport = Passport(identity=identity, run=run, name=name, admission=admission)
    direct = [transports[each]() for each in settings.transports if each != VIA]
    via = identity if VIA in settings.transports else None
    node = Node(passport, direct, SystemClock(), emit, relay=settings.relay, via=via)
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


async def _connect(node: Node, ticket: Ticket, contacts: list[PeerId]) -> PeerId:
    """Return the first member that lets this peer in: of those on the ticket, which may be stale, and those met."""
    met = [peer for peer in node.known_addresses() if peer != node.peer]
    try:
        return await node.connect_any(list(dict.fromkeys([*contacts, *met])))
    except GenesisMismatch as error:
        raise TicketMismatch(
            f"this ticket is for run {short(ticket.run)}, which is not trained where it leads: {error}."
        ) from error


@contextmanager
def _keep_ticket(node: Node, identity: Identity, folder: PeerFolder, admission: Admission) -> Iterator[str]:
    """Keep a fresh ticket on disk as members come, so that `weft ticket` on any member prints one."""
    secret = admission.secret if isinstance(admission, ByTicket) else None

    def renew() -> str:
        text = issue(identity, node.run, node.contacts(), secret)
        keep_ticket(folder, text)
        return text

    node.on_contacts_settled(renew)
    try:
        yield renew()
    finally:
        drop_ticket(folder)


@contextmanager
def _stopped(peer: Peer) -> Iterator[None]:
    """Tell the peer to stop however it ends: where it was cancelled, its thread ends with the step under way."""
    try:
        yield
    finally:
        peer.stop("it has ended")


def _place(
    node: Node,
    identity: Identity,
    folder: PeerFolder,
    options: Options,
    tokenizer: Tokenizer,
    store: ShardStore,
    index: DataIndex,
    vector: Tensor,
    compute: Compute,
    emit: Emit,
) -> Place:
    return Place(
        node=node,
        identity=identity,
        folder=folder,
        settings=options.settings,
        tokenizer=tokenizer,
        shards=store,
        index=index,
        initial=vector,
        clock=SystemClock(),
        compute=compute,
        emit=emit,
    )


def _admission(run: RunConfig, secret: bytes | None) -> Admission:
    match run.admission:
        case TicketAdmission():
            if secret is None:
                raise ConfigError(
                    "this run admits by ticket, and this ticket holds no secret. Ask a member: weft ticket"
                )
            return ByTicket(secret=secret)
        case KeysAdmission(keys=keys):
            return ByKeys(allowed=keys)
        case OpenAdmission():
            return Anyone()
        case _:
            assert_never(run.admission)


async def _own(
    run: RunConfig, tokenizer: Tokenizer, options: Options, own_data: tuple[CorpusConfig, Path] | None
) -> DataIndex:
    if own_data is None:
        raise ConfigError("this run is private: every peer trains on its own files. Name yours with --data.")
    corpus, base = own_data
    return await asyncio.to_thread(pack_private, run, tokenizer, corpus, base, options.home)


async def _snapshot(folder: PeerFolder, run: RunConfig, settings: PeerConfig) -> Snapshot | None:
    if not (folder.checkpoint / NAME).exists():
        return None
    snapshot = await asyncio.to_thread(load, folder.checkpoint, max_parameters=settings.max_parameters)
    return snapshot if snapshot.config == run else None
