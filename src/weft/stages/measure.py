"""Held-out loss of a model that nobody holds whole: a member of the first stage sends windows through all stages.

    StageEvaluator    of the first stage: as `Evaluator`, with all stages computing
    Bystander         of the others: stays at the end until nobody measures or fetches any more

It samples no text: that takes a pass through all stages for each token.
"""

import asyncio
from collections.abc import Callable

from torch import Tensor

from weft.clock import Clock
from weft.ids import Round
from weft.peer.evaluation import Evaluator, Unmeasured
from weft.stages.conducted import Conducted
from weft.stages.source import Source

FIRST_S = 3.0  # for whoever measures at the end to begin
MOST_S = 600.0
LOOK_S = 0.5


class StageEvaluator(Evaluator):
    def passing(self, source: Source, conducted: Conducted) -> "StageEvaluator":
        """Send what is measured through `source`, by parameters as of `conducted`'s round; return itself."""
        self._source, self._conducted = source, conducted
        return self

    async def _measured(self, outer: Tensor, windows: int, between: Callable[[], None]) -> tuple[float, int]:  # noqa: ARG002
        return await self._source.measured(self._heldout, windows, self._conducted.beat, between)

    async def _sample(self, round: Round) -> None:
        """Write nothing."""


class Bystander(Unmeasured):
    """
    Args:
        has_busy: whether anybody needs this stage still.
    """

    def __init__(self, clock: Clock, has_busy: Callable[[], bool]) -> None:
        super().__init__()
        self._clock = clock
        self._has_busy = has_busy

    async def finish(self) -> None:
        """Wait until nobody needs this stage any more."""
        began = self._clock.now()
        await asyncio.sleep(FIRST_S)
        while self._has_busy() and self._clock.now() - began < MOST_S:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(LOOK_S)
