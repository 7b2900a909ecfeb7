"""What a member holds of one text: pages, rows that wait, tokens that were drawn, bytes that others may fetch."""

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np

from weft.engine.draw import Counts, Drawing, Drawn
from weft.engine.scheduling.guess import MAX_GUESSED
from weft.engine.scheduling.pages import PAGE
from weft.ids import PeerId
from weft.pipeline.link import Parcel
from weft.texts.forms import Followed
from weft.texts.guessed import Guessed
from weft.texts.log import Strip
from weft.texts.messages import OpenSequence
from weft.texts.receipts.receipt import Signing
from weft.texts.section import tokens_of
from weft.texts.sequence import MAX_EARLY, Rows, Sequence

ROOM = 256  # tokens that are to be drawn, for which a text is given pages at once


@dataclass(eq=False)
class HeldText:
    """
    Args:
        given: what came in and is not computed.
        early: what rows hold that came before their attempt was resumed.
        drawn: tokens, by place.
        num_counted: tokens that `counts` has.
        form: that the answer is held to.
        blobs: bytes that the next member may fetch.
        guessed: of the first stage.
        signing: None: the attempt has not begun here, or no receipts are given.
        read_at: the number of the step that read a piece of it last.
        worked_s: when a row of it was computed last.
    """

    sequence: Sequence
    asker: PeerId
    opened: OpenSequence
    pages: list[int]
    given: Strip
    early: dict[Rows, bytes] = field(default_factory=dict)
    drawn: dict[int, Drawn] = field(default_factory=dict)
    counts: Counts | None = None
    num_counted: int = 0
    form: Followed | None = None
    blobs: list[Parcel] = field(default_factory=list)
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_fetching: int = 0
    guessed: Guessed = field(default_factory=Guessed)
    signing: Signing | None = None
    read_at: int = -1
    worked_s: float = -math.inf

    @property
    def id(self) -> bytes:
        return self.opened.sequence

    @property
    def num_left(self) -> int:
        return self.sequence.num_taken - self.sequence.num_computed

    @property
    def is_drawing(self) -> bool:
        """Whether what is left is a token, and what is guessed to follow."""
        return self.num_left <= 1 + MAX_GUESSED

    @property
    def drawing(self) -> Drawing:
        return Drawing() if self.opened.drawing is None else self.opened.drawing.drawing

    @property
    def num_told(self) -> int:
        """Return how many tokens it had when its attempt was made."""
        return self.opened.places[-1]

    def has_room(self, rows: Rows) -> bool:
        """Return whether so much may wait here: what whoever asks has told of, or pages are there for, and `ROOM`."""
        most = max(self.num_told, self.sequence.num_computed, len(self.pages) * PAGE) + ROOM
        num_early = 0 if self.sequence.is_resumed else sum(each.num for each in self.early)
        return rows.stop <= most and num_early + rows.num <= most

    @property
    def may_fetch(self) -> bool:
        """Return whether rows whose bytes are to be fetched may wait behind others."""
        return self.num_fetching < MAX_EARLY

    def counts_until(self, place: int, vocab_size: int) -> Counts | None:
        """Return the counts of all tokens before a place, where drawing looks at them."""
        if not self.drawing.has_penalties:
            return None
        tokens = tokens_of(self.opened.tokens)
        if self.counts is None:
            self.counts = Counts(np.array(tokens[: self.opened.num_prompt]), vocab_size)
            self.num_counted = self.opened.num_prompt
        for at in range(self.num_counted, place):
            self.counts.add(tokens[at] if at < len(tokens) else self.drawn[at].token)
        self.num_counted = max(self.num_counted, place)
        return self.counts

    def drawn_until(self, place: int) -> list[int]:
        """Return the tokens before a place from the form's begin on, as far as any were drawn."""
        if self.form is None:
            return []
        found = list(self.form.told)
        for at in range(self.form.start + len(found), place):
            if at not in self.drawn:  # the form is complete, and this rests on a wrong guess
                break
            found.append(self.drawn[at].token)
        return found
