"""The decided rounds of one run on this machine, by number: what `weft ledger` looks up. One SQLite file.

    opening      the run's first manifest, signed by who began it
    header       of every round, 136 bytes: of those before this peer came, from others
    manifest     of rounds that this peer was there for, the newest of them
    milestone    certificates of rounds that changed who is a member, and of the newest

A round of another branch takes the place of the one that stood there, and all after it go.

Failure:
- the disk is full or the file is damaged: `DataError`. Nothing depends on it but what is looked up here.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET

from weft.errors import DataError, WireError
from weft.ids import RunId
from weft.ledger.header import HEADER_NBYTES, unpack
from weft.ledger.tree import Tree, root_of_tops
from weft.sync.proof import electorate_of, followed, is_signed, opened
from weft.sync.records.messages import GroupRecord, Manifest, header_of
from weft.sync.records.proof import MAX_PROOF_NBYTES, Milestone, changes_members, is_opening
from weft.wire import Record, Signed, decode, digest, digest_of, encode

if TYPE_CHECKING:
    import sqlite3

MAX_MANIFESTS = 10_000  # the newest: of up to 20 kB each
_TABLES = (
    "CREATE TABLE IF NOT EXISTS opening (only INTEGER PRIMARY KEY CHECK (only = 0), signed BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, header BLOB NOT NULL, manifest BLOB, "
    "milestone BLOB, groups BLOB, is_kept INTEGER NOT NULL DEFAULT 0)",
)
_SYNCHRONOUS = "NORMAL"  # what a power cut takes, others tell again
_BUSY_S = 10.0

T = TypeVar("T")


class _Groups(Record, frozen=True, kw_only=True):
    records: tuple[GroupRecord, ...]


class RoundsFile:
    """
    Args:
        path: of the file, made when something is put.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def is_there(self) -> bool:
        return self._path.exists()

    # --- what this peer was there for ---

    def begin(self, opening: Signed) -> None:
        """Keep how the run began.

        Raises:
            DataError: it cannot be written.
        """
        with self._open(can_make=True) as file:
            file.execute("INSERT INTO opening VALUES (0, ?) ON CONFLICT DO NOTHING", (encode(opening),))

    def put(self, manifest: Manifest, milestone: Milestone | None, groups: Iterable[GroupRecord] = ()) -> None:
        """Keep a decided round, the newest.

        Args:
            milestone: what shows that its members decided it; None: it is not known here.
            groups: the lists of those groups that it counts, as far as they are known.

        Raises:
            DataError: it cannot be written.
        """
        if manifest.entry is UNSET:
            return
        number, header = manifest.round, header_of(manifest, manifest.entry).pack()
        shown = None if milestone is None else encode(milestone)
        with self._open(can_make=True) as file:
            if _header_of(file, number) == header:  # as an earlier process knew it
                file.execute("UPDATE rounds SET milestone = ifnull(milestone, ?) WHERE round = ?", (shown, number))
                return
            if is_opening(manifest):  # of what was decided before it, the last shows the most
                file.execute("UPDATE rounds SET is_kept = 1 WHERE round < ? AND milestone IS NOT NULL", (number,))
            file.execute("DELETE FROM rounds WHERE round >= ?", (number,))
            if milestone is not None and not is_opening(manifest) and is_signed(milestone):  # else it shows less
                file.execute("UPDATE rounds SET milestone = NULL WHERE NOT is_kept AND milestone IS NOT NULL")
            file.execute("UPDATE rounds SET manifest = NULL, groups = NULL WHERE round = ?", (number - MAX_MANIFESTS,))
            listed = encode(_Groups(records=tuple(groups)))
            row = (number, header, encode(manifest), shown, listed, changes_members(manifest))
            file.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?)", row)

    # --- what others tell of the rounds before ---

    def fill(
        self, run: RunId, opening: Signed, headers: bytes, milestones: Sequence[Milestone], head: Manifest
    ) -> bool:
        """Keep what others told of rounds before `head`, which is here; False: it is not what led to `head`.

        Args:
            headers: of all rounds before `head`, from the run's first.
            milestones: of rounds up to `head`.

        Raises:
            DataError: it cannot be written.
        """
        told = [headers[at : at + HEADER_NBYTES] for at in range(0, len(headers), HEADER_NBYTES)]
        if head.entry is UNSET or len(told) != head.round or not is_past(head, Tree(told)):
            return False
        told.append(header_of(head, head.entry).pack())
        if unpack(told[0]).manifest != digest(opening.body) or not _lead_to(head, run, opening, milestones, told):
            return False
        with self._open(can_make=True) as file:
            if _header_of(file, head.round) != told[-1]:
                return False  # it was left for another branch meanwhile
            file.executemany(
                "INSERT INTO rounds (round, header) VALUES (?, ?) ON CONFLICT (round) DO UPDATE SET header = "
                "excluded.header, manifest = NULL, groups = NULL, milestone = NULL WHERE header != excluded.header",
                enumerate(told[:-1]),
            )
            file.executemany(
                "UPDATE rounds SET milestone = ifnull(milestone, ?), is_kept = 1 WHERE round = ?",
                ((encode(each), each.certificate.manifest.round) for each in milestones),
            )
            file.execute("INSERT OR REPLACE INTO opening VALUES (0, ?)", (encode(opening),))
        return True

    def is_whole(self, run: RunId, head: Manifest) -> bool:
        """Return whether all is here that leads to `head`."""
        if not self.is_there or (opening := self.opening()) is None or not is_past(head, self.tree()):
            return False
        manifest, begun = opened(run, opening), self.headers(0, 1)
        if not begun or unpack(begun).manifest != digest_of(manifest):
            return False
        members = set(manifest.members)
        for each in self.milestones():
            if each.certificate.manifest.round <= head.round and changes_members(each.certificate.manifest):
                manifest = each.certificate.manifest
                if electorate_of(manifest) != members:
                    return False
                members = set(manifest.members)
        if head.round and changes_members(head):
            return manifest == head
        return not head.round or members == electorate_of(head)

    # --- what is looked up ---

    def opening(self) -> Signed | None:
        """Return the run's first manifest, signed; None: it is not known yet."""
        rows = self._all("SELECT signed FROM opening")
        return decode(rows[0][0], Signed) if rows else None

    def headers(self, start: int, most: int) -> bytes:
        """Return the headers of rounds from `start` on, as far as none is missing."""
        rows = self._all("SELECT round, header FROM rounds WHERE round >= ? ORDER BY round LIMIT ?", start, most)
        return b"".join(header for number, (round, header) in enumerate(rows, start) if number == round)

    def tree(self) -> Tree:
        """Return the tree over the headers from the run's first round on, as far as none is missing."""
        rows = self._all("SELECT round, header FROM rounds ORDER BY round")
        return Tree(header for number, (round, header) in enumerate(rows) if number == round)

    def manifest(self, round: int) -> Manifest | None:
        """Return a round's manifest; None: this peer was not there, or that is long ago."""
        return self._one(Manifest, "SELECT manifest FROM rounds WHERE round = ?", round)

    def manifests(self) -> Iterator[Manifest]:
        """Yield those that are here, ascending."""
        for (data,) in self._all("SELECT manifest FROM rounds WHERE manifest IS NOT NULL ORDER BY round"):
            yield decode(data, Manifest)

    def groups(self, round: int) -> tuple[GroupRecord, ...]:
        """Return the lists that are here of groups that a round counts."""
        found = self._one(_Groups, "SELECT groups FROM rounds WHERE round = ?", round)
        return () if found is None else found.records

    def milestones(self, after: int = -1, most: int = -1) -> list[Milestone]:
        """Return those of rounds after one, ascending.

        Args:
            most: of them; -1: all.
        """
        rows = self._all(
            "SELECT milestone FROM rounds WHERE round > ? AND milestone IS NOT NULL ORDER BY round LIMIT ?", after, most
        )
        return [decode(data, Milestone, max_nbytes=MAX_PROOF_NBYTES) for (data,) in rows]

    def newest(self) -> int | None:
        """Return the number of the last round; None: there is none."""
        ((found,),) = self._all("SELECT max(round) FROM rounds")
        return None if found is None else int(found)

    def num(self) -> int:
        """Return how many rounds are known, some by their headers alone."""
        ((found,),) = self._all("SELECT count(*) FROM rounds")
        return int(found)

    # --- the file ---

    def _one(self, kind: type[T], query: str, round: int) -> T | None:
        rows = self._all(query, round)
        return decode(rows[0][0], kind, max_nbytes=MAX_PROOF_NBYTES) if rows and rows[0][0] is not None else None

    def _all(self, query: str, *values: Any) -> list[Any]:
        with self._open(can_make=False) as file:
            return file.execute(query, values).fetchall()

    @contextmanager
    def _open(self, *, can_make: bool) -> "Iterator[sqlite3.Connection]":
        import sqlite3  # here: a peer of another run needs none

        try:
            if can_make:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            target = f"{self._path.absolute().as_uri()}{'' if can_make else '?mode=ro'}"
            with closing(sqlite3.connect(target, uri=True, timeout=_BUSY_S)) as file:
                if can_make:
                    file.execute("PRAGMA journal_mode = WAL")
                    file.execute(f"PRAGMA synchronous = {_SYNCHRONOUS}")
                    for table in _TABLES:
                        file.execute(table)
                with file:
                    yield file
        except (sqlite3.Error, OSError) as error:
            raise DataError(f"the rounds that this run records, {self._path}: {error}.") from error


def is_past(head: Manifest, tree: Tree) -> bool:
    """Return whether a tree begins with the headers of all rounds before `head`."""
    if head.entry is UNSET or len(tree) < head.round:
        return False
    return tree.root(head.round) == root_of_tops(head.round, head.entry.past)


def _lead_to(
    head: Manifest, run: RunId, opening: Signed, milestones: Sequence[Milestone], headers: Sequence[bytes]
) -> bool:
    """Return whether milestones are of the rounds that headers are of, and the members after them vote for `head`."""
    manifests = [each.certificate.manifest for each in milestones]
    if any(each.round > head.round or not changes_members(each) for each in manifests):
        return False
    if any(unpack(headers[each.round]).manifest != digest_of(each) for each in manifests):
        return False
    try:
        found = followed(run, opening, milestones).last
    except WireError:
        return False
    return found == head or set(found.members) == electorate_of(head)


def _header_of(file: "sqlite3.Connection", round: int) -> bytes | None:
    found = file.execute("SELECT header FROM rounds WHERE round = ?", (round,)).fetchone()
    return None if found is None else bytes(found[0])
