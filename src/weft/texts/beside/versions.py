"""Of which rounds a member holds the weights for texts, such that members have some in common: pure.

    round r is due ─► the version that fewest others hold, or else the older one, is let go of ─► r is made ready

A member holds `MAX_VERSIONS` at most, the one that is made ready among them; so while one is, texts begin with the
other one, which should be with all members. Versions are far enough apart that most texts end with the weights they
began with: a version that texts are drawn with is kept for `DRAIN_S`.

Nobody decides for all. Rounds that are due are the multiples of a stride, which is a power of 2 times the least: who
finds rounds to be a little slower than another does has half its stride, and every second round in common with it. Who
has come begins with a version that nobody else has: then the stride is shorter until all have one in common with it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from weft.texts.member import MAX_VERSIONS

APART_S = 20.0  # from one version to the next, at least
SOON_S = 5.0  # the same, where somebody has none in common: longer than one takes to be made ready
DRAIN_S = 120.0  # that a version is kept for, once a newer one is here, while texts are drawn with it
STUCK_S = 300.0  # after which a member that lags does not keep others from newer weights


class Take(NamedTuple):
    """Make a round's weights ready.

    Args:
        drop: a version to let go of before; None: there is room.
    """

    drop: int | None


def is_due(round: int, least: int, newest: int | None, since_s: float, *, meets_all: bool) -> bool:
    """Return whether a round's weights are wanted.

    Args:
        least: rounds from one version to the next.
        newest: version that is held; None: there is none.
        since_s: seconds since its round.
        meets_all: whether each other member has one of the versions that are held. Who has come has not.
    """
    if newest is None or round <= newest:
        return newest is None and round % least == 0
    stride, round_s = least, since_s / (round - newest)
    while 0 < stride * round_s < (APART_S if meets_all else SOON_S):
        stride *= 2
    return round % stride == 0


def taken(ages_s: Mapping[int, float], others: Collection[Sequence[int]], num_texts: Mapping[int, int]) -> Take | None:
    """Return how one version more is taken; None: it is passed over.

    Args:
        ages_s: of each version that is held, the seconds since its round.
        others: versions of each other member, of whichever stage.
        num_texts: that are drawn with each.
    """
    if len(ages_s) < MAX_VERSIONS:
        return Take(None)
    newest = max(ages_s)
    keep = max(ages_s, key=lambda round: (sum(round in each for each in others), round))
    if ages_s[keep] >= STUCK_S:
        keep = newest
    drop = min(round for round in ages_s if round != keep)
    return None if num_texts.get(drop) and ages_s[newest] < DRAIN_S else Take(drop)
