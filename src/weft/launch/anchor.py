"""From a ticket to a running anchor: identity, network, files; nothing here loads torch.

    reason = await anchor(ticket_text, options, on_started=...)

It returns when the anchor is stopped. One that has kept the run before comes up also where nobody else is there.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weft.anchor.anchor import Anchor, AnchorContext
from weft.anchor.archive import Archive
from weft.anchor.disk import Anchored
from weft.errors import NetError, PeerError, Refused
from weft.events import Notice, PeerStarted
from weft.ids import Digest, RunId
from weft.keys import Identity, open_identity
from weft.launch.runs import names_in, unless_begun
from weft.launch.session import Options, Session, session
from weft.net.multi_source import small_from
from weft.net.ticket import Ticket, read
from weft.run.host import limit_cores
from weft.run.outline import Outline, read_outline
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
    limit_cores(options.settings.caps.cores)
    run, before = ticket.run, names_in(options.home)
    with unless_begun(run, options, before) as begun:
        async with session(options, run, _identity(options, run), ticket.admission()) as s:
            await s.start()
            outline = await _outline(s, ticket)
            begun()
            s.admit(outline, ticket.secret)
            kept, archive = Anchored(s.folder.anchored), await _archive(s, outline)
            await asyncio.to_thread(kept.load)
            context = AnchorContext(
                node=s.node,
                home=options.home,
                kept=kept,
                compute=s.compute,
                clock=s.clock,
                emit=s.emit,
                max_parameters=options.settings.max_parameters,
                archive=archive,
            )
            keeping = Anchor(outline, context)
            name = s.node.passport.name
            with s.ticket(keeping.standing) as fresh:
                async with s.guarded(keeping):
                    on_started(keeping, outline, fresh)
                    s.emit(PeerStarted(run=run, name=name, software=software, device="none", num_parameters=0))
                    return await keeping.keep()


def _identity(options: Options, run: RunId) -> Identity:
    """Return the identity asked for, or one of this home that is for this run's anchor alone.

    An identity that trains is left to whoever trains: it would be in use when that one starts again.
    """
    path: Path = options.key or options.home.keys / f"anchor-{run[:KEY_DIGITS]}.pem"
    return open_identity(path, create=True)


async def _archive(s: Session, outline: Outline) -> Archive | None:
    """Return what this machine keeps for ever, if it keeps all of an audited run."""
    if s.options.settings.keep != "all":
        return None
    if not outline.is_audited:
        s.emit(Notice(text="members of this run do not audit each other: nothing but the newest state is kept"))
        return None
    archive = Archive(s.folder.archive)
    await asyncio.to_thread(archive.load, s.node.run)
    return archive


async def _outline(s: Session, ticket: Ticket) -> Outline:
    """Return what is known of the run, from this home or from whoever lets this peer in."""
    blobs = s.options.home.blobs
    data = blobs.read(Digest(ticket.run), MAX_RECORD_NBYTES)
    if data is not None:
        with suppress(NetError, PeerError, Refused):  # whoever comes finds it here
            await s.meet(ticket)
        return read_outline(data, ticket.run)
    data = await small_from(s.node, await s.meet(ticket), Digest(ticket.run), MAX_RECORD_NBYTES)
    outline = read_outline(data, ticket.run)
    blobs.put(data)
    return outline
