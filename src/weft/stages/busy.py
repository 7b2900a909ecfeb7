"""How fast a peer computes a stage: seconds of its device for each sample that goes all the way.

It does not know what is computed.
"""

KEEPS = 0.98  # of what was measured before, at each piece of work: the last hundred or so count
PIECES = 3  # of a sample's way: forward pass, input gradient, weights' gradients


class Busy:
    """Of one stage. A piece of work is of one micro-batch."""

    def __init__(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self._spent_s = 0.0
        self._num = 0.0

    def note(self, spent_s: float) -> None:
        """Take up what a piece of work took."""
        self._spent_s = KEEPS * self._spent_s + spent_s
        self._num = KEEPS * self._num + 1

    @property
    def rate(self) -> float:
        """Samples a second that this peer would compute if it never waited; 0.0: nothing was measured."""
        return self._num * self._micro_batch / (PIECES * self._spent_s) if self._spent_s > 0 else 0.0
