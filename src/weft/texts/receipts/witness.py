"""What who asks does with receipts: it checks signatures, and that neighbours say the same of what went between them.

    stage k signs  made = m        stage k + 1 signs  given = g        of the same rows: m == g, or one of them lies

Both ends of the path are compared with the text itself: tokens that were given to the first stage, and those that the
last one drew. A member that computes rows again, after a mend, signs them again; compared is what it had signed in the
attempt of which the next stage's rows came. Where an attempt began within a block for one of them and not for the
other, nothing is compared.

Pure. Nothing here is waited for: what is wrong, or does not come, is told as an event, and the answer goes on.
"""

from collections.abc import Sequence
from typing import NamedTuple

from weft.errors import WireError
from weft.events import Event, ReceiptFailed, ReceiptsDiffer
from weft.ids import PeerId
from weft.texts.messages import BLOCK, TOKEN_NBYTES, Receipts
from weft.texts.receipts.receipt import Receipt, ReceiptHeader, record_digest, row_digest, rows_digest, signed
from weft.wire import Signed, Verify, require_signature

MAX_SPARE = 8  # receipts of a stage beyond one a block: where attempts begin, and at the end


class Kept(NamedTuple):
    """A receipt whose signature holds."""

    header: ReceiptHeader
    receipt: Receipt
    signed: Signed

    @property
    def peer(self) -> PeerId:
        return self.signed.signer


class _Attempt(NamedTuple):
    """
    Args:
        orders: what the member of each stage was told: how much to keep, and from where to send on.
    """

    round: int
    path: tuple[PeerId, ...]
    orders: dict[int, tuple[int, int]]


class Witness:
    """Of one text.

    Args:
        id: of the text.
        most: tokens of it.
    """

    def __init__(self, id: bytes, most: int, verify: Verify) -> None:
        self._id, self._most, self._verify = id, most, verify
        self._attempts = dict[int, _Attempt]()
        self._headers = dict[tuple[int, int], ReceiptHeader]()  # by attempt and stage
        self._ends = dict[tuple[int, int], tuple[int, bytes]]()  # the place and digest behind the last receipt
        self._kept = dict[tuple[int, int, int, int], Kept]()  # by stage, attempt, start and stop
        self._open = list[Kept]()  # what was not compared yet with what came in
        self._differ = set[Event]()  # told already

    @property
    def kept(self) -> tuple[Kept, ...]:
        return tuple(self._kept.values())

    def opened(self, attempt: int, round: int, path: tuple[PeerId, ...]) -> None:
        self._attempts[attempt] = _Attempt(round, path, {})

    def ordered(self, attempt: int, stage: int, keep: int, send_from: int) -> None:
        self._attempts[attempt].orders[stage] = keep, send_from

    def told(self, peer: PeerId, note: Receipts) -> list[Event]:
        """Take receipts up; return what is wrong with them."""
        attempt = self._attempts.get(note.attempt)
        if attempt is None or note.stage >= len(attempt.path) or attempt.path[note.stage] != peer:
            return []
        key = note.attempt, note.stage
        if key not in self._headers:
            if note.weights is None or note.numbers is None:
                return [ReceiptFailed(stage=note.stage, member=peer, reason="it does not say with which weights")]
            self._headers[key] = ReceiptHeader(
                sequence=self._id,
                attempt=note.attempt,
                stage=note.stage,
                round=attempt.round,
                weights=note.weights,
                numbers=note.numbers,
                inward=attempt.path[note.stage - 1],
                onward=attempt.path[(note.stage + 1) % len(attempt.path)],
            )
        header, found = self._headers[key], list[Event]()
        for each in note.receipts:
            receipt, sealed = signed(header, each, peer)
            end, previous = self._ends.get(key, (0, record_digest(header)))
            if (reason := self._wrong(receipt, sealed, note.stage, end)) is not None:
                return [*found, ReceiptFailed(stage=note.stage, member=peer, reason=reason)]
            if receipt.previous != previous:
                found.append(ReceiptFailed(stage=note.stage, member=peer, reason="one before it did not come"))
            kept = Kept(header, receipt, sealed)
            self._ends[key] = receipt.stop, record_digest(receipt)
            self._kept[note.stage, note.attempt, receipt.start, receipt.stop] = kept
            self._open.append(kept)
        return found

    def _wrong(self, receipt: Receipt, sealed: Signed, stage: int, end: int) -> str | None:
        num = sum(each == stage for each, *_ in self._kept)
        most = (self._most // BLOCK + MAX_SPARE) * (len(self._attempts) + 1)
        if receipt.start < end or receipt.stop > self._most or num >= most:
            return "it is of rows that are none, or that have one"
        try:
            require_signature(sealed, self._verify)
        except WireError:
            return "its signature does not hold"
        return None

    def compared(self, tokens: Sequence[int], stopped_by: int | None = None) -> list[Event]:
        """Compare what came since, as far as the other side is there; return where two say different things.

        Args:
            tokens: of the text.
            stopped_by: the token that ended it, and is not in it.
        """
        found, waiting = list[Event](), list[Kept]()
        known = tokens if stopped_by is None else (*tokens, stopped_by)
        for kept in self._open:
            results = [self._as_given(kept, tokens), self._as_made(kept, known)]
            found += [each for each in results if isinstance(each, Event) and each not in self._differ]
            self._differ.update(found)
            if None in results:
                waiting.append(kept)
        self._open = waiting
        return found

    def _as_given(self, kept: Kept, tokens: Sequence[int]) -> Event | bool | None:
        """Return whether what a member says that it got could be compared, None where that may still come; or what is
        wrong with it."""
        header, receipt = kept.header, kept.receipt
        if header.stage == 0:
            if len(tokens) < receipt.stop:
                return None
            given = [row_digest(_packed(token)) for token in tokens[receipt.start : receipt.stop]]
            return rows_digest(given) == receipt.given or _not_of_the_text(kept)
        made_in = self._made_in(header.stage - 1, header.attempt, receipt.start, receipt.stop)
        if made_in is None:
            return False
        before = self._kept.get((header.stage - 1, made_in, receipt.start, receipt.stop))
        if before is None:
            return None
        is_same = before.receipt.made == receipt.given
        return is_same or ReceiptsDiffer(stage=header.stage, before=before.peer, member=kept.peer)

    def _as_made(self, kept: Kept, tokens: Sequence[int]) -> Event | bool | None:
        """The same for what a last stage's member says that it drew."""
        header, receipt = kept.header, kept.receipt
        attempt = self._attempts[header.attempt]
        if header.stage < len(attempt.path) - 1:
            return True
        if len(tokens) <= receipt.stop:
            return None
        _, send_from = attempt.orders.get(header.stage, (0, 0))
        drawn = [
            row_digest(_packed(tokens[row + 1]) if row >= send_from else b"")
            for row in range(receipt.start, receipt.stop)
        ]
        return rows_digest(drawn) == receipt.made or _not_of_the_text(kept)

    def _made_in(self, stage: int, attempt: int, start: int, stop: int) -> int | None:
        """Return in which attempt a stage's member had computed all these rows that it sent on in `attempt`."""
        peer = self._attempts[attempt].path[stage]
        for number in range(attempt, -1, -1):
            each = self._attempts.get(number)
            if each is None or stage not in each.orders:
                continue
            keep, _ = each.orders[stage]
            if each.path[stage] != peer or start < keep < stop:
                return None
            if keep <= start:
                return number
        return None

    def missing(self, attempt: int, stop: int) -> list[Event]:
        """The text has ended in an attempt; return which members have not given receipts up to a place."""
        of, found = self._attempts[attempt], list[Event]()
        for stage, (keep, _) in of.orders.items():
            end, _ = self._ends.get((attempt, stage), (0, b""))
            if keep < stop and end < stop:
                reason = "some did not come" if end else "none came"
                found.append(ReceiptFailed(stage=stage, member=of.path[stage], reason=reason))
        return found


def _packed(token: int) -> bytes:
    return token.to_bytes(TOKEN_NBYTES, "little")


def _not_of_the_text(kept: Kept) -> Event:
    return ReceiptFailed(
        stage=kept.header.stage, member=kept.peer, reason="it is not of the tokens that went between it and this peer"
    )
