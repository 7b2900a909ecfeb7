"""Takes part in a run with stages, on what `weft.launch.peer` has opened: found or joined, to its end.

It does not know how anything is shown.
"""

from dataclasses import replace
from functools import partial

from weft.clock import SystemClock
from weft.ids import Digest, Round, Tokens
from weft.launch.peer import Stand
from weft.peer.peer import Outcome
from weft.stages.harvest import gather_at_end, has_model
from weft.stages.peer import Company
from weft.stages.step.membership import Kit


async def take_part(stand: Stand, wait_for: int | None) -> Outcome:
    """Hold stages of the run until it is complete or this peer is stopped.

    Args:
        wait_for: begin once so many peers are here; None: join.
    """
    ground, node = stand.ground, stand.node
    company = Company(
        Kit(
            run=stand.run,
            node=node,
            identity=ground.identity,
            home=ground.options.home,
            folder=ground.folder,
            settings=ground.options.settings,
            data=stand.data,
            clock=SystemClock(),
            compute=stand.compute,
            emit=ground.emit,
        )
    )
    if wait_for is not None:
        company.ending.work = partial(gather_at_end, company)
    with ground.ticket(node, stand.admission) as ticket:
        async with ground.guarded(company):
            stand.on_started(company, ticket)
            await (company.join() if wait_for is None else company.found(wait_for))
    return summed(company)


def summed(company: Company) -> Outcome:
    """Return how the peer ended: as its first stage did, with the whole model where that was put together."""
    outcomes, whole = company.outcomes, company.grounds.folder.checkpoint
    if outcomes:
        first = outcomes[min(outcomes)]
        return replace(first, run=company.run, checkpoint=whole if has_model(whole) else first.checkpoint)
    sent, received = company.grounds.node.moved
    return Outcome(
        reason=company.reason or "complete",  # it held nothing as the run ended
        run=company.run,
        peer=company.grounds.node.peer,
        round=Round(0),
        committed_tokens=Tokens(0),
        replica=Digest(""),
        loss=None,
        nats_per_byte=None,
        sample=None,
        sent_nbytes=sent,
        received_nbytes=received,
        checkpoint=whole,
    )
