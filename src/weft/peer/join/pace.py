"""Whether a newcomer can ever catch up (`Pace`), and how far it is behind (`Lag`).

It needs the state, and of each round that is committed while it fetches, the results. Where the results alone are as
many as what reaches it, it never is done, however long it goes on.

Pure: both are told the time. They do not know where bytes come from.
"""

from collections import deque
from dataclasses import dataclass

TELL_AFTER_S, TELL_AFTER_ROUNDS = 20.0, 3  # before that a pace is luck
RECENT_S = 15.0  # what is said of the near future is by these last seconds


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A newcomer's line and its run."""

    received_bps: float  # by this machine
    added_bps: float  # by the run's results


class Pace:
    """Of one newcomer.

    Args:
        result_nbytes: what one round adds.
    """

    def __init__(self, result_nbytes: int) -> None:
        self._result_nbytes = result_nbytes
        self._recent: deque[tuple[float, int]] = deque()  # when, and received up to then
        self._last: tuple[float, int, int] | None = None  # when, round, received up to then
        self._passed_s = 0.0
        self._received_nbytes = 0
        self._num_rounds = 0

    def look(self, now: float, round: int, received_nbytes: int, *, is_fetching: bool) -> None:
        """Take up how things stand.

        Args:
            round: the latest of the run.
            received_nbytes: by this machine up to now, whatever it is.
            is_fetching: since the last look, so that what it received says what its line can do.
        """
        if self._last is not None and is_fetching:
            at, before, received = self._last
            self._passed_s += now - at
            self._num_rounds += max(round - before, 0)
            self._received_nbytes += received_nbytes - received
        self._last = now, round, received_nbytes
        self._recent.append((now, received_nbytes))
        while now - self._recent[0][0] > RECENT_S:
            self._recent.popleft()

    def too_slow(self) -> Figures | None:
        """Return both figures where the line is no faster than the run; None: it is, or that cannot be said yet."""
        if self._passed_s < TELL_AFTER_S or self._num_rounds < TELL_AFTER_ROUNDS:
            return None
        figures = Figures(
            received_bps=8 * self._received_nbytes / self._passed_s,
            added_bps=8 * self._result_nbytes * self._num_rounds / self._passed_s,
        )
        return figures if figures.received_bps <= figures.added_bps else None

    def needs_s(self, left_nbytes: int) -> float:
        """Return how long so many bytes take at what came lately; infinite where nothing did."""
        if not left_nbytes:
            return 0.0
        (since, before), (now, received) = self._recent[0], self._recent[-1]
        come = received - before
        return left_nbytes * (now - since) / come if come > 0 else float("inf")


class Lag:
    """For how long the oldest round that a peer lacks has been known to it.

    In seconds, since rounds of some runs take tenths of them, and what others tell of theirs is two seconds old.
    """

    def __init__(self) -> None:
        self._lacking: deque[tuple[int, float]] = deque()  # a round, and when it was first heard of; ascending

    def note(self, reached: int, latest: int, now: float) -> None:
        """Take up which round this peer has reached, and the latest that others tell of."""
        while self._lacking and self._lacking[0][0] <= reached:
            self._lacking.popleft()
        while self._lacking and self._lacking[-1][0] > latest:  # of a branch that was left, or nobody tells of it now
            self._lacking.pop()
        if latest > max(reached, self._lacking[-1][0] if self._lacking else reached):
            self._lacking.append((latest, now))

    def lasts_s(self, reached: int, now: float) -> float:
        """Return it, for a peer that has reached a round; 0 where it lacks none."""
        return next((now - at for round, at in self._lacking if round > reached), 0.0)
