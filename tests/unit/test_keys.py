"""Identities: private files, one process at a time, backups that only their passphrase opens."""

import base64
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from weft import keys, wire
from weft.errors import DiskFull, KeyFileError, KeyLocked
from weft.ids import PeerId

posix_only = pytest.mark.skipif(os.name != "posix", reason="file modes are a POSIX notion")

SECOND_PROCESS = """
import sys
from pathlib import Path
from weft import keys
from weft.errors import KeyLocked
try:
    with keys.open_identity(Path(sys.argv[1])) as identity:
        print("opened", identity.peer)
except KeyLocked as error:
    print("refused", error)
"""


HOLDING_PROCESS = """
import sys
from pathlib import Path
from weft import keys
identity = keys.open_identity(Path(sys.argv[1]), create=True)
print(identity.peer, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cheap_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretch passphrases little, where a test is about something else."""
    monkeypatch.setattr(keys, "_SCRYPT_N", 1 << 4)


def open_in_second_process(path: Path) -> str:
    """Try to use the identity from another process; return what it said."""
    return subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, str(path)], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_identity_is_loaded_again(tmp_path: Path) -> None:
    with keys.open_identity(tmp_path / "peer.pem", create=True) as made:
        peer = made.peer
    with keys.open_identity(tmp_path / "peer.pem") as loaded:
        assert loaded.peer == peer
    assert len(peer) == 64
    assert bytes.fromhex(peer).hex() == peer


@pytest.mark.usefixtures("cheap_backups")
@posix_only
def test_only_the_owner_can_read_an_identity(tmp_path: Path) -> None:
    home = tmp_path / "home" / "keys"
    before = os.umask(0)  # the most open one: the mode must not depend on it
    try:
        with keys.open_identity(home / "peer.pem", create=True):
            pass
        keys.back_up(home / "peer.pem", tmp_path / "backup.pem", b"correct horse")
        keys.restore(tmp_path / "backup.pem", tmp_path / "restored.pem", b"correct horse")
    finally:
        os.umask(before)
    assert mode(home / "peer.pem") == mode(tmp_path / "backup.pem") == mode(tmp_path / "restored.pem") == 0o600
    assert mode(home) == 0o700


@posix_only
@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_an_identity_that_others_can_read_is_refused_with_the_fix(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "peer.pem"
    keys.open_identity(path, create=True).close()
    path.chmod(bits)
    with pytest.raises(KeyFileError, match=f"chmod 600 {path}"):
        keys.open_identity(path)
    path.chmod(0o600)
    keys.open_identity(path).close()
    other = tmp_path / "bin.dat"
    other.write_bytes(b"no key")
    other.chmod(bits)
    with pytest.raises(KeyFileError, match="holds no private key"):
        keys.read_peer(other)


def test_a_second_process_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    path = tmp_path / "peer.pem"
    with keys.open_identity(path, create=True) as identity:
        said = open_in_second_process(path)
        assert said.startswith("refused")
        assert str(path) in said
        assert "--key" in said  # the way out
    assert open_in_second_process(path) == f"opened {identity.peer}"


def test_an_identity_is_free_again_when_its_process_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "peer.pem"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING_PROCESS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        peer = process.stdout.readline().strip()
        with pytest.raises(KeyLocked):
            keys.open_identity(path)
    finally:
        process.kill()
        process.communicate(timeout=60)
    with keys.open_identity(path) as identity:
        assert identity.peer == peer


def test_one_process_cannot_open_an_identity_twice(tmp_path: Path) -> None:
    with keys.open_identity(tmp_path / "peer.pem", create=True), pytest.raises(KeyLocked):
        keys.open_identity(tmp_path / "peer.pem")


def test_an_identity_that_cannot_be_read_is_not_left_locked(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="weft keys new"):
        keys.open_identity(tmp_path / "peer.pem")
    keys.open_identity(tmp_path / "peer.pem", create=True).close()


def test_peers_of_one_home_take_distinct_identities(tmp_path: Path) -> None:
    held = [keys.open_free_identity(tmp_path) for _ in range(4)]
    peers = [identity.peer for identity in held]
    assert len(set(peers)) == 4
    held[1].close()
    with keys.open_free_identity(tmp_path) as again:  # the first free one, not a new one
        assert again.peer == peers[1]
    for identity in held:
        identity.close()
    assert sorted(path.name for path in tmp_path.glob("*.pem")) == [f"peer-{n}.pem" for n in range(4)]


def test_a_home_with_no_free_identity_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_IDENTITIES", 2)
    with keys.open_free_identity(tmp_path), keys.open_free_identity(tmp_path), pytest.raises(KeyLocked, match="--home"):
        keys.open_free_identity(tmp_path)


@pytest.mark.usefixtures("cheap_backups")
@pytest.mark.parametrize("passphrase", [None, b"correct horse", "päss".encode()])
def test_a_backup_restores_the_same_peer(tmp_path: Path, passphrase: bytes | None) -> None:
    with keys.open_identity(tmp_path / "peer.pem", create=True) as identity:
        assert keys.back_up(tmp_path / "peer.pem", tmp_path / "backup.pem", passphrase) == identity.peer
    assert keys.restore(tmp_path / "backup.pem", tmp_path / "new" / "peer.pem", passphrase) == identity.peer
    with keys.open_identity(tmp_path / "new" / "peer.pem") as restored:
        assert restored.peer == identity.peer
        assert keys.verify(identity.peer, b"m", restored.sign(b"m"))


@pytest.mark.usefixtures("cheap_backups")
@pytest.mark.parametrize("guess", [b"wrong horse", b"", None])
def test_a_backup_does_not_open_without_its_passphrase(tmp_path: Path, guess: bytes | None) -> None:
    keys.open_identity(tmp_path / "peer.pem", create=True).close()
    keys.back_up(tmp_path / "peer.pem", tmp_path / "backup.pem", b"correct horse")
    with pytest.raises(KeyFileError):
        keys.restore(tmp_path / "backup.pem", tmp_path / "restored.pem", guess)
    assert not (tmp_path / "restored.pem").exists()


def test_a_backup_with_a_passphrase_holds_no_bare_key(tmp_path: Path) -> None:
    keys.open_identity(tmp_path / "peer.pem", create=True).close()
    keys.back_up(tmp_path / "peer.pem", tmp_path / "backup.pem", b"correct horse")
    content = (tmp_path / "backup.pem").read_bytes()
    assert content.startswith(b"weft-backup-1 ")
    assert b"PRIVATE KEY" not in content
    with pytest.raises(KeyFileError):
        keys.open_identity(tmp_path / "backup.pem")


def test_a_backup_made_long_ago_still_opens(tmp_path: Path) -> None:
    (tmp_path / "backup").write_bytes(
        b"weft-backup-1 g6Vub25jZcQMUSGQBgbG6geFJdfppHNhbHTEEKDPu4mrbmbAVxi+ZVhaJgimc2VhbGVkxIcBA9n3fMW7DN7AcA9vX+6K"
        b"YxGr3C4yucV7ah+feZOi1Pg7g5TEspm+bXxq1vUkMMKJa3+2ZW0jcZTem/7ifl79kzoAGYUgaWneBhHxSWhuNDF9t+EEzgxgg5KPT9BzyefA"
        b"Lmv/xD0aOkVsKORPy5HmYbmDgW1QBnIUdxy1ZLz1vP01V4A3q3I=\n"
    )
    peer = keys.restore(tmp_path / "backup", tmp_path / "restored.pem", b"correct horse")
    assert peer == keys.Identity.from_seed(bytes(range(32))).peer


@pytest.mark.usefixtures("cheap_backups")
def test_two_backups_of_one_identity_have_nothing_in_common(tmp_path: Path) -> None:
    keys.open_identity(tmp_path / "peer.pem", create=True).close()
    read = []
    for name in ("a", "b"):
        keys.back_up(tmp_path / "peer.pem", tmp_path / name, b"correct horse")
        raw = base64.b64decode((tmp_path / name).read_bytes().split()[1])
        read.append(wire.decode(raw, keys.EncryptedKey))
    assert read[0].salt != read[1].salt
    assert read[0].nonce != read[1].nonce
    assert read[0].sealed != read[1].sealed


@pytest.mark.usefixtures("cheap_backups")
@pytest.mark.parametrize("at", [0, 20, 60, 120, -20])
def test_an_altered_backup_is_refused(tmp_path: Path, at: int) -> None:
    keys.open_identity(tmp_path / "peer.pem", create=True).close()
    keys.back_up(tmp_path / "peer.pem", tmp_path / "backup", b"correct horse")
    content = bytearray((tmp_path / "backup").read_bytes())
    content[at] ^= 1
    (tmp_path / "backup").write_bytes(content)
    with pytest.raises(KeyFileError, match="backup"):
        keys.restore(tmp_path / "backup", tmp_path / "restored.pem", b"correct horse")
    assert not (tmp_path / "restored.pem").exists()


def test_an_empty_passphrase_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    keys.open_identity(tmp_path / "peer.pem", create=True).close()
    with pytest.raises(KeyFileError, match="protects nothing"):
        keys.back_up(tmp_path / "peer.pem", tmp_path / "backup.pem", b"")
    assert not (tmp_path / "backup.pem").exists()


@pytest.mark.usefixtures("cheap_backups")
def test_a_passphrase_for_a_bare_backup_is_refused(tmp_path: Path) -> None:
    keys.open_identity(tmp_path / "peer.pem", create=True).close()
    keys.back_up(tmp_path / "peer.pem", tmp_path / "backup.pem", None)
    with pytest.raises(KeyFileError, match=r"backup\.pem"):
        keys.restore(tmp_path / "backup.pem", tmp_path / "restored.pem", b"correct horse")


def test_no_identity_is_ever_overwritten(tmp_path: Path) -> None:
    for name in ("a.pem", "b.pem"):
        keys.open_identity(tmp_path / name, create=True).close()
    before = (tmp_path / "b.pem").read_bytes()
    for copy in (keys.back_up, keys.restore):
        with pytest.raises(KeyFileError, match="never overwrites"):
            copy(tmp_path / "a.pem", tmp_path / "b.pem", None)
    assert (tmp_path / "b.pem").read_bytes() == before


def test_half_a_key_is_not_left_behind_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"no room on the disk .* Free some"):
        keys.open_identity(tmp_path / "peer.pem", create=True)
    monkeypatch.undo()
    assert not (tmp_path / "peer.pem").exists()
    keys.open_identity(tmp_path / "peer.pem", create=True).close()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"cannot read .*peer\.pem"):
        keys.open_identity(path)


def test_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peer.pem"
    rsa = generate_private_key(65537, 2048)
    path.write_bytes(
        rsa.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="another kind of key"):
        keys.open_identity(path)


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(KeyFileError, match="--home"):
        keys.open_free_identity(tmp_path / "home")


# --- signatures ---

# RFC 8032, section 7.1, test 2.
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PEER = PeerId("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_signatures_are_those_of_the_standard() -> None:
    identity = keys.Identity.from_seed(SEED)
    assert identity.peer == PEER
    assert identity.sign(b"\x72") == SIGNATURE
    assert keys.verify(PEER, b"\x72", SIGNATURE)


@pytest.mark.parametrize(
    ("peer", "message", "signature"),
    [
        (PEER, b"\x73", SIGNATURE),
        (PEER, b"\x72", SIGNATURE[:-1]),
        (PEER, b"\x72", SIGNATURE + b"\x00"),
        (PEER, b"\x72", b""),
        (PEER, b"\x72", bytes(64)),
        (PEER.upper(), b"\x72", SIGNATURE),
        (PEER + " ", b"\x72", SIGNATURE),
        (PEER[:-2], b"\x72", SIGNATURE),
        ("", b"\x72", SIGNATURE),
        ("no hex", b"\x72", SIGNATURE),
        ("é" * 64, b"\x72", SIGNATURE),
        ("ff" * 32, b"\x72", SIGNATURE),
    ],
)
def test_what_is_not_signed_does_not_verify(peer: str, message: bytes, signature: bytes) -> None:
    assert keys.verify(PeerId(peer), message, signature) is False


def test_generated_identities_differ() -> None:
    assert len({keys.Identity.generate().peer for _ in range(16)}) == 16


def test_the_private_key_is_not_in_a_printed_identity() -> None:
    identity = keys.Identity.from_seed(SEED)
    assert SEED.hex() not in repr(identity) + repr(vars(identity))


def test_a_damaged_key_is_refused_wherever_its_bit_flipped(tmp_path: Path) -> None:
    path = tmp_path / "peer-0.pem"
    keys.open_identity(path, create=True).close()
    whole = path.read_bytes()
    peer = keys.read_peer(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :])
        try:
            assert keys.read_peer(path) == peer  # what is around the key may say anything
        except KeyFileError as error:
            assert str(path) in str(error)  # noqa: PT017
    at = whole.index(b"\n") + 40
    path.write_bytes(whole[:at] + (b"B" if whole[at : at + 1] == b"A" else b"A") + whole[at + 1 :])
    with pytest.raises(KeyFileError, match=r"is damaged, or was replaced by another.*weft keys restore"):
        keys.open_identity(path)
    path.with_suffix(".pub").unlink()
    other = keys.open_identity(path)
    other.close()
    assert other.peer != peer
    assert path.with_suffix(".pub").read_text() == f"{other.peer}\n"


@pytest.mark.parametrize("kept", [b"", b"ssh-ed25519 AAAA somebody\n", b"\xff\xfe"])
def test_what_another_program_keeps_beside_a_key_is_left_alone(kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "id"
    path.with_suffix(".pub").write_bytes(kept)
    keys.open_identity(path, create=True).close()
    assert path.with_suffix(".pub").read_bytes() == kept
