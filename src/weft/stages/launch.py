"""A peer of a run with stages, in a session that `weft.launch` has opened: found or joined, to its end.

At the end of a run with stages, the peer that began it gathers the whole model, while the others stay.

    the first stage is complete ─► all stages have counted all, or will not ─► their sections, one after the other

What it holds itself it takes from where it is; the rest it fetches. Members wait at the end as long as somebody says
that it is busy (`step.conductor.Needs`), so nobody is gone meanwhile.

Failure:
- no room for the whole model, or a section cannot be had: a notice says so; the sections stay where they are, and
  `weft gather` puts them together another time.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from weft.errors import CheckpointError, WeftError
from weft.events import Notice
from weft.ids import Digest, PeerId, Round, Tokens
from weft.launch.peer import Prepared
from weft.launch.session import Session
from weft.peer.context import Data
from weft.peer.peer import Outcome
from weft.run.staged import StagedConfig
from weft.stages.backup import StagesOnDisk
from weft.stages.gather.gather import Found, Gather, Gathered, Means, found_in
from weft.stages.peer import FINISH_S, StagesPeer
from weft.stages.reader import StageReader
from weft.stages.step.pipeline import Kit
from weft.store.chunks import chunk_bytes
from weft.store.home import CHECKPOINT_FILE
from weft.wire import Buffer, digest_of

LOOK_S = 0.5
READ_SINCE = 1 << 40  # since when this peer sees a stage that it does not hold: no number of one that it does


async def gather_at_end(peer: StagesPeer) -> Gathered | None:
    """Write the checkpoint of the whole run into this peer's folder of it; None: it cannot be had, and it was said."""
    kit, run = peer.kit, peer.run
    readers = {
        stage: StageReader(kit.node, run.of_stage(stage), READ_SINCE, kit.compute, kit.clock)
        for stage in range(run.num_pieces)
        if peer.holdings.holding(stage) is None
    }

    def here(stage: int) -> list[Found]:
        held = _held(peer, stage)
        return [held] if held is not None else found_in([kit.folder], run, stage)

    def members(stage: int) -> list[PeerId]:
        return sorted(each for each in peer.table.held(stage) if kit.node.is_linked(each))

    await _ended(peer, readers, members)
    means = Means(
        tokenizer=kit.data.tokenizer.to_bytes(),
        came_with=kit.data.came_with,
        scratch=kit.folder.scratch,
        compute=kit.compute,
        clock=kit.clock,
        emit=kit.emit,
    )
    try:
        return await Gather(run, means, readers, here, members).gather(kit.folder.checkpoint)
    except WeftError as error:
        text = f"weft could not put the whole model together: {error} Its sections stay where they are: weft gather"
        kit.emit(Notice(text=text))
        return None


async def _ended(peer: StagesPeer, readers: Mapping[int, StageReader], members: Callable[[int], list[PeerId]]) -> None:
    """Wait until all stages have counted what the first one has trained, or have had the time to."""
    clock, began = peer.kit.clock, peer.kit.clock.now()

    async def beat(stage: int) -> int:
        if stage in readers:
            return await readers[stage].beat(members(stage)) or 0
        member = peer.holdings.holding(stage)
        return 0 if member is None else member.conductor.step.round

    while clock.now() - began < FINISH_S:
        first, *others = [await beat(stage) for stage in range(peer.run.num_pieces)]
        if first and all(each >= first for each in others):
            return
        await asyncio.sleep(LOOK_S)


def _held(peer: StagesPeer, stage: int) -> Found | None:
    """Return the section that this peer holds."""
    member = peer.holdings.holding(stage)
    head = None if member is None else member.peer.head
    if member is None or head is None:
        return None
    replica = member.peer.replica

    def pieces() -> Iterator[Buffer]:
        if replica.head != head:
            raise CheckpointError(f"{peer.run.called(stage)} went on meanwhile")
        yield from chunk_bytes(replica.outer)

    beat = member.snapshots.round_after(digest_of(head))
    return Found(head, replica.charter, pieces, int(head.round) if beat is None else beat)


def prepare(s: Session, run: StagedConfig, data: Data) -> Prepared[StagesPeer]:
    """Return a peer of the run, which puts the whole model together at the end where it begins the run."""
    peer = StagesPeer(kit_of(s, run, data))

    async def run_to_end(wait_for: int | None) -> Outcome:
        if wait_for is not None:
            peer.ending.plan(partial(gather_at_end, peer))
        return await live(peer, wait_for)

    return Prepared(peer, run_to_end, stand="begun" if StagesOnDisk(s.folder).rounds else "new")


def kit_of(s: Session, run: StagedConfig, data: Data) -> Kit:
    """Return what a peer of the run works with."""
    return Kit(
        run=run,
        node=s.node,
        identity=s.identity,
        home=s.options.home,
        folder=s.folder,
        settings=s.options.settings,
        data=data,
        clock=s.clock,
        compute=s.compute,
        emit=s.emit,
    )


async def live(peer: StagesPeer, wait_for: int | None) -> Outcome:
    """Hold stages of the run until it is complete or `peer` is stopped; return how it ended, as its first stage did.

    Args:
        wait_for: begin once so many peers are here; None: join.
    """
    outcomes = await peer.live(wait_for)
    whole = peer.kit.folder.checkpoint
    if outcomes:
        first = outcomes[min(outcomes)]
        return replace(
            first, run=peer.run, checkpoint=whole if (whole / CHECKPOINT_FILE).exists() else first.checkpoint
        )
    sent, received = peer.kit.node.moved
    return Outcome(
        reason=peer.reason or "complete",  # it held nothing as the run ended
        run=peer.run,
        peer=peer.kit.node.peer,
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
