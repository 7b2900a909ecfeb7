"""Which range of a large blob is fetched next, and whether another stream would help.

    ranges    waiting ──take──► under way on one stream ──arrived──► done
                 ▲                       │
                 └──────── back ─────────┘      the stream broke

A path that loses packets holds each TCP connection to MSS / RTT * sqrt(3 / (2 p)), however wide it is (Mathis et al.,
1997): there, several are as much faster. Elsewhere they only take more than their share, so one more is opened where
the rest would take long, and no further one when the last one gained little.

Pure: it is told the time. It does not know streams.
"""

from collections import deque

FIRST_NBYTES = 2 << 20  # of one range, as long as nothing is known of the path
LEAST_NBYTES, MOST_NBYTES = 256 << 10, 8 << 20  # worth a request; soon begun anew when a stream breaks
RANGE_S = 1.0  # a range takes about so long: no stream keeps the others waiting at the end
LOOK_S = 1.5  # between two looks at how fast it goes: some ten round trips over an ocean
NUM_STEADY = 2  # looks whose mean is compared
NUM_LOOKS = 6  # within which a stream must have brought something
WORTH_S = 4.0  # what is fetched sooner than that needs no help
MAX_STREAMS = 4  # more gain nothing on one path
GAIN = 1.15  # times as fast: what the last stream must have brought before another is tried

Span = tuple[int, int]  # begin and end


class Ranges:
    """Of one blob of `nbytes`."""

    def __init__(self, nbytes: int, now: float) -> None:
        self._nbytes = nbytes
        self._next = 0  # nobody has been asked for what lies behind it
        self._back: deque[Span] = deque()
        self._done: dict[int, int] = {}  # what has arrived beyond the front: begin -> end
        self._front = 0  # all before it has arrived
        self._looked_at = now
        self._looked_nbytes = 0
        self._usual_nbytes = FIRST_NBYTES
        self._rates: list[float] = []  # of each look since the last stream was opened
        self._before_bps = 0.0  # with one stream less
        self._is_enough = False

    @property
    def front(self) -> int:
        """Return how much has arrived from the beginning on, without a gap."""
        return self._front

    @property
    def is_enough(self) -> bool:
        """Return whether the last stream that was opened gained little."""
        return self._is_enough

    @property
    def is_done(self) -> bool:
        return self._front == self._nbytes

    def take(self, num_streams: int) -> Span | None:
        """Return what to ask for next, or None where all is under way. Towards the end ranges become shorter, so that
        streams end together."""
        if self._back:
            return self._back.popleft()
        left = self._nbytes - self._next
        if not left:
            return None
        size = min(max(left // (2 * num_streams), LEAST_NBYTES), self._usual_nbytes, left)
        begin, self._next = self._next, self._next + size
        return begin, begin + size

    def back(self, span: Span) -> None:
        """Note that a range did not come."""
        self._back.append(span)

    def arrived(self, span: Span) -> None:
        begin, end = span
        self._done[begin] = end
        while (reached := self._done.pop(self._front, None)) is not None:
            self._front = reached

    def wants_another(self, num_streams: int, come_nbytes: int, now: float) -> bool:
        """Return whether one more stream is worth it; asked every now and then.

        Args:
            come_nbytes: what has come so far, also of ranges that have not arrived whole.
        """
        passed_s = now - self._looked_at
        if passed_s < LOOK_S:
            return False
        self._rates.append(8 * (come_nbytes - self._looked_nbytes) / passed_s)
        self._looked_at, self._looked_nbytes = now, come_nbytes
        usual = int(self._rates[-1] / 8 / num_streams * RANGE_S)
        self._usual_nbytes = min(max(usual, LEAST_NBYTES), MOST_NBYTES)
        is_waiting = bool(self._back) or self._next < self._nbytes
        if not is_waiting or num_streams >= MAX_STREAMS or len(self._rates) < NUM_STEADY + 1:
            return False
        bps = sum(self._rates[-NUM_STEADY:]) / NUM_STEADY  # in the first moments a connection finds its pace
        if bps <= 0 or 8 * (self._nbytes - come_nbytes) / bps < WORTH_S:
            return False
        if bps < GAIN * self._before_bps:
            if len(self._rates) >= NUM_LOOKS:
                self._is_enough = True
            return False
        if self._is_enough:
            return False
        self._rates, self._before_bps = [], bps
        return True
