"""Small blobs from whoever holds them: the first that delivers one.

It does not know what a blob is for.
"""

from collections.abc import Iterable, Sequence

from weft.ids import Digest, PeerId, short
from weft.net.blobs.first import first_of
from weft.net.node import Node


def everybody(node: Node, first: Iterable[PeerId]) -> list[PeerId]:
    """Return whom to ask for what any member has: `first`, who is linked by now, and whose addresses are known by now.

    Who let a newcomer in may be gone a moment later, and the others are the ones it named.
    """
    known = dict.fromkeys([*first, *node.peers, *node.known_addresses()])
    return [peer for peer in known if peer != node.peer]


async def small_from(node: Node, peers: Sequence[PeerId], digest: Digest, max_nbytes: int) -> bytes:
    """Return a blob of unknown length, at most `max_nbytes`, from the first of `peers` that delivers it.

    Raises:
        PeerError: none did; says what each answered.
    """
    return await first_of(peers, lambda peer: node.fetch_small(peer, digest, max_nbytes), f"blob {short(digest)}")
