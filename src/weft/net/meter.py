"""What passed between this peer and another, and when the other was last heard.

Control frames and blobs are counted alike, as their bytes come, without the transport's own overhead. Any byte
received is proof of life, also one of a frame that is not whole yet, judged by this machine's clock.
"""

from weft.clock import Clock
from weft.ids import PeerId


class Meter:
    """Counts for one remote peer, over all its connections."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.sent_nbytes = 0
        self.received_nbytes = 0
        self.heard_at: float | None = None  # on `clock`; None: never

    def sent(self, num_bytes: int) -> None:
        self.sent_nbytes += num_bytes

    def received(self, num_bytes: int) -> None:
        self.received_nbytes += num_bytes
        self.heard_at = self._clock.now()


class Meters:
    """One meter per peer, made when first asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_peer: dict[PeerId, Meter] = {}

    def __getitem__(self, peer: PeerId) -> Meter:
        return self._by_peer.setdefault(peer, Meter(self._clock))

    def now(self) -> float:
        return self._clock.now()

    def all(self) -> dict[PeerId, Meter]:
        return dict(self._by_peer)

    def last_heard(self, peer: PeerId) -> float | None:
        meter = self._by_peer.get(peer)
        return None if meter is None else meter.heard_at
