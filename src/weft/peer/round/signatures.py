"""Signatures of members, each checked once: a letter may come again, and within what proves a decision.

To check one takes longer than all else that is done with a letter. Kept are those that held, for one round.
"""

from weft import keys
from weft.ids import Digest, PeerId
from weft.wire import digest

MAX_HELD = 64  # of one signer: twice what an attempt of the largest run takes


class Signatures:
    """Of one peer."""

    def __init__(self) -> None:
        self._held: dict[PeerId, dict[bytes, Digest]] = {}  # what each signature signs

    def begin(self) -> None:
        """A round begins."""
        self._held.clear()

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Return what `keys.verify` does."""
        known, name = self._held.get(peer, {}), digest(message)
        if known.get(signature) == name:
            return True
        if not keys.verify(peer, message, signature):
            return False
        self._held[peer] = known
        if len(known) >= MAX_HELD:
            del known[next(iter(known))]
        known[signature] = name
        return True
