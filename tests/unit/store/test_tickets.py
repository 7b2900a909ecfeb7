"""The secret of a run's tickets is whole or replaced, and for its owner's eyes from the first moment."""

import os
import stat
from pathlib import Path

import pytest

from model.world import first_base
from weft.errors import ConfigError, DiskFull
from weft.ids import PeerId, RunId
from weft.net.admission import Anyone, ByTicket
from weft.store.home import Home, PeerFolder
from weft.store.journal import Votes
from weft.store.tickets import keep_name, keep_secret, keep_ticket, last_name, read_name, read_secret
from weft.sync.round.rules import Durable

SECRET = bytes(range(16))


@pytest.fixture
def folder(tmp_path: Path) -> PeerFolder:
    return PeerFolder(tmp_path / "peer")


def test_a_secret_is_read_back(folder: PeerFolder) -> None:
    assert read_secret(folder) is None
    keep_secret(folder, Anyone())
    assert read_secret(folder) is None
    keep_secret(folder, ByTicket(secret=SECRET))
    assert read_secret(folder) == SECRET


@pytest.mark.parametrize(
    "torn", [b"", b"0", SECRET.hex().encode()[:-2], b"no hex at all, but long enough to be", b"\xff\xfe"]
)
def test_a_damaged_secret_is_refused_until_a_ticket_brings_it_back(folder: PeerFolder, torn: bytes) -> None:
    folder.root.mkdir()
    path = folder.root / "secret"
    path.write_bytes(torn)
    with pytest.raises(ConfigError, match="weft join -") as caught:
        read_secret(folder)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == torn
    keep_secret(folder, ByTicket(secret=SECRET))
    assert read_secret(folder) == SECRET


def test_a_secret_that_cannot_be_read_says_why(folder: PeerFolder) -> None:
    (folder.root / "secret").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot read .*secret.*directory"):
        read_secret(folder)


def test_a_secret_is_synced_and_a_full_disk_is_named(folder: PeerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskFull, match="secret"):
        keep_secret(folder, ByTicket(secret=SECRET))
    keep_ticket(folder, "a ticket")  # others can do without it
    assert list(folder.root.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions are not POSIX's")
def test_what_is_private_is_so_before_it_has_its_name(folder: PeerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: dict[str, int] = {}
    real_replace = os.replace

    def replace(source: str, target: Path) -> None:
        modes[target.name] = stat.S_IMODE(os.stat(source).st_mode)
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    keep_secret(folder, ByTicket(secret=SECRET))
    keep_ticket(folder, "a ticket")
    promises = Votes(folder.durable)
    promises.write(Durable(base=first_base(3)))
    promises.close()
    assert modes == {"secret": 0o600, "ticket": 0o600, "durable.bin": 0o600}


@pytest.mark.parametrize("damaged", ["", "x" * 65, "a\nb", "\x1b[2J"])
def test_a_name_is_kept_until_another_is_given_and_a_damaged_one_is_none(folder: PeerFolder, damaged: str) -> None:
    assert read_name(folder) == ""
    keep_name(folder, "anna")
    keep_name(folder, "grün")
    assert read_name(folder) == "grün"
    folder.name.write_bytes(damaged.encode())
    assert read_name(folder) == ""


def test_a_peer_is_called_in_another_run_as_it_was_called_last(tmp_path: Path) -> None:
    home, anna, bert = Home(tmp_path), PeerId("a" * 64), PeerId("b" * 64)
    assert last_name(home, anna) == ""
    for run, at, name in (("1" * 64, 20, "anna"), ("2" * 64, 10, "ann")):
        folder = home.folder(RunId(run), anna)
        folder.root.mkdir(parents=True)
        keep_name(folder, name)
        os.utime(folder.name, (at, at))
    assert last_name(home, anna) == "anna"
    assert last_name(home, bert) == "", "another key is another peer"
