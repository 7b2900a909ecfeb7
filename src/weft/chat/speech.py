"""Where a model's answers end, and what they say."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weft.chat.template import ends_of
from weft.chat.vocabulary import Vocabulary
from weft.data.tokenizer import Tokenizer
from weft.model.came_with import CameWith


@dataclass(frozen=True)
class Speech:
    """
    Args:
        ends: tokens that end an answer.
    """

    tokenizer: Tokenizer
    ends: Collection[int]

    def said(self, tokens: Sequence[int]) -> str:
        """Return an answer's text."""
        return self.tokenizer.decode([token for token in tokens if token not in self.ends])


def speech_of(tokenizer: Tokenizer, came_with: CameWith) -> Speech:
    """Return how answers are read of a model: they end as its folder says, and with the tokenizer's end of a text."""
    ends = ends_of(came_with, Vocabulary(tokenizer).control.get)
    if tokenizer.end_of_text is not None:
        ends.add(tokenizer.end_of_text)
    return Speech(tokenizer, frozenset(ends))
