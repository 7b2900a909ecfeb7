"""Gathers a run's model without taking part in it: joins nothing, trains nothing, holds up nobody.

    gathered = await visit(ticket_text, options, into)     from members of all stages, linked for as long as it takes
    gathered = await from_here(run, home, into)            from what lies in this home, all of it

A visitor says every two seconds that it fetches (`StageNews`, as all peers of such a run do): so it is told who holds
which stage, and at the run's end members stay until it has what it came for.

Failure:
- no member of a stage is linked within `MEET_S`, and its section does not lie here: PeerError, as `gather`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from weft.clock import Clock, SystemClock
from weft.data.tokenizer import MAX_BLOB_NBYTES
from weft.errors import CheckpointError, ConfigError
from weft.events import DataReady, Emit, Event
from weft.ids import Digest, PeerId, RunId, short
from weft.launch.fetch import fetch_base, fetch_files, fetch_run, missing_base_nbytes, read_came_with
from weft.launch.session import Options, Session, open_for, session
from weft.net.node import Node
from weft.net.ticket import Ticket, read
from weft.run.config import RunConfig
from weft.run.genesis import MAX_RUN_NBYTES, on_corpus, read_run
from weft.run.outline import admission_of
from weft.run.staged import StagedConfig
from weft.stages.gather.gather import Found, Gather, Gathered, Means, folders_of, found_in
from weft.stages.messages import StageNews
from weft.stages.reader import StageReader
from weft.stages.table import StageTable
from weft.store.home import Home, PeerFolder
from weft.tasks import Inline, Tasks

R = TypeVar("R", bound=RunConfig)

NEWS_S = 2.0
MEET_S = 15.0  # until members of all stages are linked: each tells what it holds every two seconds
LOOK_S = 0.2
FETCHING = StageNews(held=(), kept=(), is_trainer=False, is_busy=True)


class Visitor:
    """Of a node that is linked to one member at least."""

    def __init__(self, node: Node, run: StagedConfig, clock: Clock, news: StageNews = FETCHING) -> None:
        self._node = node
        self._news = news
        self._clock = clock
        self.table = StageTable(run.stages, has_tied=run.tied is not None)
        node.on_note(StageNews, self._on_news)
        node.on_link(self._on_link)
        node.on_contact(lambda contact: node.keep(contact.peer))

    async def watch(self) -> None:
        """Say what it comes for, until this is cancelled."""
        for peer in self._node.known_addresses():
            self._node.keep(peer)
        while True:
            for peer in self._node.peers:
                self._node.post(peer, self._news)
            await asyncio.sleep(NEWS_S)

    async def met(self) -> None:
        """Wait until members of all stages are linked, or nobody is to be waited for any more."""
        began = self._clock.now()
        while self.table.empty() and self._clock.now() - began < MEET_S:  # noqa: ASYNC110  # news come when they come
            await asyncio.sleep(LOOK_S)

    def members(self, stage: int) -> list[PeerId]:
        return sorted(peer for peer in self.table.held(stage) if self._node.is_linked(peer))

    async def _on_news(self, peer: PeerId, news: StageNews) -> None:
        self.table.told(peer, news)

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if is_up:
            self._node.post(peer, self._news)
        else:
            self.table.gone(peer)


async def visit(ticket_text: str, options: Options, into: Path | None) -> Gathered:
    """Fetch all sections from the members of the run that a ticket names; write the checkpoint of the whole.

    Args:
        into: the checkpoint's folder; None: where this home keeps that run's.

    Raises:
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered, or let this peer in.
        ConfigError: the run has no stages.
        WeftError: as `Gather.gather`.
    """
    ticket = read(ticket_text)
    identity = open_for(options, ticket.run, is_maker=False)
    async with session(options, ticket.run, identity, ticket.admission()) as s:
        await s.start()
        run, tokenizer = await introduced(s, ticket, _with_stages)
        s.day.require(4 * run.num_parameters + missing_base_nbytes(run, options.home))
        async with visiting(s.node, run, s.clock) as visitor:
            await visitor.met()
            await fetch_base(s.node, s.node.peers, run, options.home)
            folders = folders_of(s.folder.root.parent)
            readers = {
                stage: StageReader(s.node, run.of_stage(stage), 0, s.compute, s.clock)
                for stage in range(run.num_pieces)
            }
            means = Means(
                tokenizer=tokenizer,
                came_with=read_came_with(run, options.home),
                scratch=s.folder.scratch,
                compute=s.compute,
                clock=s.clock,
                emit=s.emit,
            )

            def here(stage: int) -> list[Found]:
                return found_in(folders, run, stage)

            return await Gather(run, means, readers, here, visitor.members).gather(into or s.folder.checkpoint)


async def from_here(name: RunId, home: Home, into: Path | None, emit: Emit) -> Gathered:
    """Put the sections together that lie in this home.

    Args:
        into: as `visit`.

    Raises:
        CheckpointError: some do not lie here; says which.
        ConfigError: the run has no stages.
    """
    data = home.blobs.read(Digest(name), MAX_RUN_NBYTES)
    if data is None:
        raise CheckpointError(f"{home.root} has no description of run {short(name)}. Give a ticket of a member.")
    run = _with_stages(read_run(data, _ANY))
    tokenizer = home.blobs.read(run.data.tokenizer, MAX_BLOB_NBYTES)
    if tokenizer is None:
        raise CheckpointError(f"{home.root} has no tokenizer of run {short(name)}. Give a ticket of a member.")
    folders = folders_of(home.root / "runs" / name)
    found = {stage: found_in(folders, run, stage) for stage in range(run.num_pieces)}
    if missing := [run.called(stage) for stage in range(run.num_pieces) if not found[stage]]:
        raise CheckpointError(
            f"run {short(name)} has {run.stages} stages, and these are not here: {', '.join(missing)}. Other "
            "peers hold them. While they run, fetch them with: weft gather -"
        )
    newest = max(folders, key=lambda each: _newest_round(each, run))
    means = Means(
        tokenizer=tokenizer,
        came_with=read_came_with(run, home),
        scratch=newest.scratch,
        compute=Inline(),
        clock=SystemClock(),
        emit=emit,
    )
    return await Gather(run, means, {}, found.__getitem__).gather(into or newest.checkpoint)


_ANY = 1 << 62  # parameters: what lies here was accepted before


def _newest_round(folder: PeerFolder, run: StagedConfig) -> int:
    found = [each.head.round for stage in range(run.num_pieces) for each in found_in([folder], run, stage)]
    return max(found, default=-1)


async def introduced(s: Session, ticket: Ticket, checked: Callable[[RunConfig], R]) -> tuple[R, bytes]:
    """Return the run and its tokenizer's blob; the run's held-out text comes, too, as far as others may have it.

    Args:
        checked: returns the run, or refuses it before more is fetched.
    """
    members, home = await s.meet(ticket), s.options.home
    run = checked(on_corpus(await fetch_run(s.node, members, home, s.options.settings.max_parameters)))
    s.node.admit(admission_of(run.admission, run.stewards, ticket.secret))

    def told(event: Event) -> None:  # that its data is ready is what a peer says that begins
        if not isinstance(event, DataReady):
            s.emit(event)

    heldout = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, train=()))
    tokenizer = await fetch_files(s.node, members, heldout, home, s.clock, told)
    return run, tokenizer.to_bytes()


def _with_stages(run: object) -> StagedConfig:
    if not isinstance(run, StagedConfig):
        name = getattr(run, "name", "")
        raise ConfigError(f"run {name!r} has no stages: every member holds the whole model, and its checkpoint has it.")
    return run


@asynccontextmanager
async def visiting(node: Node, run: StagedConfig, clock: Clock, news: StageNews = FETCHING) -> AsyncIterator[Visitor]:
    """Be linked to members of all stages meanwhile, and tell them `news`."""

    def fail(error: Exception) -> None:
        failures.append(error)

    failures: list[Exception] = []
    visitor = Visitor(node, run, clock, news)
    async with aclosing(Tasks(fail)) as tasks:
        tasks.spawn(visitor.watch())
        yield visitor
    if failures:
        raise failures[0]
