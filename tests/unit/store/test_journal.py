"""What is decided between checkpoints, on disk: read back whole or not at all."""

from pathlib import Path

import pytest

from unit.peer.snapshots import DIGEST, manifest
from weft.errors import DiskFull
from weft.ids import Attempt, Round
from weft.store.journal import Journal
from weft.store.pool import Pool
from weft.sync.records.messages import Certificate
from weft.wire import digest


def certificate(number: int) -> Certificate:
    return Certificate(attempt=Attempt(0), manifest=manifest(number), votes=(), farewells=())


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


def test_what_was_written_is_read_in_order_by_a_process_after_it(journal: Journal, tmp_path: Path) -> None:
    for number in (2, 10, 9):
        journal.decide(certificate(number))
    journal.keep(Round(9), digest(b"merged"), memoryview(b"merged"))
    again = Journal(tmp_path / "journal")
    assert [each.manifest.round for each in again.rounds()] == [2, 9, 10]
    assert again.result(Round(9), digest(b"merged")) == b"merged"
    assert again.result(Round(8), digest(b"merged")) is None
    assert again.result(Round(9), DIGEST) is None


def test_what_is_damaged_is_not_believed_nor_what_follows_it(journal: Journal, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        journal.decide(certificate(number))
    journal.keep(Round(1), digest(b"merged"), b"merged")
    (tmp_path / "journal" / f"1-{digest(b'merged')}").write_bytes(b"merger")
    (tmp_path / "journal" / "2.bin").write_bytes(b"\x00")
    assert [each.manifest.round for each in journal.rounds()] == [1]
    assert journal.result(Round(1), digest(b"merged")) is None


def test_a_checkpoint_makes_what_is_before_it_superfluous(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "notes.txt").write_text("somebody's own")
    for number in (1, 2, 3):
        journal.decide(certificate(number))
        journal.keep(Round(number), digest(bytes(number)), bytes(number))
    journal.forget(Round(2))
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        f"3-{digest(bytes(3))}",
        "3.bin",
        "notes.txt",
    ]
    assert journal.nbytes == 3 + (tmp_path / "journal" / "3.bin").stat().st_size


def test_a_folder_that_cannot_be_written_is_told_of_once_until_a_checkpoint(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("in the way")
    journal.decide(certificate(1))
    journal.keep(Round(2), DIGEST, b"merged")
    assert "are not kept" in (journal.take_failure() or "")
    assert journal.take_failure() is None
    (tmp_path / "journal").unlink()
    journal.decide(certificate(3))
    assert list(journal.rounds()) == []
    journal.forget(Round(3))
    journal.decide(certificate(4))
    assert [each.manifest.round for each in journal.rounds()] == [4]


def test_who_wants_no_checkpoints_gets_no_journal(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", is_on=False).decide(certificate(1))
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_is_read_though_the_disk_has_no_room_to_read_it_into(journal: Journal, tmp_path: Path) -> None:
    class Full(Pool):
        def block(self, nbytes: int) -> memoryview:
            raise DiskFull(f"no room for {nbytes} bytes")

    journal.keep(Round(1), digest(b"abc"), b"abc")
    again = Journal(tmp_path / "journal", memory=Full(0))
    assert again.result(Round(1), digest(b"abc")) == b"abc"
