"""From a run, or a ticket to one, to a running peer: opens the identity, the network, the files, and takes part.

    outcome = await found(work, options, wait_for=4, on_started=show_ticket)
    outcome = await join(work, ticket_text, options, on_started=...)

`work` is what is trained: a transformer on texts (`corpus`), or what a loop of somebody's own has (`loop`). Both return
when the run is complete or the peer was stopped. A run that this machine has kept before goes on where its checkpoint
stands.

Where a run goes on that has ended, or will:

    at a checkpoint of here      require_unended     the run ended here, by an act that named the next one
    at a member                  charter_at          what holds of the run now: its settings, and where it will go on

A member of the successor, whose genesis names the run before, answers an old ticket in its handshake.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor

from weft.data.tokenizer import Tokenizer
from weft.errors import CheckpointError, TicketMismatch, Unreachable
from weft.events import Emit, Event, Notice, Working
from weft.ids import PeerId, RunId, short
from weft.launch.code import learn
from weft.launch.fetch import fetch_run
from weft.launch.guard import Guarded
from weft.launch.runs import names_in, unless_begun
from weft.launch.session import Options, Session, present, session
from weft.launch.terms import Kept, MemberWatch, Terms, terms
from weft.net.admission import new_secret
from weft.net.membership.gossip import ClaimReader
from weft.net.membership.membership import say_goodbye
from weft.net.node import Node
from weft.net.ticket import Ticket, read
from weft.peer.context import Data
from weft.peer.fork import waits_s
from weft.peer.messages import CharterAnswer, CharterRequest
from weft.peer.peer import COMPLETE, Context, Outcome, Peer
from weft.peer.state.checkpoint import Snapshot, load, read_contents
from weft.peer.state.replica import is_complete
from weft.pipeline.link import StageLink
from weft.run.amend import first_charter
from weft.run.config import Genesis, RunConfig
from weft.store.home import PeerFolder
from weft.store.pool import Pool
from weft.store.tickets import read_secret
from weft.sync.records.acts import Amend, Succeed
from weft.sync.records.charter import Charter
from weft.texts.beside.serving import Serving, cut_of, share_device
from weft.training.learner import Learner

CALL_S = 10.0
BEGUN = "the run has begun already: it goes on with the peers that are here, and waits for no more"

Stand = Literal["new", "begun", "complete"]
"""How far a run is that this machine has kept."""


class Participant(Guarded, Protocol):
    """What takes part: a peer, or one of a run with stages."""

    @property
    def run(self) -> Genesis: ...

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is lost if it ends now: it has not begun, or has said goodbye and saved. From any thread."""
        ...


P = TypeVar("P", bound=Participant)
P_co = TypeVar("P_co", bound=Participant, covariant=True)


@dataclass(frozen=True)
class Prepared(Generic[P_co]):
    """A peer that can begin."""

    peer: P_co
    live: Callable[[int | None], Awaitable[Outcome]]  # to the end: begin the run with so many peers, or (None) join it
    standing: Callable[[PeerId], int | None] = lambda _peer: 1  # as `Peer.standing`
    stand: Stand = "new"
    charter: Charter | None = None  # what holds by this machine's checkpoint; None: there is none


@dataclass(frozen=True)
class Opened:
    """What whoever starts a peer is told once others can join."""

    ticket: str  # a fresh one
    emit: Emit  # to the peer's log
    stand: Stand
    charter: Charter | None = None  # what holds of the run now; None: what its config says


OnStarted = Callable[[P, Opened], None]


@dataclass(frozen=True)
class Invitation:
    """What a newcomer knows of a run before it takes part."""

    ticket: Ticket
    run: Genesis
    charter: Charter | None  # what holds now; None: nobody has said
    members: MemberWatch
    kept: Kept | None = None  # where nobody of it answers
    is_here: bool = False  # it is complete, and this machine has all of it
    member_at: int | None = None  # the round at which this machine left it as a member; None: none is known here
    has_taken_part: bool = False  # its terms were agreed to here before, and nothing of it is kept, maybe

    @property
    def is_return(self) -> bool:
        """Return whether a member comes back to others."""
        is_known = self.has_taken_part or self.member_at is not None
        return is_known and self.kept is None and not self.is_here

    async def terms(self, s: Session, run: Genesis) -> Terms:
        """Return what it costs to join.

        Args:
            run: as it is now, with what was amended of it.

        Raises:
            ConfigError: the settings name a device that is not there.
        """
        heard, options, me = await self.members.heard(), s.options, s.identity.peer
        return await asyncio.to_thread(
            terms, run, self.ticket, options.home, options.settings, heard, me, self.kept, is_here=self.is_here
        )


class Workload(Protocol[P_co]):
    """What is trained."""

    def seal(self, options: Options, emit: Emit) -> tuple[Genesis, Data | None]:
        """Return the run to be founded, or made here before, and its data; what others may fetch is in the home then.

        Raises:
            WeftError: no peer would accept it, or this machine cannot train it.
        """
        ...

    async def agree(self, s: Session, invitation: Invitation) -> bool:
        """Return whether to take part in a run of others.

        Raises:
            WeftError: it is another run than was meant, or this machine cannot train it.
        """
        ...

    async def prepare(
        self, s: Session, genesis: Genesis, members: Sequence[PeerId], data: Data | None
    ) -> Prepared[P_co]:
        """Fetch what is missing, and make the peer.

        Args:
            data: as `seal` has it; None where the run is joined.
        """
        ...


async def found(work: Workload[P], options: Options, *, wait_for: int = 1, on_started: OnStarted[P]) -> Outcome:
    """Make the run of `work`, or go on with it where this machine's checkpoint stands.

    Args:
        wait_for: begin once so many peers are here, this one included.
    """
    pending: list[Event] = []

    def emit(event: Event) -> None:  # this peer has no name in the run yet
        (options.aside if isinstance(event, Working) else pending.append)(event)

    before = names_in(options.home)
    learn(options, emit)
    genesis, data = await asyncio.to_thread(work.seal, options, emit)
    run = genesis.run
    with unless_begun(run, options, before) as begun, present(options, run, is_maker=True) as identity:
        async with session(options, run, identity) as s:
            for event in pending:
                s.emit(event)
            require_unended(s.folder, run)
            s.admit(genesis, read_secret(s.folder) or new_secret())
            await s.start()
            prepared = await work.prepare(s, genesis, (), data)
            begun()  # from here on others may be invited
            return await _live(s, prepared, wait_for, on_started)


async def join(work: Workload[P], ticket_text: str, options: Options, *, on_started: OnStarted[P]) -> Outcome | None:
    """Join the run that the ticket names; return None when the person does not agree to the terms.

    A peer that was in the run before brings what its checkpoint holds: its inner optimizer and what it trained and
    nobody counted. The state itself it fetches where others have gone further.

    Raises:
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered and there is no checkpoint, or nobody let this peer in.
        GenesisMismatch: the run's first weights are others than its maker's, or its tensors others than the loop's.
        WeftError: as `Peer.join`, and what this machine cannot do.
    """
    ticket = read(ticket_text)
    run, before = ticket.run, names_in(options.home)
    with unless_begun(run, options, before) as begun, present(options, run, is_maker=False) as identity:
        async with session(options, run, identity, ticket.admission()) as s:
            require_unended(s.folder, run)
            learn(options, s.emit)
            await s.start()
            invited = await _invited(work, s, ticket)
            if invited is None:  # terms that were only read leave nothing behind
                await say_goodbye(s.node, "did not agree to the terms")
                return None
            begun()  # what is fetched from here on stays for the next try
            genesis, members, charter = invited
            s.admit(genesis, ticket.secret)
            prepared = await work.prepare(s, genesis, members, None)
            return await _live(s, replace(prepared, charter=charter or prepared.charter), None, on_started)


async def _invited(
    work: Workload[P], s: Session, ticket: Ticket
) -> tuple[Genesis, list[PeerId], Charter | None] | None:
    """Return the run, who let this peer in, and what holds of it now; None: its terms were not agreed to."""
    run = ticket.run
    async with MemberWatch(s.node, s.clock) as watch:
        members = await _members(s, ticket)
        genesis = await fetch_run(s.node, members, s.options.home, s.options.settings.max_parameters)
        charter = await charter_at(s.node, members[0]) if members else None
        require_going(run, charter)
        kept = None if members else _kept(s, genesis)
        is_here = _is_complete_here(s, genesis, charter)
        invitation = Invitation(
            ticket,
            genesis,
            charter,
            watch,
            kept,
            is_here=is_here,
            member_at=_member_at(s),
            # Kept since its terms were agreed to; an anchor agreed to other ones.
            has_taken_part=s.folder.secret.exists() and not s.folder.anchored.exists(),
        )
        return (genesis, members, charter) if await work.agree(s, invitation) else None


async def _live(s: Session, prepared: Prepared[P], wait_for: int | None, on_started: OnStarted[P]) -> Outcome:
    with s.ticket(prepared.standing) as ticket:
        async with s.guarded(prepared.peer):
            on_started(prepared.peer, Opened(ticket, s.emit, prepared.stand, prepared.charter))
            return await prepared.live(wait_for)


async def _members(s: Session, ticket: Ticket) -> list[PeerId]:
    """Return those that let this peer in, or nobody where nobody answers and this machine has kept the run.

    Raises:
        Unreachable: nobody answers, and there is nothing here to go on with.
    """
    try:
        return await s.meet(ticket)
    except Unreachable as error:
        if not s.folder.has_checkpoint:
            raise
        s.emit(Notice(text=f"nobody of this run answers, so only what this machine kept of it is here: {error}"))
        return []


def _kept(s: Session, run: Genesis) -> Kept | None:
    """Return where this machine's checkpoint stands, and what `Peer.join` does with it where nobody answers."""
    with suppress(CheckpointError):  # whoever reads the rest says what is wrong
        if (head := read_contents(s.folder.checkpoint).head) is not None:
            return Kept(head.round, waits_s(run, head.members, s.identity.peer), head.committed_tokens)
    return None


def _member_at(s: Session) -> int | None:
    """Return the round of this machine's checkpoint, where this peer is a member by it."""
    with suppress(CheckpointError):
        if s.folder.has_checkpoint and (head := read_contents(s.folder.checkpoint).head) is not None:
            return head.round if s.identity.peer in head.members else None
    return None


def _is_complete_here(s: Session, run: Genesis, charter: Charter | None) -> bool:
    """Return whether this machine's checkpoint is of the run's end, as members have it or else as it says itself."""
    with suppress(CheckpointError):
        if s.folder.has_checkpoint:
            contents = read_contents(s.folder.checkpoint)
            return is_complete(contents.head, charter or contents.charter or first_charter(run))
    return False


# --- a peer of a whole model ---


async def whole(s: Session, run: Genesis, context: Context, amends: Amend | None = None) -> Prepared[Peer]:
    """Return a peer that goes on from what this machine has kept of the run."""
    snapshot = await _snapshot(s, run, context.memory)
    peer = Peer(run, context)
    stand: Stand = "new"
    charter = None if snapshot is None else snapshot.charter
    if snapshot is not None and snapshot.head is not None:
        charter = charter or first_charter(run)
        stand = "complete" if amends is None and is_complete(snapshot.head, charter) else "begun"

    async def live(wait_for: int | None) -> Outcome:
        if wait_for is None:
            if stand == "complete":
                s.emit(Notice(text=COMPLETE))
            return await peer.join(snapshot=snapshot)
        if wait_for > 1 and stand == "begun":
            s.emit(Notice(text=BEGUN))
        return await peer.found(wait_for=wait_for, snapshot=snapshot, amends=amends)

    return Prepared(peer, live, peer.standing, stand, charter)


def beside_texts(s: Session, run: RunConfig, tokenizer: Tokenizer) -> tuple[Session, Serving | None]:
    """Return what a peer of a whole model works with, and what draws texts beside it where its settings say so.

    Raises:
        ConfigError: what texts may take holds not one page; no such device.
    """
    if not s.options.settings.serve_nbytes:
        return s, None
    settings, compute, beside = share_device(s.options.settings, s.compute, s.clock, s.emit)
    texts = Serving(cut_of(run, tokenizer), settings, StageLink(s.node), s.clock, beside, s.emit)
    return replace(s, options=replace(s.options, settings=settings), compute=compute), texts


def context_of(
    s: Session,
    data: Data | None,
    initial: Tensor,
    make_learner: Callable[[Emit], Learner],
    *,
    memory: Pool | None = None,
    reader: ClaimReader | None = None,
    texts: Serving | None = None,
) -> Context:
    """Return what a peer stands on.

    Args:
        initial: becomes its outer parameters.
        texts: of the whole model, drawn beside.
    """
    return Context(
        node=s.node,
        identity=s.identity,
        folder=s.folder,
        settings=s.options.settings,
        data=data,
        initial=initial,
        clock=s.clock,
        compute=s.compute,
        emit=s.emit,
        make_learner=make_learner,
        memory=memory or Pool(0),
        reader=reader,
        texts=texts,
    )


async def _snapshot(s: Session, run: Genesis, memory: Pool) -> Snapshot | None:
    if not s.folder.has_checkpoint:
        return None
    limit = s.options.settings.max_parameters
    snapshot = await asyncio.to_thread(load, s.folder.checkpoint, max_parameters=limit, empty=memory.empty)
    return snapshot if snapshot.config == run else None


# --- a run that has ended ---


def where(run: RunId, successor: Succeed) -> str:
    """Return, for a person, where `run` goes on."""
    how = "ask its members for a ticket: weft ticket"
    if successor.ticket:
        how = f"`weft join -` asks for its ticket: {successor.ticket}"
    return f"run {short(run)} goes on as run {short(successor.run)}. Join that one: {how}"


def require_unended(folder: PeerFolder, run: RunId) -> None:
    """Let a peer go on, unless its own checkpoint says that the run has ended in favour of another.

    Raises:
        TicketMismatch: it has; says where it goes on.
    """
    with suppress(CheckpointError):  # whoever reads the rest says what is wrong
        if folder.has_checkpoint:
            require_going(run, read_contents(folder.checkpoint).charter)


def require_going(run: RunId, charter: Charter | None) -> None:
    """Let a peer go on, unless `charter` says that the run has ended in favour of another.

    Raises:
        TicketMismatch: it has; says where it goes on.
    """
    if charter is not None and charter.has_ended and charter.successor is not None:
        raise TicketMismatch(f"nothing is left to train: {where(run, charter.successor)}")


async def charter_at(node: Node, member: PeerId) -> Charter | None:
    """Return what holds of the run where a member stands; None where it does not say."""
    answer = await node.ask(member, CharterRequest(run=node.run), CharterAnswer, deadline_s=CALL_S)
    return None if answer is None else answer.charter
