"""The certificate of a peer: its Ed25519 key in the form that TLS wants, and nothing else.

The certificate is self-signed, names nobody, never expires, and is a pure function of the key, so its
fingerprint is one with the peer's. No authority is asked and no date is checked: what counts is that the key
inside is the expected `PeerId`. The TLS 1.3 handshake proves that the server holds that key.

Python's TLS cannot accept a client's certificate without an authority, so only the listening side shows one;
the dialling side proves its key in `tls_handshake`.
"""

import datetime
import secrets
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID

from weft.errors import PeerError
from weft.ids import PeerId
from weft.keys import Identity

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weft peer")])
# Fixed, so that a machine whose clock is wrong by years makes the same certificate. Nobody checks them.
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


def make_certificate(identity: Identity) -> bytes:
    """Return the certificate of `identity`, in DER."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(identity.private_key.public_key())
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
    )
    return builder.sign(identity.private_key, algorithm=None).public_bytes(serialization.Encoding.DER)


def certified_peer(certificate: bytes | None) -> PeerId:
    """Return whose key is in a certificate (DER) that a server showed.

    Raises:
        PeerError: there is none, it is malformed, or its key is not Ed25519.
    """
    if certificate is None:
        raise PeerError("it shows no certificate")
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise PeerError(f"its certificate is malformed: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise PeerError("its certificate holds another kind of key; it is no weft peer")
    return PeerId(key.public_bytes_raw().hex())


def server_context(identity: Identity, certificate: bytes) -> ssl.SSLContext:
    """Return the settings of the listening side, which shows `certificate` (DER)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No session tickets: we never resume, and bytes that the client has not read when it closes would reset the link.
    context.num_tickets = 0
    # Python loads a key only from a file. The file holds it encrypted under a passphrase that never leaves memory.
    passphrase = secrets.token_hex(32).encode()
    key_pem = identity.private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase),
    )
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:  # mode 0700, gone at the end of the block
        path = Path(folder) / "chain.pem"
        path.write_bytes(key_pem + ssl.DER_cert_to_PEM_cert(certificate).encode())
        context.load_cert_chain(path, password=passphrase)
    return context


def client_context() -> ssl.SSLContext:
    """Return the settings of the dialling side, which checks the server's key itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
