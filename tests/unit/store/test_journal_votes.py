"""What a member promised is read back as written, whatever a crash left behind."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model.world import first_base
from weft.errors import CheckpointError, DiskFull
from weft.ids import Attempt, BranchId, Round
from weft.store.journal import MAX_LEFT, SLOT_NBYTES, Votes
from weft.sync.round.rules import Durable


def promise(attempt: int) -> Durable:
    return Durable(base=first_base(3), promised=Attempt(attempt))


def test_the_last_promise_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "peer" / "durable.bin"
    assert Votes(path).read() is None
    promises = Votes(path)
    for attempt in range(1, 6):
        promises.write(promise(attempt))
        assert Votes(path).read() == promise(attempt)
    promises.close()


def test_a_later_process_goes_on_where_the_earlier_ended(tmp_path: Path) -> None:
    path = tmp_path / "durable.bin"
    for attempt in range(1, 5):
        promises = Votes(path)
        promises.read()
        promises.write(promise(attempt))
        promises.close()
        assert Votes(path).read() == promise(attempt)


def of(branch: str, round: int) -> Durable:
    base = msgspec.structs.replace(first_base(3), branch=BranchId(branch * 64), round=Round(round))
    return Durable(base=base)


def test_a_round_voted_in_is_never_begun_again_on_any_branch(tmp_path: Path) -> None:
    path = tmp_path / "durable.bin"
    promises = Votes(path)
    assert promises.may_begin(of("a", 0).base)
    for branch, round in [("a", 4), ("a", 7), ("b", 8), ("c", 9), ("b", 12)]:
        assert promises.may_begin(of(branch, round).base)
        promises.write(of(branch, round))
    promises.close()
    again = Votes(path)
    again.read()
    for kept in (promises, again):
        for branch, last in [("a", 7), ("b", 12), ("c", 9), ("d", -1)]:
            allowed = [round for round in range(15) if kept.may_begin(of(branch, round).base)]
            assert allowed == list(range(last + 1, 15))


def test_branches_left_long_ago_are_forgotten(tmp_path: Path) -> None:
    promises = Votes(tmp_path / "durable.bin")
    names = [f"{number:064x}" for number in range(MAX_LEFT + 2)]
    for name in names:
        base = msgspec.structs.replace(first_base(3), branch=BranchId(name), round=Round(5))
        promises.write(Durable(base=base))
    promises.close()
    bases = [msgspec.structs.replace(first_base(3), branch=BranchId(name), round=Round(5)) for name in names]
    assert [promises.may_begin(base) for base in bases] == [True] + [False] * (MAX_LEFT + 1)


@pytest.mark.parametrize("num_written", range(0, 400, 7))
def test_a_write_cut_short_leaves_the_one_before(tmp_path: Path, num_written: int) -> None:
    path = tmp_path / "durable.bin"
    promises = Votes(path)
    promises.write(promise(1))
    promises.write(promise(2))
    before = path.read_bytes()
    promises.write(promise(3))
    after = path.read_bytes()
    promises.close()
    start = next(place for place in range(len(before)) if before[place] != after[place]) // SLOT_NBYTES * SLOT_NBYTES
    torn = before[:start] + after[start : start + num_written] + before[start + num_written :]
    path.write_bytes(torn)
    assert Votes(path).read() in (promise(2), promise(3))
    assert Votes(path).read() == promise(3 if torn == after else 2)


def test_a_record_larger_than_a_slot_makes_the_file_larger(tmp_path: Path) -> None:
    path = tmp_path / "durable.bin"
    base = first_base(3)
    large = Durable(base=msgspec.structs.replace(base, electorate=base.electorate * 500), promised=Attempt(7))
    promises = Votes(path)
    promises.write(promise(1))
    promises.write(large)
    assert Votes(path).read() == large
    promises.write(promise(8))
    assert Votes(path).read() == promise(8)
    promises.close()
    assert path.stat().st_size > 2 * SLOT_NBYTES


@pytest.mark.parametrize("damage", [b"", b"short", bytes(2 * SLOT_NBYTES)])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "durable.bin"
    path.write_bytes(damage)
    with pytest.raises(CheckpointError, match="damaged"):
        Votes(path).read()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """For the file that is there (write), and for one that is begun anew after a restart (fsync)."""
    promises = Votes(tmp_path / "durable.bin")
    promises.write(promise(1))
    if call == "fsync":
        promises.close()

    def refuse(*_given: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(DiskFull, match=r"cannot write .*durable\.bin: no room .* Free some and start again"):
        promises.write(promise(2))
    monkeypatch.undo()
    assert Votes(tmp_path / "durable.bin").read() == promise(1)
    promises.close()
