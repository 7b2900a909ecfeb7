"""A peer's Ed25519 identity: create, lock, load, back up, sign, verify.

The same key is the peer's network address and what its signatures are checked with. It lies in one PEM file that only
its owner can read, and is locked while a process uses it: two peers with one key would look like one peer that
contradicts itself.

A home holds numbered identities, so several peers on one machine each take the first one that is free.

Almost any 32 bytes are a key, so one flipped bit makes another peer. Beside a key lies whose it is (peer-0.pub),
written when it is first used, and a key that says otherwise is refused.
"""

import base64
import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InternalError, InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from filelock import FileLock, Timeout

from weft.errors import DiskFull, KeyFileError, KeyLocked, WeftError
from weft.ids import PeerId, short
from weft.rng import fresh_secret
from weft.wire import Record, decode, encode

MAX_IDENTITIES = 1024  # peers that one home serves at the same time
_MAX_KEY_FILE_NBYTES = 64 << 10  # no key is longer; a device or a disk image named by mistake is not read whole
_BACKUP_MAGIC = b"weft-backup-1 "
_SCRYPT_N = 1 << 17  # 128 MiB and about half a second for every guess


class Identity:
    """A private key, and the lock that keeps it to one process. Close it to let another process use it."""

    def __init__(self, private_key: Ed25519PrivateKey, lock: FileLock | None = None) -> None:
        self.private_key = private_key
        self._lock = lock
        self.peer = PeerId(private_key.public_key().public_bytes_raw().hex())

    @classmethod
    def generate(cls) -> "Identity":
        """Return a new identity that is kept nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """Return the identity of a 32-byte seed: for tests and simulations only."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`. Sign records through `wire.seal`, which separates kinds."""
        return self.private_key.sign(message)

    def close(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # the end of the process lets go of it
                self._lock.release()

    def __enter__(self) -> "Identity":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Return whether `signature` is `peer`'s signature of `message`. Never raises on what a peer sent."""
    try:
        raw = bytes.fromhex(peer)
        if raw.hex() != peer:  # capitals and spaces would give one key many names
            return False
        return _holds(raw, message, signature)
    except ValueError:
        return False


@lru_cache(maxsize=256)  # those of a round: to read one takes a tenth of a check
def _public_key(key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(key)


def _holds(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        _public_key(key).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def open_identity(path: Path, *, create: bool = False) -> Identity:
    """Load the identity at `path` and lock it.

    Args:
        path: the PEM file.
        create: make a new key when there is none.

    Raises:
        KeyLocked: another process uses it.
        KeyFileError: missing, unreadable, readable by others, or no Ed25519 key.
        DiskFull: no room for a new one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(path.with_suffix(".lock"), mode=0o600)
        lock.acquire(timeout=0)
    except Timeout:
        raise KeyLocked(
            f"identity {path} is in use by another process. Stop that one, or give this peer its own: "
            f"--key {path.with_name('other.pem')} (made if missing), or leave --key out to take a free one."
        ) from None
    except OSError as error:
        raise KeyFileError(
            f"cannot use {path.parent} for identities: {error}. Choose another home with --home."
        ) from error
    try:
        if create and not path.exists():
            _write_private(path, _to_pem(Ed25519PrivateKey.generate()))
        found = Identity(_read_private(path), lock)
        _keep_whose(path, found.peer)
        return found
    except BaseException:
        lock.release()
        raise


def take_lock(path: Path, wait_s: float = 0.0) -> FileLock | None:
    """Return the lock at `path`, taken; None: another process has it, also after `wait_s`.

    Raises:
        KeyFileError: its folder cannot be used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(path, mode=0o600)
        lock.acquire(timeout=wait_s)
    except Timeout:
        return None
    except OSError as error:
        raise KeyFileError(f"cannot use {path.parent}: {error}. Choose another home with --home.") from error
    return lock


def open_free_identity(keys_dir: Path) -> Identity:
    """Lock the first identity in `keys_dir` that no process uses, making one when all are taken.

    Raises:
        KeyLocked: all `MAX_IDENTITIES` are in use.
        KeyFileError: the folder cannot be used, or a key in it is malformed.
    """
    for number in range(MAX_IDENTITIES):
        with suppress(KeyLocked):
            return open_identity(keys_dir / f"peer-{number}.pem", create=True)
    raise KeyLocked(f"all {MAX_IDENTITIES} identities in {keys_dir} are in use. Start this peer with another --home.")


def read_peer(path: Path) -> PeerId:
    """Return whose identity lies at `path`, also while a process uses it.

    Raises:
        KeyFileError: missing, unreadable, readable by others, or no Ed25519 key.
    """
    return Identity(_read_private(path)).peer


def load_identity(path: Path) -> Identity:
    """Load the identity at `path` to sign with, also while a process uses it. To connect with it, open it.

    Raises:
        KeyFileError: missing, unreadable, readable by others, or no Ed25519 key.
    """
    return Identity(_read_private(path))


def is_backup(content: bytes) -> bool:
    """Return whether a file that begins with `content` is an encrypted backup of an identity."""
    return content.startswith(_BACKUP_MAGIC)


def needs_passphrase(backup: Path) -> bool:
    """Return whether a backup is encrypted.

    Raises:
        KeyFileError: missing, or unreadable.
    """
    return is_backup(_read(backup, "backup"))


def back_up(source: Path, target: Path, passphrase: bytes | None) -> PeerId:
    """Copy the identity at `source` to `target`, encrypted when a passphrase is given.

    Raises:
        KeyFileError: `source` is no identity, `target` exists, or the passphrase is empty.
    """
    if passphrase is not None and not passphrase:
        raise KeyFileError(f"an empty passphrase protects nothing: {target} was not written. Give one, or choose none.")
    key = _read_private(source)
    pem = _to_pem(key)
    _write_private(target, pem if passphrase is None else _encrypt(pem, passphrase))
    return Identity(key).peer


def restore(backup: Path, target: Path, passphrase: bytes | None, held: Iterable[Path] = ()) -> PeerId:
    """Write the identity of a backup to `target`.

    Args:
        held: files of identities that are here already.

    Raises:
        KeyFileError: not a backup, wrong passphrase, `target` exists, or the identity is among those held.
    """
    content = _read(backup, "backup")
    is_encrypted = is_backup(content)
    if is_encrypted and not passphrase:
        raise KeyFileError(f"backup {backup} is encrypted. Give the passphrase it was made with.")
    if not is_encrypted and passphrase is not None:
        raise KeyFileError(f"backup {backup} is not encrypted, so it needs no passphrase. Leave the passphrase out.")
    key = _parse(_decrypt(backup, content, passphrase) if passphrase else content, backup)
    peer = Identity(key).peer
    if (path := next((path for path in held if _peer_of(path) == peer), None)) is not None:
        raise KeyFileError(f"the identity of {backup} is here already: {path}. Name a file to have it twice.")
    _write_private(target, _to_pem(key))
    return peer


def _peer_of(path: Path) -> PeerId | None:
    try:
        return read_peer(path)
    except KeyFileError:  # it is of no concern here
        return None


class EncryptedKey(Record, frozen=True, kw_only=True):
    """The inside of a backup: an identity's PEM under a passphrase.

    key = scrypt(passphrase, salt, N = 2^17, r = 8, p = 1), 32 bytes; sealed = ChaCha20-Poly1305(key, nonce, PEM).
    The costs belong to the format's version: a file cannot ask for less, nor for all of a machine's memory.
    (PKCS #8 as the cryptography library writes it has 2048 rounds of PBKDF2: too cheap to guess at.)
    """

    salt: bytes
    nonce: bytes
    sealed: bytes


def _encrypt(pem: bytes, passphrase: bytes) -> bytes:
    salt, nonce = fresh_secret(16), fresh_secret(12)
    sealed = ChaCha20Poly1305(_stretch(passphrase, salt)).encrypt(nonce, pem, _BACKUP_MAGIC)
    return _BACKUP_MAGIC + base64.b64encode(encode(EncryptedKey(salt=salt, nonce=nonce, sealed=sealed))) + b"\n"


def _decrypt(path: Path, content: bytes, passphrase: bytes) -> bytes:
    try:
        record: EncryptedKey = decode(
            base64.b64decode(content.removeprefix(_BACKUP_MAGIC).strip(), validate=True), EncryptedKey
        )
        return ChaCha20Poly1305(_stretch(passphrase, record.salt)).decrypt(record.nonce, record.sealed, _BACKUP_MAGIC)
    except InvalidTag:
        raise KeyFileError(f"cannot open backup {path}: wrong passphrase, or the file was altered.") from None
    except ValueError as error:  # no base64, no record, or a nonce of another length
        raise KeyFileError(f"backup {path} is damaged: {error}. Copy it again.") from error


def _stretch(passphrase: bytes, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=_SCRYPT_N, r=8, p=1).derive(passphrase)


def _read_private(path: Path) -> Ed25519PrivateKey:
    key = _parse(_read(path), path)  # what is no key need not be kept from others
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise KeyFileError(f"identity {path} can be read by other users. Run: chmod 600 {path}")
    found, kept = Identity(key).peer, _kept_whose(path)
    if kept not in (None, found):
        raise KeyFileError(
            f"identity {path} is damaged, or was replaced by another: it is the key of {short(found)}, and "
            f"{_beside(path).name} beside it says {short(kept)}. Restore the right one (`weft keys restore`), or "
            f"remove {_beside(path)} to become {short(found)}, which is another peer to everybody."
        )
    return key


def _beside(path: Path) -> Path:
    return path.with_suffix(".pub")


def _kept_whose(path: Path) -> PeerId | None:
    try:
        text = _beside(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return PeerId(text) if re.fullmatch(r"[0-9a-f]{64}", text) else None  # a file of another program


def _keep_whose(path: Path, peer: PeerId) -> None:
    with suppress(OSError), _beside(path).open("x", encoding="ascii") as file:  # it is checked where it can be written
        file.write(f"{peer}\n")


def _read(path: Path, what: Literal["identity", "backup"] = "identity") -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_KEY_FILE_NBYTES)
    except FileNotFoundError:
        advice = (
            f"Is the path right? `weft keys list` shows yours; a new one: weft keys new {path}"
            if what == "identity"
            else "Is the path right?"
        )
        raise KeyFileError(f"there is no {what} at {path}. {advice}") from None
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error}.") from error


def _parse(pem: bytes, path: Path) -> Ed25519PrivateKey:
    if is_backup(pem):
        raise KeyFileError(f"{path} is an encrypted backup of an identity. Restore it with: weft keys restore {path}")
    try:
        key = serialization.load_pem_private_key(pem, None)
    # TypeError: encrypted by another program. InternalError: what one flipped bit can come to.
    except (ValueError, TypeError, UnsupportedAlgorithm, InternalError) as error:
        reason = str(error).partition("\n")[0]
        raise KeyFileError(
            f"cannot read {path}: it holds no private key in PEM form that weft can use ({reason})."
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path} holds another kind of key; weft uses Ed25519. Make one with: weft keys new")
    return key


def _to_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(f"{path} exists; weft never overwrites an identity. Move it away first.") from None
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)  # half a key would be found, and refused, for ever after
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> WeftError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no room on the disk of {path.parent} for {path.name}. Free some, then start again.")
    return KeyFileError(f"cannot write {path}: {error.strerror or error}. Choose another place for it.")
