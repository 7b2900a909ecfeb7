"""Canonical bytes: how a record becomes bytes, what its digest is, and how it is signed.

A record is a frozen msgspec struct. Its canonical bytes are MessagePack, a map from field name to value, with fields
and the keys of mappings sorted by name and every number in its shortest form, so equal records have equal bytes on
every machine. `decode` refuses bytes that are not the canonical form of what they decode to: no two byte strings mean
the same record.

Only bytes that come from this file are hashed or signed.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from blake3 import blake3

from weft.errors import WireError
from weft.ids import Digest, PeerId, short

Buffer = bytes | bytearray | memoryview
R = TypeVar("R", bound=msgspec.Struct)
Verify = Callable[[PeerId, bytes, bytes], bool]  # of the signer, the message and the signature, as `keys.verify`

# Control records are small; bulk bytes travel as blobs. 4 MiB holds a manifest of 64 contributors with 64 parts.
MAX_RECORD_NBYTES = 4 << 20
_HASH_THREADS_FROM = 1 << 20  # below this, starting threads costs more than it saves
_MAX_QUOTED = 200  # characters of msgspec's message, which quotes what the peer wrote

_encoder = msgspec.msgpack.Encoder(order="sorted")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that is hashed, signed or sent. Subclasses choose their own tag."""


def encode(record: msgspec.Struct) -> bytes:
    """Return the canonical bytes of `record`."""
    return _encoder.encode(record)


def decode(data: Buffer, kind: type[R] | Any, *, max_nbytes: int = MAX_RECORD_NBYTES) -> Any:
    """Return the record of type `kind` (a struct or a tagged union of structs) whose canonical bytes are `data`.

    Raises:
        WireError: too long, malformed, of another type, or not canonical.
    """
    if len(data) > max_nbytes:
        raise WireError(f"record of {len(data)} bytes exceeds the bound of {max_nbytes}; dropped unread")
    return _read(bytes(data), kind)


def _read(data: bytes, kind: Any) -> Any:
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise WireError(f"bytes are no {_kind_name(kind)}: {printable(str(error)[:_MAX_QUOTED])}") from None
    if _encoder.encode(record) != data:
        raise WireError(f"bytes are a {_kind_name(kind)} in a form that is not canonical")
    return record


def printable(text: str, keep: str = "") -> str:
    """Return text of somebody else's with "?" for what could steer a terminal; `keep` stays, such as line ends."""
    if text.isprintable():  # nearly all is
        return text
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in text)


def digest(data: Buffer) -> Digest:
    """Return the BLAKE3 hash of `data`."""
    if len(data) >= _HASH_THREADS_FROM:
        return Digest(blake3(data, max_threads=blake3.AUTO).hexdigest())
    return Digest(blake3(data).hexdigest())


def digest_of(record: msgspec.Struct) -> Digest:
    return digest(encode(record))


class Signer(Protocol):
    @property
    def peer(self) -> PeerId: ...

    def sign(self, message: bytes) -> bytes: ...


class Signed(Record, frozen=True, kw_only=True):
    """A record's canonical bytes under its author's signature. `kind` keeps one kind from passing as another."""

    kind: str
    body: bytes
    signer: PeerId
    signature: bytes


def seal(signer: Signer, record: msgspec.Struct) -> Signed:
    """Return `record` signed by `signer`."""
    kind, body = type(record).__name__, encode(record)
    return Signed(kind=kind, body=body, signer=signer.peer, signature=signer.sign(_signed_message(kind, body)))


def unseal(signed: Signed, kind: type[R], verify: Verify) -> R:
    """Return the record inside `signed` once its signature holds.

    Args:
        verify: `keys.verify`, or what remembers its answers.

    Raises:
        WireError: another kind, a bad signature, or bytes that are no such record.
    """
    _require_kind(signed, kind)
    require_signature(signed, verify)
    return claimed(signed, kind)


def require_signature(signed: Signed, verify: Verify) -> None:
    """Check that the signature holds, whatever it signs.

    Raises:
        WireError: it does not.
    """
    if not verify(signed.signer, _signed_message(signed.kind, signed.body), signed.signature):
        raise WireError(f"signature of {short(signed.signer)} on a {signed.kind} does not hold")


def claimed(signed: Signed, kind: type[R]) -> R:
    """Return the record inside `signed`, whoever wrote it: to decide whether its signature is worth checking.

    Raises:
        WireError: another kind, or bytes that are no such record.
    """
    _require_kind(signed, kind)
    record: R = decode(signed.body, kind)
    return record


def _require_kind(signed: Signed, kind: type[R]) -> None:
    if signed.kind != kind.__name__:
        raise WireError(f"expected a signed {kind.__name__}, got a {printable(signed.kind[:64])}")


def _signed_message(kind: str, body: bytes) -> bytes:
    return b"weft.signed.v1\x00" + kind.encode() + b"\x00" + body


def _kind_name(kind: Any) -> str:
    return getattr(kind, "__name__", "record")
