"""What a smaller model, which reads the same tokens, would draw next: guesses that need no text to have stood before.

    step 1      the draft model reads what it has not read of a text, and draws a token with the text's own noise
    step 2..k   it reads that token, and draws the next
    verified    the model itself draws at each of these places in one step (`guess`)

Noise is the text's seed and position alone (`draw`), so both models draw from their distributions with the same
numbers, and draw the same token with a probability of (1 - d) / (1 + d) at least, d being the total variation between
them (Gumbel coupling: Daliri et al., 2408.07978). What is drawn does not depend on the draft model.

Its keys and values are in pages of the same numbers as the model's: who shares a page shares both. So a page is named
only once the draft model has read it, too (`Sequence.num_drafted`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from weft.clock import Clock, SystemClock
from weft.engine.batch import Piece
from weft.engine.draw import Counts, Drawing, draw
from weft.engine.scheduling.pace import Pace
from weft.engine.step import Stepper, on_host
from weft.errors import NotFinite


@dataclass
class Asked:
    """A text of which tokens are to be guessed.

    Args:
        tokens: all of it.
        start: how many of them were read.
        pages: also of what is guessed.
        num: how many are wanted, at least one.
        counts: of the text, where its drawing has penalties; what is guessed does not count.
        guessed: they come here.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    num: int
    drawing: Drawing
    counts: Counts | None
    guessed: list[int] = field(default_factory=list)


class Draft:
    """A draft model.

    Args:
        stepper: has as many pages as the model's.
        vocab_size: of the model; where the draft model has more tokens, those are never guessed.
    """

    def __init__(self, stepper: Stepper, vocab_size: int, clock: Clock | None = None) -> None:
        self._stepper = stepper
        self._vocab_size = vocab_size
        self._pace = Pace()
        self._clock = clock or SystemClock()

    def step_s(self, num_texts: int) -> float:
        """Return how long it takes to guess one token of each of so many texts; 0 before anything is known."""
        return self._pace.step_s(num_texts, 0)

    def guess(self, asked: Sequence[Asked]) -> None:
        """Guess what follows each text.

        Raises:
            NotFinite: of broken weights.
        """
        for number in count():
            some = [each for each in asked if each.num > number]
            if not some:
                return
            began, num_graphs = self._clock.now(), self._stepper.num_graphs
            pieces = [_piece(each) for each in some]
            logits = on_host(self._stepper.step(pieces))[:, : self._vocab_size].astype(np.float64)
            if not np.isfinite(logits).all():
                raise NotFinite("the draft model's logits are NaN or infinite: its weights are broken. Leave it out.")
            for each, scores in zip(some, logits, strict=True):
                place = len(each.tokens) + len(each.guessed)
                each.guessed.append(draw(scores, each.drawing, place, each.counts).token)
            if self._stepper.num_graphs == num_graphs:
                num_more = sum(len(piece.tokens) for piece in pieces) - len(pieces)
                self._pace.note(len(some), num_more, self._clock.now() - began)

    def read(self, pieces: Iterable[Piece]) -> None:
        """Read tokens, and guess nothing."""
        self._stepper.step(list(pieces))


def _piece(asked: Asked) -> Piece:
    if asked.guessed:
        return Piece(asked.guessed[-1:], len(asked.tokens) + len(asked.guessed) - 1, asked.pages, num_draws=1)
    return Piece(asked.tokens[asked.start :], asked.start, asked.pages, num_draws=1)
