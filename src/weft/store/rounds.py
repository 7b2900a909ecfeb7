"""The decided rounds of one run on this machine, by number: what `weft ledger` looks up. One SQLite file.

    header      of every round, 168 bytes: of those before this peer came, from others
    manifest    of every round that this peer was there for
    link        certificates of rounds that changed who is a member, and of the newest

A round of another branch takes the place of the one that stood there, and all after it go.

Failure:
- the disk is full or the file is damaged: `DataError`. Nothing depends on it but what is looked up here.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET

from weft.errors import DataError
from weft.ledger.header import HEADER_NBYTES, unpack
from weft.ledger.tree import Tree, root_of_tops
from weft.sync.records.messages import GroupRecord, Manifest, header_of
from weft.sync.records.proof import MAX_PROOF_NBYTES, Link, is_link_needed
from weft.wire import Record, decode, encode

_TABLES = """
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, header BLOB NOT NULL, manifest BLOB, link BLOB, groups BLOB,
    is_kept INTEGER NOT NULL DEFAULT 0
)
"""
_BUSY_S = 10.0

T = TypeVar("T")


class _Groups(Record, frozen=True, kw_only=True):
    records: tuple[GroupRecord, ...]


def is_history(head: Manifest, tree: Tree) -> bool:
    """Return whether a tree begins with the headers of all rounds before `head`."""
    if head.entry is UNSET or len(tree) < head.round:
        return False
    return tree.root(head.round) == root_of_tops(head.round, head.entry.history)


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

    def put(self, manifest: Manifest, link: Link | None, groups: Iterable[GroupRecord] = ()) -> None:
        """Keep a decided round, the newest.

        Args:
            link: what shows that its members decided it; None: it is not known here.
            groups: the lists of those groups that it counts, as far as they are known.

        Raises:
            DataError: it cannot be written.
        """
        if manifest.entry is UNSET:
            return
        header = header_of(manifest, manifest.entry).pack()
        is_kept = is_link_needed(manifest)
        with self._open(can_make=True) as file:
            found = file.execute("SELECT header FROM rounds WHERE round = ?", (manifest.round,)).fetchone()
            if found == (header,) and link is None:
                return  # as an earlier process knew it
            file.execute("DELETE FROM rounds WHERE round >= ?", (manifest.round,))
            file.execute("UPDATE rounds SET link = NULL WHERE NOT is_kept AND link IS NOT NULL")
            file.execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?)",
                (
                    manifest.round,
                    header,
                    encode(manifest),
                    None if link is None else encode(link),
                    encode(_Groups(records=tuple(groups))),
                    is_kept,
                ),
            )

    def fill(self, headers: bytes, links: tuple[Link, ...], head: Manifest) -> bool:
        """Keep what others told of rounds before `head`, if these are the headers that its history holds.

        Args:
            headers: of all rounds before `head`, from the run's first.
        """
        tree = Tree(headers[at : at + HEADER_NBYTES] for at in range(0, len(headers), HEADER_NBYTES))
        if not is_history(head, tree):
            return False
        with self._open(can_make=True) as file:
            for at in range(0, len(headers), HEADER_NBYTES):
                header = headers[at : at + HEADER_NBYTES]
                file.execute(
                    "INSERT INTO rounds (round, header) VALUES (?, ?) ON CONFLICT (round) DO UPDATE SET "
                    "header = excluded.header, manifest = NULL, link = NULL WHERE header != excluded.header",
                    (unpack(header).round, header),
                )
            for link in links:
                manifest = link.certificate.manifest
                file.execute(
                    "UPDATE rounds SET link = ?, manifest = ?, is_kept = 1 WHERE round = ? AND link IS NULL",
                    (encode(link), encode(manifest), manifest.round),
                )
        return True

    def headers(self, start: int, most: int) -> bytes:
        """Return the headers of rounds from `start` on, as far as none is missing."""
        rows = self._all("SELECT round, header FROM rounds WHERE round >= ? ORDER BY round LIMIT ?", start, most)
        return b"".join(header for number, (round, header) in enumerate(rows, start) if number == round)

    def manifest(self, round: int) -> Manifest | None:
        """Return a round's manifest; None: this peer was not there."""
        return self._one(Manifest, "SELECT manifest FROM rounds WHERE round = ?", round)

    def manifests(self) -> Iterator[Manifest]:
        """Yield those that are here, ascending."""
        for (data,) in self._all("SELECT manifest FROM rounds WHERE manifest IS NOT NULL ORDER BY round"):
            yield decode(data, Manifest)

    def groups(self, round: int) -> tuple[GroupRecord, ...]:
        """Return the lists that are here of groups that a round counts."""
        found = self._one(_Groups, "SELECT groups FROM rounds WHERE round = ?", round)
        return () if found is None else found.records

    def links(self, after: int = -1, most: int = -1) -> list[Link]:
        """Return the links that are here of rounds after one, ascending.

        Args:
            most: of them; -1: all.
        """
        rows = self._all(
            "SELECT link FROM rounds WHERE round > ? AND link IS NOT NULL ORDER BY round LIMIT ?", after, most
        )
        return [decode(data, Link, max_nbytes=MAX_PROOF_NBYTES) for (data,) in rows]

    def newest(self) -> int | None:
        """Return the number of the last round; None: there is none."""
        ((found,),) = self._all("SELECT max(round) FROM rounds")
        return None if found is None else int(found)

    def tree(self) -> Tree:
        """Return the tree over the headers from the run's first round on, as far as none is missing."""
        rows = self._all("SELECT round, header FROM rounds ORDER BY round")
        return Tree(header for number, (round, header) in enumerate(rows) if number == round)

    # --- the file ---

    def _one(self, kind: type[T], query: str, round: int) -> T | None:
        rows = self._all(query, round)
        return decode(rows[0][0], kind, max_nbytes=MAX_PROOF_NBYTES) if rows and rows[0][0] is not None else None

    def _all(self, query: str, *values: Any) -> list[Any]:
        with self._open(can_make=False) as file:
            return file.execute(query, values).fetchall()

    @contextmanager
    def _open(self, *, can_make: bool) -> Iterator[sqlite3.Connection]:
        def said(error: Exception) -> DataError:
            return DataError(f"the rounds that this run records, {self._path}: {error}")

        try:
            if can_make:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                target = self._path.as_uri()
            else:
                target = f"{self._path.as_uri()}?mode=ro"
            with closing(sqlite3.connect(target, uri=True, timeout=_BUSY_S)) as file, file:
                if can_make:
                    file.execute("PRAGMA journal_mode = WAL")
                    file.execute("PRAGMA synchronous = NORMAL")  # what a power cut takes, others tell again
                    file.execute(_TABLES)
                yield file
        except (sqlite3.Error, OSError) as error:
            raise said(error) from error
