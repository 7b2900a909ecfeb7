"""What the stages of one peer tell, each with its number, so that watchers can tell their rounds apart.

    emit, compute = telling.of(stage)

A peer's bytes are all of one node: each commit tells of those since the last commit of any of its stages. A step takes
from the one before to its end, with all that is waited for; what a round's work took is what the device was at work.

It does not know what a stage computes.
"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from weft.clock import Clock
from weft.events import Emit, Event, RoundCommitted, StepDone
from weft.net.node import Node
from weft.peer.compute import Compute

T = TypeVar("T")


class Telling:
    """Of one peer."""

    def __init__(self, node: Node, clock: Clock, emit: Emit) -> None:
        self._node = node
        self._clock = clock
        self._emit = emit
        self._moved_before = (0, 0)

    def of(self, stage: int, compute: Compute) -> tuple[Emit, "Timed"]:
        """Return what takes a stage's events, and `compute`, measured."""
        timed = Timed(compute, self._clock)
        stepped_at = self._clock.now()

        def emit(event: Event) -> None:
            nonlocal stepped_at
            match event:
                case StepDone():
                    before, stepped_at = stepped_at, self._clock.now()
                    event = msgspec.structs.replace(event, duration_s=stepped_at - before)
                case RoundCommitted():
                    event = self._committed(event, timed)
            self._emit(msgspec.structs.replace(event, stage=stage))

        return emit, timed

    def _committed(self, event: RoundCommitted, timed: "Timed") -> RoundCommitted:
        moved, before = self._node.moved, self._moved_before
        self._moved_before = moved
        return msgspec.structs.replace(
            event, sent_nbytes=moved[0] - before[0], received_nbytes=moved[1] - before[1], work_s=timed.take_s()
        )


class Timed:
    """A `Compute` that knows how long training took since it was asked last."""

    def __init__(self, compute: Compute, clock: Clock) -> None:
        self._compute = compute
        self._clock = clock
        self._spent_s = 0.0

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        began = ended = 0.0

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
            self._spent_s += ended - began

    async def serve(self, work: Callable[[], T]) -> T:
        return await self._compute.serve(work)

    async def aclose(self) -> None:
        """Do nothing: the peer's other stages compute there, too."""
