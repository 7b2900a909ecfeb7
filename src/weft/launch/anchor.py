"""From a ticket to a running anchor: identity, network, files; nothing here loads torch.

    reason = await anchor(ticket_text, options, on_started=...)

It returns when the anchor is stopped. One that has kept the run before comes up also where nobody else is there.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path

from weft.anchor.anchor import Anchor, AnchorContext
from weft.anchor.disk import Anchored
from weft.clock import SystemClock
from weft.errors import NetError, PeerError, Refused
from weft.events import PeerStarted
from weft.executor import Threads
from weft.ids import Digest, RunId
from weft.keys import Identity, open_identity
from weft.launch.session import Footing, Options, connect, footing
from weft.net.multi_source import small_from
from weft.net.node import Node
from weft.net.ticket import Ticket, read
from weft.run.host import limit_cores
from weft.run.outline import Outline, admission_of, public, read_outline
from weft.store.tickets import keep_secret
from weft.wire import MAX_RECORD_NBYTES

KEY_DIGITS = 16  # of a run, in the name of the key that keeps it


async def anchor(
    ticket_text: str, options: Options, *, software: str, on_started: Callable[[Anchor, Outline, str], None]
) -> str:
    """Keep the run that the ticket names until the anchor is stopped; return why it was.

    Args:
        on_started: told the anchor, what is known of the run, and a fresh ticket once others can come.

    Raises:
        TicketError: no ticket; TicketMismatch: of another version or run.
        Unreachable, Refused: nobody on it answered, or let this peer in, and nothing of the run is here yet.
        WeftError: as `Anchor.keep`, and what this machine cannot do.
    """
    ticket = read(ticket_text)
    if options.settings.caps.cores is not None:
        limit_cores(options.settings.caps.cores)
    with footing(options, ticket.run, _identity(options, ticket.run)) as ground:
        async with aclosing(Threads()) as compute, ground.node(ticket.admission()) as node:
            outline = await _outline(node, ticket, ground)
            admission = admission_of(outline.admission, outline.stewards, ticket.secret)
            node.admit(admission)
            node.passport.predecessor = outline.predecessor
            keep_secret(ground.folder, admission)
            kept = Anchored(ground.folder.anchored)
            await asyncio.to_thread(kept.load)
            node.serve_blobs(public(outline, ticket.run, options.home), is_patient=True)
            context = AnchorContext(
                node=node,
                home=options.home,
                kept=kept,
                compute=compute,
                clock=SystemClock(),
                emit=ground.emit,
                max_parameters=options.settings.max_parameters,
            )
            keeping = Anchor(outline, context)
            name = node.passport.name
            with ground.ticket(node, admission) as fresh:
                async with ground.guarded(keeping):
                    on_started(keeping, outline, fresh)
                    ground.emit(
                        PeerStarted(run=ticket.run, name=name, software=software, device="none", num_parameters=0)
                    )
                    return await keeping.keep()


def _identity(options: Options, run: RunId) -> Identity:
    """Return the identity asked for, or one of this home that is for this run's anchor alone.

    An identity that trains is left to whoever trains: it would be in use when that one starts again.
    """
    path: Path = options.key or options.home.keys / f"anchor-{run[:KEY_DIGITS]}.pem"
    return open_identity(path, create=True)


async def _outline(node: Node, ticket: Ticket, ground: Footing) -> Outline:
    """Return what is known of the run, from this home or from whoever lets this peer in."""
    contacts = [contact for contact in ticket.contacts if contact.peer != node.peer]
    for contact in contacts:
        node.remember(contact.peer, contact.addresses, contact.name)
    blobs = ground.options.home.blobs
    data = blobs.read(Digest(ticket.run), MAX_RECORD_NBYTES)
    if data is not None:
        with suppress(NetError, PeerError, Refused):  # whoever comes finds it here
            await connect(node, ticket, [contact.peer for contact in contacts])
        return read_outline(data, ticket.run)
    first = await connect(node, ticket, [contact.peer for contact in contacts])
    peers = [first, *(peer for peer in node.peers if peer != first)]
    data = await small_from(node, peers, Digest(ticket.run), MAX_RECORD_NBYTES)
    outline = read_outline(data, ticket.run)
    blobs.put(data)
    return outline
