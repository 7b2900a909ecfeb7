"""Tasks as rows of a run's data: what is asked, as tokens, and how an answer to it is checked.

    row    | <user> 2 + 2? <assistant> | {"answers": ["4"], "match": "number"} | padding |      seq_len words

A row holds one task. Nothing in it is trained on: answers are drawn, and rewarded (`training.rewarded`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import UInt32

from weft.chat.matches import Match
from weft.chat.packing import noon, rows_of, with_sides
from weft.chat.tasks import Task, tasks_of
from weft.chat.template import Template, TextTooLong
from weft.chat.vocabulary import Vocabulary
from weft.data.corpus import TasksSource
from weft.data.packing import Stream
from weft.data.rows import words
from weft.data.store import BEGINS, MAX_VOCAB, SHARD_NBYTES, DataIndex, ShardStore
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError
from weft.ids import several

Words = UInt32[np.ndarray, " words"]


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an answer is right; as `tasks.Task`."""

    answers: tuple[str, ...]
    match: Match

    def is_right(self, said: str) -> bool:
        """Raises ConfigError: it is code, and this machine has nothing to run it in."""
        return Task("", "", (), (), self.answers, self.match).is_right(said)


@dataclass(frozen=True)
class Judged:
    """How answers are judged.

    Args:
        max_tokens: of an answer.
        needs_answers: by what each task says; else by something of the run's own.
        runs_code: tasks may have tests.
    """

    max_tokens: int
    needs_answers: bool = True
    runs_code: bool = False


@dataclass(frozen=True)
class Asked:
    """A task of a row.

    Args:
        prompt: up to where the answer begins.
    """

    prompt: tuple[int, ...]
    check: Check


@dataclass
class Told:
    """What became of tasks, counted for people."""

    num_too_long: int = 0
    num_chosen: int = 0

    def __str__(self) -> str:
        said = (
            (
                self.num_too_long,
                "left out, because train.seq_len has no room for it with an answer of reward.max_tokens, or with how "
                "it is checked",
            ),
            (self.num_chosen, "left out, because its answer is chosen and not drawn"),
        )
        return "; ".join(f"{several(num, 'task')} {what}" for num, what in said if num)


class Asking:
    """Puts tasks to a model by its chat template.

    Args:
        wall_s: seconds since 1970, for templates that say the date.
    """

    def __init__(self, template: Template, vocabulary: Vocabulary, wall_s: float) -> None:
        self._template, self._vocabulary, self._wall_s = template, vocabulary, wall_s

    def prompt(self, task: Task) -> list[int]:
        """Return a task's tokens, up to where the answer begins.

        Raises:
            TextTooLong: it is too long for any row: names the place.
            DataError: the template refuses it: names the place.
        """
        messages = [self._vocabulary.guarded_message(each) for each in task.messages]
        try:
            found = self._vocabulary.encode(self._template.render(messages, wall_s=self._wall_s))
        except TextTooLong as error:
            raise TextTooLong(f"{task.place}: {error}") from None
        except DataError as error:
            raise DataError(f"{task.place}: {error}") from None
        if not found:
            raise DataError(f"{task.place}: the model's chat template makes nothing of this task. Use another model.")
        return found


def pack_tasks(
    store: ShardStore,
    source: TasksSource,
    heldout_fraction: float,
    template: Template,
    tokenizer: Tokenizer,
    row_length: int,
    judged: Judged,
    base: Path,
    *,
    shard_nbytes: int = SHARD_NBYTES,
    on_packed: Callable[[int], None] = lambda _nbytes: None,
) -> tuple[DataIndex, Told]:
    """Write the tasks into `store` and return their index, and what was left out.

    Args:
        row_length: words: the run's sequence length.
        base: the folder that relative paths start from: the run file's.
        shard_nbytes: the size of every shard but the last.
        on_packed: told how many bytes of text were packed since it was told last.

    Raises:
        DataError: files missing or malformed, a task that the template refuses, one with tests where none are run, or
            fewer than two.
        DiskFull: no room for the shards.
    """
    if tokenizer.vocab_size > MAX_VOCAB:
        raise DataError(f"the tokenizer has {tokenizer.vocab_size} ids. Allowed with tasks: at most {MAX_VOCAB}.")
    vocabulary, told = Vocabulary(tokenizer, template.writes), Told()
    asking = Asking(template, vocabulary, noon(source.date))
    streams = {side: Stream(store, "uint32", shard_nbytes) for side in ("train", "heldout")}
    num = {"train": 0, "heldout": 0}
    padding = 0 if tokenizer.end_of_text is None else tokenizer.end_of_text
    read = partial(tasks_of, needs_answers=judged.needs_answers)
    for side, task in with_sides(read, _name, source, heldout_fraction, base, "task", "learnt from"):
        if task.choices:
            told.num_chosen += 1
            continue
        if task.match == "tests" and not judged.runs_code:
            raise DataError(
                f"{task.place}: its answers are code, which members have to run, each in a sandbox. If they are to, "
                "say so: [reward] runs_code = true."
            )
        try:
            asked = asking.prompt(task)
        except TextTooLong:
            told.num_too_long += 1
            continue
        row = _row(asked, _checked(task, vocabulary, tokenizer), padding, row_length)
        if row is None or len(asked) + judged.max_tokens > row_length:
            told.num_too_long += 1
            continue
        num[side] += 1
        streams[side].write(row)
        on_packed(sum(len(str(each.get("content", "")).encode()) for each in task.messages))
    if not all(num.values()):
        which = "to learn from" if not num["train"] else "held out"
        raise DataError(f"no task is left {which}. {told or 'Name files with more of them.'}")
    for stream in streams.values():
        stream.write(_padded([], padding, 1))  # the word after the last row
    index = DataIndex(
        dtype="uint32",
        train=streams["train"].finish(),
        heldout=streams["heldout"].finish(),
        train_text_nbytes=0,
        heldout_text_nbytes=0,
        tokenizer=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        rows=rows_of(source, row_length, num["train"], num["heldout"]),
    )
    return index, told


def asked_in(row: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> Asked:
    """Return the task of a row.

    Raises:
        DataError: it is none: whoever made the run packed it otherwise.
    """
    found = np.asarray(row, np.int64)
    begins = np.flatnonzero(found & BEGINS)
    ids = found & (BEGINS - 1)
    if len(begins) < 2 or begins[0]:
        raise DataError("a row of the run's data holds no task. Whoever made the run packed it wrongly; tell them.")
    stop = begins[2] if len(begins) > 2 else len(ids)
    try:
        check = msgspec.json.decode(tokenizer.decode(ids[begins[1] : stop].tolist()), type=Check)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise DataError(
            f"a row of the run's data does not say how an answer is checked: {error}. Tell its maker."
        ) from None
    return Asked(tuple(ids[: begins[1]].tolist()), check)


def _checked(task: Task, vocabulary: Vocabulary, tokenizer: Tokenizer) -> list[int]:
    """Return how answers to a task are checked, as tokens.

    Raises:
        DataError: the tokenizer does not give back what it was given.
    """
    text = msgspec.json.encode(Check(answers=tuple(map(str, task.answers)), match=task.match)).decode()
    ids = vocabulary.encode_plain(text)
    if tokenizer.decode(ids) != text:
        raise DataError(
            f"{task.place}: the model's tokenizer does not keep {text[:60]!r} as it is, so peers would check another "
            "answer. Use the tokenizer of a chat model."
        )
    return ids


def _row(asked: list[int], check: list[int], padding: int, length: int) -> Words | None:
    """Return a task's row; None: there is no room in it."""
    if len(asked) + len(check) > length:
        return None
    parts = [words(np.array(each, np.uint32), np.zeros(len(each), bool)) for each in (asked, check)]
    return _padded(parts, padding, length)


def _padded(parts: list[Words], padding: int, length: int) -> Words:
    rest = np.full(length - sum(map(len, parts)), padding, np.uint32)
    rest[:1] |= BEGINS
    return np.concatenate([*parts, rest])


def _name(task: Task) -> str:
    """Return what says on which side a task is: the same whatever file it is in, and wherever."""
    return msgspec.json.encode(task.messages).decode()
