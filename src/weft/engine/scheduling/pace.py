"""How long a step takes: measured, and foretold for steps that were not made yet.

    seconds = a + b * rows that draw + c * tokens that are read + d * pairs of one of them and one before it

by least squares of relative errors over the last steps: a and b of those that only draw, c and d of what those that
read took longer; each at least 0. Where some read in each step for long, those that only drew had few rows: then all
four are found together. A token at the end of a long prompt looks at all before it: that may take as long as all else.
"""

from collections import deque
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]  # by step, or by step and term
NUM_STEPS = 64
ENOUGH = 8  # steps that only draw, to know what drawing takes
REACH = 1.5  # times as many rows: so far steps that only draw tell of others
RENEW = 8  # steps that only draw are alike: to reckon after each took a twentieth of a small one
_LEAST_S = 1e-9  # that a step takes


class Pace:
    """Of one model on one device."""

    def __init__(self) -> None:
        self._drawing: deque[tuple[int, int, int, float]] = deque(maxlen=NUM_STEPS)
        self._reading: deque[tuple[int, int, int, float]] = deque(maxlen=NUM_STEPS)
        self._fit: tuple[float, float, float, float] | None = None
        self._num_since = 0  # steps that only drew, since it was made

    def note(self, num_drawn: int, num_read: int, took_s: float, pairs: int = 0) -> None:
        """A step drew for so many sequences, read so many more tokens, and took so long.

        Args:
            pairs: of a token that was read, and one before it in its text (`pairs_of`).
        """
        (self._reading if num_read else self._drawing).append((num_drawn, num_read, pairs, took_s))
        self._num_since += 1
        if num_read or len(self._drawing) <= ENOUGH or self._num_since >= RENEW:
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
            self._fit, self._num_since = self._solve(), 0
        return self._fit

    def _solve(self) -> tuple[float, float, float, float]:
        drawing, reading = (np.array(each, dtype=np.float64).reshape(-1, 4) for each in (self._drawing, self._reading))
        if len(drawing) >= ENOUGH and _reach(drawing[:, 0], reading[:, 0]):  # they alone tell what drawing takes
            a, b = _fitted(_with_one(drawing[:, :1]), drawing[:, 3], drawing[:, 3])
            c, d = _fitted(reading[:, 1:3], reading[:, 3] - a - b * reading[:, 0], reading[:, 3])
            if c + d > 0 or not len(reading):
                return a, b, c, d
        steps = np.concatenate((drawing, reading))
        a, b, c, d = _fitted(_with_one(steps[:, :3]), steps[:, 3], steps[:, 3])
        return a, b, c, d


def _reach(rows: Floats, others: Floats) -> bool:
    """Return whether steps of so many rows tell of the others."""
    return not len(others) or float(others.max()) <= REACH * float(rows.max())


def _with_one(terms: Floats) -> Floats:
    return np.column_stack((np.ones(len(terms)), terms))


def _fitted(terms: Floats, wanted: Floats, took_s: Floats) -> list[float]:
    """Return what each term is taken times, at least 0, for the least squares of errors relative to `took_s`.

    A term that is the same in all steps is told apart from no constant before it: it is left out.
    """
    found = [0.0] * terms.shape[1]
    known = [at for at in range(terms.shape[1]) if len(terms) and (at == 0 or np.ptp(terms[:, at]) > 0)]
    weights = 1 / np.maximum(took_s, _LEAST_S)
    while known:  # what would be negative is left out, the most negative first
        size = np.maximum(np.abs(terms[:, known]).max(0), 1e-300)  # pairs are thousands of times as many as rows
        some = np.linalg.lstsq(terms[:, known] / size * weights[:, None], wanted * weights, rcond=None)[0]
        if some.min() >= 0:
            for at, value in zip(known, (some / size).tolist(), strict=True):
                found[at] = value
            return found
        del known[int(some.argmin())]
    return found


def pairs_of(start: int, num: int) -> int:
    """Return the pairs of one of `num` tokens from `start` on and one before it."""
    return num * start + num * (num - 1) // 2
