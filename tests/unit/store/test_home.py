"""The folders of one machine: nothing is read unchecked, and no name leads elsewhere."""

import stat
from pathlib import Path

import pytest

from weft import wire
from weft.errors import ConfigError, DataError
from weft.ids import Digest, PeerId, RunId
from weft.store.home import BlobStore, Home

DATA = bytes(range(256)) * 50
RUN, PEER = RunId("ab" * 32), PeerId("cd" * 32)


def test_a_blob_is_a_read_only_file_named_by_its_digest(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    digest = blobs.put(DATA)
    assert digest == wire.digest(DATA)
    assert [path.name for path in blobs.folder.iterdir()] == [digest]
    assert stat.S_IMODE((blobs.folder / digest).stat().st_mode) == 0o444
    assert blobs.read(digest, len(DATA)) == DATA
    view = blobs.open(digest)
    assert view is not None
    assert view == DATA
    assert view.readonly
    assert blobs.put(DATA) == digest


@pytest.mark.parametrize("data", [b"", b"x", bytearray(b"abc"), memoryview(b"abcdef")[2:]])
def test_any_buffer_can_be_a_blob(tmp_path: Path, data: wire.Buffer) -> None:
    digest = BlobStore(tmp_path).put(data)
    assert BlobStore(tmp_path).read(digest, 100) == bytes(data)


def test_a_blob_that_is_not_here_is_none(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "none")
    assert blobs.read(wire.digest(DATA), 100) is None
    assert blobs.open(wire.digest(DATA)) is None


def test_a_blob_beyond_its_bound_is_not_read(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digest = blobs.put(DATA)
    with pytest.raises(DataError, match=f"has {len(DATA)} bytes; at most {len(DATA) - 1}"):
        blobs.read(digest, len(DATA) - 1)


@pytest.mark.parametrize("changed", [b"", DATA[:-1], DATA + b"x", b"\xff" + DATA[1:]])
def test_a_corrupt_blob_is_named_and_removed(tmp_path: Path, changed: bytes) -> None:
    digest = BlobStore(tmp_path).put(DATA)
    (tmp_path / digest).chmod(0o644)
    (tmp_path / digest).write_bytes(changed)
    with pytest.raises(DataError, match=f"blob .*{digest} does not hold the bytes that its name says"):
        BlobStore(tmp_path).read(digest, 1 << 20)
    assert BlobStore(tmp_path).read(digest, 1 << 20) is None


def test_putting_a_blob_over_a_corrupt_one_repairs_it(tmp_path: Path) -> None:
    digest = BlobStore(tmp_path).put(DATA)
    (tmp_path / digest).chmod(0o644)
    (tmp_path / digest).write_bytes(b"xx")
    BlobStore(tmp_path).put(DATA)
    assert BlobStore(tmp_path).read(digest, 1 << 20) == DATA


@pytest.mark.parametrize("name", ["", "..", "../" * 21 + "x", "AB" * 32, "ab" * 32 + "\n", "/etc/passwd"])
def test_a_name_that_is_no_digest_opens_no_file(tmp_path: Path, name: str) -> None:
    home = Home(tmp_path)
    with pytest.raises(DataError, match="is no digest"):
        home.blobs.open(Digest(name))
    for run, peer in ((name, PEER), (RUN, name)):
        with pytest.raises(ConfigError, match="names no run or peer"):
            home.folder(RunId(run), PeerId(peer))


def test_each_peer_of_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    home = Home(tmp_path)
    folder = home.folder(RUN, PEER)
    assert folder.root == tmp_path / "runs" / RUN / PEER
    files = (folder.checkpoint, folder.log, folder.durable, folder.addresses)
    assert [path.name for path in files] == ["checkpoint", "log.jsonl", "durable.bin", "addresses"]
    assert all(path.parent == folder.root for path in files)
    assert home.folder(RUN, PeerId("ef" * 32)).root != folder.root
    assert not any(tmp_path.iterdir()), "naming a folder makes none"


def test_private_shards_lie_apart(tmp_path: Path) -> None:
    home = Home(tmp_path)
    digest = home.private.put(DATA)
    assert home.shards.read(digest) is None
    assert home.blobs.open(digest) is None
    assert home.private.read(digest) == DATA
