"""Who strays from the others, and whether all together get anywhere, judged by numbers that members show.

    band of i     m +- max(width + share |m|, 6 d, 6 e)
    m, d          median of what the others showed last, two or more of them, and the median distance from it
    e             median distance of their last five values from the median of each one's own

Half of the others may show anything without moving a median far, and neither how members differ nor how their values
scatter leaves the band. Who has shown five values is judged by each new one. A member has left the band once three in
a row were outside, and is back after three in a row inside: each is said once.

Progress is told by the median over members: that of the last rounds against that of the first ones, and where two are
in the middle, the one that speaks for progress. Of a run of few rounds it takes fewer, two at least. It is judged by
who saw the run begin: later a loss may stand still for good reasons.

Pure. It does not know what the values are, nor where they come from.
"""

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass
from statistics import median, median_high, median_low

from weft.ids import PeerId

WINDOW = 5  # values of a member
MADS = 6.0  # some three standard deviations: of five values one is their median itself
IN_A_ROW = 3
LEAST_OTHERS = 2
STRETCH = 6  # losses whose median stands for all of them
SHORT = 2  # as many where the run has few rounds
PIECES = 8  # of the run: a longer stretch is no beginning
BEGUN = 0.05  # of the run: who comes later did not see it begin,
FIRST_ROUNDS = 2  # but in these
DUE = 0.1  # of the run, by when there is progress, or none


@dataclass(frozen=True)
class Strayed:
    """A member has left the band, or is back in it.

    Args:
        value: what it showed last.
        usual: the median of the others.
    """

    peer: PeerId
    value: float
    usual: float
    is_back: bool


class Band:
    """Of one kind of value.

    Args:
        width: half of the least band.
        share: of the others' median, that is added to it.
    """

    def __init__(self, width: float = 0.0, share: float = 0.0) -> None:
        self._width = width
        self._share = share
        self._shown: dict[PeerId, deque[float]] = {}
        self._in_a_row: dict[PeerId, int] = {}  # times on the other side of the border than before
        self._outside: set[PeerId] = set()

    def take(self, values: Mapping[PeerId, float]) -> list[Strayed]:
        """Take up the newest values, of some or all, and return whose place has changed."""
        for peer, value in values.items():
            self._shown.setdefault(peer, deque(maxlen=WINDOW)).append(value)
        judged = (self._judge(peer) for peer in sorted(values))
        return [each for each in judged if each is not None]

    def keep(self, members: Container[PeerId]) -> None:
        """Forget all others."""
        for peer in [peer for peer in self._shown if peer not in members]:
            del self._shown[peer]
            self._in_a_row.pop(peer, None)
            self._outside.discard(peer)

    def usual(self, num_members: int) -> float | None:
        """Return the median of the last that each member showed; None: too few did, of so many."""
        is_enough = len(self._shown) >= max(1, min(LEAST_OTHERS + 1, num_members))
        return median(shown[-1] for shown in self._shown.values()) if is_enough else None

    def _judge(self, peer: PeerId) -> Strayed | None:
        others = [shown for other, shown in self._shown.items() if other != peer and len(shown) == WINDOW]
        if len(others) < LEAST_OTHERS or len(self._shown[peer]) < WINDOW:
            return None
        value, lasts = self._shown[peer][-1], [shown[-1] for shown in others]
        usual = median(lasts)
        apart = median(abs(last - usual) for last in lasts)
        scatter = median(abs(each - middle) for shown in others for middle in (median(shown),) for each in shown)
        width = max(self._width + self._share * abs(usual), MADS * apart, MADS * scatter)
        is_outside = abs(value - usual) > width
        was_outside = peer in self._outside
        self._in_a_row[peer] = self._in_a_row.get(peer, 0) + 1 if is_outside != was_outside else 0
        if self._in_a_row[peer] < IN_A_ROW:
            return None
        self._in_a_row[peer] = 0
        (self._outside.discard if was_outside else self._outside.add)(peer)
        return Strayed(peer, value, usual, is_back=was_outside)


@dataclass(frozen=True)
class Stalled:
    """The loss is no lower than at first."""

    first: float
    now: float


class Progress:
    """Whether a loss falls while the run goes on."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=STRETCH)
        self._num = 0
        self._saw_it_begin: bool | None = None
        self._is_said = False

    def take(self, round: int, share: float, loss: float) -> Stalled | None:
        """Take up a loss.

        Args:
            round: after which it is told.
            share: of the run's tokens that is counted by now.

        Returns:
            once, that there is no progress; again after there was some.
        """
        if self._saw_it_begin is None:
            self._saw_it_begin = share <= BEGUN or round <= FIRST_ROUNDS
        if not self._saw_it_begin:
            return None
        self._num += 1
        self._last.append(loss)
        if len(self._first) < STRETCH:
            self._first.append(loss)
        stretch = self._stretch(share)
        if share < DUE or self._num < 2 * stretch:
            return None
        first, now = median_high(self._first[:stretch]), median_low(list(self._last)[-stretch:])
        if now < first:
            self._is_said = False
        elif not self._is_said:
            self._is_said = True
            return Stalled(first, now)
        return None

    def _stretch(self, share: float) -> int:
        """Return how many losses are the first, of as many as a whole run would tell at this pace: an even number, of
        which the middle is two."""
        wanted = STRETCH if share <= 0 else int(self._num / share) // PIECES * 2
        return max(SHORT, min(STRETCH, wanted))
