"""What a member signs of the rows that it computed: what came in, what went out, and what the last of them was like.

    row       BLAKE3 of its bytes as they went over the wire, 16 bytes: activations, or a token; nothing where
              a last stage drew nothing
    rows      BLAKE3 of the digests of rows, one after the other, 16 bytes
    header    said once: whose rows, of which text, with which weights, between whom
    receipt   of the rows from a multiple of `BLOCK` to the next, where a text or an attempt ends, of fewer

The stage before has signed as `made` what this one signs as `given`. So where two say different things of the same
rows, there is a signature under each. Receipts of a header follow each other: each names the one before it.

Rows may be guesses. What was computed for a wrong one is computed anew, so a block is signed once rows come that attach
behind it: a first stage sends those only after a token that was told. What is left at a text's end is asked for.
"""

from collections.abc import Callable, Iterable
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from weft.engine.fingerprint import MAX_NBYTES, fingerprint
from weft.engine.numbers import Kind
from weft.ids import PeerId
from weft.net.messages import HexPeer
from weft.pipeline.messages import Number, Stage
from weft.texts.messages import (
    BLOCK,
    MAX_RECEIPTS,
    RECEIPT_DIGEST_NBYTES,
    Id,
    OpenSequence,
    Place,
    ReceiptDigest,
    Receipts,
    ReceiptTold,
    RowsSigned,
    WeightsDigest,
)
from weft.texts.section import Done, Section, Work, packed
from weft.wire import Record, Signed, Signer, digest, encode, seal


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


# --- what a member signs, as it computes it ---


def header_of(opened: OpenSequence, section: Section) -> ReceiptHeader | None:
    """Return what a member's receipts of an attempt have in common; None: its section does not say what it is."""
    if section.digest is None:
        return None
    return ReceiptHeader(
        sequence=opened.sequence,
        attempt=opened.attempt,
        stage=opened.stage,
        round=opened.round,
        weights=section.digest,
        numbers=section.kind,
        inward=opened.inward,
        onward=opened.onward,
    )


class Signing:
    """Of one text in one attempt, at one member.

    Args:
        start: the place of the first row that it computes.
    """

    def __init__(self, header: ReceiptHeader, section: Section, start: int, signer: Signer) -> None:
        self.header = header
        self._section, self._signer = section, signer
        self._start = self._settled = start
        self._given, self._made = list[bytes](), list[bytes]()
        self._fingerprints = dict[int, bytes]()  # by the place after the row
        self._named = self._previous = record_digest(self.header)

    @property
    def stop(self) -> int:
        return self._start + len(self._given)

    def computed(self, work: Work, done: Done, num: int) -> None:
        """The first `num` rows of a piece were computed; what was there from its place on is void."""
        if not self._start <= work.start <= self.stop:
            self._start = self._settled = work.start
        section, at = self._section, work.start - self._start
        self._given[at:] = row_digests(work.data, section.given_nbytes)[:num]
        if section.is_last:
            drawn = dict(zip(work.drawn_places, done.drawn, strict=False))  # none behind a complete form
            told = [drawn.get(place) for place in range(work.start + 1, work.start + num + 1)]
            self._made[at:] = [row_digest(b"" if each is None else packed([each.token])) for each in told]
        else:
            self._made[at:] = row_digests(done.data, section.row_nbytes)[:num]
        self._fingerprints |= done.fingerprints

    def settled(self, place: int) -> None:
        """Rows before a place will not be computed again in this attempt."""
        self._settled = max(self._settled, place)

    def notes(self, look_up: Callable[[int], bytes], until: int | None = None) -> list[Receipts]:
        """Sign whole blocks that are computed and settled; with `until`, all rows before that place.

        Args:
            look_up: returns a row that was sent on; nothing where it is not here any more.
        """
        is_first = self._previous == self._named
        told = list[ReceiptTold]()
        last = min(self.stop, self._settled if until is None else until)
        while self._start < last:
            end = (self._start // BLOCK + 1) * BLOCK
            if end > last and until is None:
                break
            told.append(self._receipt(min(end, last), look_up))
        return [
            Receipts(
                sequence=self.header.sequence,
                attempt=self.header.attempt,
                stage=self.header.stage,
                receipts=tuple(told[at : at + MAX_RECEIPTS]),
                weights=self.header.weights if is_first and not at else None,
                numbers=self.header.numbers if is_first and not at else None,
            )
            for at in range(0, len(told), MAX_RECEIPTS)
        ]

    def _receipt(self, stop: int, look_up: Callable[[int], bytes]) -> ReceiptTold:
        num = stop - self._start
        receipt = Receipt(
            header=self._named,
            start=self._start,
            num=num,
            given=rows_digest(self._given[:num]),
            made=rows_digest(self._made[:num]),
            fingerprint=self._fingerprint(stop, look_up),
            previous=self._previous,
        )
        del self._given[:num], self._made[:num]
        self._start, self._previous = stop, record_digest(receipt)
        return ReceiptTold(
            start=receipt.start,
            num=num,
            given=receipt.given,
            made=receipt.made,
            fingerprint=receipt.fingerprint,
            previous=receipt.previous,
            signature=seal(self._signer, receipt).signature,
        )

    def _fingerprint(self, stop: int, look_up: Callable[[int], bytes]) -> bytes:
        """Return that of the row before a place: of activations as they were sent on, or of the logits."""
        if self._section.is_last:
            found = self._fingerprints.get(stop, b"")
            self._fingerprints = {place: each for place, each in self._fingerprints.items() if place > stop}
            return found
        row = look_up(stop - 1)
        return fingerprint(self._section.row_of(row)) if row else b""
