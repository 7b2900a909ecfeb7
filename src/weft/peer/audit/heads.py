"""What a peer knows of the states that training steps begin at: the newest manifests, what held after each, and the
digests of the outer parameters then."""

from dataclasses import dataclass

from weft.ids import Digest, PeerId, Round
from weft.store.index import StateIndex, VectorIndex
from weft.sync.merge.method import OUTER
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.wire import digest_of

MAX_KEPT = 64  # rounds: more than a work may span


@dataclass(frozen=True)
class Head:
    manifest: Manifest
    charter: Charter
    outer: VectorIndex


class Heads:
    def __init__(self) -> None:
        self._kept: dict[Digest, Head] = {}  # oldest first
        self._counted: dict[Digest, Round] = {}  # works, and in which of these rounds

    def note(self, manifest: Manifest, charter: Charter, state: StateIndex) -> None:
        """Note that the replicated vectors after a manifest are those of an index."""
        outer = next(vector for vector in state.vectors if vector.name == OUTER)
        if (name := digest_of(manifest)) in self._kept:
            return
        self._kept[name] = Head(manifest, charter, outer)
        self._counted |= {Digest(each.work): manifest.round for each in manifest.contributions if each.work}
        for forgotten in list(self._kept)[:-MAX_KEPT]:
            left = self._kept.pop(forgotten).manifest
            for each in left.contributions:
                self._counted.pop(Digest(each.work or ""), None)

    def forget(self) -> None:
        """Forget all: they were those of a state that was false."""
        self._kept.clear()
        self._counted.clear()

    def known(self, manifest: Digest) -> Head | None:
        return self._kept.get(manifest)

    def counted_in(self, work: Digest) -> Round | None:
        """Return in which round a work was counted; None: in none that is known here."""
        return self._counted.get(work)

    @property
    def oldest(self) -> Round | None:
        """Return the first round that is known here; None: none is."""
        return next((head.manifest.round for head in self._kept.values()), None)

    def has_voted(self, peer: PeerId) -> bool:
        """Return whether a peer was a member after one of the rounds that are known here."""
        return any(peer in head.manifest.members for head in self._kept.values())

    def electorate(self, manifest: Digest) -> tuple[PeerId, ...]:
        """Return who decided a manifest; nobody: that is not known here."""
        found = self._kept.get(manifest)
        before = None if found is None else self._kept.get(Digest(found.manifest.previous))
        return () if before is None else before.manifest.members
