"""What this peer's replicated vectors are called, where the run's rounds are recorded, and whether others say the same.

After an outer step the vectors are named: their chunks are hashed, and the list of the hashes is. A member writes that
name into its vote for the next round. So a round's certificate says what the state before it was, by the word of those
who voted, and not only by that of who gives it to a newcomer.

    manifest 7 ──outer step──► vectors ──hashes──► name ──► vote for manifest 8: "the state before it was that"

Nothing is decided by names: votes count as in any run. Who was given its state names none until others have named the
same, for it knows no better.

    most of the electorate name another     this peer's state is false: it fetches the state anew. Who was given its
                                            state leaves out those who have voted since, and named none
    some do, and no majority either way     an event names them; the round goes on
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import UNSET

from weft.events import StateContradicted, StatesDiffer
from weft.ids import Digest, PeerId, Round
from weft.peer.context import Context
from weft.peer.state.replica import Replica
from weft.store.chunks import chunk_digests, chunks, index_of
from weft.sync.merge.sharded import SpreadVector
from weft.sync.records import rewinds
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import Accept, Manifest
from weft.tasks import Compute
from weft.wire import Buffer, digest, digest_of

HASHED_AT_ONCE = 16  # chunks: some ten milliseconds, after which what a round wants merged has its turn
ENOUGH = 3  # rounds in which all who name a state name the one that this peer was given


class StateNaming:
    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._of: Digest | None = None  # the manifest of the outer step
        self._name: Digest | None = None
        self.index: StateIndex | None = None  # of the vectors that are named
        self._donors: tuple[PeerId, ...] = ()  # who gave the state, until others have named the same
        self._num_agreed = 0  # rounds in which others did
        # Of those that have voted since: who named none, for it was given its own, and whether others named the same.
        self._nameless: frozenset[PeerId] = frozenset()
        self._agree: dict[PeerId, bool] = {}
        self._told: frozenset[PeerId] = frozenset()  # who differs

    def came_from(self, donors: tuple[PeerId, ...]) -> None:
        """Note that the vectors were given: what others were called says nothing of them."""
        self._of, self._name, self._donors, self._num_agreed = None, None, donors, 0
        self._nameless, self._agree = frozenset(), {}

    @property
    def is_sure(self) -> bool:
        """Whether this peer knows its state by more than the word of who gave it."""
        return not self._donors

    async def find(self) -> tuple[Digest, Digest] | None:
        """Return the manifest that the present vectors were made by, and what they are called; None: nobody asks."""
        head = self._replica.head
        if head is None or not self._replica.charter.is_recorded:
            return None
        of = digest_of(head)
        if self._of != of or self._name is None:
            has_moved = head.has_result or rewinds.decided(head) is not None
            is_same = self._name is not None and head.previous == self._of and not has_moved
            if not is_same:
                self.index = await listed(self._context.compute, self._replica)
                self._name = digest_of(self.index)
            self._of = of
        assert self._name is not None
        return of, self._name

    def contradiction(self, manifest: Manifest, votes: Mapping[PeerId, Accept]) -> tuple[PeerId, ...] | None:
        """Return who gave this peer its state, if most say that it is false; None: they do not.

        Args:
            manifest: that was decided; this peer's vectors are those before it.
            votes: for it.
        """
        if self._of != manifest.previous or self._replica.head is None:
            return None
        me = self._context.node.peer
        names = {peer: Digest(vote.state) for peer, vote in votes.items() if vote.state is not UNSET}
        others = frozenset(peer for peer, name in names.items() if peer != me and name != self._name)
        if self._is_contradicted(votes, names):
            self._context.emit(StateContradicted(round=manifest.round, donors=self._donors))
            return self._donors
        self._num_agreed = 0 if others else self._num_agreed + bool(names.keys() - {me})
        num_alike = sum(name == self._name for name in names.values())
        if 2 * num_alike > len(self._replica.head.members) or self._num_agreed >= ENOUGH:
            self._donors = ()
        if others != self._told:
            self._tell(manifest.round, others)
        return None

    def _is_contradicted(self, votes: Mapping[PeerId, Accept], names: Mapping[PeerId, Digest]) -> bool:
        """Return whether most members say that this peer's state is false.

        Of who was given it, most of those who name one: where most are new, few do. Who has not been heard since counts
        with those who agree, for whoever tells of a round can leave votes out; of two members one decides a round.
        """
        assert self._replica.head is not None
        members = set(self._replica.head.members)
        self._nameless = (self._nameless | votes.keys()) - names.keys()
        self._agree |= {peer: name == self._name for peer, name in names.items()}
        if self.is_sure or len(members) <= 2:
            num = len(members) if self.is_sure else len(names)
            most = next((name for name, count in Counter(names.values()).items() if 2 * count > num), self._name)
            return most != self._name
        num_against = sum(not self._agree.get(peer, True) for peer in members)
        return 2 * num_against > len(members - self._nameless)

    def _tell(self, round: Round, others: frozenset[PeerId]) -> None:
        self._told = others
        if others:
            self._context.emit(StatesDiffer(round=round, members=tuple(sorted(others))))


async def listed(compute: Compute, replica: Replica) -> StateIndex:
    """Return the index of a replica's vectors, which nobody changes meanwhile."""
    vectors, digests = replica.vectors(), dict[str, tuple[Digest, ...]]()
    for name, vector in sorted(vectors.items()):
        if isinstance(vector, SpreadVector):  # each rank hashes its own
            digests[name] = await compute.serve(lambda vector=vector: chunk_digests(vector))  # type: ignore[misc]
        else:
            digests[name] = tuple(await hashed_in_turns(compute, chunks(vector)))
    return index_of(vectors, digests)


async def hashed_in_turns(compute: Compute, pieces: Sequence[Buffer]) -> list[Digest]:
    """Return the digests of pieces, some at a time: rounds have their turns in between."""
    found = list[Digest]()
    for start in range(0, len(pieces), HASHED_AT_ONCE):
        some = pieces[start : start + HASHED_AT_ONCE]
        found += await compute.serve(lambda some=some: [digest(piece) for piece in some])  # type: ignore[misc]
    return found
