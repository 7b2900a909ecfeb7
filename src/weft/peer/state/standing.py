"""What this peer's replicated vectors are called, where the run's rounds are recorded, and whether others say the same.

After an outer step the vectors are named: their chunks are hashed, and the list of the hashes is. Whoever leads the
next round writes that name into its manifest, and nobody votes for another than its own. So a manifest says what the
state before it was, by the word of most members, and not only by that of who gives it to a newcomer.

    manifest 7 ──outer step──► vectors ──hashes──► name ──► manifest 8: "the state before this was that"

Failure:
- what this peer has is called otherwise: it was given another state than the run's, or its machine computes wrongly.
  An event says so, and it fetches the state anew.
"""

from itertools import islice

from weft.events import StateContradicted
from weft.ids import Digest, PeerId
from weft.peer.context import Context
from weft.peer.state.replica import Replica
from weft.store.chunks import chunk_bytes, index_of
from weft.sync.records.messages import Manifest
from weft.sync.round.rules import contradicts
from weft.tasks import Compute
from weft.wire import digest, digest_of

HASHED_AT_ONCE = 16  # chunks: some ten milliseconds, after which what a round wants merged has its turn


class Standing:
    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._of: Digest | None = None  # the manifest of the outer step
        self._name: Digest | None = None

    async def find(self) -> tuple[Digest, Digest] | None:
        """Return the manifest that the present vectors were made by, and what they are called; None: nobody asks."""
        head = self._replica.head
        if head is None or not self._replica.charter.is_recorded:
            return None
        of = digest_of(head)
        if self._of != of:
            if self._name is None or head.has_result:
                self._name = await named(self._context.compute, self._replica)
            self._of = of
        assert self._name is not None
        return of, self._name

    def forget(self) -> None:
        """Take no more for granted what the present vectors are called: others came in their place."""
        self._of = self._name = None

    def is_contradicted(self, manifest: Manifest, donors: tuple[PeerId, ...]) -> bool:
        """Return whether a decided manifest names another state before it than this peer has, and say so.

        Args:
            donors: who gave this peer the state that it began with.
        """
        if self._of != manifest.previous or not contradicts(self._name, manifest):
            return False
        self._context.emit(StateContradicted(round=manifest.round, donors=donors))
        return True


async def named(compute: Compute, replica: Replica) -> Digest:
    """Return the digest of the index of a replica's vectors, which nobody changes meanwhile."""
    vectors = replica.vectors()
    digests: dict[str, list[Digest]] = {}
    for name, vector in sorted(vectors.items()):
        found, pieces = digests.setdefault(name, []), chunk_bytes(vector)

        def some() -> list[Digest]:
            return [digest(piece) for piece in islice(pieces, HASHED_AT_ONCE)]  # noqa: B023  # awaited at once

        while more := await compute.serve(some):
            found += more
    return digest_of(index_of(vectors, digests))
