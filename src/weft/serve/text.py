"""Text from tokens as they come.

tokens ──Vocabulary.pieces──► bytes ──half characters held back──► text ──begins of stop strings held back──► out
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from weft.chat.vocabulary import Vocabulary
from weft.engine.draw import Drawn

T = TypeVar("T")


@dataclass(frozen=True)
class Likely:
    """A token that was drawn, with its log-probability, and those that were likeliest."""

    piece: bytes
    logprob: float
    likeliest: tuple[tuple[bytes, float], ...]


def likely(drawn: Drawn, vocabulary: Vocabulary) -> Likely | None:
    if drawn.logprob is None:
        return None
    likeliest = tuple((vocabulary.piece(token), logprob) for token, logprob in drawn.likeliest)
    return Likely(vocabulary.piece(drawn.token), drawn.logprob, likeliest)


class Unfolding(Generic[T]):
    """A text that grows by pieces of bytes, and is told as far as it is sure.

    What may be the begin of a stop string, or half a character, is held back. Each piece may have something that goes
    out with its last character; what a stop string cuts off does not go out.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._num_told = 0  # characters
        self._waiting: list[tuple[int, T]] = []  # with the number of characters after which each goes out
        self.is_stopped = False

    def feed(self, piece: bytes, with_it: T | None = None) -> tuple[str, list[T]]:
        """Take a piece; return the text that is sure now, and what goes out with it."""
        self._held += self._decoder.decode(piece)
        if with_it is not None:
            self._waiting.append((self._num_told + len(self._held), with_it))
        at = min((place for stop in self._stops if (place := self._held.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.is_stopped = True
            told, self._held = self._held[:at], ""
            return told, self._out(told)
        num_kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        told = self._held[: len(self._held) - num_kept]
        self._held = self._held[len(told) :]
        return told, self._out(told)

    def finish(self) -> tuple[str, list[T]]:
        """Nothing more comes: return what was held back."""
        if self.is_stopped:
            return "", []
        told = self._held + self._decoder.decode(b"", True)
        self._held = ""
        self._num_told += len(told)
        rest = [each for _, each in self._waiting]
        self._waiting.clear()
        return told, rest

    def _out(self, told: str) -> list[T]:
        self._num_told += len(told)
        out = [each for place, each in self._waiting if place <= self._num_told]
        self._waiting = [(place, each) for place, each in self._waiting if place > self._num_told]
        return out


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`, but are not all of it."""
    return next((num for num in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:num])), 0)
