"""Rows of whole texts, of which not every token is trained on: how they are written, and how a model reads them.

    row of a shard   | Hi <answer> Hello. <end> | What is 1 + 1? <answer> 2 <end> | padding |      seq_len words
    word             token, and in its two highest bits: it begins a text; it is trained on
    model            tokens; targets, -100 for what is not trained on; positions, which begin at 0 with each text

No text sees another one in its row. A window of a run's data is a row, and as of running text its last target is the
word after it: the first of the next row, which is never trained on.

Where the texts are pairs, each answer that was chosen is followed in its row by the one that was rejected.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64, Num, UInt32
from torch import Tensor

from weft.data.store import BEGINS, TRAINED

UNTRAINED = -100  # what torch's cross_entropy passes over
NUM_OPEN = 64  # rows that still take texts


class Batch(NamedTuple):
    """Windows of a run's data, as a model reads them.

    Args:
        targets: one place further; of rows of whole texts, `UNTRAINED` where nothing is predicted.
        positions: of each token in its text; None: a window is one text.
    """

    tokens: Int64[Tensor, "batch seq"]
    targets: Int64[Tensor, "batch seq"]
    positions: Int64[Tensor, "batch seq"] | None = None

    @property
    def num_predicted(self) -> int:
        """Return how many tokens the loss is a mean over, or pairs."""
        return self.targets.numel() if self.positions is None else int((self.targets != UNTRAINED).sum())

    def part(self, start: int, stop: int) -> "Batch":
        """Return some of its windows."""
        return self._each(lambda tensor: tensor[start:stop])

    def blank(self) -> "Batch":
        """Return a window of nothing, of this batch's kind."""
        return self.part(0, 1)._each(torch.zeros_like)

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device))

    def share_of(self, whole: "Batch") -> float:
        """Return the weight of this part's mean loss in that of all: its share of what is predicted."""
        if self.positions is None:
            return len(self.tokens) / len(whole.tokens)
        return self.num_predicted / max(whole.num_predicted, 1)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tokens, targets, positions = self
        return type(self)(change(tokens), change(targets), None if positions is None else change(positions))


class PairBatch(Batch):
    """Rows whose texts are pairs, of which the first was chosen."""

    @property
    def num_predicted(self) -> int:
        assert self.positions is not None
        return int(pairs_of(self.targets, self.positions).sum())


def sums_of_texts(
    values: Num[Tensor, "batch seq"], positions: Int64[Tensor, "batch seq"]
) -> Num[Tensor, "batch pair 2"]:
    """Return for each text of a row the sum of `values` over its tokens, by pairs; 0 of texts that are not there."""
    text = (positions == 0).cumsum(1) - 1
    sums = values.new_zeros(len(values), values.shape[1] + values.shape[1] % 2)
    return sums.scatter_add(1, text, values).view(len(values), -1, 2)


def pairs_of(targets: Int64[Tensor, "batch seq"], positions: Int64[Tensor, "batch seq"]) -> Bool[Tensor, "batch pair"]:
    """Return which pairs there are in rows: padding is none."""
    return (sums_of_texts((targets != UNTRAINED).long(), positions) > 0).all(-1)


def words(ids: UInt32[np.ndarray, " tokens"], is_trained: Bool[np.ndarray, " tokens"]) -> UInt32[np.ndarray, " tokens"]:
    """Return one text's words. Its first token is not trained on, for nothing predicts it."""
    found = ids.astype(np.uint32) | np.where(is_trained, np.uint32(TRAINED), np.uint32(0))
    found[0] = ids[0] | BEGINS
    return found


def blank(num_samples: int, seq_len: int, *, has_rows: bool, is_paired: bool = False) -> Batch:
    """Return windows of tokens that mean nothing, all of them predicted: what computing is tried on."""
    zeros = torch.zeros(num_samples, seq_len, dtype=torch.int64)
    return (PairBatch if is_paired else Batch)(zeros, zeros, zeros if has_rows else None)


def batch_of(words: Int64[Tensor, "batch words"], *, has_rows: bool, is_paired: bool = False) -> Batch:
    """Return the batch of these windows, each with the word after it.

    Args:
        has_rows: they are rows of whole texts; else they are running text, and their words are tokens.
        is_paired: those texts are pairs.
    """
    if not has_rows:
        return Batch(words[:, :-1].contiguous(), words[:, 1:].contiguous())
    ids, begins, is_trained = words & (BEGINS - 1), (words & BEGINS) != 0, (words & TRAINED) != 0
    places = torch.arange(words.shape[1] - 1, device=words.device)
    first = torch.where(begins[:, :-1], places, 0).cummax(1).values
    targets = torch.where((is_trained & ~begins)[:, 1:], ids[:, 1:], UNTRAINED)
    return (PairBatch if is_paired else Batch)(ids[:, :-1].contiguous(), targets, places - first)


def written(batch: Batch) -> Int64[Tensor, "batch words"]:
    """Return the words that `batch_of` makes `batch` of."""
    tokens, targets, positions = batch
    if positions is None:
        return torch.cat((tokens, targets[:, -1:]), 1)
    is_trained = targets != UNTRAINED
    found = torch.cat((tokens | torch.where(positions == 0, BEGINS, 0), targets[:, -1:].clamp(min=0)), 1)
    found[:, 1:] |= torch.where(is_trained, TRAINED, 0)
    return found


class Packer:
    """Puts texts into rows, each whole into one: into the fullest of the open rows that has room (best fit).

    Args:
        length: words of a row.
        padding: the token that fills it up.
    """

    def __init__(self, length: int, padding: int) -> None:
        self._length = length
        self._padding = padding
        self._open: list[_Row] = []

    def add(self, text: UInt32[np.ndarray, " words"]) -> Iterator[UInt32[np.ndarray, " words"]]:
        """Take a text of at most `length` words; yield a row that is thereby done, if one is."""
        fitting = [row for row in self._open if row.num + len(text) <= self._length]
        if fitting:
            row = max(fitting, key=_num)
        else:
            if len(self._open) == NUM_OPEN:
                yield self._close(max(self._open, key=_num))
            row = _Row()
            self._open.append(row)
        row.texts.append(text)
        row.num += len(text)
        if row.num == self._length:
            yield self._close(row)

    def finish(self) -> Iterator[UInt32[np.ndarray, " words"]]:
        """Yield the rows that are still open, then the word after the last one."""
        while self._open:
            yield self._close(self._open[0])
        yield self._pad(1)

    def _close(self, row: "_Row") -> UInt32[np.ndarray, " words"]:
        self._open = [each for each in self._open if each is not row]
        return np.concatenate([*row.texts, self._pad(self._length - row.num)])

    def _pad(self, num: int) -> UInt32[np.ndarray, " words"]:
        found = np.full(num, self._padding, np.uint32)
        found[:1] |= BEGINS
        return found


@dataclass
class _Row:
    """One that still takes texts, and how many words it has."""

    texts: list[UInt32[np.ndarray, " words"]] = field(default_factory=list)
    num: int = 0


_num = attrgetter("num")
