"""Turns conversations into shards and their index: rows of whole conversations (`weft.data.rows`).

    files ──conversations──► messages ──Renderer──► tokens, and which are trained on ──Packer──► rows ──► shards

Of pairs of answers both lie in one row, the chosen one first.

One conversation in 1 / heldout_fraction is held out, by its name; where there are few, the one of the lowest hash is.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import NamedTuple, TypeVar

from jaxtyping import UInt32
from msgspec import UNSET, UnsetType
from numpy import concatenate, ndarray

from weft.chat.conversations import Conversation, Pair, conversations, pairs
from weft.chat.rendering import Rendered, Renderer
from weft.chat.template import MAX_TEXT_NBYTES, Template, TextTooLong
from weft.chat.vocabulary import Vocabulary
from weft.data.corpus import ConversationsSource, PreferencesSource, SourceConfig, Split, TasksSource, rank
from weft.data.packing import Stream
from weft.data.rows import Packer, words
from weft.data.store import MAX_VOCAB, SHARD_NBYTES, DataIndex, Rows, ShardInfo, ShardStore
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.ids import several

Item = TypeVar("Item")
TOO_LARGE = f"left out, because of more than the {MAX_TEXT_NBYTES >> 20} MiB that a chat template may make"


@dataclass
class Told:
    """What became of conversations, or of pairs of answers, counted for people."""

    what: str
    num_cut: int = 0
    num_too_long: int = 0  # and left out
    num_too_large: int = 0  # left out: a template makes no text of them
    num_untrained: int = 0  # left out: nothing in them is trained on, or it was all cut off
    num_alike: int = 0  # left out: both answers are one

    def __str__(self) -> str:
        """Return it in words, empty where there is nothing to say."""
        said = (
            (self.num_cut, "longer than train.seq_len, cut"),
            (self.num_too_long, "longer than train.seq_len, left out"),
            (self.num_too_large, TOO_LARGE),
            (self.num_untrained, "left out, because nothing in what is read of them is trained on"),
            (self.num_alike, "left out, because chosen and rejected are the same"),
        )
        return "; ".join(f"{several(num, self.what)} {what}" for num, what in said if num)


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
        heldout_fraction: 1: all are held out, and nothing is trained on.
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
    renderer = renderer_of(source, template, tokenizer)
    is_paired = isinstance(source, PreferencesSource)
    sides = {side: _Side(store, tokenizer, row_length, shard_nbytes) for side in ("train", "heldout")}
    told = Told("pair" if is_paired else "conversation")
    for side, found in split(source, heldout_fraction, base):
        try:
            rendered = [renderer.render(each) for each in found.texts]
        except TextTooLong:
            told.num_too_large += 1
            continue
        on_packed(sum(len(each.text.encode()) for each in rendered))
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
        rows=rows_of(source, row_length, train.num_trained, heldout.num_trained),
    )
    return index, told


def renderer_of(source: ConversationsSource, template: Template, tokenizer: Tokenizer) -> Renderer:
    """Return what writes the conversations of a source.

    Raises:
        DataError: its date is no day.
    """
    return Renderer(template, Vocabulary(tokenizer, template.writes), noon(source.date))


def rows_of(source: SourceConfig, length: int, train_trained: int = 0, heldout_trained: int = 0) -> Rows | UnsetType:
    """Return what an index says of rows of that source; unset: it is running text.

    Args:
        length: tokens of a row.
        train_trained, heldout_trained: tokens that are trained on, or tasks; 0: it is not packed yet.
    """
    if not isinstance(source, ConversationsSource):
        return UNSET
    return Rows(
        length=length,
        train_trained=train_trained,
        heldout_trained=heldout_trained,
        too_long=source.too_long,
        date=source.date,
        is_paired=True if isinstance(source, PreferencesSource) else UNSET,
        are_tasks=True if isinstance(source, TasksSource) else UNSET,
    )


def split(
    source: ConversationsSource, heldout_fraction: float, base: Path
) -> Iterator[tuple[Split, Conversation | Pair]]:
    """Yield every conversation, or pair, with the side it is on. The first 1 / heldout_fraction are read twice.

    Raises:
        DataError: as `conversations`, or there are fewer than two.
    """
    is_paired = isinstance(source, PreferencesSource)
    read: Callable[[Sequence[str], Path], Iterator[Conversation | Pair]] = pairs if is_paired else conversations
    what = "pair" if is_paired else "conversation"
    return with_sides(read, lambda each: each.name, source, heldout_fraction, base, what, "trained on")


def with_sides(
    read: Callable[[Sequence[str], Path], Iterator[Item]],
    name_of: Callable[[Item], str],
    source: ConversationsSource,
    heldout_fraction: float,
    base: Path,
    what: str,
    use: str,
) -> Iterator[tuple[Split, Item]]:
    """Yield every item of a source with the side it is on. The first 1 / heldout_fraction are read twice.

    Args:
        read: yields the items of files, by paths from a folder.
        name_of: returns what decides it.
        what: one item is called.
        use: what becomes of those that are not held out, for people.

    Raises:
        DataError: there are fewer than two.
    """
    first = [name_of(each) for each in islice(read(source.paths, base), max(2, ceil(1 / heldout_fraction)))]
    if len(first) < 2 and (heldout_fraction < 1 or not first):
        raise DataError(
            f"there {f'is one {what}' if first else f'are no {what}s'} in {', '.join(source.paths)}: one is "
            f"held out and the others are {use}. Name files with two at least."
        )
    surely = min(first, key=rank)
    for item in read(source.paths, base):
        name = name_of(item)
        yield "heldout" if name == surely or rank(name) < heldout_fraction else "train", item


def noon(date: str) -> float:
    """Return the noon of a day, in seconds since 1970.

    Raises:
        DataError: it is no day.
    """
    try:
        return datetime.datetime.fromisoformat(f"{date}T12:00").timestamp()
    except ValueError:
        raise DataError(f"data.source.date: {date} is no day. Write it as 2026-01-31.") from None


class _Packed(NamedTuple):
    shards: tuple[ShardInfo, ...]
    text_nbytes: int
    num_trained: int


class _Side:
    """Training or held-out conversations, or pairs, on their way into shards."""

    def __init__(self, store: ShardStore, tokenizer: Tokenizer, row_length: int, shard_nbytes: int) -> None:
        self.num_trained = 0
        self._row_length = row_length
        self._rows = Packer(row_length, 0 if tokenizer.end_of_text is None else tokenizer.end_of_text)
        self._stream = Stream(store, "uint32", shard_nbytes)

    def add(self, texts: Sequence[Rendered], told: Told, *, is_cut: bool) -> None:
        """Take a conversation, or the two of a pair: all in one row."""
        lengths = [len(each.ids) for each in texts]
        is_too_long = sum(lengths) > self._row_length
        if is_too_long and not is_cut:
            told.num_too_long += 1
            return
        if is_too_long:  # the shorter of a pair keeps what it has, where that is less than half of the row
            most = max(self._row_length // len(texts), self._row_length - sum(lengths) + max(lengths))
            lengths = [min(length, most) for length in lengths]
        cut = [each.ids[:length] for each, length in zip(texts, lengths, strict=True)]
        trained = [each.is_trained[:length] for each, length in zip(texts, lengths, strict=True)]
        if len({ids.tobytes() for ids in cut}) < len(texts):
            told.num_alike += 1
            return
        if not all(each[1:].any() for each in trained):
            told.num_untrained += 1
            return
        row, nbytes = list[UInt32[ndarray, " words"]](), 0
        told.num_cut += is_too_long
        for each, length, is_trained in zip(texts, lengths, trained, strict=True):
            row.append(words(each.ids[:length], is_trained))
            num_trained = int(is_trained[1:].sum())
            self.num_trained += num_trained
            written = sum(len(each.text[start:stop].encode()) for start, stop in each.spans)
            nbytes += round(num_trained / int(each.is_trained.sum()) * written)
        self._write(self._rows.add(concatenate(row)), nbytes)

    def finish(self) -> _Packed:
        self._write(self._rows.finish(), 0)
        return _Packed(self._stream.finish(), self._stream.text_nbytes, self.num_trained)

    def _write(self, rows: Iterator[UInt32[ndarray, " words"]], text_nbytes: int) -> None:
        for row in rows:
            self._stream.write(row)
        self._stream.text_nbytes += text_nbytes
