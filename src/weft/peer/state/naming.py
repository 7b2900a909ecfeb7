"""What this peer's replicated vectors are called, where the run's rounds are recorded, and whether others say the same.

After an outer step the vectors are named: their chunks are hashed, and the list of the hashes is. Whoever leads the
next round writes that name into its manifest, and nobody votes for another than its own. So a manifest says what the
state before it was, by the word of a majority, and not only by that of who gives it to a newcomer.

    manifest 7 ──outer step──► vectors ──hashes──► name ──► manifest 8: "the state before this was that"

Failure:
- what this peer has is called otherwise: it was given another state than the run's, or its machine computes wrongly.
  An event says so, and it fetches the state anew.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from weft.events import StateContradicted
from weft.ids import Digest, PeerId
from weft.peer.context import Context
from weft.peer.state.replica import Replica
from weft.store.chunks import chunk_digests, chunks, index_of
from weft.sync.merge.sharded import SpreadVector
from weft.sync.records.messages import Manifest
from weft.sync.round.rules import contradicts, state_before
from weft.tasks import Compute
from weft.wire import Buffer, digest, digest_of

HASHED_AT_ONCE = 16  # chunks: some ten milliseconds, after which what a round wants merged has its turn


class StateNaming:
    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._of: Digest | None = None  # the manifest of the outer step
        self._name: Digest | None = None
        self._donors: tuple[PeerId, ...] = ()  # who gave the state, until a manifest has confirmed it

    def came_from(self, donors: tuple[PeerId, ...]) -> None:
        """Note that the vectors were given, or loaded (no donors): what others were called says nothing of them."""
        self._of, self._name, self._donors = None, None, donors

    async def find(self) -> tuple[Digest, Digest] | None:
        """Return the manifest that the present vectors were made by, and what they are called; None: nobody asks."""
        head = self._replica.head
        if head is None or not self._replica.charter.is_recorded:
            return None
        of = digest_of(head)
        if self._of != of or self._name is None:
            is_same = self._name is not None and head.previous == self._of and not head.has_result
            self._name = self._name if is_same else await named(self._context.compute, self._replica)
            self._of = of
        assert self._name is not None
        return of, self._name

    def contradiction(self, manifest: Manifest) -> tuple[PeerId, ...] | None:
        """Return who gave this peer its state, if a decided manifest names another before it, and say so; None: none
        does."""
        if self._of != manifest.previous:
            return None
        if not contradicts(self._name, manifest):
            if state_before(manifest) is not None:
                self._donors = ()  # from here on it is this machine's own
            return None
        self._context.emit(StateContradicted(round=manifest.round, donors=self._donors))
        return self._donors


async def named(compute: Compute, replica: Replica) -> Digest:
    """Return the digest of the index of a replica's vectors, which nobody changes meanwhile."""
    vectors, digests = replica.vectors(), dict[str, tuple[Digest, ...]]()
    for name, vector in sorted(vectors.items()):
        if isinstance(vector, SpreadVector):  # each rank hashes its own
            digests[name] = await compute.serve(lambda vector=vector: chunk_digests(vector))  # type: ignore[misc]
        else:
            digests[name] = tuple(await hashed_in_turns(compute, chunks(vector)))
    return digest_of(index_of(vectors, digests))


async def hashed_in_turns(compute: Compute, pieces: Iterable[Buffer]) -> list[Digest]:
    """Return the digests of pieces, some at a time: rounds have their turns in between."""
    waiting: Iterator[Buffer] = iter(pieces)
    found = list[Digest]()
    while more := await compute.serve(lambda: [digest(piece) for piece in islice(waiting, HASHED_AT_ONCE)]):
        found += more
    return found
