"""Conversations as tokens, and which of them are the assistant's: those alone are trained on.

    messages ──template──► text, and where answers stand in it ──vocabulary──► tokens, and whether each is of an answer

Where answers stand is said by the template's own marks ({% generation %}), or else found by its turns: what is before
answer i is what the template makes of the messages before it, with the begin of an answer, and what is after it begins
where the text of the messages up to it ends. Some templates write an earlier answer otherwise than the last one,
without its reasoning; there an answer is what stands in the whole text from the same begin to the same end.

White space after an answer's end mark is the template's and not the answer's. A template that writes something else
before an answer than it asks for one with is refused, for then what is trained on is not what is asked for later.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt32

from weft.chat.conversations import Conversation, Message
from weft.chat.template import Template, TemplateFault, plain
from weft.chat.vocabulary import BEGIN, END, GUARD, Vocabulary
from weft.errors import DataError

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """
    Args:
        text: all of it, as a person reads it.
        spans: of characters that are trained on.
    """

    ids: UInt32[np.ndarray, " tokens"]
    is_trained: Bool[np.ndarray, " tokens"]
    text: str
    spans: tuple[Span, ...]


class Renderer:
    """
    Args:
        template: None: plain turns.
        wall_s: seconds since 1970, for templates that say the date: the same for all conversations.
        settings: other variables of the template.
    """

    def __init__(
        self,
        template: Template | None,
        vocabulary: Vocabulary,
        wall_s: float = 0.0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._template, self._vocabulary = template, vocabulary
        self._wall_s, self._settings = wall_s, settings

    def render(self, conversation: Conversation) -> Rendered:
        """Return a conversation's tokens.

        Raises:
            DataError: the template refuses it, or the tokenizer does not know a character: names the place.
        """
        guarded = self._vocabulary.guarded_tree
        messages = [guarded(each) for each in conversation.messages]
        tools = [guarded(each) for each in conversation.tools]
        try:
            text, spans = self._marked(messages, tools)
            placed = self._vocabulary.placed(text)
        except DataError as error:
            raise DataError(f"{conversation.place}: {error}") from None
        ids = np.array([each.token for each in placed], np.uint32)
        starts, stops = (np.array([each[side] for each in placed], np.int64) for side in (1, 2))
        is_trained = np.zeros(len(ids), bool)
        for start, stop in spans:
            is_trained |= (starts < stop) & (stops > start)
        return Rendered(ids, is_trained, *_without_guards(text, spans))

    def _marked(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, list[Span]]:
        if self._template is not None and self._template.has_marks:
            return _unmarked(self._text(messages, tools, is_marked=True))
        return self._by_turns(messages, tools)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Any], *, asks: bool = False, is_marked: bool = False
    ) -> str:
        """Return a template's text.

        Args:
            asks: whether the begin of an answer comes after it.
        """
        if self._template is None:
            text = plain(messages)
            return text if asks else text.removesuffix("Assistant:")
        return self._template.render(
            messages, tools, wall_s=self._wall_s, settings=self._settings, is_continued=not asks, is_marked=is_marked
        )

    def _by_turns(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, list[Span]]:
        whole, spans = self._text(messages, tools), list[Span]()
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, upto = self._text(messages[:number], tools, asks=True), self._text(messages[: number + 1], tools)
            start = _num_shared(before, whole)
            if start < len(before.rstrip()) or (spans and start < spans[-1][1]):
                raise TemplateFault(
                    f"the chat template writes {whole[start : start + 20]!r} before answer {len(spans) + 1}, and "
                    f"asks for one with {before[start : start + 20]!r}. Mark in the template what is trained on, with "
                    "{% generation %} and {% endgeneration %}"
                )
            spans.append((start, _stop(whole, upto, start, message, self._vocabulary.control_pattern)))
        return whole, spans


def _stop(whole: str, upto: str, start: int, message: Message, control: re.Pattern[str]) -> int:
    """Return where an answer ends that begins at `start`.

    Args:
        upto: the text of the messages up to it, at whose end may stand what ends a conversation.
        control: finds control tokens, none of which is cut.
    """
    answer = upto[start:].rstrip()
    if whole.startswith(answer, start):
        return start + len(answer)
    content = (message.get("content") or "").strip()
    at, in_answer = whole.find(content, start), answer.rfind(content)
    rest, end = whole[at + len(content) :], answer[in_answer + len(content) :].lstrip()
    num_white = len(rest) - len(rest.lstrip())
    num = num_white + _num_shared(rest[num_white:], end)
    num = next((found.start() for found in control.finditer(rest) if found.start() < num < found.end()), num)
    ends = rest[:num].rstrip()
    if not content or at < 0 or in_answer < 0 or bool(ends) != bool(end):
        raise TemplateFault(
            "the chat template writes an earlier answer otherwise than the last one, and does not mark what is trained "
            "on: {% generation %} before an answer and {% endgeneration %} after it do"
        )
    return at + len(content) + len(ends)


def _num_shared(a: str, b: str) -> int:
    """Return how many first characters are the same."""
    least = min(len(a), len(b))
    return next((place for place in range(least) if a[place] != b[place]), least)


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """Return a text without its marks, and what stands between them."""
    parts, spans, at = list[str](), list[Span](), 0
    begun: int | None = None
    for part, mark in _cut(text):
        parts.append(part)
        at += len(part)
        if mark == BEGIN:
            begun = at
        elif mark == END and begun is not None:
            spans.append((begun, at))
            begun = None
    return "".join(parts), spans


def _cut(text: str) -> Iterator[tuple[str, str]]:
    """Yield stretches, each with the mark after it; of the last, none."""
    at = 0
    for place, letter in enumerate(text):
        if letter in (BEGIN, END):
            yield text[at:place], letter
            at = place + 1
    yield text[at:], ""


def _without_guards(text: str, spans: Sequence[Span]) -> tuple[str, tuple[Span, ...]]:
    """Return a text as a person reads it, and the same stretches of it."""

    def moved(place: int) -> int:
        return place - text.count(GUARD, 0, place)

    return text.replace(GUARD, ""), tuple((moved(start), moved(stop)) for start, stop in spans)
