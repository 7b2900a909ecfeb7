"""How long a text waits for its next token before other members are asked for it.

Of a text that draws it is a multiple of its usual gap, and no less than what its members say of themselves.
"""

from collections import deque
from statistics import quantiles

LEAST_S = 0.3  # without a token, before a new attempt is made
GAPS = 4.0  # times the usual gap, likewise
FIRST_GAPS = 4.0  # times what the first token should take
FIRST_S = 2.0  # and at least so long
MOST_S = 60.0  # and at most, however slow members say they are, and however long a pause was
NUM_GAPS = 64


class Patience:
    """Of one text."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=NUM_GAPS)

    def came(self, gap_s: float) -> None:
        """A token has come, so long after the one before."""
        self._gaps.append(gap_s)

    def until_first_s(self, first_s: float, ring_s: float) -> float:
        """Return how long to wait for the first token of an attempt: somebody may have to read all of the text.

        Args:
            first_s: that its members say it takes.
            ring_s: likewise, of a token.
        """
        return min(MOST_S, max(FIRST_S, FIRST_GAPS * first_s, GAPS * self._usual_s(ring_s)))

    def until_next_s(self, gap_s: float, ring_s: float) -> float:
        """Return how long to wait for each further one.

        Args:
            gap_s: that its members say there is just now, such as one whose share of the device is spent.
            ring_s: that they say a token takes.
        """
        least_s = (
            LEAST_S if self._has_gaps else FIRST_S
        )  # members have told of themselves before they computed anything
        return min(MOST_S, max(least_s, GAPS * self._usual_s(ring_s), GAPS * gap_s))

    @property
    def _has_gaps(self) -> bool:
        return len(self._gaps) > 1

    def _usual_s(self, ring_s: float) -> float:
        return quantiles(self._gaps, n=20)[-1] if self._has_gaps else ring_s
