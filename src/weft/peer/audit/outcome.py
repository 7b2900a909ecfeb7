"""What an audit comes to, and how long one waits for it.

An answer may take some rounds and some seconds, both: rounds may be short, and a peer that was killed comes back. Who
answers, and then is slow, is given as much again, twice. What an auditor says after all of that is still looked into by
others, and what they ask for is still there (`weft.peer.audit.trace`).
"""

from dataclasses import dataclass

from weft.clock import Clock
from weft.events import RoundsUnlike
from weft.peer.round.driver import RoundDriver
from weft.sync.records.acts import Outcome, Warrant
from weft.verify.calibration import Apart, Unlike

ANSWER_ROUNDS, ANSWER_S = 4, 30.0
ASK_AGAIN_S = 1.0
MAX_CAME = 2  # answers that give a worker more time: it may answer for ever, and let nothing be fetched
TOLD_ROUNDS, TOLD_S = (1 + MAX_CAME) * ANSWER_ROUNDS + 1, (1 + MAX_CAME) * ANSWER_S + 15.0  # for what one auditor takes


@dataclass(frozen=True)
class Found:
    """What an audit has found.

    Args:
        distance: between both states, where steps were done again: relative to what they changed.
        apart: the same of the vector that lies farthest, and how far it may; None: no two states were compared.
        lean: as of `weft.verify.steering`.
        proof: what shows it to anybody; None: a majority has to look for itself.
    """

    outcome: Outcome
    why: str = ""
    distance: float = 0.0
    proof: Warrant | None = None
    apart: Apart | None = None
    lean: float = 0.0


def unlike_told(unlike: Unlike) -> RoundsUnlike:
    """Return the event that says how this machine rounds."""
    return RoundsUnlike(
        distance=unlike.farthest.distance,
        held=unlike.farthest.held,
        num_members=unlike.num_members,
        num_unlike=unlike.num_unlike,
    )


class Patience:
    """From now on.

    Args:
        times: as long as for one answer.
    """

    def __init__(self, rounds: RoundDriver, clock: Clock, times: int = 1) -> None:
        self._rounds = rounds
        self._clock = clock
        self._last_round = rounds.chain.head.round + times * ANSWER_ROUNDS
        self._last_s = clock.now() + times * ANSWER_S

    @property
    def is_over(self) -> bool:
        return self._rounds.chain.head.round >= self._last_round and self._clock.now() >= self._last_s
