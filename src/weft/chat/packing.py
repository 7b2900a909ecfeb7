"""Turns conversations into shards and their index: rows of whole conversations (`weft.data.rows`).

    files ──conversations──► messages ──Renderer──► tokens, and which are trained on ──Packer──► rows ──► shards

One conversation in 1 / heldout_fraction is held out, by its name; where there are few, the one of the lowest hash is.
"""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import NamedTuple

from jaxtyping import UInt32
from numpy import ndarray

from weft.chat.conversations import Conversation, conversations
from weft.chat.rendering import Rendered, Renderer
from weft.chat.template import Template
from weft.chat.vocabulary import Vocabulary
from weft.data.corpus import ConversationsSource, Split, rank
from weft.data.packing import Stream
from weft.data.rows import Packer, words
from weft.data.store import MAX_VOCAB, SHARD_NBYTES, DataIndex, Rows, ShardInfo, ShardStore
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.ids import several


@dataclass
class Told:
    """What became of conversations, counted for people."""

    num_cut: int = 0
    num_too_long: int = 0  # and left out
    num_untrained: int = 0  # left out: nothing in them is trained on, or it was all cut off

    def __str__(self) -> str:
        """Return it in words, empty where there is nothing to say."""
        said = (
            (self.num_cut, "longer than a row, cut"),
            (self.num_too_long, "longer than a row, left out"),
            (self.num_untrained, "left out, because nothing in what is read of them is trained on"),
        )
        return "; ".join(f"{several(num, 'conversation')} {what}" for num, what in said if num)


def pack_conversations(
    store: ShardStore,
    source: ConversationsSource,
    heldout_fraction: float,
    template: Template,
    tokenizer: Tokenizer,
    row_length: int,
    base: Path,
    *,
    shard_nbytes: int = SHARD_NBYTES,
    on_packed: Callable[[int], None] = lambda _nbytes: None,
) -> tuple[DataIndex, Told]:
    """Write the conversations into `store` and return their index, and what was cut or left out.

    Args:
        row_length: tokens: the run's sequence length.
        base: the folder that relative paths start from: the run file's.
        shard_nbytes: the size of every shard but the last.
        on_packed: told how many bytes of text were packed since it was told last.

    Raises:
        DataError: files missing or malformed, a conversation that the template refuses, fewer than two, or more tokens
            than words have room for.
        DiskFull: no room for the shards.
    """
    if tokenizer.vocab_size > MAX_VOCAB:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids. Allowed with conversations: at most {MAX_VOCAB}."
        )
    renderer = Renderer(template, Vocabulary(tokenizer), _noon(source.date))
    sides, told = {side: _Side(store, tokenizer, row_length, shard_nbytes) for side in ("train", "heldout")}, Told()
    for side, conversation in split(source, heldout_fraction, base):
        rendered = renderer.render(conversation)
        on_packed(len(rendered.text.encode()))
        sides[side].add(rendered, told, is_cut=source.too_long == "cut")
    train, heldout = sides["train"].finish(), sides["heldout"].finish()
    index = DataIndex(
        dtype="uint32",
        train=train.shards,
        heldout=heldout.shards,
        train_text_nbytes=train.text_nbytes,
        heldout_text_nbytes=heldout.text_nbytes,
        tokenizer=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        rows=Rows(
            length=row_length,
            train_trained=train.num_trained,
            heldout_trained=heldout.num_trained,
            too_long=source.too_long,
            date=source.date,
        ),
    )
    return index, told


def split(source: ConversationsSource, heldout_fraction: float, base: Path) -> Iterator[tuple[Split, Conversation]]:
    """Yield every conversation with the side it is on. The first 1 / heldout_fraction are read twice.

    Raises:
        DataError: as `conversations`, or there are fewer than two.
    """
    first = [each.name for each in islice(conversations(source.paths, base), max(2, ceil(1 / heldout_fraction)))]
    if len(first) < 2:
        raise DataError(
            f"there {'is one conversation' if first else 'are no conversations'} in {', '.join(source.paths)}: one is "
            "held out and the others are trained on. Name files with two at least."
        )
    surely = min(first, key=rank)
    for conversation in conversations(source.paths, base):
        is_heldout = conversation.name == surely or rank(conversation.name) < heldout_fraction
        yield "heldout" if is_heldout else "train", conversation


def _noon(date: str) -> float:
    try:
        return datetime.datetime.fromisoformat(f"{date}T12:00").timestamp()
    except ValueError:
        raise DataError(f"data.source.date: {date} is no day. Write it as 2026-01-31.") from None


class _Packed(NamedTuple):
    shards: tuple[ShardInfo, ...]
    text_nbytes: int
    num_trained: int


class _Side:
    """Training or held-out conversations on their way into shards."""

    def __init__(self, store: ShardStore, tokenizer: Tokenizer, row_length: int, shard_nbytes: int) -> None:
        self.num_trained = 0
        self._row_length = row_length
        self._rows = Packer(row_length, 0 if tokenizer.end_of_text is None else tokenizer.end_of_text)
        self._stream = Stream(store, "uint32", shard_nbytes)

    def add(self, rendered: Rendered, told: Told, *, is_cut: bool) -> None:
        num, ids, is_trained = self._row_length, rendered.ids, rendered.is_trained
        if len(ids) > num and not is_cut:
            told.num_too_long += 1
            return
        ids, is_trained = ids[:num], is_trained[:num]
        if not is_trained[1:].any():
            told.num_untrained += 1
            return
        told.num_cut += len(rendered.ids) > num
        found = words(ids, is_trained)
        share = float(is_trained[1:].sum() / rendered.is_trained.sum())
        nbytes = sum(len(rendered.text[start:stop].encode()) for start, stop in rendered.spans)
        self.num_trained += int(is_trained[1:].sum())
        self._write(self._rows.add(found), round(share * nbytes))

    def finish(self) -> _Packed:
        self._write(self._rows.finish(), 0)
        return _Packed(self._stream.finish(), self._stream.text_nbytes, self.num_trained)

    def _write(self, rows: Iterator[UInt32[ndarray, " words"]], text_nbytes: int) -> None:
        for row in rows:
            self._stream.write(row)
        self._stream.text_nbytes += text_nbytes
