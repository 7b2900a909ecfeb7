"""Whether somebody steers within what is held for honest: a test of signs. It raises suspicion, and judges nobody.

    lean     <b - a, c> / |c|^2,  c = (a + b) / 2 - before     a: an auditor's state, b: the peer's; by how much its
                                                               step is longer than the auditor's, along both
    none     less than `SHARE` of the threshold either way: as far as machines may differ that round otherwise
    test     of the last `LASTS` steps of a peer n lean, k of them to the side that more do: so many or more of n fair
             signs have a chance of 2 sum_{i >= k} C(n, i) / 2^n; at most `FALSE_ALARM`, and it is suspected

Rounding errors have no side: a machine's step is longer than another's as often as it is shorter (Dixon and Mood, 1946,
for the test). Who makes each of its steps by a hundredth of a hundredth longer stays within the threshold each time,
and is on the same side each time. c lies between both states, for along a itself each other state is the shorter, on
average, by what a has of rounding.

Only what is along the step has a sign here. Who steers to the side of it is not found.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import comb

from weft.ids import PeerId

LASTS = 64  # audits of one peer
FALSE_ALARM = 1e-6  # of each test, were no lean below `SHARE`
SHARE = 0.01  # of the threshold


def chance(num_longer: int, num_shorter: int) -> float:
    """Return the chance that of so many fair signs so many, or more, are on one side, whichever it is."""
    num, most = num_longer + num_shorter, max(num_longer, num_shorter)
    return min(1.0, 2 * sum(comb(num, each) for each in range(most, num + 1)) / (1 << num))


@dataclass(frozen=True)
class Steered:
    """What a peer's last audited steps show.

    Args:
        mean: of their leans.
        is_back: they no longer show it.
    """

    num: int
    mean: float
    is_back: bool = False


def is_one_sided(leans: Sequence[float]) -> bool:
    """
    Args:
        leans: of steps, 0 where there is none.
    """
    return chance(sum(each > 0 for each in leans), sum(each < 0 for each in leans)) <= FALSE_ALARM


class Steering:
    """Of all peers that one auditor looks at, since its process began."""

    def __init__(self) -> None:
        self._leans = dict[PeerId, deque[float]]()
        self._suspected = set[PeerId]()

    def decided(self, members: Collection[PeerId]) -> None:
        """Forget who is no member any more."""
        self._leans = {peer: leans for peer, leans in self._leans.items() if peer in members}
        self._suspected &= set(members)

    def note(self, peer: PeerId, lean: float, most: float) -> Steered | None:
        """Note how a step leans that was near enough; return what that comes to, where it was something else before.

        Args:
            most: that parameters may lie apart.
        """
        leans = self._leans.setdefault(peer, deque(maxlen=LASTS))
        leans.append(lean if abs(lean) >= SHARE * most else 0.0)
        if is_one_sided(leans) == (peer in self._suspected):
            return None
        self._suspected ^= {peer}
        return Steered(len(leans), sum(leans) / len(leans), peer not in self._suspected)
