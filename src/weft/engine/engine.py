"""One model, and everybody who wants text of it: a thread computes steps as long as there is something to compute.

    text = engine.begin(Wanted(...))
    async for drawn in text:            # token by token
        ...
    text.ended                          # "stop", "length", "cancelled"

Whoever reads slowly holds up nobody: once `text.MAX_UNREAD` tokens wait for it, its text leaves the schedule until half
of them are read. Of a long text more may wait (`text.UNREAD_PART`), since it may have to be read again. Where more than
`MAX_BEHIND` texts wait for their readers so, one of whoever has most of them ends. The thread owns the schedule, the
pages and the numbers; others reach it through a queue alone. Engines that share a device may share turns at it
(`Turns`): one step at a time.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.clock import Clock, SystemClock
from weft.engine.batch import Piece
from weft.engine.draft import Asked, Draft
from weft.engine.draw import Counts, draw
from weft.engine.scheduling.budget import ALONE_S, MAX_SLOWDOWN, SHARED_S
from weft.engine.scheduling.guess import Guesses, Worth
from weft.engine.scheduling.pace import Pace, pairs_of
from weft.engine.scheduling.pages import PAGE, PagePool
from weft.engine.scheduling.schedule import Row, Scheduler, Sequence
from weft.engine.scheduling.shares import all_who_make_way, first_of_most, who_makes_way
from weft.engine.step import Steps, on_host
from weft.engine.text import Ending, EngineBroken, Full, Text, Told, Unread, Wanted, check
from weft.errors import ConfigError

MAX_WAITING = 256
MAX_BEHIND = 256  # texts whose readers are behind


@dataclass
class Totals:
    """What the engine has done since it began, and what it holds."""

    num_steps: int = 0
    num_read: int = 0  # tokens of prompts, computed
    num_drawn: int = 0
    num_asked: int = 0  # tokens of prompts that could have been shared
    num_shared: int = 0
    num_yielded: int = 0  # texts that gave up their pages
    num_guesses: int = 0  # steps of a text with guesses
    num_guessed: int = 0  # tokens
    num_right: int = 0  # of those, drawn
    num_running: int = 0
    num_waiting: int = 0
    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)  # of an engine: by key, and its priority
    num_behind: int = 0  # texts that wait for their readers
    num_pages: int = 0
    num_held: int = 0  # pages


class Turns:
    """Whose step it is, of engines that share a device: who waits is let in by the order in which they came, so between
    two steps of one each other that has something to compute has one.

    Args:
        within: turns for which those who take these stand in line together, as one; None: nobody else is there.
    """

    def __init__(self, within: "Turns | None" = None) -> None:
        self._within = within
        self._changed = threading.Condition()
        self._line: deque[int] = deque()  # threads, whose turn it is first

    @property
    def is_wanted(self) -> bool:
        """Return whether somebody has the turn, or waits for it."""
        return bool(self._line) or (self._within is not None and self._within.is_wanted)

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._line.append(me)
            self._changed.wait_for(lambda: self._line[0] == me)
        if self._within is not None:
            self._within.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._within is not None:
            self._within.__exit__()
        with self._changed:
            self._line.popleft()
            self._changed.notify_all()


class Serves(Protocol):
    """What texts are asked of, wherever they are computed."""

    vocab_size: int
    context: int

    @property
    def totals(self) -> Totals:
        """What was done, and is held."""
        ...

    def begin(self, wanted: Wanted, num_more: int = 0) -> Text:
        """Begin a text; arguments and errors are those of `Engine.begin`."""
        ...

    def close(self) -> None:
        """End all texts."""
        ...


def close_all(engines: Collection[Serves]) -> None:
    """End all texts of several engines, side by side: one that is to end waits for its turn, and others that have not
    been told yet would take theirs again and again."""
    if engines:
        with ThreadPoolExecutor(len(engines), "closing") as closing:
            list(closing.map(lambda each: each.close(), engines))


@dataclass(eq=False)
class _Job:
    """A text as the thread has it."""

    text: Text
    sequence: Sequence
    counts: Counts | None
    num_summed: int = 0  # tokens of the prompt
    sum: "NDArray[np.float64] | float" = 0.0


class Engine:
    """Serves one model.

    Args:
        max_rows, max_running, max_slowdown: see `Scheduler`.
        has_guesses: whether several tokens of a text are computed in one step where they can be guessed.
        draft: a model that guesses what look-up does not know; it is this engine's alone from now on.
        on_step: told how many tokens were drawn, how many were read, and how long it took, on the engine's thread.
        turns: at the device, which other engines take, too; None: it is this engine's alone.
    """

    def __init__(
        self,
        stepper: Steps,
        *,
        vocab_size: int,
        context: int,
        num_pages: int,
        max_rows: int = 64,
        max_running: int = 256,
        max_slowdown: float = MAX_SLOWDOWN,
        has_guesses: bool = True,
        draft: Draft | None = None,
        clock: Clock | None = None,
        on_step: Callable[[int, int, float], None] = lambda _drawn, _read, _s: None,
        turns: Turns | None = None,
    ) -> None:
        self._stepper = stepper
        self._turns = turns or Turns()
        self.vocab_size = vocab_size
        self.context = min(context, num_pages * PAGE)
        self._pool = PagePool(num_pages)
        self._pace = Pace()
        self._draft = draft
        self._schedule = Scheduler(
            self._pool,
            self._pace,
            max_rows=max_rows,
            max_running=max_running,
            max_slowdown=max_slowdown,
            draft_s=lambda num: 0.0 if draft is None else draft.step_s(num),
        )
        self.clock = clock or SystemClock()
        self._on_step = on_step
        self._has_guesses = has_guesses
        self._jobs: dict[Sequence, _Job] = {}
        self._by_text: dict[Text, _Job] = {}
        self._num_begun = self._num_opened = 0  # texts, each counted on one thread alone
        self._num_counted = 0  # of those that were opened, how many are in `totals` already, or have ended
        self._behind: dict[_Job, None] = {}  # who has waited longest for its reader first
        self._told: list[tuple[Text, Told]] = []  # of this turn, and not yet to who reads them
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._broken: EngineBroken | None = None
        self._is_closed = False
        self.totals = Totals(num_pages=num_pages)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- from the event loop ---

    def begin(self, wanted: Wanted, num_more: int = 0) -> Text:
        """Begin a text.

        Args:
            num_more: texts of the same request that begin after this one. If there are not places for all, nobody loses
                one.

        Raises:
            ConfigError: as `check`; or a mean of hidden states is asked for, where there are several.
            Full: too many wait, and nobody has more texts among them than these would.
            EngineBroken: a fault has ended the engine.
        """
        check(wanted, self.vocab_size, self.context)
        if wanted.is_mean and not self._stepper.has_sums:
            raise ConfigError("experts that are asked together have no embeddings. Ask a single model for those.")
        if self._broken is not None:
            raise self._broken
        num_waiting = self.totals.num_waiting + self._num_begun - self._num_counted
        num_free = max(0, ceil(wanted.room * MAX_WAITING - num_waiting))
        waiting = self.totals.waiting  # once: the thread puts another in its place
        others = all_who_make_way(waiting, wanted.key, wanted.room, num_free, 1 + num_more)
        if others is None:
            raise Full(self._retry_s())
        if not num_free:  # the thread finds the place (`_open`); until it counts anew
            for key, num in ((others[0], -1), (wanted.key, 1)):
                before, room = waiting.get(key, (0, wanted.room))
                waiting[key] = before + num, room
        text = Text(wanted, self._cancel, self._go_on, self.clock)
        if self._is_closed:
            text.tell("cancelled")
            return text
        self._num_begun += 1
        self._asked.put(lambda: self._open(text))
        if self._broken is not None:  # just now, so that the thread may not have seen this one
            raise self._broken
        if self._is_closed:  # the same
            text.tell("cancelled")
        return text

    def _cancel(self, text: Text) -> None:
        self._asked.put(lambda: self._close(text, "cancelled"))

    def _go_on(self, text: Text) -> None:
        self._asked.put(lambda: self._again(text))

    def _retry_s(self) -> float:
        return max(1.0, self._pace.step_s(self.totals.num_running, 0) * MAX_WAITING)

    def close(self) -> None:
        """End all texts, and the thread."""
        self._is_closed = True
        self._asked.put(None)
        self._thread.join()

    # --- on the thread ---

    def _run(self) -> None:
        try:
            self._turn_until_closed()
        except Exception as error:  # a fault of weft's own: whoever waits hears of it, now and later
            self._broken = EngineBroken(error)
            while not self._asked.empty():
                asked = self._asked.get()
                with suppress(Exception):  # what broke may break again
                    if asked is not None:
                        asked()
            Text.tell_all([*self._told, *((text, self._broken) for text in self._by_text)])

    def _turn_until_closed(self) -> None:
        while self._take_asked(is_idle=not self._schedule.num_running + self._schedule.num_waiting):
            self._tell_readers()  # who has cancelled does not wait for a step
            if rows := self._schedule.plan(SHARED_S if self._turns.is_wanted else ALONE_S):
                self._step(rows)
            self._tell_totals()
            self._tell_readers()
        for text in list(self._by_text):
            self._close(text, "cancelled")
        self._tell_readers()

    def _take_asked(self, *, is_idle: bool) -> bool:
        """Do what was asked for meanwhile, and wait for it where there is nothing else to do."""
        while True:
            try:
                asked = self._asked.get(block=is_idle)
            except queue.Empty:
                return True
            if asked is None:
                return False
            asked()
            is_idle = False

    def _open(self, text: Text) -> None:
        self._num_opened += 1
        if self._broken is not None:
            self._told.append((text, self._broken))
            return
        wanted = text.wanted
        if self._schedule.num_waiting >= wanted.room * MAX_WAITING:
            other = who_makes_way(self._schedule.waiting, wanted.key, wanted.room)
            if other is None:
                self._told.append((text, Full(self._retry_s())))
                return
            self._end(self._jobs[self._schedule.youngest_waiting(other)], Full(self._retry_s()))
        most = min(self.context, len(wanted.prompt) + wanted.max_new_tokens)
        guesses = Guesses() if self._has_guesses and not wanted.is_mean else None
        drafts = None if self._draft is None else Worth()
        sequence = Sequence(wanted.key, list(wanted.prompt), most, wanted.salt, guesses, drafts, room=wanted.room)
        counts = self._counts_of(wanted) if wanted.drawing.has_penalties else None
        job = self._jobs[sequence] = self._by_text[text] = _Job(text, sequence, counts)
        if len(sequence.tokens) >= most:
            self._end(job, "length")
            return
        self._schedule.add(sequence)

    def _counts_of(self, wanted: Wanted) -> Counts:
        asked = len(wanted.prompt) - wanted.num_drawn
        counts = Counts(np.array(wanted.prompt[:asked]), self.vocab_size)
        for token in wanted.prompt[asked:]:
            counts.add(token)
        return counts

    def _close(self, text: Text, ending: Ending | Exception) -> None:
        if (job := self._by_text.get(text)) is not None:
            self._end(job, ending)

    def _end(self, job: _Job, ending: Ending | Exception) -> None:
        self._schedule.remove(job.sequence)
        self._behind.pop(job, None)
        del self._jobs[job.sequence], self._by_text[job.text]
        self._tell_totals()  # who reads the ending finds its pages free
        self._told.append((job.text, ending))

    def _wait_for_readers(self, texts: Iterable[Text]) -> None:
        """Take texts whose readers are behind out of the schedule; of too many let one go."""
        for text in texts:
            job = self._by_text.get(text)
            if job is not None and text.is_behind():
                self._schedule.remove(job.sequence)
                self._behind[job] = None
                self._tell_totals()
        while len(self._behind) > MAX_BEHIND:
            self._end(first_of_most(self._behind, lambda job: job.text.wanted.key), Unread())

    def _again(self, text: Text) -> None:
        """A reader is behind no more."""
        job = self._by_text.get(text)
        if job is not None and job in self._behind:
            del self._behind[job]
            self._schedule.add_again(job.sequence)

    def _reads_on(self, row: Row) -> bool:
        """Return whether a row may be computed: not where a mean lacks tokens, for they were found in pages again.

        It gave its pages up and got some of them back. It is read anew, under a salt by which none is found.
        """
        job, sequence = self._jobs[row.sequence], row.sequence
        if not job.text.wanted.is_mean or row.start in (0, job.num_summed):
            return True
        self._schedule.remove(sequence)
        sequence.salt += b"+"
        self._schedule.add(sequence)
        return False

    def _add_sums(self, rows: list[Row]) -> None:
        summed = [row for row in rows if self._jobs[row.sequence].text.wanted.is_mean]
        for row, of_row in zip(summed, self._stepper.sums if summed else (), strict=True):
            job = self._jobs[row.sequence]
            job.sum = of_row.cpu().double().numpy() + (job.sum if row.start else 0.0)
            job.num_summed = row.stop

    def _step(self, rows: list[Row]) -> None:
        rows = [row for row in rows if self._reads_on(row)]
        if not rows:
            return
        try:
            with self._turns:
                rows = self._with_drafts(rows)
                began, num_graphs = self.clock.now(), self._stepper.num_graphs
                logits = on_host(self._stepper.step([self._piece(row) for row in rows]))
                self._add_sums(rows)
                self._schedule.done(rows)
                self._let_draft_read()
        except Exception as error:  # out of memory, a broken device: whoever waits hears of it
            for row in rows:
                self._end(self._jobs[row.sequence], error)
            return
        ended = self.clock.now()
        for row in rows:
            text = self._jobs[row.sequence].text
            text.busy_s = ended
            if text.began_s is None:
                text.began_s = began
                text.num_shared = row.sequence.num_shared
                self.totals.num_asked += len(text.wanted.prompt)
                self.totals.num_shared += row.sequence.num_shared
        drawing = [row for row in rows if row.draws]
        starts = np.cumsum([0, *(row.num_draws for row in drawing)])
        num_drawn = sum(
            self._draw_all(row, logits[start : start + row.num_draws])
            for row, start in zip(drawing, starts[:-1], strict=True)
        )
        num_read = sum(row.stop - row.start for row in rows) - len(drawing)
        took_s = self.clock.now() - began
        if self._stepper.num_graphs == num_graphs:
            pairs = sum(pairs_of(row.start, row.stop - row.start) for row in rows if row.stop - row.start > 1)
            self._pace.note(int(starts[-1]), num_read, took_s, pairs)
        self.totals.num_steps += 1
        self.totals.num_read += num_read
        self.totals.num_drawn += num_drawn
        self._on_step(num_drawn, num_read, took_s)

    def _piece(self, row: Row) -> Piece:
        sequence = row.sequence
        is_mean = self._jobs[sequence].text.wanted.is_mean
        return Piece(row.tokens, row.start, sequence.pages, num_draws=row.num_draws, sums=is_mean)

    def _with_drafts(self, rows: list[Row]) -> list[Row]:
        """Return rows with what the draft model guesses behind them."""
        if self._draft is None or not any(row.num_drafts for row in rows):
            return rows
        asked = {
            row: Asked(
                sequence.tokens,
                sequence.num_drafted,
                sequence.pages,
                row.num_drafts,
                self._jobs[sequence].text.wanted.drawing,
                self._jobs[sequence].counts,
            )
            for row in rows
            if row.num_drafts
            for sequence in (row.sequence,)
        }
        self._draft.guess(list(asked.values()))
        return [replace(row, guessed=tuple(asked[row].guessed)) if row in asked else row for row in rows]

    def _let_draft_read(self) -> None:
        """Let the draft model read pages that the model has read, before others take them up."""
        if self._draft is None or not (sequences := self._schedule.to_draft()):
            return
        self._draft.read(
            Piece(each.tokens[each.num_drafted : each.num_read], each.num_drafted, each.pages, num_draws=0)
            for each in sequences
        )
        for each in sequences:
            self._schedule.drafted(each, each.num_read)

    def _draw_all(self, row: Row, logits: NDArray[np.float32]) -> int:
        """Draw after a row's last token, and after each guess behind it that is what was drawn; return how many."""
        job, num_drawn = self._jobs[row.sequence], 0
        if job.text.wanted.is_mean:
            job.text.mean = np.asarray(job.sum / job.num_summed, dtype=np.float32)
            self._end(job, "stop")
            return 1
        num_right = 0
        for scores, guessed in zip(logits, (*row.guessed, None), strict=True):
            num_drawn += 1
            if not self._draw(job, scores.astype(np.float64)) or row.sequence.tokens[-1] != guessed:
                break
            num_right += 1
        if row.guessed:
            self._schedule.guessed_right(row, num_right)
            self.totals.num_guesses += 1
            self.totals.num_guessed += len(row.guessed)
            self.totals.num_right += num_right
        return num_drawn

    def _draw(self, job: _Job, logits: NDArray[np.float64]) -> bool:
        """Draw the next token of a text; return whether it goes on."""
        wanted, sequence = job.text.wanted, job.sequence
        try:
            allowed = None if wanted.constraint is None else wanted.constraint.allowed()
            if allowed is not None and not allowed.any():
                self._end(job, "stop")
                return False
            drawn = draw(logits, wanted.drawing, len(sequence.tokens), job.counts, allowed)
            if wanted.constraint is not None and drawn.token not in wanted.stop_ids:
                wanted.constraint.take(drawn.token)
        except Exception as error:  # a broken model, or a grammar that fails: of this text alone
            self._end(job, error)
            return False
        if drawn.token in wanted.stop_ids:
            self._end(job, "stop")
            return False
        sequence.tokens.append(drawn.token)
        if job.counts is not None:
            job.counts.add(drawn.token)
        self._told.append((job.text, drawn))
        if len(sequence.tokens) >= sequence.max_tokens:
            self._end(job, "length")
            return False
        return True

    def _tell_readers(self) -> None:
        while self._told:
            told, self._told = self._told, []
            Text.tell_all(told)
            self._wait_for_readers(dict.fromkeys(text for text, _ in told))

    def _tell_totals(self) -> None:
        self.totals.num_running = self._schedule.num_running
        self.totals.waiting = self._schedule.waiting
        self.totals.num_waiting = self._schedule.num_waiting
        self._num_counted = self._num_opened
        self.totals.num_behind = len(self._behind)
        self.totals.num_held = self._pool.num_pages - self._pool.num_room
        self.totals.num_yielded = self._schedule.num_yielded
