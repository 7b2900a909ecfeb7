"""From a run file or a ticket to a running peer: opens the identity, the network, the files, and joins them.

    outcome = await found(run_file, base, options, wait_for=4, on_started=show_ticket)
    outcome = await join(ticket_text, options, agree=ask_person, on_started=...)

Both return when the run is complete or the peer was stopped. A run that this machine has kept before goes on where its
checkpoint stands.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from weft.clock import Clock, SystemClock
from weft.data import CorpusConfig, DataIndex, Tokenizer
from weft.data.batch import Batches
from weft.errors import ConfigError, Unreachable
from weft.events import Emit, Event, Notice, Working
from weft.executor import Compute, Threads
from weft.ids import PeerId
from weft.launch.fetch import fetch_files, fetch_initial, fetch_run
from weft.launch.guard import Guarded
from weft.launch.session import Footing, Options, connect, footing, open_for
from weft.launch.succession import charter_at, require_going, require_unended
from weft.launch.terms import Company, Terms, terms
from weft.net.admission import Admission, new_secret
from weft.net.membership.membership import say_goodbye
from weft.net.node import Node
from weft.net.ticket import Ticket, read
from weft.peer.context import Data, Trainers
from weft.peer.peer import Context, Outcome, Peer
from weft.peer.state.checkpoint import Snapshot, load
from weft.run.amend import amended
from weft.run.config import Genesis, RunConfig, RunFile
from weft.run.genesis import initial, on_corpus, pack_private, seal
from weft.run.host import limit_cores
from weft.run.machine import PeerConfig
from weft.run.outline import admission_of, public
from weft.run.staged import StagedConfig, held_of
from weft.store.home import PeerFolder
from weft.store.pool import Pool
from weft.store.tickets import keep_secret, read_secret
from weft.training.device import check_fits, choose
from weft.training.learner import Learner
from weft.training.section_memory import fitting
from weft.training.trainer import Trainer


class OneProcess:
    """This process alone."""

    def check_fits(self, run: RunConfig, settings: PeerConfig) -> None:
        if isinstance(run, StagedConfig):
            fitting(run, settings, choose(settings))
        else:
            check_fits(run, settings, choose(settings))

    def memory(self, folder: PeerFolder) -> Pool:  # noqa: ARG002  # the protocol's signature
        return Pool(0)

    def held(self, vector: Tensor, folder: PeerFolder) -> Tensor:  # noqa: ARG002  # the same
        return vector

    def learner(self, run: RunConfig, settings: PeerConfig, batches: Batches, emit: Emit, clock: Clock) -> Learner:
        return Trainer(run, settings, batches, emit, clock)


ONE = OneProcess()


class Tells(Protocol):
    @property
    def emit(self) -> Emit: ...


class Takes(Guarded, Protocol):
    """What takes part: a peer, or one of a run with stages."""

    @property
    def run(self) -> Genesis: ...

    @property
    def context(self) -> Tells: ...


@dataclass(frozen=True)
class Stand:
    """What takes part in a run with stages stands on."""

    run: StagedConfig
    ground: Footing
    node: Node
    compute: Compute
    data: Data
    admission: Admission
    on_started: Callable[[Takes, str], None]


TakePart = Callable[[Stand, int | None], Awaitable[Outcome]]
"""Take part to the end; begin the run with so many peers, or (None) join it."""


def _required(stages: TakePart | None) -> TakePart:
    if stages is None:
        raise ConfigError("this run has stages, which this program cannot hold. Take part with: weft join TICKET")
    return stages


async def found(
    run_file: RunFile,
    base: Path,
    options: Options,
    *,
    wait_for: int = 1,
    on_started: Callable[[Takes, str], None],
    trainers: Trainers = ONE,
    stages: TakePart | None = None,
) -> Outcome:
    """Make the run that `run_file` describes, or go on with it where this machine's checkpoint stands.

    Args:
        base: the folder that paths in the run file start from.
        wait_for: begin once so many peers are here, this one included.
        on_started: told the peer and a fresh ticket once others can join.
        stages: takes part in a run with stages; None: such a run is refused.
    """
    _limit(options.settings)
    pending: list[Event] = []

    def emit(event: Event) -> None:  # this peer has no name in the run yet
        (options.aside if isinstance(event, Working) else pending.append)(event)

    sealed = await asyncio.to_thread(
        seal, run_file, base, options.home, emit, max_parameters=options.settings.max_parameters
    )
    await asyncio.to_thread(trainers.check_fits, held_of(sealed.config), options.settings)
    run = sealed.config.run
    with footing(options, run, open_for(options, run, is_maker=True)) as ground:
        for event in pending:
            ground.emit(event)
        admission = admission_of(
            sealed.config.admission, sealed.config.stewards, read_secret(ground.folder) or new_secret()
        )
        keep_secret(ground.folder, admission)
        require_unended(ground.folder, run)
        async with aclosing(Threads()) as compute, ground.node(admission) as node:
            node.passport.predecessor = sealed.config.predecessor
            node.serve_blobs(public(sealed.config, sealed.config.run, options.home), is_patient=True)
            data = Data(sealed.tokenizer, sealed.store, sealed.index)
            if isinstance(sealed.config, StagedConfig):
                stand = Stand(sealed.config, ground, node, compute, data, admission, on_started)
                return await _required(stages)(stand, wait_for)
            outer = await _outer(sealed.config, ground, trainers)
            if outer is None:
                raise ConfigError("the run's initial weights are not on this machine; start it anew.")
            snapshot = await snapshot_of(ground.folder, sealed.config, options.settings, trainers.memory(ground.folder))
            peer = Peer(sealed.config, _place(ground, node, compute, data, _Start(sealed.config, trainers, outer)))
            with ground.ticket(node, admission, peer.knows_anchor) as ticket:
                async with ground.guarded(peer):
                    on_started(peer, ticket)
                    return await peer.found(wait_for=wait_for, snapshot=snapshot)


async def join(
    ticket_text: str,
    options: Options,
    *,
    agree: Callable[[Terms], bool],
    on_started: Callable[[Takes, str], None],
    own_data: tuple[CorpusConfig, Path] | None = None,
    trainers: Trainers = ONE,
    stages: TakePart | None = None,
) -> Outcome | None:
    """Join the run that the ticket names; return None when the person does not agree to the terms.

    A peer that was in the run before brings what its checkpoint holds: its inner optimizer and what it trained and
    nobody counted. The state itself it fetches where others have gone further.

    Args:
        agree: shown what it costs, in a thread of its own.
        own_data: what to train on in a private run, and the folder its paths start from.

    Raises:
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered and there is no checkpoint, or nobody let this peer in.
        GenesisMismatch: the run's first weights are others than its maker's.
        WeftError: as `Peer.join`, and what this machine cannot do.
    """
    ticket = read(ticket_text)
    _limit(options.settings)
    with footing(options, ticket.run, open_for(options, ticket.run, is_maker=False)) as ground:
        require_unended(ground.folder, ticket.run)
        async with aclosing(Threads()) as compute, ground.node(ticket.admission()) as node:
            for contact in ticket.contacts:
                if contact.peer != node.peer:
                    node.remember(contact.peer, contact.addresses, contact.name)
            async with Company(node, SystemClock()) as company:
                members = await members_of(node, ticket, ground)
                run = on_corpus(await fetch_run(node, members, options.home, options.settings.max_parameters))
                charter = await charter_at(node, members[0]) if members else None
                require_going(ticket.run, charter)
                now = run if charter is None else on_corpus(amended(run, charter))  # what it costs is by what holds now
                await asyncio.to_thread(trainers.check_fits, held_of(now), options.settings)
                pace = await company.pace()
            asked = await asyncio.to_thread(
                terms, held_of(now), ticket, options.home, options.settings, SystemClock(), pace
            )
            if not await asyncio.to_thread(agree, asked):
                await say_goodbye(node, "did not agree to the terms")
                return None
            ground.day.require(asked.fetch_nbytes)
            admission = admission_of(run.admission, run.stewards, ticket.secret)
            node.admit(admission)
            node.passport.predecessor = run.predecessor
            keep_secret(ground.folder, admission)
            if isinstance(run, StagedConfig):
                data = await _data(node, members, run, ground, own_data)
                node.serve_blobs(public(run, run.run, options.home), is_patient=True)
                return await _required(stages)(Stand(run, ground, node, compute, data, admission, on_started), None)
            snapshot = await snapshot_of(ground.folder, run, options.settings, trainers.memory(ground.folder))
            await fetch_initial(node, members, run, options.home)
            outer = await _outer(run, ground, trainers)
            if outer is None:
                raise ConfigError("the run's initial weights could not be had. Ask a member for a fresh ticket.")
            data = await _data(node, members, run, ground, own_data)
            node.serve_blobs(public(run, run.run, options.home), is_patient=True)
            peer = Peer(run, _place(ground, node, compute, data, _Start(run, trainers, outer)))
            with ground.ticket(node, admission, peer.knows_anchor) as fresh:
                async with ground.guarded(peer):
                    on_started(peer, fresh)
                    return await peer.join(snapshot=snapshot)


# --- pieces ---


async def members_of(node: Node, ticket: Ticket, ground: Footing) -> list[PeerId]:
    """Return those that let this peer in, or nobody where nobody answers and this machine has kept the run.

    Raises:
        Unreachable: nobody answers, and there is nothing here to go on with.
    """
    try:
        first = await connect(node, ticket, [contact.peer for contact in ticket.contacts if contact.peer != node.peer])
    except Unreachable as error:
        if not ground.folder.has_checkpoint:
            raise
        ground.emit(Notice(text=f"going on with what this machine has kept of the run: {error}"))
        return []
    return [first, *(peer for peer in node.peers if peer != first)]


def _limit(settings: PeerConfig) -> None:
    if settings.caps.cores is not None:
        limit_cores(settings.caps.cores)


@dataclass(frozen=True)
class _Start:
    """What training begins with."""

    run: RunConfig
    trainers: Trainers
    outer: Tensor


async def _outer(run: RunConfig, ground: Footing, trainers: Trainers) -> Tensor | None:
    """Return the parameters that the run begins with, where they are kept; None: they are not here."""

    def held() -> Tensor | None:
        vector = initial(run, ground.options.home)
        return None if vector is None else trainers.held(vector, ground.folder)

    return await asyncio.to_thread(held)


def _place(ground: Footing, node: Node, compute: Compute, data: Data, start: _Start) -> Context:
    clock, settings, run, trainers = SystemClock(), ground.options.settings, start.run, start.trainers
    return Context(
        node=node,
        identity=ground.identity,
        folder=ground.folder,
        settings=settings,
        data=data,
        initial=start.outer,
        clock=clock,
        compute=compute,
        emit=ground.emit,
        make_learner=lambda emit: trainers.learner(run, settings, data.batches(run, "train"), emit, clock),
        memory=trainers.memory(ground.folder),
    )


async def _data(
    node: Node,
    members: Sequence[PeerId],
    run: RunConfig,
    ground: Footing,
    own_data: tuple[CorpusConfig, Path] | None,
) -> Data:
    home = ground.options.home
    tokenizer = await fetch_files(node, members, run, home, SystemClock(), ground.emit)
    if run.is_private:
        return Data(tokenizer, home.private, await _own(run, tokenizer, ground, own_data))
    return Data(tokenizer, home.shards, run.data)


async def _own(
    run: RunConfig, tokenizer: Tokenizer, ground: Footing, own_data: tuple[CorpusConfig, Path] | None
) -> DataIndex:
    if own_data is None:
        raise ConfigError(
            "this run is private: every peer trains on its own files. Name yours with --data, in Python data=[...]."
        )
    corpus, base = own_data
    loop = asyncio.get_running_loop()

    def emit(event: Event) -> None:  # from the thread that packs
        loop.call_soon_threadsafe(ground.emit, event)

    return await asyncio.to_thread(pack_private, run, tokenizer, corpus, base, ground.options.home, emit)


async def snapshot_of(
    folder: PeerFolder, run: Genesis, settings: PeerConfig, memory: Pool | None = None
) -> Snapshot | None:
    """Return what this machine has kept of the run.

    Args:
        memory: for its vectors.
    """
    if not folder.has_checkpoint:
        return None
    empty = (memory or Pool(0)).empty
    snapshot = await asyncio.to_thread(load, folder.checkpoint, max_parameters=settings.max_parameters, empty=empty)
    return snapshot if snapshot.config == run else None
