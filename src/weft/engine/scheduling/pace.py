"""How long a step takes: measured, and foretold for steps that were not made yet.

    seconds = a + b * rows that draw + c * tokens that are read

by least squares over the last steps, each of a, b, c at least 0.
"""

from collections import deque

import numpy as np

NUM_STEPS = 64


class Pace:
    """Of one model on one device."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=NUM_STEPS)
        self._fit: tuple[float, float, float] | None = None

    def note(self, num_drawn: int, num_read: int, took_s: float) -> None:
        """A step drew for so many sequences, read so many more tokens, and took so long."""
        self._steps.append((num_drawn, num_read, took_s))
        self._fit = None

    def step_s(self, num_drawn: int, num_read: int) -> float:
        """Return how long a step will take; 0 before anything is known."""
        a, b, c = self._solved()
        return a + b * num_drawn + c * num_read

    def readable(self, num_drawn: int, within_s: float) -> int:
        """Return how many tokens a step that draws for so many can read beside, within so long."""
        a, b, c = self._solved()
        if c <= 0:
            return 0
        return max(0, int((within_s - a - b * num_drawn) / c))

    def row_share(self, num_drawn: int) -> float:
        """Return how long one more row takes, by how long a token does where so many are drawn in a step; 0 to 1.

        Before anything is known, and where rows cost nothing: 0.
        """
        a, b, _ = self._solved()
        whole = a + b * num_drawn
        return b * num_drawn / whole if whole > 0 else 0.0

    @property
    def knows_reading(self) -> bool:
        return self._solved()[2] > 0

    def _solved(self) -> tuple[float, float, float]:
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    def _solve(self) -> tuple[float, float, float]:
        steps = np.array(self._steps, dtype=np.float64).reshape(-1, 3)
        known = [0, *(column for column in (1, 2) if np.ptp(steps[:, column - 1]) > 0)] if len(steps) else []
        terms = np.column_stack((np.ones(len(steps)), steps[:, :2]))
        while known:  # what would be negative is left out, the most negative first
            found = np.linalg.lstsq(terms[:, known], steps[:, 2], rcond=None)[0]
            worst = int(found.argmin())
            if found[worst] >= 0:
                solved = dict(zip(known, map(float, found), strict=True))
                return solved.get(0, 0.0), solved.get(1, 0.0), solved.get(2, 0.0)
            del known[worst]
        return 0.0, 0.0, 0.0
