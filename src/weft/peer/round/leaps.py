"""How often another member may take this peer to a later attempt that it leads.

    the first time in a round   at once: who was cut off alone has gone on by itself, and must be followed
    again                       after as many timers of the present attempt as the other members have turns, nearly

Else a member that leaps to attempt after attempt that it leads, and falls silent, would stop the round for ever; with
this the others' turns come, whoever of a minority does so. What is not heard now is said again, and this peer's own
timers bring it on meanwhile.

It does not know why an attempt is given up.
"""

from collections.abc import Callable

from weft.clock import Clock
from weft.ids import Attempt, PeerId
from weft.sync.records.messages import AnyRoundMessage, Collect, Prepare, Propose
from weft.sync.round.machine import State

SLACK = 0.75  # others' timers may be that much shorter


class Leaps:
    """Of one peer, round after round.

    Args:
        progress_s: returns how long this peer follows its present attempt.
    """

    def __init__(self, clock: Clock, progress_s: Callable[[], float]) -> None:
        self._clock = clock
        self._progress_s = progress_s
        self._led_at: dict[PeerId, float] = {}  # when each took this peer to a later attempt of the present round

    def begin(self) -> None:
        """A round begins."""
        self._led_at.clear()

    def may_lead(self, state: State, sender: PeerId, message: AnyRoundMessage) -> bool:
        """Return whether to listen, where that may take this peer to a later attempt."""
        if not isinstance(message, Prepare | Propose | Collect) or message.attempt <= state.attempt:
            return True
        if (led_at := self._led_at.get(sender)) is None:
            return True
        turns_s = SLACK * (len(state.base.electorate) - 1) * self._progress_s()
        return self._clock.now() - led_at >= turns_s

    def note(self, sender: PeerId, before: Attempt, after: Attempt) -> None:
        """What the sender said was heard in one attempt, and this peer is in another now."""
        if after != before:
            self._led_at[sender] = self._clock.now()
