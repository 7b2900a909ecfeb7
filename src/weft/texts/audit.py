"""Whether a receipt is honest: its rows are computed again, of what its member says that it got.

    exact     what came out has the digest that was signed, and the fingerprint is the same to the bit
    others    the fingerprint is as near as those of honest runs are (`Bounds`), and so is each row that is given, if
              it has the digest that was signed; of a last stage each token scores nearly as well as the best

Numbers that are not exact round differently with each number of rows in a step, number of threads, and processor. So
`Bounds` are those of honest runs, measured with the same model and numbers (`python -m benchmarks.receipts`).

What it needs: the section's weights, all rows that came in from the text's beginning (tokens, for the first stage; for
others what the stage before has in its log, or gives when computed again), and for a last stage how was drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.engine.draw import Drawing, margin
from weft.engine.fingerprint import EQUAL, Distance, Floats, distance, fingerprint
from weft.engine.pages import num_pages
from weft.errors import PayloadError
from weft.texts.receipt import Receipt, ReceiptHeader, record_digest, row_digest, row_digests, rows_digest
from weft.texts.section import Section, Work, packed

PIECE = 64  # rows computed at once


class Bounds(NamedTuple):
    """
    Args:
        apart: how far fingerprints of honest runs are apart at most.
        margin: how much better than a token that was drawn the best scores at most (`engine.draw.margin`).
    """

    apart: Distance
    margin: float


EXACT = Bounds(EQUAL, 0.0)


@dataclass(frozen=True)
class Finding:
    """
    Args:
        wrong: what is; empty: the receipt is honest.
        apart: of the fingerprint, where there is one; and of each row that is given.
        margins: of tokens that were drawn.
    """

    receipt: Receipt
    wrong: tuple[str, ...] = ()
    apart: tuple[Distance, ...] = ()
    margins: tuple[float, ...] = ()

    @property
    def is_honest(self) -> bool:
        return not self.wrong


@dataclass(frozen=True)
class Told:
    """What is known of a text at one stage.

    Args:
        given: all rows that came in, from the text's beginning.
        made: rows that were sent on, by place; or tokens, by the place of the row that each was drawn after.
        drawing: of a last stage.
    """

    given: bytes
    made: dict[int, bytes]
    drawing: Drawing = Drawing()  # noqa: RUF009  # frozen


class _Row(NamedTuple):
    """A row that was computed again: numbers, and what they would have gone over the wire as."""

    place: int
    numbers: Floats
    data: bytes


def audit(
    section: Section, header: ReceiptHeader, receipts: Sequence[Receipt], told: Told, bounds: Bounds = EXACT
) -> list[Finding]:
    """Compute a stage's rows of a text again, and return what is to be said of each receipt.

    Drawing with penalties, or under a grammar, looks at more than is told here: its tokens are not judged.

    Args:
        section: with the weights and numbers that the header names; its pages are written to from the first on.
        receipts: of one header, ascending.
        told: where rows that were sent on are missing, those are not looked at.
        bounds: of numbers that are not exact.

    Raises:
        PayloadError: rows that came in are none.
    """
    bounds = EXACT if header.numbers == "exact" else bounds
    rows, found = list[_Row](), list[Finding]()
    stream = _computed(section, told, max((each.stop for each in receipts), default=0))
    for receipt in receipts:
        for row in stream:
            if row.place >= receipt.start:
                rows.append(row)
            if row.place == receipt.stop - 1:
                break
        rows = [row for row in rows if row.place >= receipt.start]
        found.append(_judged(section, header, receipt, told, rows, bounds))
    return found


def _computed(section: Section, told: Told, stop: int) -> Iterator[_Row]:
    width = section.given_nbytes
    if len(told.given) < stop * width:
        raise PayloadError("an audit needs all rows that came in, from the text's beginning to the last receipt's end")
    pages = range(num_pages(stop))
    for start in range(0, stop, PIECE):
        num = min(PIECE, stop - start)
        work = Work(told.given[start * width : (start + num) * width], num, start, pages)
        if section.is_last:
            logits = section.logits(work)
            yield from (_Row(start + at, row.astype(np.float32), b"") for at, row in enumerate(logits))
        else:
            (done,) = section.compute([work])
            if done.failed is not None:
                raise done.failed
            for at in range(num):
                data = done.data[at * section.row_nbytes : (at + 1) * section.row_nbytes]
                yield _Row(start + at, section.row_of(data), data)


def _judged(
    section: Section, header: ReceiptHeader, receipt: Receipt, told: Told, rows: Sequence[_Row], bounds: Bounds
) -> Finding:
    if (section.kind, section.digest) != (header.numbers, header.weights):
        return Finding(receipt, ("it names other weights, or other numbers, than those that it is audited with",))
    if receipt.header != record_digest(header):
        return Finding(receipt, ("it is none of this header",))
    wrong = list[str]()
    width = section.given_nbytes
    given = row_digests(told.given[receipt.start * width : receipt.stop * width], width)
    if rows_digest(given) != receipt.given:
        wrong.append("it is of other rows than those that came in")
    apart = list[Distance]()
    if receipt.fingerprint:
        is_same = header.numbers != "exact" or fingerprint(rows[-1].numbers) == receipt.fingerprint
        apart.append(_distance(receipt.fingerprint, rows[-1].numbers))
        if not is_same or not apart[0].is_within(bounds.apart):
            wrong.append("its last row is not what these weights give")
    made = [told.made.get(row.place, b"") for row in rows]
    if section.is_last:
        margins = _margins(told, rows)
        if rows_digest(map(row_digest, made)) != receipt.made:
            wrong.append("it is of other tokens than those that were drawn")
        if any(each > bounds.margin for each in margins):
            wrong.append("a token is not the one that is drawn")
        return Finding(receipt, tuple(wrong), tuple(apart), tuple(margins))
    if header.numbers == "exact":
        if rows_digest(row_digest(row.data) for row in rows) != receipt.made:
            wrong.append("what went out is not what these weights give")
    elif all(made):
        if rows_digest(map(row_digest, made)) != receipt.made:
            wrong.append("it is of other rows than those that went out")
        apart += [_distance(fingerprint(section.row_of(one)), row.numbers) for one, row in zip(made, rows, strict=True)]
        if not all(each.is_within(bounds.apart) for each in apart[1:]):
            wrong.append("a row that went out is not what these weights give")
    return Finding(receipt, tuple(wrong), tuple(apart))


def _distance(told: bytes, row: Floats) -> Distance:
    try:
        return distance(told, row)
    except PayloadError:  # it is no fingerprint of such a row
        return Distance(len(row), float("inf"), float("inf"))


def _margins(told: Told, rows: Sequence[_Row]) -> list[float]:
    """Return those of all rows that a token was drawn after."""
    drawing = told.drawing
    if drawing.presence or drawing.frequency or drawing.repetition != 1.0:
        return []
    drawn = [(row, int.from_bytes(told.made[row.place], "little")) for row in rows if told.made.get(row.place)]
    return [margin(row.numbers.astype(np.float64), drawing, row.place + 1, token) for row, token in drawn]


def tokens_told(tokens: Sequence[int], first: int) -> dict[int, bytes]:
    """Return the tokens of a text from a place on, each by the place of the row before it."""
    return {place - 1: packed([tokens[place]]) for place in range(first, len(tokens))}
