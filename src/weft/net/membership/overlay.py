"""Which links a peer keeps among those it knows: decided alone, by pure functions of what it knows.

    up to 32 peers     all links: everybody watches everybody
    more               4 on a ring: two successors and two predecessors in the order of the peers' hashes
                       4 far ones: chosen by a hash with this process's own secret, so that nobody can make a key that
                       is chosen; as many others, in the mean, choose this peer

The ring alone connects all peers, and gives each the same four watchers wherever all know the same peers: when some of
them die, the next ones take their place. The far links make all paths short: with 1,000 peers a peer keeps about twelve
links, and what it says reaches everybody in about four steps. A newcomer displaces a far link with probability 3 / n,
and ring links of its four neighbours only.

Which of both regimes a peer is in, it decides by the number of peers it knows, with hysteresis, and follows those it is
linked to: so two peers differ for seconds, not for good.
"""

import heapq
from collections.abc import Iterable
from functools import lru_cache

from blake3 import blake3

from weft.ids import PeerId

MAX_ALL = 32  # peers, this one included: 31 x 31 heartbeats every 2 s; with more the links are bounded
MIN_BOUNDED = 24  # fewer than that, and it is all links again
SETTLE_S = 30.0  # a newcomer learns whom there is, and a dip in numbers passes

NUM_RING = 2  # to either side
NUM_FAR = 4

_RING = "weft 2026 ring v1"


def kept(me: PeerId, others: Iterable[PeerId], secret: bytes) -> tuple[PeerId, ...]:
    """Return whom to keep links to among `others`, in ascending order.

    Each is chosen as one of the first in some order of them all. So as others come it is enough to choose among those
    kept and those that came; as one that was not kept goes, nothing changes.

    Args:
        secret: 32 bytes that nobody else knows.
    """
    crowd = [peer for peer in others if peer != me]
    here = _place(me)
    ring = sorted(crowd, key=lambda peer: (_place(peer) - here) % (1 << 64))
    near = [*ring[:NUM_RING], *ring[-NUM_RING:]]
    far = heapq.nsmallest(NUM_FAR, crowd, key=lambda peer: blake3(peer.encode(), key=secret).digest(8))
    return tuple(sorted({*near, *far}))


def watches_all(is_all: bool, num_known: int, settled_s: float, is_told_bounded: bool) -> bool:
    """Return whether to keep all links from now on.

    Args:
        is_all: whether they are kept so far.
        num_known: peers alive or suspected, this one included.
        settled_s: since when this process runs, and knows so few or many; the lesser of both.
        is_told_bounded: whether somebody linked keeps few links.
    """
    if not is_all:
        return num_known < MIN_BOUNDED and settled_s >= SETTLE_S
    follows = is_told_bounded and (num_known >= MIN_BOUNDED or settled_s < SETTLE_S)
    return num_known <= MAX_ALL and not follows


@lru_cache(maxsize=4096)  # a pure function, asked for each peer at each change
def _place(peer: PeerId) -> int:
    return int.from_bytes(blake3(peer.encode(), derive_key_context=_RING).digest(8), "big")
