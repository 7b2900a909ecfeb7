"""Where a run goes on that has ended, or will: what a machine knows of it, and what a member says.

    at a checkpoint of here      require_unended     the run ended here, by an act that named the next one
    at a member                  charter_at          what holds of the run now: its settings, and where it will go on

A member of the successor, whose genesis names the run before, answers an old ticket in its handshake.
"""

from contextlib import suppress

from weft.errors import CheckpointError, TicketMismatch
from weft.ids import PeerId, RunId, short
from weft.net.node import Node
from weft.peer.messages import CharterAnswer, CharterRequest
from weft.peer.state.checkpoint import read_contents
from weft.store.home import PeerFolder
from weft.sync.records.acts import Succeed
from weft.sync.records.charter import Charter

CALL_S = 10.0


def where(run: RunId, successor: Succeed) -> str:
    """Return, for a person, where `run` goes on."""
    how = f"weft join {successor.ticket}" if successor.ticket else "ask its members for a ticket: weft ticket"
    return f"run {short(run)} goes on as run {short(successor.run)}. Take part in that one: {how}"


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
