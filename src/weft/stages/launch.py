"""Takes part in a run with stages, on what `weft.peer.launch` has opened: found or joined, to its end.

It does not know how anything is shown.
"""

from dataclasses import replace
from functools import partial

from weft.clock import SystemClock
from weft.ids import Digest, Round, Tokens
from weft.peer.launch import Stand
from weft.peer.peer import Outcome
from weft.pipeline.desk import Desk
from weft.pipeline.lane import Lane
from weft.stages.company import Company
from weft.stages.harvest import gather_at_end, has_model
from weft.stages.membership import Grounds
from weft.stages.pulse import Pulse


async def take_part(stand: Stand, wait_for: int | None) -> Outcome:
    """Hold stages of the run until it is complete or this peer is stopped.

    Args:
        wait_for: begin once so many peers are here; None: join.
    """
    ground, node = stand.ground, stand.node
    lane = Lane(node)

    def grounds(company: Company) -> Grounds:
        return Grounds(
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
            lane=lane,
            desk=Desk(lane),
            pulse=Pulse(node, lambda peer: peer in company.roll.ready(0)),
            onward=company.sender,
            has_busy=company.has_busy,
        )

    company = Company(grounds)
    if wait_for is not None:
        company.ending.work = partial(gather_at_end, company)
    with ground.ticket(node, stand.admission) as ticket:
        async with ground.guarded(company):
            stand.on_started(company, ticket)
            outcomes = await (company.join() if wait_for is None else company.found(wait_for))
    return summed(stand, outcomes, company.reason)


def summed(stand: Stand, outcomes: dict[int, Outcome], reason: str) -> Outcome:
    """Return how the peer ended: as its first stage did, with the whole model where that was put together."""
    if outcomes:
        whole, first = stand.ground.folder.checkpoint, outcomes[min(outcomes)]
        return replace(first, run=stand.run, checkpoint=whole if has_model(whole) else first.checkpoint)
    sent, received = stand.node.moved
    return Outcome(
        reason=reason,
        run=stand.run,
        peer=stand.node.peer,
        round=Round(0),
        committed_tokens=Tokens(0),
        replica=Digest(""),
        loss=None,
        nats_per_byte=None,
        sample=None,
        sent_nbytes=sent,
        received_nbytes=received,
        checkpoint=stand.ground.folder.checkpoint,
    )
