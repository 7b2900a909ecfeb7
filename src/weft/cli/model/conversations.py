"""Conversations and tasks as a model reads them: the text of one, what of it is trained on, or what answers it, and how
long all of them are."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.chat.conversations import Conversation, Pair, are_pairs, conversations, pairs
from weft.chat.packing import TOO_LARGE
from weft.chat.rendering import Rendered, Renderer
from weft.chat.task_rows import Asking
from weft.chat.tasks import are_tasks, tasks_of
from weft.chat.template import Template, TemplateFault, TextTooLong, template_of
from weft.chat.vocabulary import Vocabulary
from weft.cli.model.trained import open_day, open_words
from weft.errors import ConfigError, DataError
from weft.ids import several
from weft.model.came_with import CameWith
from weft.wire import printable

GREEN = ("\x1b[32m", "\x1b[0m")
BRACKETS = ("⟦", "⟧")  # where there are no colours


def shown(given: str, model: str, number: int, home: Path) -> Iterator[str]:
    """Yield what there is to say of the conversations of a file, a folder or a glob, or its pairs of answers, or tasks.

    Args:
        model: whose chat template and tokenizer they are read with.
        number: of the one whose text is shown, from 1.

    Raises:
        DataError: something is no conversation, or the template refuses one: names file and line.
        ConfigError: there are fewer, or the model has no chat template.
        NoSuchRun, CheckpointError: there is no such model.
    """
    if are_tasks([given], Path.cwd()):
        yield from _tasks_shown(given, model, number, home)
        return
    found, what = _found(given)  # what is not there is said before a model is looked for
    tokenizer, came_with = open_words(model, home)
    template = template_for(f"--model {model}", came_with)
    renderer = Renderer(template, Vocabulary(tokenizer, template.writes), open_day(model, home))
    lengths, num_trained, num_too_large, wanted = list[int](), 0, 0, None
    for place, each in enumerate(found, start=1):
        try:
            rendered = [renderer.render(text) for text in each.texts]
        except TextTooLong:
            if place == number:
                raise
            num_too_large += 1
            continue
        lengths.append(sum(len(text.ids) for text in rendered))
        num_trained += sum(int(text.is_trained.sum()) for text in rendered)
        wanted = (each.place, rendered) if place == number else wanted
    if wanted is None and (lengths or num_too_large):
        raise _too_few(number, len(lengths) + num_too_large, what)
    if wanted is None:
        raise DataError(f"{given} holds no {what}. Name a file that does.")
    yield several(len(lengths), what)
    if num_too_large:
        yield f"{several(num_too_large, what)} more {TOO_LARGE}"
    yield f"template  of {model}; answers are found by its {'own marks' if template.has_marks else 'turns'}"
    yield (
        f"tokens    {sum(lengths):,}, of which {num_trained:,} are trained on ({num_trained / sum(lengths):.0%}); "
        f"longest {max(lengths):,}, median {int(np.median(lengths)):,}"
    )
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    begin, end = GREEN if has_colours else BRACKETS
    yield f"number {number}, {wanted[0]}: {begin}trained on{end}"
    for name, text in zip(("chosen:", "rejected:") if len(wanted[1]) > 1 else ("",), wanted[1], strict=True):
        yield f"\n{name}" if name else ""
        yield _text(text, begin, end).rstrip("\n")


def _tasks_shown(given: str, model: str, number: int, home: Path) -> Iterator[str]:
    """Yield the same of tasks."""
    found = list(tasks_of([given], Path.cwd(), needs_answers=False))
    if has_answers := any(task.answers for task in found):
        found = list(tasks_of([given], Path.cwd()))  # all need one, then
    tokenizer, came_with = open_words(model, home)
    template = template_for(f"--model {model}", came_with)
    asking = Asking(template, Vocabulary(tokenizer, template.writes), open_day(model, home))
    prompts = [asking.prompt(task) for task in found]
    if number > len(found):
        raise _too_few(number, len(found), "task")
    lengths = [len(prompt) for prompt in prompts]
    yield several(len(found), "task")
    yield f"template  of {model}"
    yield f"tokens    {sum(lengths):,} before answers; longest {max(lengths):,}, median {int(np.median(lengths)):,}"
    ways = Counter("a choice" if task.choices else task.match for task in found)
    yield (
        f"right by  {', '.join(f'{way} ({num:,})' for way, num in ways.most_common())}"
        if has_answers
        else 'right by  a judge of the run\'s, for no answers are given: [reward] type = "extension"'
    )
    task = found[number - 1]
    yield f"number {number}, {task.place}:"
    yield ""
    yield _safe(tokenizer.decode(prompts[number - 1])).rstrip("\n")
    if not has_answers:
        return
    yield ""
    right = [task.choices[each] if isinstance(each, int) else each for each in task.answers]
    yield f"right is {'the choice' if task.choices else f'by match = {task.match}'}:"
    yield from map(_safe, right)


def _too_few(number: int, num: int, what: str) -> ConfigError:
    return ConfigError(f"--number {number}: there {'is' if num == 1 else 'are'} {several(num, what)}.")


def template_for(called: str, came_with: CameWith) -> Template:
    """Return a model's chat template.

    Args:
        called: what a person calls the model.

    Raises:
        ConfigError: it has none, or one that cannot be read.
    """
    try:
        template = template_of(came_with)
    except TemplateFault as error:
        raise TemplateFault(f"{called}: {error}") from None
    if template is None:
        raise ConfigError(
            f"{called}: it has no chat template, so nobody knows how conversations are written for it. Name a chat "
            "model, or put chat_template.jinja into its folder."
        )
    return template


def _found(given: str) -> tuple[Iterator[Conversation | Pair], str]:
    """Return what a file holds, and one's name: pairs, where its first row is one."""
    if are_pairs([given], Path.cwd()):
        return pairs([given], Path.cwd()), "pair"
    return conversations([given], Path.cwd()), "conversation"


def _text(rendered: Rendered, begin: str, end: str) -> str:
    parts, at = list[str](), 0
    for start, stop in rendered.spans:
        parts += [_safe(rendered.text[at:start]), begin, _safe(rendered.text[start:stop]), end]
        at = stop
    return "".join([*parts, _safe(rendered.text[at:])])


def _safe(text: str) -> str:
    return printable(text, keep="\n\t")
