"""Whom one looks at more often. It raises the chance of an audit, and judges nobody.

    new           fewer than `NEW` works of it were counted since it came, or since the run began
    strays        what it shows is far from what others show, until it is back (`weft.peer.loop.outliers`), or its
                  training steps are all on one side of theirs (`weft.verify.steering`)
    unanswered    an audit got no answer from it, or it did not open its own, in the last `LASTS` rounds

Each peer knows this by itself, and others need not agree: whoever is asked answers whoever was drawn at
`TIMES` the run's rate.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from weft.ids import PeerId

TIMES = 4.0
NEW = 10  # works
LASTS = 20  # rounds


class Suspicion:
    """Of one peer, since its process began."""

    def __init__(self) -> None:
        self._round: int | None = None  # the last that was told
        self._newcomers: set[PeerId] = set()
        self._members: set[PeerId] = set()
        self._num_counted = Counter[PeerId]()
        self._strays: set[tuple[PeerId, str]] = set()
        self._unanswered: dict[PeerId, int] = {}

    def decided(self, round: int, members: Collection[PeerId], counted: Iterable[PeerId]) -> None:
        """A round counts works of these peers; these are members after it."""
        came = set(members) - self._members
        if self._round is None and round > NEW:  # who was there before this process is not known to be new
            came = set()
        self._newcomers = {each for each in self._newcomers | came if each in members}
        self._round, self._members = round, set(members)
        self._num_counted.update(counted)
        for gone in self._num_counted.keys() - self._members:
            del self._num_counted[gone]  # who comes again is new again
        self._strays = {(peer, what) for peer, what in self._strays if peer in self._members}
        self._unanswered = {peer: at for peer, at in self._unanswered.items() if round - at < LASTS}

    def strays(self, peer: PeerId, what: str, is_back: bool) -> None:
        """What a member shows of something is unlike the others', or like theirs again."""
        (self._strays.discard if is_back else self._strays.add)((peer, what))

    def unanswered(self, peer: PeerId, round: int) -> None:
        """It did not answer an audit of a round, or not open what it had sealed until then."""
        self._unanswered[peer] = max(round, self._unanswered.get(peer, round))

    def times(self, peer: PeerId) -> float:
        """Return how many times as often as others it is audited."""
        is_new = peer in self._newcomers and self._num_counted[peer] < NEW
        is_odd = any(each == peer for each, _ in self._strays) or peer in self._unanswered
        return TIMES if is_new or is_odd else 1.0
