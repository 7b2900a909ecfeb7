"""What a person does to a run from outside: asks what holds of it, and hands in an act or a ballot.

    answer = await ask_charter(node, clock)
    answer = await hand_in(node, seal(identity, act), clock, patience_s)

`node` is linked to members of the run (`visit` makes one) and trains nothing. Any member will do: it tells all others.

Failure:
- the member that was asked ends or vanishes (it may be the one to be removed): the next one is asked.
- nothing is decided in time: the last answer says that it waits, and members go on without whoever asked.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
from msgspec import UNSET

from weft.clock import Clock
from weft.errors import ActVoid, Unreachable
from weft.ids import Digest, PeerId, Round
from weft.keys import Identity
from weft.launch.session import Options, Session, session
from weft.net.messages import Contact
from weft.net.node import Node
from weft.net.ticket import Ticket
from weft.peer.messages import (
    ChainAnswer,
    ChainRequest,
    CharterAnswer,
    CharterRequest,
    HandIn,
    HandInAnswer,
    StateOffer,
    StateRequest,
)
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.sync.governance import votes_of
from weft.sync.records.acts import Act, AnyDeed, Ballot, Reason, Rewind, RewindBallot
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Certificate, Manifest
from weft.sync.records.rewinds import why_not
from weft.wire import Signed, digest_of, seal

R = TypeVar("R", bound=msgspec.Struct)

CALL_S = 10.0
ASK_AGAIN_S = 1.0
MAX_LINKS = 8  # of those that the first member tells of: one that ends is not the only one
BEGINS_S = 10.0  # a member that has just started takes no part in a round yet

_NOBODY = (
    "no member that answered takes part in a round: the run has not begun, or they are still joining it. Try again in "
    "a moment"
)


@asynccontextmanager
async def visit(ticket: Ticket, identity: Identity, settings: PeerConfig) -> AsyncIterator[Node]:
    """Link a node to members on the ticket, as somebody who only visits the run and keeps nothing.

    It tells nobody where it listens: members would tell newcomers, who would look for the run there once it has ended.
    So it dials the others itself.

    Args:
        identity: connects where no secret admits, because the run may admit by key; else a key made for the moment
            does, since a peer may be training with this one.

    Raises:
        Unreachable, Refused, TicketMismatch: nobody on it answered, or let this peer in, or trains the run.
    """
    who = identity if ticket.secret is None else Identity.generate()
    async with aside(ticket, who, lambda home: Options(home=home, key=None, settings=settings)) as s:
        s.node.on_contact(partial(_meet_too, s.node))
        await s.start()
        await s.meet(ticket)
        yield s.node


@asynccontextmanager
async def aside(ticket: Ticket, who: Identity, options: Callable[[Home], Options]) -> AsyncIterator[Session]:
    """Open what somebody needs who takes no part in a run: nothing of it is kept, and nobody is told where it listens.

    Args:
        options: returns them for a home that is there meanwhile.
    """
    with TemporaryDirectory(prefix="weft-visit-", ignore_cleanup_errors=True) as folder:
        made = options(Home(Path(folder)))
        async with session(made, ticket.run, who, ticket.admission(), is_listed=False) as s:
            yield s


def _meet_too(node: Node, contact: Contact) -> None:
    if len(node.peers) < MAX_LINKS:
        node.keep(contact.peer)


async def ask_charter(node: Node, clock: Clock) -> CharterAnswer:
    """Return what holds of the run, as a linked member has it; wait a little where all are only beginning.

    Raises:
        Unreachable: no linked peer answers.
    """
    began, request = clock.now(), CharterRequest(run=node.run)
    while True:
        if (answer := await _ask(node, request, CharterAnswer)) is not None:
            return answer
        if clock.now() - began >= BEGINS_S:
            raise Unreachable(_NOBODY)
        await asyncio.sleep(ASK_AGAIN_S)


async def hand_in(node: Node, letter: Signed, clock: Clock, patience_s: float) -> HandInAnswer:
    """Hand in a signed act or ballot; return what became of it within `patience_s`.

    Raises:
        Unreachable: no linked peer answers.
    """
    began, waits = clock.now(), None
    while True:
        answer = await _ask(node, HandIn(letter=letter), HandInAnswer)
        if answer is not None and answer.outcome != "waits":
            return answer
        waits = answer or waits
        if waits is None or clock.now() - began >= patience_s:
            break
        await asyncio.sleep(ASK_AGAIN_S)
    if waits is None:
        raise Unreachable(_NOBODY)
    return waits


async def _ask(node: Node, request: msgspec.Struct, kind: type[R]) -> R | None:
    """Return what the first linked peer answers that does; None: none does."""
    for peer in sorted(node.peers):
        if (answer := await node.ask(peer, request, kind, deadline_s=CALL_S)) is not None:
            return answer
    return None


def act_of(steward: Identity, node: Node, charter: Charter, deed: AnyDeed) -> Signed:
    """Return the next act of a steward, signed."""
    serial = charter.serial_of(steward.peer) + 1
    return seal(steward, Act(run=node.run, serial=serial, deed=deed))


def rewind_ballot_of(member: Identity, node: Node, rewind: Rewind) -> Signed:
    """Return a member's ballot for going back, signed."""
    return seal(member, RewindBallot(run=node.run, rewind=rewind))


async def ask_rewind(node: Node, round: Round, reason: Reason, clock: Clock) -> Rewind:
    """Return what goes back to the parameters after a round, as a linked member remembers it: by the votes of the next.

    Raises:
        Unreachable: no linked peer answers.
        ActVoid: the round is none to go back to, or too long ago.
    """
    charter = await ask_charter(node, clock)
    for peer in sorted(node.peers):
        offer = await node.ask(peer, StateRequest(run=node.run, wanted=None), StateOffer, deadline_s=CALL_S)
        if offer is None or offer.head is None:
            continue
        request = ChainRequest(branch=offer.head.branch, after=Round(round - 1))
        answer = await node.ask(peer, request, ChainAnswer, deadline_s=CALL_S)
        found = {each.manifest.round: each for each in (() if answer is None else answer.certificates or ())}
        if round in found and round + 1 in found:
            return _rewind_to(found[round].manifest, found[Round(round + 1)], charter, reason)
    raise ActVoid(f"round {round} is not one of the last rounds before the newest, which is {charter.round}")


def _rewind_to(to: Manifest, after: Certificate, charter: CharterAnswer, reason: Reason) -> Rewind:
    votes = votes_of(after, to.members).values()
    states = Counter(Digest(vote.state) for vote in votes if vote.state is not UNSET)
    name, num = states.most_common(1)[0] if states else (None, 0)
    if name is None or 2 * num <= states.total():
        raise ActVoid(f"members did not name the same state after round {to.round}")
    rewind = Rewind(round=to.round, manifest=digest_of(to), state=name, reason=reason)
    if why := why_not(charter.charter, Round(charter.round + 1), rewind):
        raise ActVoid(why)
    return rewind


def ballot_of(member: Identity, node: Node, charter: Charter, peer: PeerId, reason: Reason) -> Signed:
    """Return a member's ballot for the removal of `peer`, signed."""
    serial = charter.times_expelled(peer) + 1
    return seal(member, Ballot(run=node.run, peer=peer, serial=serial, reason=reason))
