"""Which tokens of which sequences the next step computes: pure, and fair between those who ask.

There are no phases. A sequence has tokens, its prompt and what was drawn, and has read some of them: their keys and
values are in its pages. Who has one left to read draws in the next step; who has more reads a piece. As in vLLM
(arXiv:2309.06180) and Sarathi (arXiv:2403.02310), each step takes

    1. all that draw, at most `max_rows`, keys by turns, each with what is guessed to follow (`guess`), rows among them
    2. pieces of prompts, as many tokens as let the step last `max_slowdown` times as long as without them (`budget`)

so a long prompt slows others down by a bounded factor. Keys take turns at reading by deficit round robin (Shreedhar
and Varghese, 1995), in tokens. A key that comes new has its first turn before all others, and goes behind them; one
that has read all keeps its place until its turn has come, so nobody comes new by asking again and again (RFC 8290).
Within a key every other piece is of the prompt that came first, and those between are of the one with least left. A
question does not wait behind a book, then, nor a book for ever.

A sequence is admitted when its prompt fits and `SPARE` of all pages stay for those that run. Where they run out all the
same, the youngest sequence of the key that holds most pages gives its own up, and reads again later: nothing is lost.
One whose reader is behind leaves, too, until it is called for again: its pages are found again while nobody needs them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from math import ceil
from operator import attrgetter

from weft.engine.scheduling.budget import ALONE_S, GRAIN, MAX_SLOWDOWN, Budget
from weft.engine.scheduling.guess import Guesses, Worth
from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.pages import PAGE, Name, PagePool, names_of, num_pages
from weft.engine.scheduling.shares import longest_ago, most_held, pages_held, youngest

SPARE = 0.05  # of all pages
QUANTUM = 4 * PAGE  # tokens that a key may read each turn


@dataclass(eq=False)
class Sequence:
    """A text that grows.

    Args:
        key: who asks.
        tokens: the prompt, then what was drawn.
        max_tokens: of both together.
        salt: who may share its pages.
        guesses: of what follows; None: it is drawn token by token.
        drafts: of guesses that a draft model makes; None: there is none.
        num_drafted: tokens that the draft model has read.
        room: the priority of its key, as the share of a queue that may be full before it is refused.
        drew_at: which turn to draw was its last, counted over all.
    """

    key: str
    tokens: list[int]
    max_tokens: int
    salt: bytes = b""
    guesses: Guesses | None = None
    drafts: Worth | None = None
    num_drafted: int = 0
    room: float = 1.0
    drew_at: int = 0
    num_read: int = 0
    num_shared: int = 0  # tokens of the prompt that were in pages already when it began
    pages: list[int] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_read


@dataclass(frozen=True)
class Row:
    """Tokens `start ..< stop` of a sequence, to be read in one step; `draws`: the last gives the next token.

    `guessed` are read behind them, and each of them gives one, too. `num_drafts`: so many a draft model has to guess
    before, for which there are pages.
    """

    sequence: Sequence
    start: int
    stop: int
    draws: bool
    guessed: tuple[int, ...] = ()
    num_drafts: int = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.stop], *self.guessed]

    @property
    def num_draws(self) -> int:
        """Return after how many of its tokens one is drawn."""
        return 1 + max(len(self.guessed), self.num_drafts) if self.draws else 0


class Scheduler:
    """Of one model.

    Args:
        max_rows: rows that are drawn after in one step, guesses among them.
        max_running: sequences that have pages.
        max_slowdown: how many times as long a step may last as without the prompts that it reads.
        draft_s: how long a draft model takes for a token of each of so many texts; asked for texts with `drafts` alone.
    """

    def __init__(
        self,
        pool: PagePool,
        pace: Pace,
        *,
        max_rows: int,
        max_running: int,
        max_slowdown: float = MAX_SLOWDOWN,
        draft_s: Callable[[int], float] = lambda _num: 0.0,
    ) -> None:
        self.pool = pool
        self._pace = pace
        self._max_rows, self._max_running, self._max_slowdown = max_rows, max_running, max_slowdown
        self._draft_s = draft_s
        self._running: list[Sequence] = []  # oldest first
        self._waiting: dict[str, deque[Sequence]] = {}
        self._new: deque[str] = deque()  # keys that have had no turn, who came first first
        self._turns: deque[str] = deque()  # the others, whose turn it is first; some have nothing left to read
        self._deficit: dict[str, int] = {}  # tokens that a key may still read in its turn
        self._favours_short = set[str]()  # keys whose next piece is of the prompt with least left
        self._num_turns = 0  # of sequences to draw, so far
        self.num_yielded = 0  # times that a sequence gave up its pages
        self._wants_room: Sequence | None = None  # it waits for pages: no smaller one of another key slips in before it

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting(self) -> dict[str, tuple[int, float]]:
        """Return how many sequences of each key wait, and its priority."""
        return {key: (len(queue), queue[0].room) for key, queue in self._waiting.items()}

    def add(self, sequence: Sequence) -> None:
        self._queue(sequence.key).append(sequence)

    def add_again(self, sequence: Sequence) -> None:
        """A sequence that was here before goes on: before those of its key that have not begun."""
        self._queue(sequence.key).appendleft(sequence)

    def youngest_waiting(self, key: str) -> Sequence:
        """Return the last of a key's sequences that wait; there is one at least."""
        return self._waiting[key][-1]

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended, or nobody wants it any more."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._let_go(sequence)
        elif sequence in (queue := self._waiting.get(sequence.key, deque())):
            queue.remove(sequence)
            self._wants_room = None if self._wants_room is sequence else self._wants_room
            if not queue:
                del self._waiting[sequence.key]

    def plan(self, alone_s: float = ALONE_S) -> list[Row]:
        """Return what the next step computes, with pages for all of it. Empty: there is nothing to do.

        Args:
            alone_s: as of a `Budget`.
        """
        rows = [self._row(each, len(each.tokens)) for each in self._drawing() if self._has_page(each)]
        rows = [row for row in rows if row.sequence in self._running]  # some gave up their pages for others
        for row in rows:
            self._num_turns += 1
            row.sequence.drew_at = self._num_turns
        rows = list(self._with_guesses(rows))
        num_drawing = sum(row.num_draws for row in rows)
        return [*rows, *self._pieces(Budget(self._pace, num_drawing, self._max_slowdown, alone_s))]

    def done(self, rows: list[Row]) -> None:
        """A step has computed these rows. What was drawn is appended by the caller afterwards."""
        for row in rows:
            self._read(row.sequence, row.stop)

    def guessed_right(self, row: Row, num: int) -> None:
        """The first `num` of what was guessed was drawn, and is appended: its keys and values are those of the step."""
        sequence = row.sequence
        worth = sequence.drafts if row.num_drafts else sequence.guesses
        if worth is not None:
            worth.note(len(row.guessed), num)
        if sequence in self._running:
            if row.num_drafts:  # the last guess was not read to guess more
                sequence.num_drafted = row.stop + min(num, len(row.guessed) - 1)
            self._read(sequence, row.stop + num)

    def to_draft(self) -> list[Sequence]:
        """Return of which texts the draft model has a page to read, that they have read and others may take up."""
        return [
            each
            for each in self._running
            if each.drafts is not None and each.num_drafted // PAGE < each.num_read // PAGE
        ]

    def drafted(self, sequence: Sequence, stop: int) -> None:
        """The draft model has read a text up to there."""
        sequence.num_drafted = stop
        self._name(sequence)

    def _read(self, sequence: Sequence, stop: int) -> None:
        sequence.num_read = stop
        self._name(sequence)

    def _name(self, sequence: Sequence) -> None:
        """Let others take up the pages that are read; by the draft model, too."""
        stop = sequence.num_read if sequence.drafts is None else min(sequence.num_read, sequence.num_drafted)
        before = len(sequence.names)
        sequence.names = names_of(sequence.tokens[:stop], sequence.salt, sequence.names)
        for page in range(before, len(sequence.names)):
            self.pool.call(sequence.pages[page], sequence.names[page])

    # --- those that draw ---

    def _drawing(self) -> list[Sequence]:
        """Return which sequences draw: of too many one of each key, then a second; who drew last comes last."""
        ready = [each for each in self._running if each.num_left == 1]
        if len(ready) <= self._max_rows:
            return ready
        return longest_ago(ready, _key_of, attrgetter("drew_at"), ready)[: self._max_rows]

    def _with_guesses(self, rows: list[Row]) -> Iterator[Row]:
        """Yield rows with guesses behind them, as far as they pay, and rows and pages are left."""
        left, share = self._max_rows - len(rows), self._pace.row_share(len(rows))
        for row in rows:
            sequence = row.sequence
            if sequence.guesses is None:
                yield row
                continue
            most = min(left, sequence.max_tokens - len(sequence.tokens) - 1)
            guessed = sequence.guesses.guess(sequence.tokens, most, share)
            if guessed or sequence.drafts is None:
                guessed = guessed[: self._num_held(sequence, len(guessed))]
                left -= len(guessed)
                yield replace(row, guessed=tuple(guessed))
            else:
                num = self._num_held(sequence, sequence.drafts.num(most, share + self._draft_share(len(rows))))
                left -= num
                yield replace(row, num_drafts=num)

    def _draft_share(self, num: int) -> float:
        """Return how long a draft model's token takes by how long one of the model itself does, of so many texts."""
        whole_s = self._pace.step_s(num, 0)
        return self._draft_s(num) / whole_s if whole_s > 0 else 0.0

    def _num_held(self, sequence: Sequence, num: int) -> int:
        """Take pages for as many as `num` more tokens of a sequence; return for how many there are some."""
        while len(sequence.pages) < num_pages(len(sequence.tokens) + num):
            page = self.pool.grow() if self.pool.num_room > self._num_spare else None
            if page is None:  # others need it more
                return len(sequence.pages) * PAGE - len(sequence.tokens)
            sequence.pages.append(page)
        return num

    @property
    def _num_spare(self) -> int:
        return ceil(SPARE * self.pool.num_pages)

    def _has_page(self, sequence: Sequence) -> bool:
        """Return whether there is a page for the sequence's next token; others may have to give theirs up."""
        while sequence in self._running and len(sequence.pages) * PAGE < len(sequence.tokens):
            page = self.pool.grow()
            if page is None:
                self._yield_pages(self._who_yields())
            else:
                sequence.pages.append(page)
        return sequence in self._running

    def _who_yields(self) -> Sequence:
        most = most_held(pages_held(self._running, _key_of))
        return youngest(self._running, _key_of, most)

    def _yield_pages(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._let_go(sequence)
        self.num_yielded += 1
        self.add_again(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.names, sequence.num_read, sequence.num_drafted = [], [], 0, 0

    # --- pieces of prompts ---

    def _pieces(self, budget: Budget) -> Iterator[Row]:
        num_idle = 0
        planned = set[int]()  # a sequence reads one piece in a step
        while budget.is_left and num_idle < len(self._deficit):
            key = (self._new or self._turns)[0]
            sequence = self._reader(key, planned)
            if sequence is None:
                num_idle += self._pass_over(key)
                continue
            num_idle = 0
            if self._deficit[key] < PAGE:
                self._deficit[key] += QUANTUM
            start = sequence.num_read
            stop = self._end_of_piece(sequence, min(budget.readable(start), self._deficit[key]))
            if stop == start:
                return  # not enough is left for the next text
            budget.take(start, stop - start)
            self._deficit[key] -= stop - start
            if self._deficit[key] < PAGE:
                self._end_turn()
            self._favours_short ^= {key}
            planned.add(id(sequence))
            yield self._row(sequence, stop)

    def _pass_over(self, key: str) -> bool:
        """End the turn of a key that reads nothing now; return whether it has another one, since it has something."""
        is_new = key in self._new
        self._deficit[key] = 0
        self._end_turn()
        if is_new or self._reads(key):
            return True
        self._turns.pop()
        self._favours_short.discard(key)
        del self._deficit[key]
        return False

    def _end_turn(self) -> None:
        """Whose turn it is goes behind all others."""
        self._turns.append((self._new or self._turns).popleft())

    def _reader(self, key: str, planned: Set[int]) -> Sequence | None:
        """Return whose prompt is read next of those that `key` asked for: one that runs, or one that is let in now."""
        readers = [each for each in self._running if each.key == key and each.num_left > 1 and id(each) not in planned]
        if readers and key in self._favours_short:
            return self._shortest(key, readers)
        if readers:
            return readers[0]
        queue = self._waiting.get(key)
        if not queue or len(self._running) >= self._max_running:
            return None
        is_behind = self._wants_room is not None and self._wants_room.key != key
        if is_behind or not self._is_admitted(queue[0]):
            self._wants_room = self._wants_room or queue[0]
            return None
        self._wants_room = None
        return self._let_in(queue[0])

    def _shortest(self, key: str, readers: list[Sequence]) -> Sequence:
        """Return who has least left to read: of those that run, or of those that wait, if there is room for it."""
        best, queue = min(readers, key=_num_left), self._waiting.get(key)
        if queue and len(self._running) < self._max_running and self._wants_room is None:
            waiting = min(queue, key=_num_left)
            if waiting.num_left < best.num_left and self._is_admitted(waiting):
                return self._let_in(waiting)
        return best

    def _let_in(self, sequence: Sequence) -> Sequence:
        """Let one run that has waited, and has pages."""
        queue = self._waiting[sequence.key]
        queue.remove(sequence)
        if not queue:
            del self._waiting[sequence.key]
        self._running.append(sequence)
        sequence.drew_at = self._num_turns  # no newcomer goes before those that wait for their next token
        return sequence

    def _is_admitted(self, sequence: Sequence) -> bool:
        """Give a sequence the pages of all its tokens, those that are here already among them, if there is room."""
        names = names_of(sequence.tokens[:-1], sequence.salt)  # at least one token is read: it gives the next
        names = names[: self.pool.num_known(names)]
        num_more = num_pages(len(sequence.tokens)) - len(names)
        spare = self._num_spare if self._running else 0
        if num_more + spare > self.pool.num_room:
            return False
        pages = self.pool.take(names, num_more)
        if pages is None:
            return False
        sequence.pages, sequence.names = pages, names
        sequence.num_read = sequence.num_drafted = len(names) * PAGE
        sequence.num_shared = sequence.num_shared or sequence.num_read
        return True

    def _end_of_piece(self, sequence: Sequence, num: int) -> int:
        """Return where a piece of at most `num` tokens ends: at a multiple of `GRAIN`, or the sequence's end."""
        if sequence.num_left <= num:
            return len(sequence.tokens)
        return max(sequence.num_read, (sequence.num_read + num) // GRAIN * GRAIN)

    def _row(self, sequence: Sequence, stop: int) -> Row:
        return Row(sequence, sequence.num_read, stop, draws=stop == len(sequence.tokens))

    def _reads(self, key: str) -> bool:
        return key in self._waiting or any(each.key == key and each.num_left > 1 for each in self._running)

    def _queue(self, key: str) -> deque[Sequence]:
        """Return the queue of a key, which takes its turn from now on."""
        if key not in self._deficit:
            self._deficit[key] = 0
            self._new.append(key)
        return self._waiting.setdefault(key, deque())


def _key_of(sequence: Sequence) -> str:
    return sequence.key


def _num_left(sequence: Sequence) -> int:
    return sequence.num_left
