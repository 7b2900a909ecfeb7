"""The tied matrix of a peer that holds an end stage, or both: a run of its own, held as long as they are.

    member = await tied.held(stage)       before the stage is; begins it, unless it is held already
    await tied.let_go(stage)              once the stage has ended

Of its rounds nothing is told but notices: they are part of the end stages' (`tied_conductor`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from torch import Tensor

from weft.events import Event, Notice
from weft.peer.peer import Peer
from weft.stages.messages import State
from weft.stages.step.membership import Membership, first_weights
from weft.stages.step.pipeline import Kit, Pipeline
from weft.stages.step.tied_conductor import TiedConductor

LOOK_S = 0.05
KEEPER = -1  # in place of a stage: who has its newest state holds it until an end stage does
NOT_NEEDED = "this peer holds neither end stage any more"


class TiedMember(Membership):
    """
    Args:
        since: as of a membership.
        outer: what the matrix starts from; becomes its own.
    """

    conductor: TiedConductor

    def __init__(self, kit: Kit, pipeline: Pipeline, stage: int, since: int, outer: Tensor) -> None:
        super().__init__(kit, pipeline, stage, since)
        self.has_begun = asyncio.Event()  # end stages may compute with it
        batches = kit.data.batches(self.run, "train")
        self.trainer = kit.make_tied(self.run, kit.settings, batches, self._emit_from_thread, kit.clock)
        self.trainer.on_started(lambda: self._loop.call_soon_threadsafe(self.has_begun.set))
        self.conductor = TiedConductor(self.channel, self.trainer, kit.compute, pipeline.barrier, self.snapshots)
        self.peer = Peer(self.run, self._make_context(self.trainer, self.conductor, outer))

    async def is_here(self, is_over: Callable[[], bool]) -> None:
        """Wait until the matrix is that of the others, or will never be, or for `is_over`."""
        while not (self.peer.takes_part or self.is_leaving or is_over()):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LOOK_S)

    @property
    def _state(self) -> State:
        state = super()._state
        return "joining" if state == "ready" and not self.peer.takes_part else state


class Tied:
    """Of one peer, in a run whose matrix is tied.

    Args:
        spawn: lets something run until it has ended; that it failed ends the peer.
        on_change: called when it is held, or no longer.
    """

    def __init__(
        self,
        kit: Kit,
        pipeline: Pipeline,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_change: Callable[[TiedMember], None],
    ) -> None:
        def emit(event: Event) -> None:
            if isinstance(event, Notice):
                kit.emit(event)

        self.member: TiedMember | None = None
        self._kit = replace(kit, emit=emit)
        self._pipeline = pipeline
        self._table = pipeline.table
        self._spawn = spawn
        self._on_change = on_change
        self._ends: set[int] = set()
        self._making = asyncio.Lock()
        self._num_held = 0

    async def held(self, stage: int, opens: int | None) -> TiedMember:
        """Return it, which a stage can compute with now.

        Args:
            opens: members with which to open its run; None: others have, or will.
        """
        self._ends.add(stage)
        async with self._making:
            member = self.member
            if member is None or member.is_leaving:
                if member is not None:
                    await member.has_ended.wait()
                member = await self._made(opens)
            await member.has_begun.wait()
        return member

    @property
    def is_lost(self) -> bool:
        """Whether nobody has a state of it: who takes the first stage up begins it anew. It is told."""
        number = self._kit.run.tied
        if number is None or self._table.ready(number) or self._table.keepers(number):
            return False
        self._kit.emit(Notice(text="nobody has a state of the tied matrix: it begins anew"))
        return True

    def look(self) -> None:
        """Hold it without an end stage where nobody else has it, and its newest state is here; until others have."""
        number, me = self._kit.run.tied, self._kit.node.peer
        if number is None:
            return
        ready, kept = self._table.ready(number), self._table.keepers(number)
        best = min(kept, key=lambda peer: (-kept[peer], peer), default=None)
        if not ready and best == me and self.member is None and self._table.held(number):
            self._spawn(self._keep())
        elif self._ends == {KEEPER} and ready.keys() - {me}:
            self._spawn(self.let_go(KEEPER))

    async def _keep(self) -> None:
        await self.held(KEEPER, None)

    async def let_go(self, stage: int) -> None:
        """Leave it, unless another stage of this peer needs it."""
        member = self.member
        if stage not in self._ends:
            return
        self._ends.discard(stage)
        if member is None:
            return
        member.conductor.leave(stage)
        if not self._ends:
            member.stop(NOT_NEEDED)
            await member.has_ended.wait()

    def stop(self, reason: str) -> None:
        """Leave it, whatever needs it."""
        if self.member is not None:
            self.member.stop(reason)

    async def _made(self, opens: int | None) -> TiedMember:
        number = self._kit.run.tied
        assert number is not None, "no matrix of this run is tied"
        outer = await first_weights(self._kit, number)
        self._num_held += 1
        self.member = member = TiedMember(self._kit, self._pipeline, number, self._num_held, outer)
        self._spawn(self._live(member, opens))
        self._on_change(member)
        return member

    async def _live(self, member: TiedMember, opens: int | None) -> None:
        try:
            snapshot = await self._kit.compute.serve(member.snapshot)
            await member.live(wait_for=opens, snapshot=snapshot)
        finally:
            member.conductor.stop()
            if self.member is member:
                self.member = None
            member.has_begun.set()
            member.has_ended.set()
            self._on_change(member)
