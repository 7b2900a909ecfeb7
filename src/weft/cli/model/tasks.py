"""`weft eval --tasks`: how a model does on tasks whose answers can be checked.

    choices     the likeliest is its answer: by the whole of it, and by its bytes
    others      it draws an answer, always the likeliest token, many texts at once

A chat model is asked by its template; any other reads the question, and its answer is the line that follows.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from weft.chat import sandbox
from weft.chat.conversations import Conversation
from weft.chat.rendering import Renderer
from weft.chat.speech import speech_of
from weft.chat.task_rows import Asking
from weft.chat.tasks import Task, tasks_of
from weft.chat.template import template_of
from weft.chat.vocabulary import Vocabulary
from weft.cli.model.trained import Trained, place
from weft.cli.terminal import WorkLine, tell
from weft.clock import SystemClock
from weft.dashboard.report import table_of
from weft.data.store import write_atomically
from weft.engine.draw import Drawing
from weft.engine.engine import Engine
from weft.engine.load import engine_of, free_nbytes, kind_as_trained, plan
from weft.engine.text import Wanted
from weft.errors import ConfigError, DataError, DiskFull, NotFinite
from weft.ids import several
from weft.inference.likelihood import Scored, log_likelihoods
from weft.model.config import plain
from weft.model.peft import merged
from weft.progress import Meter
from weft.run.frozen import base_of
from weft.run.genesis import initial
from weft.store.evaluations import Evaluation, Result, keep_evaluation
from weft.store.home import Home
from weft.wire import digest

Answer = tuple[int, int] | str  # the likeliest choice, by the whole and by bytes; or what was drawn
Right = tuple[bool, bool]  # by the whole, and by bytes
AT_ONCE = 32  # texts that are drawn together
END_OF_LINE = "\n"


def read_tasks(paths: Sequence[str]) -> list[Task]:
    """Return the tasks of files.

    Raises:
        DataError: something is none, or there are none.
    """
    found = list(tasks_of(paths, Path.cwd()))
    if not found:
        raise DataError(f"{', '.join(paths)}: there is no task. Name a file that holds some.")
    return found


@dataclass(frozen=True)
class Way:
    """How tasks are put to a model.

    Args:
        max_tokens: of an answer that is drawn.
        has_template: by its chat template, if it has one.
    """

    max_tokens: int
    has_template: bool

    def digest(self, tasks: Sequence[Task]) -> str:
        """Return what names these tasks, wherever their file lies, put in this way."""
        asked = [(each.kind, each.messages, each.choices, each.answers, each.match) for each in tasks]
        most = 0 if all(each.choices for each in tasks) else self.max_tokens
        return digest(msgspec.json.encode((asked, most, self.has_template)))


class Asker:
    """Puts tasks to one model."""

    def __init__(self, trained: Trained, device: str, way: Way) -> None:
        self._trained, self._device, self._way = trained, place(device), way
        self._template = template_of(trained.came_with) if way.has_template else None
        written = "" if self._template is None else self._template.writes
        self._vocabulary = Vocabulary(trained.tokenizer, written)
        self._ends = speech_of(trained.tokenizer, trained.came_with).ends

    @property
    def manner(self) -> str:
        """Return how questions are put, in words."""
        return "by the model's chat template" if self._template else "as they are; an answer is the line that follows"

    def answers(self, tasks: Sequence[Task], on_done: Callable[[int], None]) -> list[Answer]:
        """Return the answer to each task: of choices the likeliest by the whole, and by bytes; else a text.

        Args:
            on_done: told how many are answered since it was told last.

        Raises:
            DataError: a question does not fit, or the template refuses it: names the place.
        """
        found: list[Answer] = [""] * len(tasks)
        chosen = [number for number, task in enumerate(tasks) if task.choices]
        drawn = [number for number, task in enumerate(tasks) if not task.choices]
        for of, answer in zip(chosen, self._chosen([tasks[each] for each in chosen], on_done), strict=True):
            found[of] = answer
        if drawn:
            prompts = [self._prompt(tasks[each]) for each in drawn]
            for of, text in zip(drawn, asyncio.run(self._drawn(prompts, on_done)), strict=True):
                found[of] = text
        return found

    # --- choices ---

    def _chosen(self, tasks: Sequence[Task], on_done: Callable[[int], None]) -> list[tuple[int, int]]:
        scored = [self._scored(task, choice) for task in tasks for choice in task.choices]
        if not scored:
            return []
        texts, num_bytes = [each for each, _ in scored], np.array([num for _, num in scored])
        model, found = self._trained.on(str(self._device)), np.zeros(len(texts))
        for number, likelihood in log_likelihoods(model, texts):
            found[number] = likelihood
        if not np.isfinite(found).all():
            raise NotFinite("a likelihood is NaN or infinite: the weights are broken. Use an earlier checkpoint.")
        del model
        answers, start = list[tuple[int, int]](), 0
        for task in tasks:
            here = found[start : start + len(task.choices)]
            by_byte = here / num_bytes[start : start + len(task.choices)]
            answers.append((int(here.argmax()), int(by_byte.argmax())))
            start += len(task.choices)
        on_done(len(tasks))
        return answers

    def _scored(self, task: Task, choice: str) -> tuple[Scored, int]:
        """Return a choice behind its question, and how many bytes of text are asked about: of a template with the marks
        of an answer's end."""
        if self._template is not None:
            answered = (*task.messages, {"role": "assistant", "content": choice})
            before = frozenset(range(sum(each["role"] == "assistant" for each in task.messages)))
            asked = Conversation(task.place, task.place, answered, passed_over=before)
            rendered = Renderer(self._template, self._vocabulary, self._trained.day_s).render(asked)
            self._require_room(len(rendered.ids), task)
            num = sum(len(rendered.text[start:stop].encode()) for start, stop in rendered.spans)
            return Scored(rendered.ids, rendered.is_trained), num
        question = _plain(task)
        num_asked = len(self._vocabulary.encode_plain(question))
        ids = self._vocabulary.encode_plain(f"{question} {choice}")
        self._require_room(len(ids), task)
        scored = Scored(np.asarray(ids, np.uint32), np.arange(len(ids)) >= max(num_asked, 1))
        return scored, len(f" {choice}".encode())

    # --- answers that are drawn ---

    def _prompt(self, task: Task) -> list[int]:
        if self._template is None:
            ids = self._vocabulary.encode_plain(_plain(task))
        else:
            ids = Asking(self._template, self._vocabulary, self._trained.day_s).prompt(task)
        self._require_room(len(ids), task, num_more=1)
        return ids

    def _require_room(self, num: int, task: Task, num_more: int = 0) -> None:
        if num + num_more > (most := self._trained.config.max_seq_len):
            raise DataError(
                f"{task.place}: it has {several(num, 'token')}, and the model reads {most:,}, with the answer. Shorten "
                "it, or leave it out."
            )

    async def _drawn(self, prompts: Sequence[list[int]], on_done: Callable[[int], None]) -> list[str]:
        config, kind = self._trained.config, kind_as_trained(self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of models before: what they had counts as taken
        longest = min(max(map(len, prompts)) + self._way.max_tokens, config.max_seq_len)
        planned = plan(config, self._device, kind, longest, None, free_nbytes(self._device))
        engine = engine_of(config, self._trained.vector, self._device, planned, longest)
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: list[int]) -> str:
            async with turns:
                text = await self._draw(engine, prompt, longest)
            on_done(1)
            return text

        try:
            return await asyncio.gather(*map(one, prompts))
        finally:
            engine.close()

    async def _draw(self, engine: Engine, prompt: list[int], longest: int) -> str:
        most = min(self._way.max_tokens, longest - len(prompt))
        text = engine.begin(Wanted("tasks", tuple(prompt), most, Drawing(temperature=0.0), self._ends))
        ids = list[int]()
        async for drawn in text:
            ids.append(drawn.token)
            if self._template is None and END_OF_LINE in self._trained.tokenizer.decode(ids).lstrip():
                text.cancel()
                break
        said = self._trained.tokenizer.decode(ids)
        return said if self._template is not None else said.lstrip().partition(END_OF_LINE)[0]


def _plain(task: Task) -> str:
    return "\n".join(str(each["content"]) for each in task.messages if each.get("content"))


# --- what comes of it ---


def ask(
    trained: Trained,
    paths: Sequence[str],
    way: Way,
    device: str,
    home: Path,
    out: Path | None = None,
    *,
    has_before: bool = False,
) -> Iterator[str]:
    """Put tasks to a model; yield what came of it, line by line. Of a run it is kept for reports.

    Args:
        out: a new file for what was answered; None: none.
        has_before: what the run began with is asked, too.

    Raises:
        DataError: something is no task, or does not fit.
        ConfigError: the run began with nothing learnt, or `out` is there already, or cannot be written.
    """
    tasks = read_tasks(paths)
    if out is not None and out.exists():
        raise ConfigError(f"--answers {out}: it is there already. Choose another name.")
    if any(task.match == "tests" for task in tasks):
        sandbox.require()
    models = [_began_with(trained, home)] if has_before else []
    columns, rights = list[tuple[str, Sequence[Result]]](), list[Right]()
    for model in (*models, trained):
        is_before = model is not trained
        asker = Asker(model, device, way)
        with Meter("answering", "tasks", WorkLine(), SystemClock(), len(tasks)) as meter:
            answers = asker.answers(tasks, meter.add)
        rights = judged(tasks, answers)
        found = results(tasks, rights)
        name = "before" if is_before else "now" if trained.round is None else f"round {trained.round}"
        columns.append((name, found))
        if trained.run is not None:
            evaluation = Evaluation(
                tasks=", ".join(Path(path).name for path in paths),
                digest=way.digest(tasks),
                round=None if is_before else trained.round,
                results=found,
            )
            folder = home / "runs" / trained.run.run
            if folder.is_dir() and not keep_evaluation(folder, evaluation):
                tell(f"reports will not show these figures: they cannot be written into {folder}")
    yield f"{several(len(tasks), 'task')}, put {asker.manner}"
    yield from lines(table_of(columns))
    if out is not None:
        _write(out, tasks, answers, rights)


def _began_with(trained: Trained, home: Path) -> Trained:
    """Return the model that a run began with.

    Raises:
        ConfigError: it began with random weights, or what it began with is not here.
    """
    run = trained.run
    if run is None:
        raise ConfigError(f"--before: {trained.folder} is no run of weft, so nobody knows what it began with.")
    base = base_of(run, Home(home))
    if base is None and run.is_seeded:
        raise ConfigError("--before: the run began with random weights, which answer nothing. Leave it out.")
    vector = initial(run, Home(home))
    if vector is not None and base is not None:
        vector = merged(run.model, base, vector)
    if vector is None:
        raise ConfigError("--before: the weights that the run began with are not here. Leave it out.")
    return replace(trained, config=plain(run.model), vector=vector, round=0, adapter=None)


def _write(path: Path, tasks: Sequence[Task], answers: Sequence[Answer], rights: Sequence[Right]) -> None:
    rows = (msgspec.json.encode(row) + b"\n" for row in answered(tasks, answers, rights))
    try:
        write_atomically(path, list(rows))
    except (DataError, DiskFull) as error:
        raise ConfigError(f"--answers {path}: {error}") from None


def judged(tasks: Sequence[Task], answers: Sequence[Answer]) -> list[Right]:
    """Return which answers are right."""

    def right(task: Task, answer: Answer) -> Right:
        if isinstance(answer, str):
            is_right = task.is_right(answer)
            return is_right, is_right
        return task.is_right(answer[0]), task.is_right(answer[1])

    return sandbox.map_together(right, tasks, answers)


def results(tasks: Sequence[Task], rights: Sequence[Right]) -> tuple[Result, ...]:
    """Return how many are right of each kind, in the order of the file, and of all, which have the name ""."""
    kinds = [each for each in dict.fromkeys(task.kind for task in tasks) if each]
    pairs = list(zip(tasks, rights, strict=True))
    has_groups = len({task.kind for task in tasks}) > 1
    groups = [(kind, [pair for pair in pairs if pair[0].kind == kind]) for kind in kinds if has_groups]
    return tuple(_result(kind, group) for kind, group in [*groups, ("", pairs)])


def _result(kind: str, group: Sequence[tuple[Task, Right]]) -> Result:
    has_choices = any(task.choices for task, _ in group)
    right, by_length = (sum(is_right[at] for _, is_right in group) for at in (0, 1))
    return Result(kind=kind, num=len(group), right=right, right_by_length=by_length if has_choices else None)


def lines(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield a table's lines: names to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def answered(tasks: Sequence[Task], answers: Sequence[Answer], rights: Sequence[Right]) -> Iterator[dict[str, Any]]:
    """Yield what was asked and answered, for a file."""
    for task, answer, (is_right, _) in zip(tasks, answers, rights, strict=True):
        said = answer if isinstance(answer, str) else task.choices[answer[0]]
        yield {"place": task.place, "kind": task.kind, "said": said, "is_right": is_right}
