"""What a member signs of the rows that it computed: what came in, what went out, and what the last of them was like.

    row       BLAKE3 of its bytes as they went over the wire, 16 bytes: activations, or a token; nothing where
              a last stage drew nothing
    rows      BLAKE3 of the digests of rows, one after the other, 16 bytes
    header    said once: whose rows, of which text, with which weights, between whom
    receipt   of the rows from a multiple of `BLOCK` to the next, where a text or an attempt ends, of fewer

The stage before has signed as `made` what this one signs as `given`. So where two say different things of the same
rows, there is a signature under each. Receipts of a header follow each other: each names the one before it.
"""

from collections.abc import Iterable
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from weft.engine.fingerprint import MAX_NBYTES
from weft.engine.numbers import Kind
from weft.ids import PeerId
from weft.net.messages import HexPeer
from weft.pipeline.messages import Number, Stage
from weft.texts.messages import RECEIPT_DIGEST_NBYTES, Id, Place, ReceiptDigest, ReceiptTold, RowsSigned, WeightsDigest
from weft.wire import Record, Signed, digest, encode

BLOCK = 32


class ReceiptHeader(Record, frozen=True, kw_only=True):
    """What a member's receipts of one attempt have in common."""

    sequence: Id
    attempt: Number
    stage: Stage
    round: Number
    """Whose weights they are."""
    weights: WeightsDigest
    """Of the section's parameters (`weights_digest`)."""
    numbers: Kind
    """As which they are computed with."""
    inward: HexPeer
    onward: HexPeer


class Receipt(Record, frozen=True, kw_only=True, array_like=True):
    """What is signed."""

    header: ReceiptDigest
    start: Place
    num: RowsSigned
    given: ReceiptDigest
    made: ReceiptDigest
    fingerprint: Annotated[bytes, Meta(max_length=MAX_NBYTES)]
    """Of the last row that went out, as whoever takes it decodes it; of a last stage's, of the logits. None where it
    is not here any more."""
    previous: ReceiptDigest
    """Of the receipt before; of the first, the header's again."""

    @property
    def stop(self) -> int:
        return self.start + self.num


def row_digest(row: bytes | memoryview) -> bytes:
    return blake3(row).digest(RECEIPT_DIGEST_NBYTES)


def rows_digest(digests: Iterable[bytes]) -> bytes:
    return blake3(b"".join(digests)).digest(RECEIPT_DIGEST_NBYTES)


def row_digests(data: bytes, row_nbytes: int) -> list[bytes]:
    """Return the digest of each row."""
    view = memoryview(data)
    return [row_digest(view[at : at + row_nbytes]) for at in range(0, len(data), row_nbytes)]


def record_digest(record: ReceiptHeader | Receipt) -> bytes:
    return blake3(encode(record)).digest(RECEIPT_DIGEST_NBYTES)


def weights_digest(*vectors: bytes | memoryview) -> bytes:
    """Return what names a section's parameters.

    Args:
        vectors: in fp32, the lowest byte first: its own, and that of a tied matrix that lies apart.
    """
    return bytes.fromhex(digest(b"".join(bytes.fromhex(digest(each)) for each in vectors)))


def signed(header: ReceiptHeader, told: ReceiptTold, signer: PeerId) -> tuple[Receipt, Signed]:
    """Return the receipt that was told, as it was signed; whether the signature holds is not looked at."""
    receipt = Receipt(
        header=record_digest(header),
        start=told.start,
        num=told.num,
        given=told.given,
        made=told.made,
        fingerprint=told.fingerprint,
        previous=told.previous,
    )
    return receipt, Signed(kind="Receipt", body=encode(receipt), signer=signer, signature=told.signature)
