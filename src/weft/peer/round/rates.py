"""How fast each member sends, as this peer receives it: the median of its last transfers.

All members fetch from one at the same time, so what each receives is alike a fraction of that one's uplink: the rates
compare members, they are no line's capacity. It does not know what was sent.
"""

from collections import deque
from statistics import median

from weft.ids import PeerId

LEAST_NBYTES = 1 << 12  # of a transfer: a smaller one measures its delay only
LEAST_S = 1e-4
NUM_REMEMBERED = 9


class Rates:
    def __init__(self) -> None:
        self._measured: dict[PeerId, deque[float]] = {}

    def note(self, peer: PeerId, nbytes: int, took_s: float) -> None:
        """A transfer from `peer` is complete."""
        if nbytes >= LEAST_NBYTES:
            rates = self._measured.setdefault(peer, deque(maxlen=NUM_REMEMBERED))
            rates.append(nbytes / max(took_s, LEAST_S))

    def known(self) -> dict[PeerId, float]:
        """Return bytes per second."""
        return {peer: median(rates) for peer, rates in self._measured.items()}
