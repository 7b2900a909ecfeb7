"""What a peer knows of the states that training steps begin at: the newest manifests, what held after each, and the
digests of the outer parameters then. The last of them are on disk: who is started again can still show what it did."""

from pathlib import Path

from msgspec import UNSET, UnsetType

from weft.errors import DataError, DiskFull
from weft.events import Emit, Notice
from weft.ids import Digest, PeerId, Round
from weft.store.home import RecordFile
from weft.sync.merge.method import OUTER
from weft.sync.records import quarantine
from weft.sync.records.charter import Charter
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import Manifest, own_work, works_in
from weft.wire import Record, digest_of

MAX_KEPT = 256  # rounds: far more than a work may span
MAX_ON_DISK = 32


class Head(Record, frozen=True, kw_only=True):
    manifest: Manifest
    charter: Charter
    outer: VectorIndex
    memory: tuple[VectorIndex, ...] | UnsetType = UNSET  # the other replicated vectors; unset: they are not known

    @property
    def index(self) -> StateIndex | None:
        """What the state after the manifest is called by; None: it is not known."""
        if self.memory is UNSET:
            return None
        return StateIndex(vectors=tuple(sorted((self.outer, *self.memory), key=lambda each: each.name)))


class _Newest(Record, frozen=True, kw_only=True):
    heads: tuple[Head, ...] = ()


class Heads:
    """
    Args:
        path: of the file of the newest.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        self._emit = emit
        self._file = RecordFile[_Newest](path, _Newest, MAX_INDEX_NBYTES, _Newest(), is_synced=False)
        self._kept = dict[Digest, Head]()  # oldest first
        self._counted = dict[Digest, Round]()  # works, and in which of these rounds
        self._held = dict[Digest, Round]()  # works that have waited, and in which of these rounds
        self._noted_at = dict[int, float]()
        for head in self._file.read().heads:
            self._keep(head)

    def note(self, manifest: Manifest, charter: Charter, state: StateIndex, now: float) -> None:
        """Note that the replicated vectors after a manifest are those of an index."""
        self._noted_at.setdefault(manifest.round, now)
        if digest_of(manifest) in self._kept:
            return
        outer = state.vector(OUTER)
        self._keep(Head(manifest=manifest, charter=charter, outer=outer, memory=state.without(OUTER)))
        for forgotten_round in list(self._noted_at)[:-MAX_KEPT]:
            del self._noted_at[forgotten_round]
        for forgotten in list(self._kept)[:-MAX_KEPT]:
            manifest_before = self._kept.pop(forgotten).manifest
            for _, work in works_in(manifest_before):
                for named in (self._counted, self._held):
                    if named.get(work) == manifest_before.round:
                        del named[work]
        try:
            self._file.keep(_Newest(heads=tuple(self._kept.values())[-MAX_ON_DISK:]))
        except (DiskFull, DataError) as error:
            self._emit(Notice(text=f"started again, this peer could not show auditors what it did: {error}"))

    def _keep(self, head: Head) -> None:
        self._kept[digest_of(head.manifest)] = head
        for each in head.manifest.contributions:
            if each.work:
                self._counted.setdefault(Digest(each.work), head.manifest.round)
        for one in head.manifest.held or ():
            self._held[Digest(one.work)] = head.manifest.round

    def forget(self) -> None:
        """Forget all: they were those of a state that was false."""
        self._kept.clear()
        self._counted.clear()
        self._held.clear()

    def newest(self, num: int) -> list[Head]:
        """Return the last so many, oldest first."""
        return list(self._kept.values())[-num:]

    def known(self, manifest: Digest) -> Head | None:
        return self._kept.get(manifest)

    def at(self, head: Manifest, round: Round) -> Head | None:
        """Return the state after a round, of those that `head` stands on; None: it is not known here."""
        found = self._kept.get(digest_of(head))
        while head.round > round and (found := self._kept.get(Digest(head.previous))) is not None:
            head = found.manifest
        return found if head.round == round else None

    def counted_in(self, work: Digest) -> Round | None:
        """Return in which round a work was counted; None: in none that is known here."""
        return self._counted.get(work)

    def held_in(self, work: Digest) -> Round | None:
        """Return in which round a work began to wait; None: in none that is known here."""
        return self._held.get(work)

    def is_recent(self, round: Round, newest: Round, num_rounds: int, num_s: float, now: float) -> bool:
        """Return whether fewer rounds have passed since, or less time: how long ago a round was that this process has
        not seen is not known.

        Args:
            newest: the round that was decided last.
        """
        noted_at = self._noted_at.get(round)
        return newest - round <= num_rounds or (noted_at is not None and now - noted_at <= num_s)

    def last_counted(self, peer: PeerId, manifest: Digest) -> Round | None:
        """Return the last round before a manifest, of those that it stands on, that has counted a peer's own work, as
        far as is known here."""
        found = self._before(manifest)
        while found is not None and own_work(found.manifest, peer) is None:
            found = self._before(digest_of(found.manifest))
        return None if found is None else found.manifest.round

    @property
    def oldest(self) -> Round | None:
        """Return the first round from which on all are known here up to the newest; None: none is."""
        newest = next(reversed(self._kept), None)
        return None if newest is None else self.until(newest)[0].manifest.round

    def until(self, manifest: Digest) -> list[Head]:
        """Return what is known of the rounds up to a manifest, without a gap: the first of them first."""
        found, name = list[Head](), manifest
        while (head := self._kept.get(name)) is not None:
            found.append(head)
            name = Digest(head.manifest.previous)
        return found[::-1]

    def has_voted(self, peer: PeerId) -> bool:
        """Return whether a peer was a member after one of the rounds that are known here."""
        return any(peer in head.manifest.members for head in self._kept.values())

    def electorate(self, manifest: Digest) -> tuple[PeerId, ...]:
        """Return who decided a manifest; nobody: that is not known here."""
        before = self._before(manifest)
        return () if before is None else before.manifest.members

    def judges(self, manifest: Digest, peer: PeerId) -> tuple[PeerId, ...]:
        """Return who may be drawn to look at what a manifest names of a member; nobody: that is not known here."""
        before = self._before(manifest)
        return () if before is None else quarantine.judges(before.charter, before.manifest.members, peer)

    def was_cleared(self, manifest: Digest, work: Digest) -> bool:
        """Return whether others had found nothing wrong with a work of a newcomer, before a manifest that counts it."""
        before = self._before(manifest)
        return before is not None and any(
            each.work == work and each.is_cleared is True for each in before.charter.quarantined or ()
        )

    def _before(self, manifest: Digest) -> Head | None:
        found = self._kept.get(manifest)
        return None if found is None else self._kept.get(Digest(found.manifest.previous))
