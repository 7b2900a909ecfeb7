"""How often in a round another member may take this peer to a later attempt that it leads.

    once                   freely: who was cut off alone has gone on by itself, and must be followed
    for the nth time more  after this peer has itself given up n attempts since: their leaders have had their time

Else a member that leaps to attempt after attempt that it leads, and falls silent, would stop the round for ever. What
is not heard now is said again.

It does not know why an attempt is given up.
"""

from weft.ids import Attempt, PeerId
from weft.sync.machine import State
from weft.sync.messages import AnyRoundMessage, Collect, Prepare, Propose


class Leaps:
    """Of one peer, round after round."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._num_led = 0  # attempts passed over at others' word
        self._num_leaps: dict[PeerId, int] = {}
        self._given_up: dict[PeerId, int] = {}  # attempts this peer had given up when it last leapt with somebody

    def may_lead_on(self, state: State, sender: PeerId, message: AnyRoundMessage) -> bool:
        """Return whether to listen to what may take this peer to a later attempt."""
        if not isinstance(message, Prepare | Propose | Collect) or message.attempt <= state.attempt:
            return True
        since = state.attempt - self._num_led - self._given_up.get(sender, 0)
        return since >= self._num_leaps.get(sender, 0)

    def note(self, sender: PeerId, before: Attempt, after: Attempt) -> None:
        """This peer was in one attempt before it heard the sender, and is in another now."""
        if after == before:
            return
        self._num_leaps[sender] = self._num_leaps.get(sender, 0) + 1
        self._given_up[sender] = before - self._num_led
        self._num_led += after - before
