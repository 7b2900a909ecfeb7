"""Held-out loss of a model that nobody holds whole: a member of the first stage sends windows through all stages.

    StageEvaluator    of the first stage: as `Evaluator`, with all stages computing
    Bystander         of the others

Both stay at the end until nobody measures or fetches any more: all sections are needed for either.

It samples no text: that takes a pass through all stages for each token.
"""

import asyncio
from collections.abc import Callable

from torch import Tensor

from weft.clock import Clock
from weft.ids import Round
from weft.peer.companion import Unmeasured
from weft.peer.loop.evaluate import Evaluator
from weft.stages.step.conductor import Conductor, Source

FIRST_S = 3.0  # for whoever measures at the end to begin
MOST_S = 600.0  # and as long as the whole model takes over a slow line
SLOW_BPS = 8e6
LOOK_S = 0.5


class Needs:
    """Whether a stage is needed at the end of the run.

    Args:
        has_busy: whether anybody measures or fetches.
        num_parameters: of the whole model.
    """

    def __init__(self, clock: Clock, has_busy: Callable[[], bool], num_parameters: int) -> None:
        self._clock = clock
        self._has_busy = has_busy
        self._most_s = MOST_S + 32 * num_parameters / SLOW_BPS

    async def over(self) -> None:
        """Wait until nobody needs this stage any more."""
        began = self._clock.now()
        await asyncio.sleep(FIRST_S)
        while self._has_busy() and self._clock.now() - began < self._most_s:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LOOK_S)


class StageEvaluator(Evaluator):
    is_measured = False  # at the end of the run

    def passing(self, source: Source, conductor: Conductor, needs: Needs) -> "StageEvaluator":
        """Send what is measured through `source`, by parameters as of `conductor`'s round; return itself."""
        self._source, self._conductor, self._needs = source, conductor, needs
        return self

    async def finish(self) -> None:
        if self._conductor.has_begun:  # else all was trained, and measured, before: the others' rounds are over, too
            await super().finish()
        self.is_measured = True
        await self._needs.over()

    async def _measured(self, outer: Tensor, windows: int, between: Callable[[], None]) -> tuple[float, int]:  # noqa: ARG002
        return await self._source.measured(self._heldout, windows, self._conductor.step, between)

    async def _sample(self, round: Round) -> None:
        """Write nothing."""


class Bystander(Unmeasured):
    def __init__(self, needs: Needs) -> None:
        super().__init__()
        self._needs = needs

    async def finish(self) -> None:
        await self._needs.over()
