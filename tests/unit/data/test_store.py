"""Shards: written whole or not at all, checked before use, refused when their bytes are not those of their name."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import wire
from weft.data import store as store_module
from weft.data.store import DataIndex, ShardInfo, ShardStore, dtype_for, write_atomically
from weft.errors import DataError, DiskFull, PayloadError, WireError
from weft.ids import Digest

TOKENS = np.arange(1000, dtype="<u2") % 200
DATA = TOKENS.tobytes()


def info_of(data: bytes, **changes: Any) -> ShardInfo:
    return ShardInfo(**{"digest": wire.digest(data), "num_tokens": len(data) // 2, "nbytes": len(data)} | changes)


def index_of(*shards: bytes, **changes: Any) -> DataIndex:
    fields: dict[str, Any] = {
        "dtype": "uint16",
        "train": tuple(map(info_of, shards)),
        "heldout": (),
        "train_text_nbytes": sum(map(len, shards)) // 2,
        "heldout_text_nbytes": 0,
        "tokenizer": wire.digest(b"tokenizer"),
        "vocab_size": 257,
    }
    return DataIndex(**fields | changes)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_shard_is_a_read_only_file_named_by_its_digest(tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "shards")
    digest = store.put(DATA)
    assert files(store.folder) == [digest] == [wire.digest(DATA)]
    assert stat.S_IMODE((store.folder / digest).stat().st_mode) == 0o444
    assert store.read(digest) == DATA
    assert store.put(DATA) == digest
    opened = store.open(index_of(DATA), info_of(DATA))
    assert type(opened) is np.ndarray
    assert np.array_equal(opened, TOKENS)
    with pytest.raises(ValueError, match="read-only"):
        opened[0] = 1


def test_a_file_that_will_be_replaced_is_writable_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "addresses"
    for text in (b"one", b"two"):
        write_atomically(path, [text])
        assert path.read_bytes() == text
        assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_missing_shards_are_listed_once(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    other, third = bytes(20), bytes(30)
    index = index_of(DATA, other, DATA, heldout=(info_of(third), info_of(other)))
    assert store.missing(index) == (info_of(DATA), info_of(other), info_of(third))
    store.put(other)
    assert store.missing(index) == (info_of(DATA), info_of(third))
    assert store.read(wire.digest(DATA)) is None
    with pytest.raises(DataError, match="is missing"):
        store.open(index, info_of(DATA))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "odd"])
def test_a_corrupt_shard_is_named_and_removed_so_that_it_can_be_fetched_again(tmp_path: Path, damage: str) -> None:
    flipped = bytearray(DATA)
    flipped[500] ^= 1
    changed = {"flip": bytes(flipped), "cut": DATA[:-2], "empty": b"", "odd": DATA[:-1]}[damage]
    for use in (lambda store: store.open(index_of(DATA), info_of(DATA)), lambda store: store.read(wire.digest(DATA))):
        store = ShardStore(tmp_path)
        path = tmp_path / store.put(DATA)
        path.chmod(0o644)
        path.write_bytes(changed)
        with pytest.raises(DataError, match=f"shard .*{path.name} does not hold the bytes that its name says"):
            use(store)
        assert store.missing(index_of(DATA)) == (info_of(DATA),)


def test_all_who_fetch_a_shard_read_the_same_bytes_and_they_are_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardStore(tmp_path)
    digest, num_checked = store.put(DATA), 0

    def counted(data: wire.Buffer) -> Digest:
        nonlocal num_checked
        num_checked += 1
        return true_digest(data)

    true_digest = wire.digest
    monkeypatch.setattr(wire, "digest", counted)
    reads = [store.read(digest) for _ in range(50)]
    assert len({id(read.obj) for read in reads if read is not None}) == 1
    del reads
    assert store.read(digest) == DATA  # nobody had it any more, and it need not be checked again
    assert num_checked == 1


def test_putting_a_shard_over_a_corrupt_one_repairs_it(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    path = tmp_path / store.put(DATA)
    path.chmod(0o644)
    path.write_bytes(b"xx")
    store.put(DATA)
    assert store.read(Digest(path.name)) == DATA


def test_a_fetched_shard_is_kept(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    store.add(index_of(DATA), wire.digest(DATA), bytearray(DATA))
    assert np.array_equal(store.open(index_of(DATA), info_of(DATA)), TOKENS)


@pytest.mark.parametrize("sent", [b"", DATA[:-2], DATA + b"\0\0", DATA[:-1] + b"\1", bytes(len(DATA))])
def test_other_bytes_than_those_asked_for_are_the_senders_fault(tmp_path: Path, sent: bytes) -> None:
    store = ShardStore(tmp_path)
    with pytest.raises(PayloadError, match="are not its bytes"):
        store.add(index_of(DATA), wire.digest(DATA), sent)
    assert files(tmp_path) == []


def test_a_shard_nobody_asked_for_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(PayloadError, match="not one of this run's"):
        ShardStore(tmp_path).add(index_of(DATA), wire.digest(b"other"), b"other")
    assert files(tmp_path) == []


def test_ids_beyond_the_vocabulary_are_refused_however_they_came(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    bad = np.array([1, 257], dtype="<u2").tobytes()
    with pytest.raises(DataError, match="token id 257, but the run's vocabulary has 257"):
        store.add(index_of(bad), wire.digest(bad), bad)
    assert files(tmp_path) == []
    store.put(bad)
    with pytest.raises(DataError, match="token id 257"):
        store.open(index_of(bad), info_of(bad))
    assert np.array_equal(store.open(index_of(bad, vocab_size=258), info_of(bad)), [1, 257])


@pytest.mark.parametrize("name", ["../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", ""])
def test_a_name_that_is_no_digest_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="is no digest"):
        ShardStore(tmp_path).read(Digest(name))
    record = wire.encode(index_of(DATA)).replace(wire.digest(DATA).encode(), b"/" * 64)
    with pytest.raises(WireError):
        wire.decode(record, DataIndex)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def no_room(handle: int) -> None:
        raise OSError(number, "no room")

    store = ShardStore(tmp_path / "shards")  # as in a home
    monkeypatch.setattr(store_module.os, "fsync", no_room)
    with pytest.raises(DiskFull, match=r"no room on the disk of .*shards for the text as tokens"):
        store.put(DATA)
    assert files(tmp_path / "shards") == []


def test_a_crash_before_the_rename_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(source: str, target: Path) -> None:
        assert Path(source).read_bytes() == DATA  # complete before it gets its name
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        ShardStore(tmp_path).put(DATA)
    assert files(tmp_path) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot write"):
        ShardStore(tmp_path).put(DATA)


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        ShardStore(tmp_path / "shards").put(DATA)


def test_the_index_is_a_canonical_record() -> None:
    index = index_of(DATA, bytes(20), heldout=(info_of(bytes(6)),))
    assert wire.decode(wire.encode(index), DataIndex) == index
    assert (index.num_tokens("train"), index.num_tokens("heldout")) == (1010, 3)


def test_loss_per_token_becomes_loss_per_byte() -> None:
    index = index_of(DATA, heldout=(info_of(bytes(200)),), heldout_text_nbytes=400)
    assert index.nats_per_byte(2.0) == pytest.approx(2.0 * 100 / 400)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 999},
        {"nbytes": 1999},
        {"num_tokens": 0, "nbytes": 0},
        {"num_tokens": -1, "nbytes": -2},
        {"num_tokens": 1 << 40, "nbytes": 1 << 41},
        {"digest": "x" * 64},
    ],
)
def test_an_index_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    good = index_of(DATA)
    raw = wire.msgspec.to_builtins(good)
    raw["train"] = ({**raw["train"][0], **changes},)
    with pytest.raises(WireError):
        wire.decode(wire.msgspec.msgpack.encode(raw), DataIndex)


@pytest.mark.parametrize(
    "changes", [{"dtype": "uint8"}, {"vocab_size": 65537}, {"vocab_size": 0}, {"tokenizer": "/tmp"}]
)
def test_an_index_with_impossible_fields_is_refused(changes: dict[str, Any]) -> None:
    raw = wire.msgspec.to_builtins(index_of(DATA)) | changes
    with pytest.raises(WireError):
        wire.decode(wire.msgspec.msgpack.encode(raw), DataIndex)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_index_or_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(data, DataIndex)


def test_the_narrowest_width_is_chosen() -> None:
    assert [dtype_for(size) for size in (257, 65536, 65537, 250_000)] == ["uint16", "uint16", "uint32", "uint32"]


def test_wide_ids_are_read_as_written(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    data = np.array([0, 70_000, 99_999], dtype="<u4").tobytes()
    info = ShardInfo(digest=store.put(data), num_tokens=3, nbytes=12)
    index = index_of(dtype="uint32", vocab_size=100_000, train=(info,))
    assert store.open(index, info).tolist() == [0, 70_000, 99_999]
