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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt32

from weft.chat.conversations import Conversation
from weft.chat.template import Message, Template, TemplateFault, TextTooLong
from weft.chat.vocabulary import BEGIN, END, GUARD, Vocabulary
from weft.errors import DataError
from weft.ids import several

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
        wall_s: seconds since 1970, for templates that say the date: the same for all conversations.
    """

    def __init__(self, template: Template, vocabulary: Vocabulary, wall_s: float) -> None:
        self._template, self._vocabulary, self._wall_s = template, vocabulary, wall_s

    def render(self, conversation: Conversation) -> Rendered:
        """Return a conversation's tokens.

        Raises:
            TextTooLong: it is too long for any row: names the place.
            DataError: the template refuses it, or the tokenizer does not know a character: names the place.
        """
        messages = [self._vocabulary.guarded_message(each) for each in conversation.messages]
        tools = [self._vocabulary.guarded_tree(each) for each in conversation.tools]
        try:
            text, spans = self._spans(messages, tools, are_chosen=bool(conversation.passed_over))
            spans = [span for number, span in enumerate(spans) if number not in conversation.passed_over]
            placed = self._vocabulary.placed(text)
        except TextTooLong as error:
            raise TextTooLong(f"{conversation.place}: {error}") from None
        except DataError as error:
            raise DataError(f"{conversation.place}: {error}") from None
        ids = np.array([each.token for each in placed], np.uint32)
        starts, stops = (np.array([each[side] for each in placed], np.int64) for side in (1, 2))
        is_trained = np.zeros(len(ids), bool)
        for start, stop in spans:
            is_trained |= (starts < stop) & (stops > start)
        return Rendered(ids, is_trained, *_without_guards(text, spans))

    def _spans(self, messages: Sequence[Message], tools: Sequence[Any], *, are_chosen: bool) -> tuple[str, list[Span]]:
        """Return a text, and where its answers stand.

        Args:
            are_chosen: some are not trained on, so each must be known.
        """
        answers = [each for each in messages if each["role"] == "assistant"]
        if (tools or any(each.get("tool_calls") for each in answers)) and not self._template.takes_tools:
            raise TemplateFault(
                "the model's chat template knows no tools, and here are some. Use a model that calls tools."
            )
        if self._template.has_marks:
            text, spans = _unmarked(self._text(messages, tools, is_marked=True))
        else:
            text, spans = self._by_turns(messages, tools)
        if len(spans) != len(answers):  # the template says what is generated, in more parts or in fewer
            if are_chosen or not any(text[start:stop].strip() for start, stop in spans):
                raise TemplateFault(
                    f"the chat template marks {several(len(spans), 'part')} as generated, and there are "
                    f"{several(len(answers), 'answer')}, so which is trained on is not known. {_MARK}"
                )
            return text, spans
        for number, (message, (start, stop)) in enumerate(zip(answers, spans, strict=True), start=1):
            called = [call["function"]["name"] for call in message.get("tool_calls", ())]
            if not text[start:stop].strip() or any(name not in text[start:stop] for name in called):
                raise TemplateFault(
                    f"the chat template leaves out {'a call' if called else 'all'} of answer {number}. Use a model "
                    "whose template writes it, or change the template."
                )
        return text, spans

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Any], *, asks: bool = False, is_marked: bool = False
    ) -> str:
        """Return a template's text.

        Args:
            asks: whether the begin of an answer comes after it.
        """
        return self._template.render(messages, tools, wall_s=self._wall_s, is_continued=not asks, is_marked=is_marked)

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
                    f"asks for one with {before[start : start + 20]!r}. {_MARK}"
                )
            spans.append((start, self._stop(whole, upto, start, message)))
        return whole, spans

    def _stop(self, whole: str, upto: str, start: int, message: Message) -> int:
        """Return where an answer ends that begins at `start`.

        Args:
            upto: the text of the messages up to it, at whose end may stand what ends a conversation.
        """
        answer = upto[start:].rstrip()
        if whole.startswith(answer, start):
            return start + len(answer)
        # What stands before its end marks is the answer; in the whole text it may lack its reasoning, or white space.
        content, control = (message.get("content") or "").strip(), self._vocabulary.control_pattern
        said = _without_ends(answer, control)
        at = start + len(whole[start:]) - len(whole[start:].lstrip())
        if content and said.endswith(content) and whole.startswith(content, at):
            rest, end = whole[at + len(content) :], answer[len(said) :].lstrip()
            num_white = len(rest) - len(rest.lstrip())
            num = num_white + _num_shared(rest[num_white:], end)
            num = next((found.start() for found in control.finditer(rest) if found.start() < num < found.end()), num)
            ends = rest[:num].rstrip()
            if bool(ends) == bool(end):
                return at + len(content) + len(ends)
        raise TemplateFault(f"the chat template writes an earlier answer otherwise than the last one. {_MARK}")


_MARK = "Mark in the template what is trained on: {% generation %} before an answer and {% endgeneration %} after it."


def _without_ends(answer: str, control: re.Pattern[str]) -> str:
    """Return an answer without the control tokens and the white space at its end."""
    ends = [found for found in control.finditer(answer) if not answer[found.end() :].strip()]
    while ends:
        answer = answer[: ends[-1].start()].rstrip()
        ends = [found for found in control.finditer(answer) if not answer[found.end() :].strip()]
    return answer


def _num_shared(a: str, b: str) -> int:
    """Return how many first characters are the same."""
    if b.startswith(a):
        return len(a)
    least = min(len(a), len(b))
    return next((place for place in range(least) if a[place] != b[place]), least)


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """Return a text without its marks, and what stands between them."""
    parts, spans, at = list[str](), list[Span](), 0
    begun: int | None = None
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part == BEGIN:
            begun = at
        elif part == END and begun is not None:
            spans.append((begun, at))
            begun = None
        elif part != END:
            parts.append(part)
            at += len(part)
    return "".join(parts), spans


def _without_guards(text: str, spans: Sequence[Span]) -> tuple[str, tuple[Span, ...]]:
    """Return a text as a person reads it, and the same stretches of it."""

    def moved(place: int) -> int:
        return place - text.count(GUARD, 0, place)

    return text.replace(GUARD, ""), tuple((moved(start), moved(stop)) for start, stop in spans)
