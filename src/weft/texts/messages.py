"""What a peer that asks for a text and the members of the stages say to each other.

who asks                       member of stage k                     member of stage k + 1
  OpenSequence ─────────────────►        with its path: what have you of this text?
  ◄───────────── SequenceOpened          so many of its tokens, or why not
  ResumeSequence ───────────────►        keep so many, send on from there
  TextRows (tokens) ────────────►        to the first stage's member
                                 TextRows ──────────────────────────►  activations, after each of its steps
  ◄────────────────────────────────────────────────────── TokenDrawn  the last stage's member, which sends the token
                                 ◄────────────────────────── TextRows  to the first one's, too: a ring
  ◄──────────────── SequenceLost         I cannot go on with it: another may
  CloseSequence ────────────────►        forget it
every member ───── SectionServed ─────►  all that are linked, every two seconds: how fast it is, and what waits there
every member ───── Receipts ──────────►  who asks: signed, what it has computed; what is left when a text ends is asked
                                         for (ReceiptWanted). Who does not know these notes drops them
                                 HowNear ───────────────────────────►  now and then
                                 ◄──────────────────────────── IsNear

All but `OpenSequence` and `HowNear` are notes. They may be lost: whoever asks notices that nothing comes, and opens a
new attempt. Rows of many texts go in one note; where they have more than `MAX_INLINE_NBYTES`, a note names bytes that
are then fetched. Every bound is here, with its reason.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Annotated, Literal

from blake3 import blake3
from msgspec import UNSET, Meta, UnsetType

from weft.engine.draw import LEAST_REPETITION, MAX_BIASED, SEED_NBYTES, Drawing
from weft.engine.fingerprint import MAX_NBYTES
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.ids import PeerId
from weft.net.messages import HexDigest, HexPeer
from weft.pipeline.messages import Number, Stage
from weft.texts.chain import DIGEST_NBYTES, KEY_NBYTES
from weft.wire import Record

ID_NBYTES = 16
SECRET_NBYTES = 16
TOKEN_NBYTES = 4
MAX_PLACES = 1 << 20  # tokens of a text: more than models read
MAX_MARKS = (1 << 14) + 64  # of the longest text, one a page
MAX_INLINE_NBYTES = 64 << 10  # longer notes would keep votes and heartbeats waiting on a slow line
MAX_PIECE = 512  # tokens of one text in a step: what a step reads for one text, and less than any model's context
MAX_ROWS_NBYTES = 64 << 20  # of one piece's activations: 512 tokens of a width of 32,768 in fp32
MAX_TEXTS = 1024  # in one note
MAX_LIKELIEST = 20
MAX_STOP_IDS = 1024
MAX_LINKS = 32
MAX_RECEIPTS = 128  # in one note
MAX_FORM_NBYTES = 80 << 10  # schemas as `chat.grammar` takes them, and names of tools
FORMS = 1  # as which forms are written: who reads others is not asked for these
BLOCK = 32  # rows that a receipt is of
RECEIPT_DIGEST_NBYTES = 16  # who would sign another output has to find it for one that the weights give: 2^128 trials

_ID = "weft 2026 name of a text v1"

Place = Annotated[int, Meta(ge=0, le=MAX_PLACES)]
Secret = Annotated[bytes, Meta(min_length=SECRET_NBYTES, max_length=SECRET_NBYTES)]
Id = Annotated[bytes, Meta(min_length=ID_NBYTES, max_length=ID_NBYTES)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
ReceiptDigest = Annotated[bytes, Meta(min_length=RECEIPT_DIGEST_NBYTES, max_length=RECEIPT_DIGEST_NBYTES)]
WeightsDigest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Added = Annotated[float, Meta(ge=-100, le=100)]
"""To a logit: whatever the model says, what comes out is finite."""
RowsSigned = Annotated[int, Meta(ge=1, le=BLOCK)]
Why = Literal["no room", "not computed", "wrong rows", "old weights", "leaving", "no form"]
Word = Literal["held", "busy", "other weights", "not here", "older", "no form"]


class DrawnHow(Record, frozen=True, kw_only=True):
    """`engine.draw.Drawing` on the wire."""

    temperature: Annotated[float, Meta(ge=0, le=1e6)]
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)]
    top_p: Annotated[float, Meta(ge=0, le=1)]
    min_p: Annotated[float, Meta(ge=0, le=1)]
    presence: Added
    frequency: Added
    repetition: Annotated[float, Meta(ge=LEAST_REPETITION, le=100)]
    bias: Annotated[tuple[tuple[TokenId, Added], ...], Meta(max_length=MAX_BIASED)]
    seed: Annotated[bytes, Meta(min_length=SEED_NBYTES, max_length=SEED_NBYTES)]
    num_likeliest: Annotated[int, Meta(ge=0, le=MAX_LIKELIEST)] | None

    def __post_init__(self) -> None:
        biases = [bias for _, bias in self.bias]
        numbers = self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition, *biases
        if not all(map(isfinite, numbers)):
            raise ValueError("every number of how tokens are drawn is finite")

    @property
    def drawing(self) -> Drawing:
        return Drawing(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence=self.presence,
            frequency=self.frequency,
            repetition=self.repetition,
            bias=dict(self.bias),
            seed=self.seed,
            num_likeliest=self.num_likeliest,
        )


def drawn_how(drawing: Drawing) -> DrawnHow:
    return DrawnHow(
        temperature=drawing.temperature,
        top_k=drawing.top_k,
        top_p=drawing.top_p,
        min_p=drawing.min_p,
        presence=drawing.presence,
        frequency=drawing.frequency,
        repetition=drawing.repetition,
        bias=tuple(sorted(drawing.bias.items())),
        seed=drawing.seed,
        num_likeliest=drawing.num_likeliest,
    )


def looks_back(drawing: Drawing, form: bytes | UnsetType) -> bool:
    """Return whether who draws has to know the tokens before."""
    return drawing.has_penalties or form is not UNSET


def id_of(asker: PeerId, secret: bytes) -> bytes:
    """Return the name of a text: nobody else can open it, though all in its path learn the name."""
    return blake3(bytes.fromhex(asker) + secret, derive_key_context=_ID).digest(ID_NBYTES)


class OpenSequence(Record, frozen=True, kw_only=True, tag="OpenSequence"):
    """A call: you are in the path of this attempt."""

    sequence: Id
    """`id_of` who asks and `secret`."""
    secret: Secret
    attempt: Number
    stage: Stage
    round: Number
    """Whose weights compute the text."""
    inward: HexPeer
    """Who sends it rows, beside who asks: the stage before, of the first one the last."""
    onward: HexPeer
    """Who takes what comes out: the next stage; of the last one the first."""
    most: Place
    """Tokens of the whole text, at most."""
    places: Annotated[tuple[Place, ...], Meta(min_length=1, max_length=MAX_MARKS)]
    chain: Annotated[bytes, Meta(max_length=MAX_MARKS * DIGEST_NBYTES)]
    """Of the text's tokens, at those places; the last is where they end."""
    key: Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)] | None
    """Of the chain: to the first stage alone."""
    drawing: DrawnHow | None
    """How tokens are drawn: to the last stage alone."""
    tokens: Annotated[bytes, Meta(max_length=TOKEN_NBYTES * (MAX_PLACES >> 3))]
    """To the last stage, where drawing depends on them: the text so far."""
    num_prompt: Place
    stop_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_IDS)]
    """To the last stage: after one of these it draws no more."""
    form: Annotated[bytes, Meta(max_length=MAX_FORM_NBYTES)] | UnsetType = UNSET
    """To the last stage: what the answer must look like (`chat.grammar.FormWanted.to_json`); unset: it is free."""

    def __post_init__(self) -> None:
        if len(self.chain) != DIGEST_NBYTES * len(self.places) or list(self.places) != sorted(set(self.places)):
            raise ValueError("places and chain are columns of one table, in order")
        if self.places[0] != 0:
            raise ValueError("the first place is the text's beginning")
        num = self.places[-1]
        if num > self.most or self.num_prompt > num or len(self.places) > num_pages(num) + PAGE:
            raise ValueError("a text is as long as its last place says, and has a place a page")
        if self.form is not UNSET and self.drawing is None:
            raise ValueError("a form is told to who draws")
        if len(self.tokens) != (TOKEN_NBYTES * num if self.looks_back else 0):
            raise ValueError("the tokens so far are told where drawing looks at them, and all of them")

    @property
    def looks_back(self) -> bool:
        """Whether drawing looks at the tokens before."""
        return self.drawing is not None and looks_back(self.drawing.drawing, self.form)


class SequenceOpened(Record, frozen=True, kw_only=True, tag="SequenceOpened"):
    word: Word
    num: Place = 0
    log_from: Place = 0
    retry_s: Seconds = 0.0


class ResumeSequence(Record, frozen=True, kw_only=True, tag="ResumeSequence"):
    """A note of who asks."""

    sequence: Id
    attempt: Number
    stage: Stage
    keep: Place
    send_from: Place


class RowsOfText(Record, frozen=True, kw_only=True, array_like=True):
    """Tokens of one text that follow each other."""

    sequence: Id
    attempt: Number
    start: Place
    chain: Annotated[bytes, Meta(min_length=DIGEST_NBYTES, max_length=DIGEST_NBYTES * (MAX_PIECE + 1))]
    """Before the first, and after each; to the first stage only before the first."""
    data: Annotated[bytes, Meta(max_length=MAX_INLINE_NBYTES)]
    """What the stage takes: activations, encoded row by row; the first one ids of four bytes, the lowest byte first."""
    blob: HexDigest | None = None
    """In place of `data`: bytes to be fetched."""


class TextRows(Record, frozen=True, kw_only=True, array_like=True):
    """A note."""

    stage: Stage
    """Of whom it is sent to."""
    rows: Annotated[tuple[RowsOfText, ...], Meta(min_length=1, max_length=MAX_TEXTS)]


class TokenDrawn(Record, frozen=True, kw_only=True, array_like=True):
    """A note to who asks."""

    sequence: Id
    attempt: Number
    place: Place
    chain: Annotated[bytes, Meta(min_length=DIGEST_NBYTES, max_length=DIGEST_NBYTES)]
    """Of the tokens before."""
    token: TokenId
    logprob: float | None = None
    likeliest: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_LIKELIEST)] = ()


class SequenceLost(Record, frozen=True, kw_only=True, tag="SequenceLost"):
    """A note to who asks: this attempt will not go on here."""

    sequence: Id
    attempt: Number
    stage: Stage
    why: Why


class CloseSequence(Record, frozen=True, kw_only=True, tag="CloseSequence"):
    """A note of who asks."""

    sequence: Id
    attempt: Number
    stage: Stage


class HowNear(Record, frozen=True, kw_only=True, tag="HowNear"):
    """A call: nothing is done for it, so the answer takes as long as the way there and back."""


class IsNear(Record, frozen=True, kw_only=True, tag="IsNear"):
    pass


class Near(Record, frozen=True, kw_only=True):
    """How far a member of the next stage is."""

    peer: HexPeer
    rtt_s: Seconds
    bps: Annotated[float, Meta(gt=0, le=1e15)]


class SectionServed(Record, frozen=True, kw_only=True, tag="SectionServed"):
    """A note: what a member of a stage offers to those that ask for texts."""

    stage: Stage
    rounds: Annotated[tuple[Number, ...], Meta(max_length=4)]
    """Whose weights it holds, the newest first; none: it serves no longer."""
    step_s: Seconds
    row_s: Seconds
    token_s: Seconds
    """A step takes step_s + row_s * rows that draw + token_s * tokens of prompts."""
    num_rows: Number
    """Texts that are drawn there."""
    num_waiting: Number
    """Tokens of prompts that wait there."""
    num_free: Number
    """Pages."""
    links: Annotated[tuple[Near, ...], Meta(max_length=MAX_LINKS)] = ()
    numbers: Kind | UnsetType = UNSET
    """That it computes with; unset: it has not said so."""
    forms: Number | UnsetType = UNSET
    """Of a last stage's member: it holds answers to forms that are written so (`FORMS`)."""


class ReceiptTold(Record, frozen=True, kw_only=True, array_like=True):
    """A `receipt.Receipt`, less what its reader knows, and its signature."""

    start: Place
    num: RowsSigned
    given: ReceiptDigest
    made: ReceiptDigest
    fingerprint: Annotated[bytes, Meta(max_length=MAX_NBYTES)]
    previous: ReceiptDigest
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Receipts(Record, frozen=True, kw_only=True, array_like=True):
    """A note to who asks: of one text and attempt, in order."""

    sequence: Id
    attempt: Number
    stage: Stage
    receipts: Annotated[tuple[ReceiptTold, ...], Meta(min_length=1, max_length=MAX_RECEIPTS)]
    weights: WeightsDigest | None = None
    """With the first ones of an attempt: what the member computes with."""
    numbers: Kind | None = None
    """Likewise."""


class ReceiptWanted(Record, frozen=True, kw_only=True, tag="ReceiptWanted"):
    """A note of who asks: the text has ended. Sign the rows before a place."""

    sequence: Id
    attempt: Number
    stage: Stage
    stop: Place


def shared_out(rows: Iterable[RowsOfText]) -> list[list[RowsOfText]]:
    """Share rows out to notes that are not too long."""
    found: list[list[RowsOfText]] = []
    room = 0
    for each in rows:
        nbytes = len(each.data) + len(each.chain) + 64
        if not found or nbytes > room or len(found[-1]) >= MAX_TEXTS:
            found.append([])
            room = MAX_INLINE_NBYTES + MAX_INLINE_NBYTES // 2
        found[-1].append(each)
        room -= nbytes
    return found
