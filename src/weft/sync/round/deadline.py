"""How long to wait: as long as measured rounds say, never a number a person has to guess.

    deadline = median + 3 MAD of the last rounds, at least 2 s, and a multiple of the median where one is asked for

Median and median absolute deviation move little when one round was slow. Before anything is measured the wait is long:
the first round holds compilation and cold caches.
"""

from collections.abc import Sequence
from statistics import median

FLOOR_S = 2.0
TELL_S = 0.01  # what arrives within so long is told of together
FIRST_S = 60.0  # nothing measured yet
NUM_REMEMBERED = 16  # rounds: links and loads change within minutes
MIN_MEASURED = 3  # fewer say little about spread


def deadline_s(measured_s: Sequence[float], least: float = 1.0) -> float:
    """Return how long to wait (seconds) given how long it took in the last rounds.

    Args:
        least: times the median, however little they differed.
    """
    recent = measured_s[-NUM_REMEMBERED:]
    if len(recent) < MIN_MEASURED:
        return FIRST_S
    middle = median(recent)
    return max(FLOOR_S, least * middle, middle + 3 * median(abs(value - middle) for value in recent))
