"""Whom to ask for what is further than what is here: of those linked, who tells of the most; last, who just failed."""

from weft.clock import Clock
from weft.ids import PeerId
from weft.net.membership.membership import Membership
from weft.net.node import Node

FAILED_S = 60.0  # who failed to deliver is asked after all others for so long


class Ranking:
    def __init__(self, node: Node, membership: Membership, clock: Clock) -> None:
        self._node = node
        self._membership = membership
        self._clock = clock
        self._failed_at: dict[PeerId, float] = {}

    def note_failure(self, *peers: PeerId) -> None:
        """Note that these have not delivered."""
        now = self._clock.now()
        kept = {peer: at for peer, at in self._failed_at.items() if now - at < FAILED_S}
        self._failed_at = kept | dict.fromkeys(peers, now)

    def has_failed(self, peer: PeerId) -> bool:
        """Return whether it failed to deliver just now."""
        at = self._failed_at.get(peer)
        return at is not None and self._clock.now() - at < FAILED_S

    def furthest_first(self) -> list[PeerId]:
        """Return the linked peers, those first that tell of the latest state, and last who just failed."""

        def place(peer: PeerId) -> tuple[bool, int, int, PeerId]:
            beat = self._membership.heartbeat_of(peer)
            if beat is None or beat.manifest is None:
                return self.has_failed(peer), 0, 0, peer
            return self.has_failed(peer), -beat.committed_tokens, -beat.round - 1, peer

        return sorted(self._node.peers, key=place)
