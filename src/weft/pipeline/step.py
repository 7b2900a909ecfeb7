"""When a step of a pipeline is over: the members of the first stage say how far they are, and all others follow.

    beat (r, h)    the inner step h of the round r of the first stage

Members of the first stage begin the micro-batches of a beat, and tell once all of theirs have come back. A beat is over
for a member of any stage once all who had micro-batches to begin have told so, or are gone; or somebody is further,
because the first stage went on without who was late. What comes of an earlier beat later counts all the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from weft.ids import PeerId


class Beat(NamedTuple):
    round: int  # of the first stage: the one that its members make this step for
    step: int  # within it

    @property
    def next_step(self) -> "Beat":
        return Beat(self.round, self.step + 1)


FIRST = Beat(0, 0)
ANY = Beat(1 << 62, 0)  # after all others


class Progress(NamedTuple):
    """How far a member of the first stage is."""

    beat: Beat
    is_done: bool  # all that it began of the beat has come back
    origins: frozenset[PeerId]  # who begins micro-batches in this round


class Beats:
    """What one peer has heard of that.

    Args:
        is_here: whether a peer is still a member of the first stage, as far as is known.
    """

    def __init__(self, is_here: Callable[[PeerId], bool]) -> None:
        self._is_here = is_here
        self._told: dict[PeerId, Progress] = {}

    def told(self, peer: PeerId, progress: Progress) -> None:
        """Take up what `peer` says of itself."""
        self._told[peer] = progress

    def forget(self, peer: PeerId) -> None:
        """Take it up that `peer` begins no more micro-batches."""
        self._told.pop(peer, None)

    @property
    def newest(self) -> Beat:
        """Return the furthest beat that anybody is in; (0, 0) where nobody has told."""
        return max((each.beat for each in self._told.values()), default=FIRST)

    @property
    def num_origins(self) -> int:
        """Return how many begin micro-batches in the newest round that was told of; 1 where nobody has told."""
        furthest = max(self._told.values(), key=lambda each: each.beat, default=None)
        return 1 if furthest is None else max(1, len(furthest.origins))

    def is_over(self, beat: Beat) -> bool:
        if self.newest > beat:
            return True
        at_it = [each for each in self._told.values() if each.beat == beat]
        origins = frozenset[PeerId]().union(*(each.origins for each in at_it))
        return bool(at_it) and all(self._has_done(peer, beat) or not self._is_here(peer) for peer in origins)

    def _has_done(self, peer: PeerId, beat: Beat) -> bool:
        told = self._told.get(peer)
        return told is not None and told.beat == beat and told.is_done
