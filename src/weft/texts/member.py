"""A member of a stage that computes texts: what it holds of each is `sequence`; here are pages, bytes, steps and notes.

    member = Member(link, stage, section, ...)
    member.start()

A step takes what is left of each text that is drawn, oldest first, and pieces of prompts as
`engine.scheduling.schedule` has it. What comes out goes to each next member in one note. Nothing here waits for
anybody: who lacks something asks anew.

Weights of two rounds may be held: a text keeps its own to its end, and new texts are drawn with the newer.

Failure:
- a note is lost, or a member of the path: nothing comes here any more, until whoever asks opens a new attempt.
- no page is left, or rows are no rows: the text is dropped here, and whoever asks is told.
- whoever asks is gone: the text is forgotten after `sequence.IDLE_S`.
- a receipt cannot be made, or is lost: the text goes on, and whoever asks says so.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any

from msgspec import UNSET

from weft.chat.grammar import Form, FormRefused, GrammarFault
from weft.clock import Clock
from weft.engine.scheduling.budget import GRAIN, Budget
from weft.engine.scheduling.guess import MAX_GUESSED
from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.pages import PAGE, PagePool, num_pages
from weft.engine.scheduling.shares import by_turns, longest_ago, most_held, pages_held, who_yields, youngest
from weft.errors import NetError, PeerError, Refused, WeftError
from weft.ids import PeerId
from weft.pipeline.link import StageLink
from weft.pipeline.worker import Run
from weft.tasks import Tasks
from weft.texts import sequence as rules
from weft.texts import trial
from weft.texts.chain import Chain, chain_of, split
from weft.texts.forms import Followed, FormReader
from weft.texts.guessed import Ring
from weft.texts.held import ROOM, HeldText
from weft.texts.log import Log, Strip
from weft.texts.messages import (
    FORMS,
    MAX_PIECE,
    TOKEN_NBYTES,
    CloseSequence,
    HowNear,
    OpenSequence,
    ReceiptWanted,
    ResumeSequence,
    RowsOfText,
    SectionServed,
    SequenceLost,
    SequenceOpened,
    TextRows,
    Why,
    id_of,
)
from weft.texts.near import Nearness, answer_how_near
from weft.texts.outbox import Outbox
from weft.texts.receipts.receipt import Signing, header_of
from weft.texts.section import Done, Draw, Section, Work, packed, tokens_of
from weft.texts.sequence import Marks, Moved, Rows

NEWS_S = 2.0
MAX_VERSIONS = 2  # of the weights, that are held at a time
MAX_ROWS = 64  # that are drawn after in one step, guesses among them
MAX_HELD, MAX_FORMED = 1024, 256  # texts; of those, with a form: each keeps a grammar
AT_WORK_S = 2.0  # after a row of a text was computed: for so long it has a part of a step's rows
BUSY_S = 1.0  # after which who finds no page here may ask again


class Member:
    """
    Args:
        round: whose weights `section` has.
        num_pages: of keys and values.
        log_nbytes: for what was sent on.
        num_stages: of the model.
        has_guesses: whether a first stage takes tokens before they are drawn, where it can guess them.
        has_receipts: whether who asks is given receipts, where the section says what its weights are.
        run: computes a step, one at a time.
        turn: waits until a step may begin; None: it may at any time.
        forms: reads forms of answers, at a last stage; None: answers are held to none.
    """

    def __init__(
        self,
        link: StageLink,
        stage: int,
        section: Section,
        *,
        round: int,
        num_pages: int,
        log_nbytes: int,
        clock: Clock,
        run: Run,
        turn: Callable[[], Awaitable[None]] | None = None,
        num_stages: int = 1,
        has_guesses: bool = True,
        has_receipts: bool = True,
        forms: FormReader | None = None,
    ) -> None:
        self.stage = stage
        self._link, self._clock = link, clock
        self._section = section  # the newest: their shapes are alike
        self._sections = {round: section}
        self._pool = PagePool(num_pages)
        self._log = Log(section.row_nbytes, log_nbytes)
        self._run, self._turn = run, turn
        self._pace, self._ring = Pace(), Ring(num_stages)
        self._next, self._near = (stage + 1) % num_stages, Nearness(link, clock)
        self._has_guesses, self._has_receipts = has_guesses and section.is_first, has_receipts
        self._forms = forms
        self._texts: dict[bytes, HeldText] = {}
        self._num_steps = 0
        self._is_measured = False
        self._due = asyncio.Event()
        self._tasks = Tasks()
        onward = 0 if section.is_last else stage + 1
        self._outbox = Outbox(link, self._log, onward, section.row_nbytes, self._tasks)

    def start(self) -> None:
        """Take texts from now on."""
        for kind, handler in self._handlers.items():
            self._link.hold(self.stage, kind, handler)
        self._tasks.spawn(self._begin())
        if self._next != self.stage:
            self._link.hold(self._next, SectionServed, self._near.heard)
            self._tasks.spawn(self._near.ask_on())

    async def aclose(self) -> None:
        """Take none from now on, and let go of all: whoever asks finds others."""
        for kind, handler in self._handlers.items():
            self._link.let_go(self.stage, kind, handler)
        self._link.let_go(self._next, SectionServed, self._near.heard)
        self._near.close()
        await self._link.tell(self.served(is_here=False))
        for text in list(self._texts.values()):
            self._lose(text, "leaving")
        await asyncio.sleep(0)  # it is said
        await self._tasks.aclose()

    @property
    def _handlers(self) -> dict[type, Callable[..., Awaitable[Any]]]:
        return {
            OpenSequence: self._on_open,
            ResumeSequence: self._on_resume,
            TextRows: self._on_rows,
            ReceiptWanted: self._on_receipt_wanted,
            CloseSequence: self._on_close,
        }

    def renew(self, round: int, section: Section) -> None:
        """Begin texts with the weights after a later round. Of the oldest ones texts are let go where it is one too
        many: whoever asks has them read again with newer ones."""
        self._section = self._sections[round] = section
        for old in sorted(self._sections)[:-MAX_VERSIONS]:
            self.drop(old)
        self._tasks.spawn(self._link.tell(self.served()))

    def drop(self, round: int) -> None:
        """Let go of the weights after a round, beside others that are here, and of the texts that are drawn with them:
        whoever asks has them read again with others."""
        del self._sections[round]
        self._section = self._sections[max(self._sections)]
        self._tasks.spawn(self._link.tell(self.served()))  # before who has lost a text asks for these weights again
        for text in [text for text in self._texts.values() if text.opened.round == round]:
            self._lose(text, "old weights")

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def num_texts_of(self, round: int) -> int:
        """Return how many texts are drawn with the weights after a round."""
        return sum(text.opened.round == round for text in self._texts.values())

    @property
    def num_held(self) -> int:
        """Return how many pages texts hold."""
        return self._pool.num_pages - self._pool.num_room

    def served(self, *, is_here: bool = True) -> SectionServed:
        """Return what is told of this member."""
        alone_s = self._pace.step_s(0, 0)
        drawing = [text for text in self._texts.values() if text.is_drawing]
        return SectionServed(
            stage=self.stage,
            rounds=tuple(sorted(self._sections, reverse=True)) if is_here and self._is_measured else (),
            step_s=alone_s,
            row_s=self._pace.step_s(1, 0) - alone_s,
            token_s=self._pace.step_s(0, 1) - alone_s,
            num_rows=len(drawing),
            num_waiting=sum(text.num_left for text in self._texts.values()) - sum(text.num_left for text in drawing),
            num_free=self._pool.num_room,
            numbers=self._section.kind,
            forms=FORMS if self._forms is not None else UNSET,
            links=self._near.told(),
        )

    # --- what is said ---

    async def _on_open(self, peer: PeerId, call: OpenSequence) -> SequenceOpened:
        if call.round not in self._sections:
            return SequenceOpened(word="other weights")
        if call.sequence != id_of(peer, call.secret) or not self._section.can_draw(call):
            return SequenceOpened(word="not here")
        form, text = None, self._texts.get(call.sequence)
        if text is not None and text.form is not None and text.opened.form == call.form:
            form = text.form.begin
        elif call.form is not UNSET:
            try:
                form = None if self._forms is None else await self._forms.read(peer, call.form)
            except FormRefused:
                return SequenceOpened(word="no form")
            if form is None:
                return SequenceOpened(word="no form" if self._forms is None else "busy", retry_s=BUSY_S)
        return self._opened(peer, call, form)

    def _opened(self, peer: PeerId, call: OpenSequence, form: Form | None) -> SequenceOpened:
        if call.round not in self._sections:  # not any more
            return SequenceOpened(word="other weights")
        marks = Marks(call.places, split(call.chain))
        text = self._texts.get(call.sequence)
        if text is not None and text.sequence.chain[0] != marks.chain[0]:  # of other weights
            self._drop(text)
            text = None
        if text is None:
            text = self._begun(peer, call, marks)
        elif not self._grow(text, marks.places[-1]):
            text = None
        if text is None:
            return SequenceOpened(word="busy", retry_s=BUSY_S)
        sequence, held = rules.opened(text.sequence, call.attempt, marks, self._clock.now())
        if held is None:
            return SequenceOpened(word="older")
        if form is not None and text.form is None and len(self._formed) >= MAX_FORMED:  # it had none when it began
            return SequenceOpened(word="busy", retry_s=BUSY_S)
        if call.attempt > text.sequence.attempt:
            text.opened, text.counts = call, None
            told = tokens_of(call.tokens)[call.num_prompt :]
            text.form = None if form is None else Followed(form, call.num_prompt, told)
            text.early.clear()
            text.guessed.again()
            self._take_back(text)
        text.sequence = sequence
        num = self._writable(text, held.num)
        return SequenceOpened(word="held", num=num, log_from=min(num, held.log_from))

    async def _on_resume(self, peer: PeerId, note: ResumeSequence) -> None:
        text = self._texts.get(note.sequence)
        if text is None or peer != text.asker or note.keep != self._writable(text, note.keep):
            return
        moved = rules.resumed(text.sequence, note.attempt, note.keep, note.send_from, self._clock.now())
        if not moved.sequence.is_resumed or text.sequence.is_resumed:
            return
        self._sign(text, note.keep)
        text.signing = self._signing(text, note.keep)
        text.given.cut(note.keep)
        self._log.cut(text.id, note.keep)
        text.drawn = {place: drawn for place, drawn in text.drawn.items() if place <= note.keep}
        kept = num_pages(note.keep)
        self._pool.release(text.pages[kept:])
        del text.pages[kept:]
        early, text.early = text.early, {}
        self._settle(text, moved, early)
        await self._outbox.send()

    async def _on_rows(self, peer: PeerId, note: TextRows) -> None:
        for each in note.rows:
            text = self._texts.get(each.sequence)
            if text is None or peer not in (text.asker, text.opened.inward):
                continue
            if each.blob is None and not text.num_fetching:
                self._take(text, each, each.data)
            elif text.may_fetch:
                text.num_fetching += 1
                self._tasks.spawn(self._fetch(peer, text, each))
        await self._outbox.send()

    async def _fetch(self, peer: PeerId, text: HeldText, rows: RowsOfText) -> None:
        """Take rows once their bytes are here, after those that came before."""
        try:
            async with text.fetching:
                data = rows.data
                if rows.blob is not None:
                    nbytes = (len(split(rows.chain)) - 1) * self._section.given_nbytes
                    data = bytes((await self._link.fetch(peer, rows.blob, nbytes)).data)
                if self._texts.get(text.id) is text:
                    self._take(text, rows, data)
        except (PeerError, NetError, Refused):
            return  # it is asked for again
        finally:
            text.num_fetching -= 1
        await self._outbox.send()

    def _take(self, text: HeldText, told: RowsOfText, data: bytes) -> None:
        chain = split(told.chain)
        if self._section.is_first and text.opened.key is not None:
            chain = chain_of(text.opened.key, tokens_of(data[: len(data) // TOKEN_NBYTES * TOKEN_NBYTES]), chain[0])
        rows = Rows(told.attempt, told.start, chain)
        is_whole = len(data) == rows.num * self._section.given_nbytes and rows.num > 0
        if not is_whole or rows.stop > text.opened.most or not text.has_room(rows):
            self._lose(text, "wrong rows")
            return
        moved = rules.taken(text.sequence, rows, self._clock.now())
        if moved.taken and rows.start != self._writable(text, rows.start):
            self._lose(text, "wrong rows")
            return
        if len(moved.sequence.early) > len(text.sequence.early):
            text.early[rows] = data
        self._settle(text, moved, {rows: data})

    def _settle(self, text: HeldText, moved: Moved, data: dict[Rows, bytes]) -> None:
        text.sequence = moved.sequence
        for rows in moved.taken:
            text.given.add(rows.start, data[rows])
            self._log.cut(text.id, rows.start)
            if rows.start < text.num_counted:  # what was drawn behind that rests on other tokens
                text.counts = None
            self._due.set()
        if self._has_guesses:
            self._guess(text, data)
        if text.signing is not None and text.sequence.is_resumed:
            starts = [rows.start for rows in data if rules.attaches(text.sequence.chain, rows)]
            text.signing.settled(max(starts, default=0))
            self._sign(text)
        if text.num_left:
            self._due.set()
        self._send_on(text, moved.sent)

    def _guess(self, text: HeldText, data: dict[Rows, bytes]) -> None:
        """Take note of tokens that were told, and take some that may follow if the last of them is all that is left.

        No guess fills a page: others could read it, and it could not be cut any more.
        """
        chain, now = text.sequence.chain, self._clock.now()
        for rows in sorted(data, key=lambda rows: rows.start):
            if rows.stop < len(chain) and chain[rows.stop] == rows.chain[-1]:
                text.guessed.told(rows.start, tokens_of(data[rows]))
        num, key = text.sequence.num_taken, text.opened.key
        is_last = text.num_left == 1 and text.guessed.stop == num
        if key is None or not is_last or not text.sequence.is_resumed:
            return
        if (trip_s := text.guessed.trip_s(now)) is not None:
            self._ring.note(trip_s)
        most = min(text.opened.most - 1 - num, PAGE - 1 - num % PAGE, self._num_rows_for(text, now) - 1)
        rows_s = self._pace.step_s(sum(text.num_left == 1 for text in self._texts.values()), 0)
        guess = text.guessed.next(most, self._ring.row_share(rows_s - self._pace.step_s(0, 0)))
        if guess:
            moved = rules.guessed(text.sequence, chain_of(key, guess, chain[-1])[1:], now)
            text.sequence = moved.sequence
            for rows in moved.taken:
                text.given.add(rows.start, packed(guess))

    def _num_rows_for(self, text: HeldText, now: float) -> int:
        """Return a text's part of a step's rows, which those that ask share alike, and each one's texts at work."""
        nums = Counter(each.asker for each in self._texts.values() if each is text or now - each.worked_s < AT_WORK_S)
        return MAX_ROWS // len(nums) // nums[text.asker]

    async def _on_close(self, peer: PeerId, note: CloseSequence) -> None:
        text = self._texts.get(note.sequence)
        if text is not None and peer == text.asker and rules.closed(text.sequence, note.attempt) is None:
            self._drop(text)

    # --- texts ---

    def _begun(self, peer: PeerId, call: OpenSequence, marks: Marks) -> HeldText | None:
        """Return a new text with pages for it, those among them that are filled; None: there is no room."""
        if not self._has_place(peer, call):
            return None
        at = dict(zip(marks.places, marks.chain, strict=True))
        num_told = marks.places[-1]
        most = num_told - 1 if self._section.is_last else num_told  # to draw, the last row has to be computed
        names = [at.get(place, b"") for place in range(PAGE, most + 1, PAGE)]
        names = names[: self._pool.num_known(names)]
        num = num_pages(min(call.most, num_told + ROOM))
        while (pages := self._pool.take(names, num - len(names))) is None:
            if not self._has_yielded(peer, num - len(names)):
                return None
            names = names[: self._pool.num_known(names)]
        num_known = len(names) * PAGE
        text = HeldText(rules.begun(marks, num_known), peer, call, pages, Strip(self._section.given_nbytes, num_known))
        self._texts[call.sequence] = text
        return text

    def _has_place(self, peer: PeerId, call: OpenSequence) -> bool:
        """Return whether one text more may be held; who has most gives some up for it."""
        while True:
            texts = list(self._texts.values())
            formed = self._formed
            is_formed = call.form is not UNSET and len(formed) >= MAX_FORMED
            if len(texts) < MAX_HELD and not is_formed:
                return True
            yields = who_yields(Counter(map(_asker_of, formed if is_formed else texts)), peer, 1)
            if yields is None:
                return False
            self._give_up(yields)

    @property
    def _formed(self) -> list[HeldText]:
        return [text for text in self._texts.values() if text.form is not None]

    def _writable(self, text: HeldText, num: int) -> int:
        """Return how much of `num` tokens can be kept: a text is not cut within a page that others may read."""
        page = num // PAGE
        is_cut = num < text.sequence.num_taken and num % PAGE > 0
        return page * PAGE if is_cut and page < len(text.pages) and self._pool.is_named(text.pages[page]) else num

    def _drop(self, text: HeldText) -> None:
        if self._texts.get(text.id) is text:
            del self._texts[text.id]
            self._pool.release(text.pages)
            self._log.drop(text.id)
            self._take_back(text)

    def _lose(self, text: HeldText, why: Why) -> None:
        """Drop a text, and say so."""
        if self._texts.get(text.id) is not text:
            return
        self._drop(text)
        lost = SequenceLost(sequence=text.id, attempt=text.sequence.attempt, stage=self.stage, why=why)
        self._tasks.spawn(self._link.post(text.asker, lost))

    def _take_back(self, text: HeldText) -> None:
        for each in text.blobs:
            self._link.take_back(each.digest)
        text.blobs.clear()

    async def _tick(self) -> None:
        while True:
            now = self._clock.now()
            for text in [text for text in self._texts.values() if rules.is_idle(text.sequence, now)]:
                self._drop(text)
            await self._link.tell(self.served())
            await asyncio.sleep(NEWS_S)

    # --- steps ---

    async def _begin(self) -> None:
        """Learn how long steps take; then say that this member serves, and make those that are asked for."""
        await trial.measure(self._section, self._pool, self._pace, self._clock, self._run, self._turn)
        self._is_measured = True
        self._tasks.spawn(self._tick())
        await self._step_on()

    async def _step_on(self) -> None:
        while True:
            await self._due.wait()
            began = self._clock.now()
            if self._turn is not None:
                await self._turn()
            self._due.clear()
            if works := self._planned():
                await self._step(works, began)
            if any(text.num_left for text in self._texts.values()):
                self._due.set()

    def _planned(self) -> list[tuple[HeldText, Work]]:
        """Return what the next step computes, with pages for all of it."""
        waiting = [text for text in self._texts.values() if text.num_left]
        planned = list[tuple[HeldText, int]]()
        left = MAX_ROWS
        for text in by_turns([text for text in waiting if text.is_drawing], _asker_of):
            num = self._piece(text, text.num_left)
            if num <= left and self._grow(text, text.sequence.num_computed + num):
                planned.append((text, num))
                left -= num
        reading = [text for text in waiting if not text.is_drawing]
        reading = longest_ago(reading, _asker_of, attrgetter("read_at"), self._texts.values())
        budget = Budget(self._pace, MAX_ROWS - left)
        for text in reading:
            start = text.sequence.num_computed
            num = self._piece(text, min(budget.readable(start), MAX_PIECE))
            if num and self._grow(text, start + num):
                planned.append((text, num))
                budget.take(start, num)
                text.read_at = self._num_steps
        self._num_steps += 1
        return [(text, self._work(text, num)) for text, num in planned if self._texts.get(text.id) is text]

    def _piece(self, text: HeldText, most: int) -> int:
        """Return how many tokens of a text are read in a step: up to a multiple of `GRAIN`, or all."""
        start = text.sequence.num_computed
        stop = text.sequence.num_taken
        if self._section.is_last:  # where drawing looks at the tokens before, one is drawn in a step
            num_draws = 1 if text.drawing.has_penalties else 1 + MAX_GUESSED
            stop = min(stop, max(text.sequence.send_from, start) + num_draws)
        if stop - start <= most:
            return stop - start
        return max(0, (start + most) // GRAIN * GRAIN - start)

    def _grow(self, text: HeldText, num: int) -> bool:
        """Have pages for `num` tokens of a text; where there are none, who holds most gives some up, if need be this
        text."""
        while len(text.pages) * PAGE < num:
            page = self._pool.grow()
            if page is not None:
                text.pages.append(page)
                continue
            self._give_up(most_held(self._num_pages_by_asker))
            if self._texts.get(text.id) is not text:
                return False
        return True

    def _has_yielded(self, peer: PeerId, num: int) -> bool:
        """Return whether a text was given up so that `peer` has room for `num` pages more."""
        yields = who_yields(self._num_pages_by_asker, peer, num)
        if yields is not None:
            self._give_up(yields)
        return yields is not None

    def _give_up(self, asker: PeerId) -> None:
        """Lose the youngest text of one that asks."""
        self._lose(youngest(self._texts.values(), _asker_of, asker), "no room")

    @property
    def _num_pages_by_asker(self) -> Counter[PeerId]:
        return pages_held(self._texts.values(), _asker_of)

    def _work(self, text: HeldText, num: int) -> Work:
        start = text.sequence.num_computed
        num_draws = start + num - max(start, text.sequence.send_from) if self._section.is_last else 0
        draw = None
        if num_draws > 0:
            opened = text.opened
            draw = Draw(
                text.drawing,
                text.counts_until(start + num, self._section.vocab_size),
                opened.stop_ids,
                opened.most,
                text.form,
                text.drawn_until(start + num - num_draws + 1),
            )
        return Work(text.given.part(start, start + num), num, start, tuple(text.pages), draw, num_draws)

    async def _step(self, works: list[tuple[HeldText, Work]], began: float) -> None:
        """
        Args:
            began: when the first of it could have been computed: what it waited for since is a part of the step, and of
                what is told of it.
        """
        chains = [text.sequence.chain[work.start + 1 : work.start + work.num + 1] for text, work in works]
        num_graphs = self._num_graphs
        try:
            found = await self._run(lambda: self._computed(works))
        except Exception:  # out of memory, a broken device: others may compute it
            for text, _ in works:
                self._lose(text, "not computed")
            return
        if self._num_graphs == num_graphs:
            num_rows, num_read, num_pairs = trial.counted((work.start, work.num) for _, work in works)
            self._pace.note(num_rows, num_read, self._clock.now() - began, num_pairs)
        for (text, work), chain, done in zip(works, chains, found, strict=True):
            self._done(text, work, chain, done)
        for peer in {text.opened.inward for text, _ in works}:
            self._link.welcome(peer)
        await self._outbox.send()

    @property
    def _num_graphs(self) -> int:
        return sum(section.num_graphs for section in self._sections.values())

    def _computed(self, works: list[tuple[HeldText, Work]]) -> list[Done]:
        """Compute a step, on another thread: rows of texts with the same weights together."""
        found = dict[int, Done]()
        for round in {text.opened.round for text, _ in works}:
            numbers = [number for number, (text, _) in enumerate(works) if text.opened.round == round]
            section = self._sections.get(round)
            if section is not None:
                found |= zip(numbers, section.compute([works[number][1] for number in numbers]), strict=True)
        return [found.get(number, Done()) for number in range(len(works))]

    def _done(self, text: HeldText, work: Work, chain: Chain, done: Done) -> None:
        if self._texts.get(text.id) is not text:
            return
        if done.failed is not None:
            self._lose(text, "no form" if isinstance(done.failed, GrammarFault) else "wrong rows")
            return
        moved = rules.computed(text.sequence, work.start, tuple(each or b"" for each in chain))
        num = moved.sequence.num_computed - work.start
        if num <= 0:
            return
        text.sequence, text.worked_s = moved.sequence, self._clock.now()
        text.given.forget(work.start + num)
        for page in range(work.start // PAGE, (work.start + num) // PAGE):
            name = text.sequence.chain[(page + 1) * PAGE]
            if name is not None:
                self._pool.call(text.pages[page], name)
        if not self._section.is_last:
            for lost, until in self._log.add(text.id, work.start, done.data[: num * self._section.row_nbytes]):
                of = self._texts[lost]
                of.sequence = rules.forgot_log(of.sequence, until)
        for place in work.drawn_places[len(done.drawn) :]:  # behind a complete form
            text.drawn.pop(place, None)
        for place, drawn in zip(work.drawn_places, done.drawn, strict=False):
            if place <= work.start + num:
                text.drawn[place] = drawn
        self._send_on(text, moved.sent)
        if text.signing is not None:
            text.signing.computed(work, done, num)
            self._sign(text)

    # --- receipts ---

    def _signing(self, text: HeldText, start: int) -> Signing | None:
        section = self._sections[text.opened.round]
        header = header_of(text.opened, section) if self._has_receipts else None
        return None if header is None else Signing(header, section, start, self._link.signer)

    def _sign(self, text: HeldText, until: int | None = None) -> None:
        """Let who asks have the receipts that are due; with `until`, of all rows before that place."""
        if text.signing is None:
            return
        try:
            notes = text.signing.notes(lambda place: self._log.part(text.id, place, place + 1), until)
        except (WeftError, ValueError):  # the text goes on without
            text.signing = None
            return
        for note in notes:
            self._tasks.spawn(self._link.post(text.asker, note))

    async def _on_receipt_wanted(self, peer: PeerId, note: ReceiptWanted) -> None:
        text = self._texts.get(note.sequence)
        if text is not None and peer == text.asker and note.attempt == text.sequence.attempt:
            self._sign(text, note.stop)

    # --- what goes on ---

    def _send_on(self, text: HeldText, sent: tuple[int, int] | None) -> None:
        if sent is None:
            return
        start, stop = sent
        if not self._section.is_last:
            self._outbox.put(text, start, stop)
            return
        for place in range(start + 1, stop + 1):
            if (drawn := text.drawn.get(place)) is not None:
                self._outbox.tell(text, place, drawn)


def _asker_of(text: HeldText) -> PeerId:
    return text.asker


def listen(link: StageLink) -> None:
    """Have what is said of texts heard by who holds the stage that is named: once on each link."""
    link.serve_stages(OpenSequence, SequenceOpened(word="not here"))
    for kind in (ResumeSequence, TextRows, ReceiptWanted, CloseSequence, SectionServed):
        link.on_stage_note(kind)
    link.serve(HowNear, answer_how_near)
