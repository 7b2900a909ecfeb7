"""How long a step takes: measured, and foretold for steps that were not made yet.

    seconds = a + b * rows that draw + c * tokens that are read + d * pairs of one of them and one before it

by least squares of relative errors over the last steps, of those that read and those that did not, each of a to d at
least 0. A token at the end of a long prompt looks at all before it: that may take as long as all else.
"""

from collections import deque
from math import sqrt

import numpy as np

NUM_STEPS = 64
_LEAST_S = 1e-9  # that a step takes


class Pace:
    """Of one model on one device."""

    def __init__(self) -> None:
        self._drawing: deque[tuple[int, int, int, float]] = deque(maxlen=NUM_STEPS)
        self._reading: deque[tuple[int, int, int, float]] = deque(maxlen=NUM_STEPS)
        self._fit: tuple[float, float, float, float] | None = None

    def note(self, num_drawn: int, num_read: int, took_s: float, pairs: int = 0) -> None:
        """A step drew for so many sequences, read so many more tokens, and took so long.

        Args:
            pairs: of a token that was read, and one before it in its text (`pairs_of`).
        """
        (self._reading if num_read else self._drawing).append((num_drawn, num_read, pairs, took_s))
        self._fit = None

    def step_s(self, num_drawn: int, num_read: int) -> float:
        """Return how long a step will take that reads prompts from their beginning; 0 before anything is known."""
        a, b, c, _ = self._solved()
        return a + b * num_drawn + c * num_read

    def read_s(self, start: int, num: int) -> float:
        """Return how much longer a step takes that reads so many tokens of a text, too, from `start` on."""
        _, _, c, d = self._solved()
        return c * num + d * pairs_of(start, num)

    def readable(self, start: int, within_s: float) -> int:
        """Return how many tokens of a text can be read, from `start` on, in so long more; 0 before that is known."""
        _, _, c, d = self._solved()
        linear, within_s = c + d * start, max(0.0, within_s)
        if d <= 0:
            return int(within_s / linear) if linear > 0 else 0
        return int((sqrt(linear**2 + 2 * d * within_s) - linear) / d)

    def row_share(self, num_drawn: int) -> float:
        """Return how long one more row takes, by how long a token does where so many are drawn in a step; 0 to 1.

        Before anything is known, and where rows cost nothing: 0.
        """
        a, b, *_ = self._solved()
        whole = a + b * num_drawn
        return b * num_drawn / whole if whole > 0 else 0.0

    @property
    def knows_reading(self) -> bool:
        return sum(self._solved()[2:]) > 0

    def _solved(self) -> tuple[float, float, float, float]:
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    def _solve(self) -> tuple[float, float, float, float]:
        steps = np.array([*self._drawing, *self._reading], dtype=np.float64).reshape(-1, 4)
        known = [0, *(column for column in (1, 2, 3) if np.ptp(steps[:, column - 1]) > 0)] if len(steps) else []
        weights = 1 / np.maximum(steps[:, 3:], _LEAST_S)
        terms = np.column_stack((np.ones(len(steps)), steps[:, :3])) * weights
        while known:  # what would be negative is left out, the most negative first
            size = np.abs(terms[:, known]).max(0)  # pairs are thousands of times as many as rows
            found = np.linalg.lstsq(terms[:, known] / size, (steps[:, 3:] * weights)[:, 0], rcond=None)[0]
            worst = int(found.argmin())
            if found[worst] >= 0:
                solved = dict(zip(known, map(float, found / size), strict=True))
                return solved.get(0, 0.0), solved.get(1, 0.0), solved.get(2, 0.0), solved.get(3, 0.0)
            del known[worst]
        return 0.0, 0.0, 0.0, 0.0


def pairs_of(start: int, num: int) -> int:
    """Return the pairs of one of `num` tokens from `start` on and one before it."""
    return num * start + num * (num - 1) // 2
