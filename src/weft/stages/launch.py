"""Takes part in a run with stages, on what `weft.launch.peer` has opened: found or joined, to its end.

At the end of a run with stages, the peer that began it gathers the whole model, while the others stay.

    the first stage is complete ─► all stages have counted all, or will not ─► their sections, one after the other

What it holds itself it takes from where it is; the rest it fetches. Members wait at the end as long as somebody says
that it is busy (`step.evaluate.Needs`), so nobody is gone meanwhile.

Failure:
- no room for the whole model, or a section cannot be had: a notice says so; the sections stay where they are, and
  `weft gather` puts them together another time.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.clock import SystemClock
from weft.errors import CheckpointError, WeftError
from weft.events import Notice
from weft.ids import Digest, PeerId, Round, Tokens
from weft.launch.peer import Stand
from weft.peer.peer import Outcome
from weft.stages.gather.gather import Found, Gather, Gathered, Means, Sources, found_in
from weft.stages.peer import FINISH_S, StagesPeer
from weft.stages.reader import StageReader
from weft.stages.step.pipeline import Kit
from weft.store.chunks import chunk_bytes
from weft.store.home import CHECKPOINT_FILE
from weft.wire import Buffer, digest_of

LOOK_S = 0.5
WINDOW = 1 << 40  # since when this peer sees a stage that it does not hold: no number of one that it does


async def gather_at_end(company: StagesPeer) -> Gathered | None:
    """Write the checkpoint of the whole run into this peer's folder of it; None: it cannot be had, and it was said."""
    kit, run = company.kit, company.run
    windows = {
        stage: StageReader(kit.node, run.of_stage(stage), WINDOW, kit.compute, kit.clock)
        for stage in range(run.num_pieces)
        if company.holding(stage) is None
    }

    def here(stage: int) -> list[Found]:
        held = _held(company, stage)
        return [held] if held is not None else found_in([kit.folder], run, stage)

    def members(stage: int) -> list[PeerId]:
        return sorted(peer for peer in company.table.held(stage) if kit.node.is_linked(peer))

    await _ended(company, windows, members)
    means = Means(
        tokenizer=kit.data.tokenizer.to_bytes(),
        scratch=kit.folder.scratch,
        compute=kit.compute,
        clock=kit.clock,
        emit=kit.emit,
    )
    gathering = Gather(run, means, windows, Sources(here=here, members=members))
    try:
        return await gathering.gather(kit.folder.checkpoint)
    except WeftError as error:
        text = f"the whole model was not put together: {error} Its sections stay where they are: weft gather"
        kit.emit(Notice(text=text))
        return None


def has_model(folder: Path) -> bool:
    """Return whether there is a checkpoint in a folder."""
    return (folder / CHECKPOINT_FILE).exists()


async def _ended(
    company: StagesPeer, windows: Mapping[int, StageReader], members: Callable[[int], list[PeerId]]
) -> None:
    """Wait until all stages have counted what the first one has trained, or have had the time to."""
    clock, began = company.kit.clock, company.kit.clock.now()

    async def beat(stage: int) -> int:
        if stage in windows:
            return await windows[stage].beat(members(stage)) or 0
        member = company.holding(stage)
        return 0 if member is None else member.conductor.step.round

    while clock.now() - began < FINISH_S:
        first, *others = [await beat(stage) for stage in range(company.run.num_pieces)]
        if first and all(each >= first for each in others):
            return
        await asyncio.sleep(LOOK_S)


def _held(company: StagesPeer, stage: int) -> Found | None:
    """Return the section that this peer holds."""
    member = company.holding(stage)
    head = None if member is None else member.peer.head
    if member is None or head is None:
        return None
    replica = member.peer.replica

    def pieces() -> Iterator[Buffer]:
        if replica.head != head:
            raise CheckpointError(f"{company.run.called(stage)} went on meanwhile")
        yield from chunk_bytes(replica.outer)

    beat = member.snapshots.round_after(digest_of(head))
    return Found(head, replica.charter, pieces, int(head.round) if beat is None else beat)


async def take_part(stand: Stand, wait_for: int | None) -> Outcome:
    """Hold stages of the run until it is complete or this peer is stopped.

    Args:
        wait_for: begin once so many peers are here; None: join.
    """
    ground, node = stand.ground, stand.node
    company = StagesPeer(
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
        company.at_end(partial(gather_at_end, company))
    with ground.ticket(node, stand.admission) as ticket:
        async with ground.guarded(company):
            stand.on_started(company, ticket)
            await (company.join() if wait_for is None else company.found(wait_for))
    return summed(company)


def summed(company: StagesPeer) -> Outcome:
    """Return how the peer ended: as its first stage did, with the whole model where that was put together."""
    outcomes, whole = company.outcomes, company.kit.folder.checkpoint
    if outcomes:
        first = outcomes[min(outcomes)]
        return replace(first, run=company.run, checkpoint=whole if has_model(whole) else first.checkpoint)
    sent, received = company.kit.node.moved
    return Outcome(
        reason=company.reason or "complete",  # it held nothing as the run ended
        run=company.run,
        peer=company.kit.node.peer,
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
