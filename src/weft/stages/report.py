"""What the stages of one peer report, each with its number, so that watchers can tell their rounds apart.

    emit, compute = reports.of(stage, compute, micro_batch)

A peer's bytes are all of one node: each commit tells of those since the last commit of any of its stages. A step takes
from the one before to its end, with all that is waited for; what a round's work took is what the device was at work.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from weft.clock import Clock
from weft.events import Emit, Event, RoundCommitted, StagesSeen, StepDone
from weft.net.node import Node
from weft.stages.table import StageTable
from weft.tasks import Compute

T = TypeVar("T")

KEEPS = 0.98  # of what was measured before, at each piece of work: the last hundred or so count
PIECES = 3  # of a sample's way: forward pass, input gradient, weights' gradients


class StageCompute:
    """The compute of one stage: it measures how long the device is at work, waiting apart.

    Args:
        micro_batch: samples that a piece of work is of.
    """

    def __init__(self, compute: Compute, clock: Clock, micro_batch: int) -> None:
        self._compute = compute
        self._clock = clock
        self._micro_batch = micro_batch
        self._spent_s = 0.0  # that nobody has taken
        self._pieces_s, self._num_pieces = 0.0, 0.0  # the newest count most

    def train(self, work: Callable[[], T], num_tokens: int = 0) -> Coroutine[Any, Any, T]:
        return self._measured(work, num_tokens, is_piece=False)

    def piece(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """Train a piece of what passes a micro-batch; see `rate`."""
        return self._measured(work, 0, is_piece=True)

    async def serve(self, work: Callable[[], T]) -> T:
        return await self._compute.serve(work)

    async def aclose(self) -> None:
        """Do nothing: others compute there, too."""

    def take_spent(self) -> float:
        """Return the seconds that were trained since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    @property
    def rate(self) -> float:
        """Samples a second that would pass through if it never waited; 0.0: nothing was measured."""
        return self._num_pieces * self._micro_batch / (PIECES * self._pieces_s) if self._pieces_s > 0 else 0.0

    async def _measured(self, work: Callable[[], T], num_tokens: int, *, is_piece: bool) -> T:
        began, ended = 0.0, None  # type: tuple[float, float | None]

        def timed() -> T:
            nonlocal began, ended
            began = self._clock.now()
            try:
                return work()
            finally:
                ended = self._clock.now()

        try:
            return await self._compute.train(timed, num_tokens)
        finally:
            if ended is not None:  # else it goes on, though nobody waits for it any more
                took_s = ended - began
                self._spent_s += took_s
                if is_piece:
                    self._pieces_s = KEEPS * self._pieces_s + took_s
                    self._num_pieces = KEEPS * self._num_pieces + 1


SHOW_S = 60.0  # between two events that say the same


class StageReports:
    """Of one peer."""

    def __init__(self, node: Node, clock: Clock, emit: Emit) -> None:
        self._node = node
        self._clock = clock
        self._emit = emit
        self._moved_before = (0, 0)
        self._shown_at, self._shown = -SHOW_S, ()  # type: tuple[float, object]

    def of(self, stage: int, compute: Compute, micro_batch: int) -> tuple[Emit, StageCompute]:
        """Return what takes a stage's events, and `compute`, measured."""
        stepped_at, measured = self._clock.now(), StageCompute(compute, self._clock, micro_batch)

        def emit(event: Event) -> None:
            nonlocal stepped_at
            match event:
                case StepDone():
                    before, stepped_at = stepped_at, self._clock.now()
                    event = msgspec.structs.replace(event, duration_s=stepped_at - before)
                case RoundCommitted():
                    event = self._committed(event, measured.take_spent())
            self._emit(msgspec.structs.replace(event, stage=stage))

        return emit, measured

    def _committed(self, event: RoundCommitted, work_s: float) -> RoundCommitted:
        moved, before = self._node.moved, self._moved_before
        self._moved_before = moved
        return msgspec.structs.replace(
            event, sent_nbytes=moved[0] - before[0], received_nbytes=moved[1] - before[1], work_s=work_s
        )

    def show(self, table: StageTable) -> None:
        """Tell who computes which stage, where that has changed, and now and then."""
        now, stages = self._clock.now(), [table.ready(stage) for stage in range(table.num_stages)]
        members = tuple(tuple(sorted(stage)) for stage in stages)
        names = {peer: self._node.contact(peer).name for peer, news in sorted(table.peers.items()) if news.is_trainer}
        if (members, names) == self._shown and now - self._shown_at < SHOW_S:
            return
        self._shown, self._shown_at = (members, names), now
        rates = tuple(sum(each.rate for each in stage.values()) for stage in stages)
        waiting = tuple(sum(each.num_waiting for each in stage.values()) for stage in stages)
        self._emit(StagesSeen(members=members, rates=rates, waiting=waiting, names=names))
