"""The certificate of a peer: its Ed25519 key in the form that TLS wants, and nothing else.

The certificate is self-signed, names nobody, and never expires. Its bytes (X.509 in DER) are the same for every peer
but for the key and the signature, so writing one is joining constants and reading one is comparing them: no parser
sees what a stranger sends. No authority is asked and no date is checked: what counts is that the key inside is the
expected `PeerId`. The TLS 1.3 handshake proves that the server holds that key.

Python's TLS cannot accept a client's certificate without an authority, so only the listening side shows one;
the dialling side proves its key in `tls_handshake`.
"""

import errno
import ssl
import tempfile
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from weft.errors import PeerError
from weft.ids import PeerId
from weft.keys import Identity
from weft.rng import fresh_secret

_KEY_NBYTES = 32
_SIGNATURE_NBYTES = 64

_ED25519 = bytes.fromhex("3005 06032b6570")  # the algorithm: object 1.3.101.112
_NAME = bytes.fromhex("3014 3112 3010 0603550403 0c09") + b"weft peer"  # issuer and subject: one common name
_VALIDITY = bytes.fromhex("3020 170d") + b"700101000000Z" + bytes.fromhex("180f") + b"99991231000000Z"
_VERSION_3 = bytes.fromhex("a003 020102")
_SERIAL_NUMBER = bytes.fromhex("020101")
# What is signed: this, then the key.
_BODY_HEAD = (
    bytes.fromhex("308189")
    + (_VERSION_3 + _SERIAL_NUMBER + _ED25519 + _NAME + _VALIDITY + _NAME)
    + (bytes.fromhex("302a") + _ED25519 + bytes.fromhex("032100"))
)
_HEAD = bytes.fromhex("3081d6") + _BODY_HEAD
_SIGNATURE_HEAD = _ED25519 + bytes.fromhex("034100")


def make_certificate(identity: Identity) -> bytes:
    """Return the certificate of `identity`, in DER: a function of the key alone."""
    key = bytes.fromhex(identity.peer)
    return _HEAD + key + _SIGNATURE_HEAD + identity.sign(_BODY_HEAD + key)


def certified_peer(certificate: bytes | None) -> PeerId:
    """Return whose key is in a certificate (DER) that a server showed.

    Raises:
        PeerError: there is none, or it is not that of a weft peer.
    """
    if certificate is None:
        raise PeerError("it shows no certificate")
    key = certificate[len(_HEAD) :][:_KEY_NBYTES]
    signature = certificate[-_SIGNATURE_NBYTES:]
    if certificate != _HEAD + key + _SIGNATURE_HEAD + signature or len(key) != _KEY_NBYTES:
        raise PeerError("its certificate is not that of a weft peer")
    return PeerId(key.hex())


def server_context(identity: Identity, certificate: bytes) -> ssl.SSLContext:
    """Return the settings of the listening side, which shows `certificate` (DER)."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # No session tickets: we never resume, and bytes that the client has not read when it closes would reset the link.
    context.num_tickets = 0
    # Python loads a key only from a file. The file holds it encrypted under a passphrase that never leaves memory.
    passphrase = fresh_secret().hex().encode()
    key_pem = identity.private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(passphrase)
    )
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:  # mode 0700, gone at the end of the block
        path = Path(folder) / "chain.pem"
        path.write_bytes(key_pem + ssl.DER_cert_to_PEM_cert(certificate).encode())
        context.load_cert_chain(path, password=passphrase)
    return context


def client_context() -> ssl.SSLContext:
    """Return the settings of the dialling side, which checks the server's key itself."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = _Socket
    return context


class _Socket(ssl.SSLSocket):
    """A TLS socket that `wrap_socket` does not leave open where the connection was reset before."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        # Only `wrap_socket` asks, to see that nothing came before TLS. It goes on after these two errors alone.
        try:
            return super().recv(buflen, flags)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EINVAL):
                self.close()
            raise
