"""Small parts of payloads, and small results, on their way without being asked for.

    contributor ──Handed, Ready──► owner of the part          owner ──Handed, Merged──► all

Each is said right before the letter that names it, on the same link, so it is here when it is wanted. To ask takes a
round trip, and more of both computers than a small part itself; in a round each member would ask twice of every other.

What is larger is asked for: it would stand on its sender's line before what others wait for, and how long it takes says
how fast its holder sends.

Members from before this note drop it, and ask. So whoever hands nothing itself is handed no more than `MAX_UNANSWERED`.

Failure:
- it gets lost, or is damaged: it is asked for.
- somebody hands what nobody wants: only members' is kept, `MAX_KEPT` of each.
"""

from weft.ids import Digest, PeerId
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.messages import HANDED_NBYTES, Handed
from weft.wire import Buffer, digest

MAX_KEPT = 4  # of one member: a payload's part and a result, of this round and the next
MAX_UNANSWERED = 8  # four rounds of that


class Handing:
    """Of one peer."""

    def __init__(self, node: Node, chain: Chain) -> None:
        self._node = node
        self._chain = chain
        self._kept: dict[PeerId, dict[Digest, bytes]] = {}  # oldest first
        self._num_unanswered: dict[PeerId, int] = {}  # handed since a peer last handed something, or its link came up
        node.on_note(Handed, self._on_handed)
        node.on_link(self._on_link)

    def hand(self, to: list[PeerId], data: Buffer) -> list[PeerId]:
        """Give these peers what they are about to want, if it is small; return to whom it has left."""
        if not 0 < memoryview(data).nbytes <= HANDED_NBYTES:
            return []
        note, told = Handed(data=bytes(data)), []
        for peer in to:
            num = self._num_unanswered.get(peer, 0)
            if num < MAX_UNANSWERED and self._node.post(peer, note):
                self._num_unanswered[peer] = num + 1
                told.append(peer)
        return told

    def take(self, peer: PeerId, wanted: Digest, nbytes: int) -> bytes | None:
        """Return what a peer has handed to this one, once; None: it has not."""
        kept = self._kept.get(peer, {})
        return kept.pop(wanted) if len(kept.get(wanted, b"")) == nbytes > 0 else None

    async def _on_handed(self, peer: PeerId, note: Handed) -> None:
        self._num_unanswered.pop(peer, None)
        if peer in self._chain.base.electorate:
            kept = self._kept.setdefault(peer, {})
            kept[digest(note.data)] = note.data
            if len(kept) > MAX_KEPT:
                del kept[next(iter(kept))]

    def _on_link(self, peer: PeerId, _is_up: bool, _reason: str) -> None:
        self._kept.pop(peer, None)
        self._num_unanswered.pop(peer, None)
