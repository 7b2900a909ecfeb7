"""When a step of the pipeline is over: the members of the first stage say how far they are, and all others follow.

They begin the micro-batches of a step, and tell once all of theirs have come back. A step is over for a member of any
stage once all who had micro-batches to begin have told so, or are gone; or somebody is further, because the first stage
went on without who was late. What comes of an earlier step later counts all the same.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from weft.ids import PeerId
from weft.net.node import Node
from weft.pipeline.messages import Passing
from weft.pipeline.step import FIRST, Step
from weft.stages.table import StageTable

LOOK_S = 0.5  # until it is looked again: that a member is gone is told by nobody


class Progress(NamedTuple):
    """How far a member of the first stage is."""

    step: Step
    is_done: bool  # all that it began of the step has come back
    origins: frozenset[PeerId]  # who begins micro-batches in this round


class Steps:
    """What one peer has heard of that.

    Args:
        is_here: whether a peer is still a member of the first stage, as far as is known.
    """

    def __init__(self, is_here: Callable[[PeerId], bool]) -> None:
        self._is_here = is_here
        self._told: dict[PeerId, Progress] = {}

    def told(self, peer: PeerId, progress: Progress) -> None:
        """Take up what `peer` says of itself."""
        self._told[peer] = progress

    def forget(self, peer: PeerId) -> None:
        """Take it up that `peer` begins no more micro-batches."""
        self._told.pop(peer, None)

    @property
    def newest(self) -> Step:
        """Return the furthest step that anybody is in; the first of all where nobody has told."""
        return max((each.step for each in self._told.values()), default=FIRST)

    @property
    def num_origins(self) -> int:
        """Return how many begin micro-batches in the newest round that was told of; 1 where nobody has told."""
        furthest = max(self._told.values(), key=lambda each: each.step, default=None)
        return 1 if furthest is None else max(1, len(furthest.origins))

    def is_over(self, step: Step) -> bool:
        if self.newest > step:
            return True
        at_it = [each for each in self._told.values() if each.step == step]
        origins = frozenset[PeerId]().union(*(each.origins for each in at_it))
        return bool(at_it) and all(self._has_done(peer, step) or not self._is_here(peer) for peer in origins)

    def _has_done(self, peer: PeerId, step: Step) -> bool:
        told = self._told.get(peer)
        return told is not None and told.step == step and told.is_done


class Barrier:
    """Of one peer: it waits for steps to be over.

    Args:
        table: who is a member of the first stage.
    """

    def __init__(self, node: Node, table: StageTable) -> None:
        self._node = node
        self.steps = Steps(lambda peer: peer in table.ready(0))
        self._changed = asyncio.Event()  # another each time
        self._last: Passing | None = None
        node.on_note(Passing, self._on_passing)
        node.on_link(self._on_link)

    def tell(self, step: Step, origins: frozenset[PeerId], *, is_done: bool) -> None:
        """Say how far this peer is with what it begins."""
        self._take(self._node.peer, Progress(step, is_done, origins))
        self._last = Passing(round=step.round, step=step.number, is_done=is_done, origins=tuple(sorted(origins)))
        for peer in self._node.peers:
            self._node.post(peer, self._last)

    def look(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_over(self, step: Step, is_over: Callable[[], bool]) -> None:
        """Wait for a step to be over, or for `is_over`."""
        await self.until(lambda: self.steps.is_over(step) or is_over())

    async def until(self, is_so: Callable[[], bool], wakes: "asyncio.Future[Any] | None" = None) -> None:
        """Wait until something is so.

        Args:
            wakes: looks again as soon as this is done.
        """
        while not is_so():
            changing = asyncio.ensure_future(self._changed.wait())
            try:
                others = [] if wakes is None else [wakes]
                await asyncio.wait([changing, *others], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changing.cancel()
                with suppress(asyncio.CancelledError):
                    await changing

    def _take(self, peer: PeerId, progress: Progress) -> None:
        self.steps.told(peer, progress)
        self.look()

    async def _on_passing(self, peer: PeerId, note: Passing) -> None:
        origins = frozenset(PeerId(each) for each in note.origins)
        self._take(peer, Progress(Step(note.round, note.step), note.is_done, origins))

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:  # should it come back, it says again how far it is
            self.steps.forget(peer)
        elif self._last is not None:
            self._node.post(peer, self._last)
        self.look()
