"""How two peers come to trust a TLS connection: what is said before the application may speak.

    client ──► server   preamble, in the clear: b"weft", protocol version, lane
    client ◄─► server   TLS 1.3; the server shows the certificate of its key
                        the client goes on only if that key is the peer it meant to reach
    client ◄── server   Challenge: a fresh nonce
    client ──► server   Signed ClientProof: this certificate, this nonce, this lane
    client ◄── server   Welcome

A proof names the certificate of the server it was made for and that server's nonce, so it is worth nothing to
anybody else, nor a second time. A server that speaks another version answers with its own preamble instead of TLS.
"""

import hmac
import struct
from typing import Any, Protocol

from weft import keys
from weft.errors import PeerError, WireError
from weft.events import HUNG_UP
from weft.ids import Digest, PeerId, is_named, short
from weft.net.transport.base import Lane, Stream
from weft.net.transport.frame import FrameReader, write_frame
from weft.net.transport.tls_certificate import certified_peer
from weft.rng import fresh_secret
from weft.wire import Record, Signed, Signer, decode, digest, encode, seal, unseal

PROTOCOL_VERSION = 1
NONCE_NBYTES = 32
# The largest message is the signed proof: two 64-character names, a signature, a digest and a nonce; 421 bytes.
MAX_MESSAGE_NBYTES = 1024

_MAGIC = b"weft"
_PREAMBLE = struct.Struct(">4sHBx")
PREAMBLE_NBYTES = _PREAMBLE.size
_LANES: dict[int, Lane] = {0: "control", 1: "bulk"}
_LANE_NUMBERS = {lane: number for number, lane in _LANES.items()}


class Challenge(Record, frozen=True, kw_only=True):
    nonce: bytes


class ClientProof(Record, frozen=True, kw_only=True):
    certificate: Digest  # of the server's certificate
    nonce: bytes
    lane: Lane


class Welcome(Record, frozen=True, kw_only=True):
    peer: PeerId


class NotWeft(PeerError):
    """The other side speaks another protocol, or another version of ours."""


def preamble(lane: Lane) -> bytes:
    return _PREAMBLE.pack(_MAGIC, PROTOCOL_VERSION, _LANE_NUMBERS[lane])


def read_preamble(data: bytes) -> Lane:
    """Return the lane that a connection's first 8 bytes ask for.

    Raises:
        NotWeft: they are no preamble, or one of another version.
    """
    magic, version, lane = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise NotWeft(f"its first bytes {data!r} are not those of a weft peer")
    if version != PROTOCOL_VERSION:
        raise NotWeft(f"it speaks version {version} of the transport, this software {PROTOCOL_VERSION}")
    if lane not in _LANES or data != preamble(_LANES[lane]):
        raise NotWeft(f"it asks for a lane that does not exist ({data.hex()})")
    return _LANES[lane]


class SecureStream(Stream, Protocol):
    """A stream inside TLS, over whatever carries it."""

    peer: PeerId

    async def handshake(self) -> bytes | None:
        """Do TLS's own handshake; return the certificate that the other end showed."""
        ...

    def abort(self) -> None: ...


async def introduce(stream: SecureStream, peer: PeerId, signer: Signer, lane: Lane) -> None:
    """Do the client's half: go on only if `peer` answers, and prove `signer`'s key to it. What fails is aborted.

    Args:
        peer: whom to reach: a key, or the first digits of one (`ids.is_named`).

    Raises:
        PeerError: somebody else answers, breaks the protocol or hangs up.
    """
    try:
        certificate = await stream.handshake()
        found = certified_peer(certificate)
        if not is_named(found, peer):
            raise PeerError(f"{short(found)} answers there, not {short(peer)}; nothing was sent")
        stream.peer = found
        challenge = await _receive(stream, Challenge)
        if len(challenge.nonce) != NONCE_NBYTES:
            raise PeerError(f"its challenge has {len(challenge.nonce)} bytes instead of {NONCE_NBYTES}")
        proof = ClientProof(certificate=digest(certificate or b""), nonce=challenge.nonce, lane=lane)
        await write_frame(stream, encode(seal(signer, proof)))
        answer = await _receive(stream, Welcome)
        if answer.peer != signer.peer:
            raise PeerError("it welcomes somebody else")
    except BaseException:
        stream.abort()
        raise


async def admit(stream: SecureStream, certificate: Digest, lane: Lane) -> None:
    """Do the server's half: learn who is at the other end, and welcome it. What fails is aborted.

    Args:
        certificate: digest of the certificate this side showed.

    Raises:
        PeerError: as `verify_client`.
    """
    try:
        await stream.handshake()
        stream.peer = await verify_client(stream, certificate, lane)
        await write_frame(stream, encode(Welcome(peer=stream.peer)))
    except BaseException:
        stream.abort()
        raise


async def verify_client(stream: Stream, certificate: Digest, lane: Lane) -> PeerId:
    """Return who is at the other end of an incoming connection, once that is proven.

    Args:
        certificate: digest of the certificate this side showed.

    Raises:
        PeerError: the proof is malformed, for another server, lane or nonce, or its signature does not hold.
    """
    nonce = fresh_secret(NONCE_NBYTES)
    await write_frame(stream, encode(Challenge(nonce=nonce)))
    signed: Signed = await _receive(stream, Signed)
    proof = unseal(signed, ClientProof, keys.verify)
    if not hmac.compare_digest(proof.nonce, nonce):
        raise PeerError("its proof answers another challenge: it is a replay")
    if proof.certificate != certificate or proof.lane != lane:
        raise PeerError("its proof was made for another connection")
    return signed.signer


async def _receive(stream: Stream, kind: type[Record]) -> Any:
    # No reading ahead: what follows the last message belongs to the application.
    payload = await FrameReader(stream, max_nbytes=MAX_MESSAGE_NBYTES, read_ahead_nbytes=0).read()
    if payload is None:
        raise WireError(HUNG_UP)
    return decode(payload, kind, max_nbytes=MAX_MESSAGE_NBYTES)
