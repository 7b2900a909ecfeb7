"""What a member promised is read back as written, whatever a crash left behind."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model.world import first_base
from weft.errors import CheckpointError, DiskFull
from weft.ids import Attempt
from weft.peer.promises import SLOT_NBYTES, Promises
from weft.sync.rules import Durable


def promise(attempt: int) -> Durable:
    return Durable(base=first_base(3), promised=Attempt(attempt))


def test_the_last_promise_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "peer" / "durable.bin"
    assert Promises(path).read() is None
    promises = Promises(path)
    for attempt in range(1, 6):
        promises.write(promise(attempt))
        assert Promises(path).read() == promise(attempt)
    promises.close()


def test_a_later_process_goes_on_where_the_earlier_ended(tmp_path: Path) -> None:
    path = tmp_path / "durable.bin"
    for attempt in range(1, 5):
        promises = Promises(path)
        promises.read()
        promises.write(promise(attempt))
        promises.close()
        assert Promises(path).read() == promise(attempt)


@pytest.mark.parametrize("num_written", range(0, 400, 7))
def test_a_write_cut_short_leaves_the_one_before(tmp_path: Path, num_written: int) -> None:
    path = tmp_path / "durable.bin"
    promises = Promises(path)
    promises.write(promise(1))
    promises.write(promise(2))
    before = path.read_bytes()
    promises.write(promise(3))
    after = path.read_bytes()
    promises.close()
    start = next(place for place in range(len(before)) if before[place] != after[place]) // SLOT_NBYTES * SLOT_NBYTES
    torn = before[:start] + after[start : start + num_written] + before[start + num_written :]
    path.write_bytes(torn)
    assert Promises(path).read() in (promise(2), promise(3))
    assert Promises(path).read() == promise(3 if torn == after else 2)


def test_a_record_larger_than_a_slot_makes_the_file_larger(tmp_path: Path) -> None:
    path = tmp_path / "durable.bin"
    base = first_base(3)
    large = Durable(base=msgspec.structs.replace(base, electorate=base.electorate * 500), promised=Attempt(7))
    promises = Promises(path)
    promises.write(promise(1))
    promises.write(large)
    assert Promises(path).read() == large
    promises.write(promise(8))
    assert Promises(path).read() == promise(8)
    promises.close()
    assert path.stat().st_size > 2 * SLOT_NBYTES


@pytest.mark.parametrize("damage", [b"", b"short", bytes(2 * SLOT_NBYTES)])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "durable.bin"
    path.write_bytes(damage)
    with pytest.raises(CheckpointError, match="damaged"):
        Promises(path).read()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """For the file that is there (write), and for one that is begun anew after a restart (fsync)."""
    promises = Promises(tmp_path / "durable.bin")
    promises.write(promise(1))
    if call == "fsync":
        promises.close()

    def refuse(*_given: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(DiskFull, match=r"cannot write .*durable\.bin: no room .* Free some and start again"):
        promises.write(promise(2))
    monkeypatch.undo()
    assert Promises(tmp_path / "durable.bin").read() == promise(1)
    promises.close()
