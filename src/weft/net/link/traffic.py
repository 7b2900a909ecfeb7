"""What passed between this peer and another, and when the other was last heard.

Control frames and blobs are counted alike, as their bytes come, without the transport's own overhead. Any byte
received is proof of life, also one of a frame that is not whole yet, judged by this machine's clock. Keys are free to
make: of those long silent only the bytes are remembered, not whose they were.
"""

from weft.clock import Clock
from weft.ids import PeerId

MAX_COUNTED = 4096  # twice as many peers as members are known


class LinkTraffic:
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


class Traffic:
    """Counts of each peer, made when first asked for; one too many takes the place of the longest silent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_peer: dict[PeerId, LinkTraffic] = {}
        self._before = (0, 0)  # sent to and received from those who gave way

    def __getitem__(self, peer: PeerId) -> LinkTraffic:
        if peer not in self._by_peer:
            if len(self._by_peer) >= MAX_COUNTED:
                self._give_way()
            self._by_peer[peer] = LinkTraffic(self._clock)
        return self._by_peer[peer]

    @property
    def moved(self) -> tuple[int, int]:
        """Return the bytes sent and received in all."""
        sent, received = self._before
        for each in self._by_peer.values():
            sent, received = sent + each.sent_nbytes, received + each.received_nbytes
        return sent, received

    def now(self) -> float:
        return self._clock.now()

    def all(self) -> dict[PeerId, LinkTraffic]:
        return dict(self._by_peer)

    def last_heard(self, peer: PeerId) -> float | None:
        known = self._by_peer.get(peer)
        return None if known is None else known.heard_at

    def _give_way(self) -> None:
        now = self._clock.now()  # who was never heard is just being met

        def heard_at(peer: PeerId) -> float:
            at = self._by_peer[peer].heard_at
            return now if at is None else at

        gone = self._by_peer.pop(min(self._by_peer, key=heard_at))
        sent, received = self._before
        self._before = sent + gone.sent_nbytes, received + gone.received_nbytes
