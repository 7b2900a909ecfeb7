"""Whether a receipt is honest: its rows are computed again, of what its member says that it got.

    exact     what came out has the digest that was signed, and the fingerprint is the same to the bit
    others    how far its numbers are from those here, and by how much its tokens score below the best

Numbers that are not exact round differently with each number of rows in a step, number of threads, and processor. So
nobody is judged by one receipt of such numbers, but by how many of many are beyond `Bounds`, which come of honest runs
with the same section and numbers (`calibrated`). Whether these are an honest member's is Wald's test (1945):

    weight       sum of log(P(far | cheat) / P(far | honest)), of each receipt that is beyond the bound
                 and log(P(near | cheat) / P(near | honest)), of each that is not
    cheating     once the weight is log(1 / FALSE_ALARM): of an honest member it comes to that with no more than this
                 probability until it is found honest, if each receipt is far with no more than P(far | honest), given
                 those before (Ville's inequality)
    honest       once the weight is log(MISSED); it begins anew, with the same probability again, so that who turns is
                 found
    not enough   until then

What it needs: the section's weights, all rows that came in from the text's beginning (tokens, for the first stage; for
others what the stage before has in its log, or gives when computed again), and for a last stage how was drawn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from weft.chat.grammar import Form, GrammarFault
from weft.engine.draw import Drawing, margin
from weft.engine.fingerprint import Floats, distance, fingerprint
from weft.engine.scheduling.pages import num_pages
from weft.errors import ConfigError, PayloadError
from weft.texts.forms import Followed
from weft.texts.receipts.receipt import Receipt, ReceiptHeader, record_digest, row_digest, row_digests, rows_digest
from weft.texts.section import Section, Work, packed

PIECE = 64  # rows computed at once


Verdict = Literal["honest", "cheating", "not enough"]


class Bounds(NamedTuple):
    """Beyond which a receipt is far.

    Args:
        apart: of `Finding.apart`.
        margin: of `Finding.margin`.
    """

    apart: float
    margin: float


class Odds(NamedTuple):
    """The largest share of an honest member's receipts that may be far, and the least of a cheat's that will be."""

    honest: float
    cheat: float


NUMBERS, TOKENS = Odds(0.1, 0.5), Odds(0.02, 0.2)  # one token that was not drawn shows in one receipt of several
FALSE_ALARM, MISSED = 1e-6, 1e-2
SLACK = 1.5  # of bounds, for processors that were not measured
MIN_CALIBRATED = 100  # receipts of each way of computing: fewer do not tell what one of fifty is like


@dataclass(frozen=True)
class Finding:
    """
    Args:
        wrong: what is, beyond any rounding.
        apart: how far numbers are from those here (`engine.fingerprint.distance`): the median of the fingerprint and
            of all rows that are given. None: there is neither.
        margin: the largest of tokens that were drawn (`engine.draw.margin`). None: there is none.
    """

    receipt: Receipt
    wrong: tuple[str, ...] = ()
    apart: float | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Told:
    """What is known of a text at one stage.

    Args:
        given: all rows that came in, from the text's beginning.
        made: rows that were sent on, by place; or tokens, by the place of the row that each was drawn after.
        drawing: of a last stage.
        form: that the answer is held to, as it is at its begin; None: it is free.
        form_from: the place of the first token that it is of: where the prompt ends.
    """

    given: bytes
    made: dict[int, bytes]
    drawing: Drawing = Drawing()  # noqa: RUF009  # frozen
    form: Form | None = None
    form_from: int = 0


class _Row(NamedTuple):
    """A row that was computed again: numbers, and what they would have gone over the wire as."""

    place: int
    numbers: Floats
    data: bytes


def audit(section: Section, header: ReceiptHeader, receipts: Sequence[Receipt], told: Told) -> list[Finding]:
    """Compute a stage's rows of a text again, and return what is to be said of each receipt.

    Drawing with penalties looks at more than is told here: its tokens are not judged. Those of a form are, as far as
    all before them are told.

    Args:
        section: with the weights and numbers that the header names; its pages are written to from the first on.
        receipts: of one header, ascending.
        told: where rows that were sent on are missing, those are not looked at.

    Raises:
        PayloadError: rows that came in are none.
    """
    rows, found = list[_Row](), list[Finding]()
    stream = _computed(section, told, max((each.stop for each in receipts), default=0))
    for receipt in receipts:
        for row in stream:
            if row.place >= receipt.start:
                rows.append(row)
            if row.place == receipt.stop - 1:
                break
        rows = [row for row in rows if row.place >= receipt.start]
        found.append(_judged(section, header, receipt, told, rows))
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


def _judged(section: Section, header: ReceiptHeader, receipt: Receipt, told: Told, rows: Sequence[_Row]) -> Finding:
    if (section.kind, section.digest) != (header.numbers, header.weights):
        return Finding(receipt, ("it names other weights, or other numbers, than those that it is audited with",))
    if receipt.header != record_digest(header):
        return Finding(receipt, ("it is none of this header",))
    wrong, is_exact = list[str](), header.numbers == "exact"
    width = section.given_nbytes
    given = row_digests(told.given[receipt.start * width : receipt.stop * width], width)
    if rows_digest(given) != receipt.given:
        wrong.append("it is of other rows than those that came in")
    apart = list[float]()
    if receipt.fingerprint:
        apart.append(_distance(receipt.fingerprint, rows[-1].numbers))
        if is_exact and fingerprint(rows[-1].numbers) != receipt.fingerprint:
            wrong.append("its last row is not what these weights give")
    made, margins = [told.made.get(row.place, b"") for row in rows], list[float]()
    if section.is_last:
        margins = _margins(told, rows)
        if rows_digest(map(row_digest, made)) != receipt.made:
            wrong.append("it is of other tokens than those that were drawn")
        if is_exact and any(margins):
            wrong.append("a token is not the one that is drawn")
    elif is_exact:
        if rows_digest(row_digest(row.data) for row in rows) != receipt.made:
            wrong.append("what went out is not what these weights give")
    elif all(made):
        if rows_digest(map(row_digest, made)) != receipt.made:
            wrong.append("it is of other rows than those that went out")
        apart += [_distance(fingerprint(section.row_of(one)), row.numbers) for one, row in zip(made, rows, strict=True)]
    return Finding(receipt, tuple(wrong), median(apart) if apart else None, max(margins, default=None))


def _distance(told: bytes, row: Floats) -> float:
    try:
        return distance(told, row)
    except PayloadError:  # it is no fingerprint of such a row
        return float("inf")


def _margins(told: Told, rows: Sequence[_Row]) -> list[float]:
    """Return those of all rows that a token was drawn after."""
    drawing = told.drawing
    if drawing.presence or drawing.frequency or drawing.repetition != 1.0:
        return []
    drawn = [(row, int.from_bytes(told.made[row.place], "little")) for row in rows if told.made.get(row.place)]
    if told.form is None:
        return [margin(row.numbers.astype(np.float64), drawing, row.place + 1, token) for row, token in drawn]
    return _margins_of_form(told, told.form, drawn)


def _margins_of_form(told: Told, form: Form, drawn: Sequence[tuple[_Row, int]]) -> list[float]:
    """Return those of tokens of a form, up to the first that it forbids."""
    followed, tokens, found = Followed(form, told.form_from, ()), list[int](), list[float]()
    for row, token in drawn:
        for place in range(told.form_from + len(tokens), row.place + 1):
            if not (made := told.made.get(place - 1)):
                return found
            tokens.append(int.from_bytes(made, "little"))
        try:
            allowed = followed.allowed_after(tokens)
        except GrammarFault:  # one before it is forbidden, and was told where it was drawn
            return found
        logits = row.numbers.astype(np.float64)
        found.append(margin(logits, told.drawing, row.place + 1, token, allowed=allowed))
    return found


def tokens_told(tokens: Sequence[int], first: int) -> dict[int, bytes]:
    """Return the tokens of a text from a place on, each by the place of the row before it."""
    return {place - 1: packed([tokens[place]]) for place in range(first, len(tokens))}


def verdict(findings: Sequence[Finding], bounds: Bounds | None) -> Verdict:
    """Return what is to be said of a member, after all that was found of its receipts.

    Args:
        findings: of one section with one kind of numbers, in the order in which they were found.
        bounds: None: numbers are exact.
    """
    if any(each.wrong for each in findings):
        return "cheating"
    if bounds is None:
        return "honest" if findings else "not enough"
    numbers = weighed([each.apart > bounds.apart for each in findings if each.apart is not None], NUMBERS)
    margins = [each.margin > bounds.margin for each in findings if each.margin is not None]
    tokens = weighed(margins, TOKENS) if margins else numbers
    if "cheating" in (numbers, tokens):
        return "cheating"
    return numbers if numbers == tokens else "not enough"


def weighed(are_far: Iterable[bool], odds: Odds) -> Verdict:
    """Return what so many far and near receipts, in this order, say of who gave them."""
    far, near = log(odds.cheat / odds.honest), log((1 - odds.cheat) / (1 - odds.honest))
    weight, said = 0.0, False
    for is_far in are_far:
        weight += far if is_far else near
        if weight >= -log(FALSE_ALARM):
            return "cheating"
        if weight <= log(MISSED):
            weight, said = 0.0, True
    return "honest" if said else "not enough"


def calibrated(ways: Sequence[Sequence[Finding]]) -> Bounds:
    """Return bounds beyond which half as many receipts of each way are, at most, as may be of an honest member's.

    Args:
        ways: what was found of honest receipts of one section, of each way of computing: processors, threads, rows
            in a step.

    Raises:
        ConfigError: they are too few.
    """
    parts = [[each.apart for each in way if each.apart is not None] for way in ways]
    margins = [each for way in ways if (each := [one.margin for one in way if one.margin is not None])]
    if not parts or min(map(len, (*parts, *margins))) < MIN_CALIBRATED:
        raise ConfigError(
            f"bounds of honest numbers need {MIN_CALIBRATED} receipts of each way of computing, and there are fewer: "
            "let more texts be drawn"
        )
    return Bounds(
        SLACK * max(float(np.quantile(each, 1 - NUMBERS.honest / 2)) for each in parts),
        SLACK * max((float(np.quantile(each, 1 - TOKENS.honest / 2)) for each in margins), default=0.0),
    )
