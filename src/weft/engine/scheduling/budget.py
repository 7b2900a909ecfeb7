"""How many tokens of prompts a step reads beside the rows that draw."""

from functools import cached_property

from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.pages import PAGE

MAX_SLOWDOWN = 2.0
GRAIN = 16  # tokens: pieces end at multiples of it
FIRST_PIECE = 4 * PAGE  # tokens, before anything was measured
ALONE_S = 0.5  # a step in which nobody draws: who comes meanwhile waits no longer
SHARED_S = 0.1  # the same, where other models of the device wait for it to end


class Budget:
    """Of one step. `GRAIN` tokens are read in each, however long they take: no prompt waits for ever.

    Args:
        num_drawing: rows that draw.
        max_slowdown: how many times as long as without prompts the step may last.
        alone_s: how long it may last where nobody draws.
    """

    def __init__(
        self, pace: Pace, num_drawing: int, max_slowdown: float = MAX_SLOWDOWN, alone_s: float = ALONE_S
    ) -> None:
        self._pace = pace
        self._num_drawing, self._max_slowdown, self._alone_s = num_drawing, max_slowdown, alone_s
        self._least = GRAIN if num_drawing else PAGE
        self._num_taken = 0
        self._taken_s = 0.0

    def readable(self, start: int) -> int:
        """Return how many more tokens may be read of a text, from `start` on."""
        if not self._pace.knows_reading:
            return FIRST_PIECE - self._num_taken
        return max(self._pace.readable(start, self._most_s - self._taken_s), self._least - self._num_taken)

    @property
    def is_left(self) -> bool:
        return self.readable(0) > 0

    def take(self, start: int, num: int) -> None:
        """So many tokens of a text are read in the step, from `start` on."""
        self._num_taken += num
        self._taken_s += self._pace.read_s(start, num)

    @cached_property
    def _most_s(self) -> float:
        """How long prompts may be read: reckoned where there are any, which in most steps there are not."""
        drawing_s = self._pace.step_s(self._num_drawing, 0)
        return (self._max_slowdown - 1) * drawing_s if self._num_drawing else self._alone_s - drawing_s
