"""Tasks whose answers can be checked, out of the files that people have.

    {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}    its number from 0, its label, or itself
    {"question": "2 + 2?", "answer": "4"}                         a text, or a list of texts of which any is right

`question` may be `prompt`, or `messages` before the answer. Choices may be `{"text": [...], "label": [...]}`. `kind`
names a group of tasks. `match` says when a text that was drawn is right:

    exact       it is the answer, but for white space around it, and a full stop after it
    contains    the answer stands in it
    number      the last number in it is the answer's
    json        it is JSON of the same value
    schema      it is JSON that fits the answer, a JSON Schema
    tests       its Python code passes the answer, which is code with assertions
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.chat.conversations import asked_of, first_row, json_value, label_of, rows_of, text_of, with_system
from weft.chat.matches import MATCHES, Match, matches, why_never
from weft.chat.template import Message
from weft.errors import DataError
from weft.ids import several


@dataclass(frozen=True)
class Task:
    """
    Args:
        place: file and line, for people.
        kind: its group; empty: none.
        messages: what is asked, as templates know it.
        choices: of which one is right; none: the answer is drawn.
        answers: texts that are right, of choices their numbers.
    """

    place: str
    kind: str
    messages: tuple[Message, ...]
    choices: tuple[str, ...]
    answers: tuple[str, ...] | tuple[int, ...]
    match: Match = "exact"

    def is_right(self, said: str | int) -> bool:
        """Return whether this answers it: the number of a choice, or a text.

        Raises:
            ConfigError: it is code, and this machine has nothing to run it in.
        """
        if isinstance(said, int):
            return said in self.answers
        return any(matches(self.match, said, str(answer)) for answer in self.answers)


_FIELDS = ("choices", "answer", "answerKey", "answers", "kind", "match")  # beside what is asked
_WITHOUT_ANSWER = {"question", "system", "choices", "kind", "match"}  # else it may be of another kind


def tasks_of(paths: Sequence[str], base: Path, *, needs_answers: bool = True) -> Iterator[Task]:
    """Return all tasks, in an order that depends on names only.

    Args:
        paths: files, folders or globs, relative to `base` or absolute.
        needs_answers: each says what is right; else something other than these judges, and may need none.

    Raises:
        DataError: nothing is there; or, once that is read, something is no task: names the file and the place.
    """
    for row, _name, place in rows_of(paths, base, _FIELDS):
        yield task_of(row, place, needs_answers=needs_answers)


def are_tasks(paths: Sequence[str], base: Path) -> bool:
    """Return whether the first row of files is a task, if only a question that somebody else judges answers to.

    Raises:
        DataError: nothing is there, or it cannot be read.
    """
    row = first_row(paths, base, _FIELDS)
    is_question = "question" in row and row.keys() <= _WITHOUT_ANSWER
    try:
        task_of(row, "", needs_answers=not is_question)
    except DataError:
        return False
    return True


def task_of(row: Mapping[str, Any], place: str, *, needs_answers: bool = True) -> Task:
    """Return the task that a row of a file holds; as `tasks_of`.

    Raises:
        DataError: it is none.
    """
    row = {name: value for name, value in row.items() if value is not None}
    answer = next((row[name] for name in ("answer", "answers", "answerKey") if name in row), None)
    if answer is None and needs_answers:
        raise DataError(f"{place}: no answer: it has {', '.join(sorted(row)) or 'no fields'}. Name it answer.")
    texts, labels = _choices(row.get("choices"), place)
    if texts and "match" in row:
        raise DataError(f"{place}: match has no effect beside choices. Leave it out.")
    match = row.get("match", "exact")
    if match not in MATCHES:
        raise DataError(f"{place}: match is {str(match)[:40]!r}. Known are {', '.join(MATCHES)}.")
    answers: tuple[str, ...] | tuple[int, ...] = ()
    if texts and answer is not None:
        answers = (_number(answer, texts, labels, place, has_labels=isinstance(row["choices"], Mapping)),)
    elif not texts:
        given = answer if isinstance(answer, list) else [] if answer is None else [answer]
        answers = tuple(_text(each, match, place) for each in given)
        if not answers and needs_answers:
            raise DataError(f"{place}: the list of right answers is empty. Give one.")
        for each in answers:
            if needs_answers and (why := why_never(match, each)):
                raise DataError(f"{place}: no answer can be right by match = {match}: {why}. It is {each[:40]!r}.")
    asked = with_system(row, asked_of(row, place), place)
    if asked[-1]["role"] == "assistant" or not str(asked[-1].get("content") or "").strip():
        what = "an answer" if asked[-1]["role"] == "assistant" else "empty"
        raise DataError(f"{place}: nothing is asked: its last message is {what}. End with a question, or remove it.")
    return Task(place, label_of(row.get("kind", ""), f"{place}: kind"), tuple(asked), texts, answers, match)


def _choices(given: Any, place: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the choices, and what they are called."""
    if given is None:
        return (), ()
    texts = given.get("text") if isinstance(given, Mapping) else given
    labels = given.get("label") if isinstance(given, Mapping) else None
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts) or len(texts) < 2:
        raise DataError(f"{place}: choices are no list of two texts or more. Write one, or remove them.")
    names = [chr(ord("A") + number) for number in range(len(texts))] if labels is None else labels
    if not isinstance(names, list) or len(names) != len(texts):
        raise DataError(f"{place}: there are {several(len(texts), 'choice')}, and not as many labels. Give one each.")
    return (
        tuple(text_of(each, f"{place}: choice {number}") for number, each in enumerate(texts, start=1)),
        tuple(label_of(each, f"{place}: label {number}") for number, each in enumerate(names, start=1)),
    )


def _number(answer: Any, texts: Sequence[str], labels: Sequence[str], place: str, *, has_labels: bool) -> int:
    """Return which choice an answer means: of labels that are given, the one it is; else its number, or a text."""
    meant = {number for number, each in enumerate(labels) if each == str(answer)}
    if not has_labels and isinstance(answer, int) and not isinstance(answer, bool):
        meant = {answer} & set(range(len(texts)))
    elif not has_labels or not meant:
        meant |= {number for number, each in enumerate(texts) if each == answer}
    if len(meant) == 1:
        return meant.pop()
    raise DataError(
        f"{place}: the answer {str(answer)[:40]!r} is {'none' if not meant else 'more than one'} of the {len(texts)} "
        "choices. Give its number, from 0 on, its label, or its text."
    )


def _text(answer: Any, match: Match, place: str) -> str:
    if match == "schema" and isinstance(answer, Mapping):  # as JSON holds it
        return msgspec.json.encode(json_value(answer, f"{place}: answer")).decode()
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"{place}: the answer is neither text nor a number. Write it as one of them.")
    return label_of(answer, f"{place}: answer")
