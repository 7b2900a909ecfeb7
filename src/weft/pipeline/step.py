"""The steps of a pipeline: all stages make each together, as far as the first one's members begin micro-batches of it.

step (r, h)    the inner step h of the round r of the first stage
"""

import asyncio
from contextlib import suppress
from typing import NamedTuple

from weft.clock import Clock
from weft.errors import CallFailed
from weft.pipeline.routing import Pace

# What was sent may wait so long for a member to come to its step, at least, and so many times as long as that takes
# usually; the first ones for a long time, for nobody knows yet how long rounds take.
LOST_S, LOST, FIRST_LOST_S = 30.0, 4.0, 600.0


class Step(NamedTuple):
    round: int  # of the first stage: the one that its members make this step for
    number: int  # within it


FIRST = Step(0, 0)
ANY = Step(1 << 62, 0)  # after all others


class CurrentStep:
    """The step that a member of a stage is at.

    Args:
        stage: its number.
    """

    def __init__(self, stage: int, clock: Clock) -> None:
        self._stage = stage
        self._clock = clock
        self._at, self._advanced = ANY, asyncio.Event()
        self._wait = Pace()  # seconds that what was sent waits for its step

    def advance(self, step: Step) -> None:
        """Let what is of `step`, and before, go on."""
        self._at = step
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def until(self, step: Step) -> None:
        """Wait until this member is at a step, or further.

        Raises:
            CallFailed: the others are long beyond it: it has lost touch with its stage, and somebody else may compute.
        """
        began = self._clock.now()
        deadline = began + (max(LOST_S, LOST * self._wait.mean) if self._wait.is_known else FIRST_LOST_S)
        while step > self._at:
            left_s = deadline - self._clock.now()
            if left_s <= 0:
                raise CallFailed(f"stage {self._stage} is at step {self._at} here, and was sent one of {step}")
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._advanced.wait()
        self._wait.measured(self._clock.now() - began)
