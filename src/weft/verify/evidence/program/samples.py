"""What depends on tokens: the tokens themselves, their rows of the embedding, and the slope of the cross entropy.

Words of a sample are one more than its tokens: the last is only predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.verify.evidence.program.grids import LOG2_E, Array, exp2, on_sums
from weft.verify.evidence.program.operation import Kind, Read, pieces


@dataclass(frozen=True)
class Words(Kind):
    """The words of all samples of a step, [batch, tokens + 1]: those of the run's data that the lease names."""

    batch: int
    tokens: int
    dtype = np.uint32

    @property
    def num(self) -> int:
        return self.batch * (self.tokens + 1)

    def whole(self, operands: Sequence[Array]) -> Array:
        return operands[0]

    def one(self, at: int, read: Read) -> Array:
        return read(0, at, 1)


@dataclass(frozen=True)
class Some:
    """Some samples of a step.

    Args:
        first: the number of the first one.
    """

    first: int
    num: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.num * self.tokens

    def words(self, words: Array) -> Array:
        """Return theirs, of those of the step."""
        return words.reshape(-1, self.tokens + 1)[self.first : self.first + self.num]

    def place(self, row: int) -> int:
        """Return where the word of a row stands; its target is the one after it."""
        sample, token = divmod(row, self.tokens)
        return (self.first + sample) * (self.tokens + 1) + token


@dataclass(frozen=True)
class Embedded(Kind):
    """Rows of a table by the words; operands: words, the table."""

    some: Some
    width: int

    @property
    def num(self) -> int:
        return self.some.rows * self.width

    def whole(self, operands: Sequence[Array]) -> Array:
        words = self.some.words(operands[0])[:, :-1].reshape(-1)
        return operands[1].reshape(-1, self.width)[words].reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, col = divmod(at, self.width)
        word = int(read(0, self.some.place(row), 1)[0])
        return read(1, word * self.width + col, 1)


@dataclass(frozen=True)
class EmbeddedBack(Kind):
    """The gradient of the table: sums over the places of each word. Operands: words, the gradient's columns as rows."""

    some: Some
    vocab: int
    width: int

    @property
    def num(self) -> int:
        return self.vocab * self.width

    def whole(self, operands: Sequence[Array]) -> Array:
        words = self.some.words(operands[0])[:, :-1].reshape(-1)
        found = np.empty((self.vocab, self.width), np.float32)
        columns = operands[1].reshape(self.width, -1)
        for here in pieces(self.width, max(self.vocab, columns.shape[1])):
            summed = np.zeros((self.vocab, here.stop - here.start))
            np.add.at(summed, words, on_sums(columns[here]).T)
            found[:, here] = summed
        return found.reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        word, col = divmod(at, self.width)
        start, rows = self.some.place(0), self.some.rows
        words = read(0, start, self.some.num * (self.some.tokens + 1)).reshape(self.some.num, -1)[:, :-1].reshape(-1)
        column = on_sums(read(1, col * rows, rows)[None])[0]
        return np.array([column[words == word].sum() + 0.0], np.float32)


@dataclass(frozen=True)
class CrossEntropyBack(Kind):
    """The gradient of logits; operands: words, logits, the largest of each row, the sum of each row's powers.

    Args:
        factor: what a token weighs.
    """

    some: Some
    vocab: int
    factor: float

    @property
    def num(self) -> int:
        return self.some.rows * self.vocab

    def whole(self, operands: Sequence[Array]) -> Array:
        words, logits, largest, summed = operands
        targets = self.some.words(words)[:, 1:].reshape(-1, 1)
        x, found = logits.reshape(-1, self.vocab), np.empty((self.some.rows, self.vocab), np.float32)
        for here in pieces(self.some.rows, self.vocab):
            is_target = np.arange(self.vocab) == targets[here]
            found[here] = self._made(x[here], largest[here, None], summed[here, None], is_target)
        return found.reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, word = divmod(at, self.vocab)
        is_target = read(0, self.some.place(row) + 1, 1) == word
        return self._made(read(1, at, 1), read(2, row, 1), read(3, row, 1), is_target)

    def _made(self, x: Array, largest: Array, summed: Array, is_target: Array) -> Array:
        share = exp2((x - largest) * np.float32(LOG2_E)) / summed
        share = np.where(is_target, share + np.float32(-1), share)
        return share * np.float32(self.factor)
