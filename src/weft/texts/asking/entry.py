"""Who asks for texts of a model that its stages' members compute: `engine.engine.Engine`, as far as `serve` sees it.

    entry = Entry(link, num_stages, ...)
    text = entry.begin(Wanted(...))         # as of an engine

Each text is a machine (`text.step`) whose effects are carried out here: calls, notes, a timer. What is drawn is told at
once. A text that nobody can compute ends with `NoPath`, and one that cannot be begun is refused before.

Failure:
- a member dies, or is silent: others take its place, and the text goes on (`text`).
- a stage has nobody: texts wait for `WAIT_S`, then fail; who comes back meanwhile is asked again.
- of a stage only those are there that were too slow, or did not answer: after `ANYWAY_S` they are asked nevertheless.
- nobody has a text's weights any more: it is read with the newest that a path has, and goes on. That is told, once a
  token was drawn.
- a text's reader is behind: members forget it, and it is read again once its reader goes on.
- a receipt does not come, or is wrong: that is told (`witness`), and the text goes on.
- a token is against the text's form: its member is passed over, and another draws it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from math import ceil

from msgspec import UNSET
from msgspec.structs import replace

from weft.clock import Clock
from weft.engine.draw import Drawn
from weft.engine.engine import MAX_BEHIND, MAX_WAITING, Totals
from weft.engine.scheduling.shares import all_who_make_way, first_of_most, youngest
from weft.engine.text import Full, Text, TextBroken, Unread, Wanted, check
from weft.errors import ConfigError
from weft.events import Emit, Event
from weft.ids import PeerId
from weft.pipeline.link import StageLink
from weft.pipeline.routing import Failure
from weft.rng import fresh_secret
from weft.tasks import Tasks
from weft.texts.asking import text as machine
from weft.texts.asking.course import Course
from weft.texts.asking.no_path import form_of
from weft.texts.asking.path import Paths
from weft.texts.asking.under_way import TextOfMembers, UnderWay
from weft.texts.messages import SECRET_NBYTES, Receipts, SectionServed, SequenceLost, TokenDrawn
from weft.texts.receipts.collected import Collected
from weft.texts.receipts.witness import Kept

WAIT_S = 10.0  # for a stage that has nobody
LATE_S = 2.0  # for receipts, once a text has ended
RETRY_S = 5.0  # after which who finds too many waiting may ask again


class Entry:
    """
    Args:
        row_nbytes: of a token's activations, encoded.
        new_secret: makes names of texts that nobody guesses.
        wait_s: for a stage that has nobody.
        paths: how members are chosen; None: as `path` has it.
    """

    def __init__(
        self,
        link: StageLink,
        *,
        num_stages: int,
        vocab_size: int,
        context: int,
        row_nbytes: int,
        clock: Clock,
        emit: Emit,
        wait_s: float = WAIT_S,
        new_secret: Callable[[int], bytes] = fresh_secret,
        paths: Paths | None = None,
    ) -> None:
        self.vocab_size, self.context = vocab_size, context
        self.num_stages, self.row_nbytes, self.wait_s = num_stages, row_nbytes, wait_s
        self.link, self.clock, self.emit = link, clock, emit
        self.paths = paths or Paths(num_stages)
        self.totals = Totals()
        self.tasks = Tasks()
        self._new_secret = new_secret
        self._under_way: dict[bytes, UnderWay] = {}
        self._by_text: dict[Text, UnderWay] = {}
        self._behind: dict[UnderWay, None] = {}  # who has waited longest for its reader first
        self._late: dict[bytes, UnderWay] = {}  # ended, and receipts may still come
        self._collected = Collected(self.tell)
        link.on_note(SectionServed, self._on_served)
        link.on_note(TokenDrawn, self._on_drawn)
        link.on_note(SequenceLost, self._on_lost)
        link.on_note(Receipts, self._on_receipts)
        link.on_parted(self._on_parted)

    def begin(self, wanted: Wanted, num_more: int = 0) -> Text:
        """Begin a text.

        Args:
            num_more: as of `engine.engine.Engine.begin`.

        Raises:
            ConfigError: as `engine.text.check`; or an embedding is wanted, or a form that no member holds answers to.
            Full: too many wait, and nobody has more texts among them than this one would.
        """
        check(wanted, self.vocab_size, self.context)
        if wanted.is_mean:
            raise ConfigError(
                "embeddings need the model on the machine that is asked; this one asks members of the run. Ask one "
                "that serves a checkpoint of the run."
            )
        form = form_of(wanted, self.paths)
        self._have_places(wanted, 1 + num_more)
        text = TextOfMembers(wanted, self._cancel, self._go_on, self.clock, course=Course())
        under = UnderWay(self, self._new_secret(SECRET_NBYTES), text, form)
        self._under_way[under.id] = self._by_text[text] = under
        self._count()
        self.tasks.spawn(self._begin(under))
        return text

    async def _begin(self, under: UnderWay) -> None:
        try:
            await under.begin()
        except Exception as fault:  # of weft's own: who reads it hears of it, and does not wait for ever
            under.end(TextBroken(fault))
            raise

    def _have_places(self, wanted: Wanted, num: int) -> None:
        """Have a place for the first of so many texts: where none is free, end the youngest that waits of who has most
        among them, as `engine.scheduling.schedule` does."""
        num_free = max(0, ceil(wanted.room * MAX_WAITING - self.totals.num_waiting))
        if num <= num_free:
            return
        waiting = [each for each in self._by_text.values() if not each.has_drawn]
        rooms = {_key_of(each): each.text.wanted.room for each in waiting}
        nums = {key: (num, rooms[key]) for key, num in Counter(map(_key_of, waiting)).items()}
        others = all_who_make_way(nums, wanted.key, wanted.room, num_free, num)
        if others is None:
            raise Full(RETRY_S)
        if not num_free:
            youngest(waiting, _key_of, others[0]).end(Full(RETRY_S))

    def _cancel(self, text: Text) -> None:
        if (under := self._by_text.get(text)) is not None:
            under.end("cancelled")

    def _go_on(self, text: Text) -> None:
        under = self._by_text.get(text)
        if under is not None and under in self._behind:
            del self._behind[under]
            under.hear(machine.Read())
            self._count()

    def waits_for_reader(self, under: UnderWay) -> None:
        """A text rests; of too many let one go."""
        self._behind[under] = None
        while len(self._behind) > MAX_BEHIND:
            first_of_most(self._behind, _key_of).end(Unread())
        self._count()

    async def aclose(self) -> None:
        """End all texts."""
        for under in list(self._by_text.values()):
            under.end("cancelled")
        await asyncio.sleep(0)  # what was said is under way
        await self.tasks.aclose()

    def close(self) -> None:
        """End all texts; what is said of it may not leave any more."""
        for under in list(self._by_text.values()):
            under.end("cancelled")

    def has_ended(self, under: UnderWay) -> None:
        self._under_way.pop(under.id, None)
        self._by_text.pop(under.text, None)
        self._behind.pop(under, None)
        self._count()
        if under.witness is not None:
            self._late[under.id] = under
            self.tasks.spawn(self._end_receipts(under))

    def _count(self) -> None:
        self.totals.num_waiting = sum(not under.has_drawn for under in self._under_way.values())
        self.totals.num_behind = len(self._behind)
        self.totals.num_running = len(self._under_way) - self.totals.num_waiting - self.totals.num_behind

    def drew(self) -> None:
        self.totals.num_drawn += 1
        self._count()

    # --- what is heard ---

    async def _on_served(self, peer: PeerId, note: SectionServed) -> None:
        self.paths.seen(peer, note, self.clock.now())

    async def _on_drawn(self, peer: PeerId, note: TokenDrawn) -> None:
        under = self._under_way.get(note.sequence)
        if under is not None and peer in under.lasts and note.token < self.vocab_size:
            drawn, num = Drawn(note.token, note.logprob, note.likeliest), under.num_tokens
            under.drew(peer, machine.Drew(note.attempt, note.place, note.chain, drawn))
            if under.num_tokens > num:
                self.link.welcome(peer)

    async def _on_lost(self, peer: PeerId, note: SequenceLost) -> None:
        under = self._under_way.get(note.sequence)
        if under is None or peer not in under.peers:
            return
        if note.why == "no room":
            self.paths.failed(peer, Failure.BUSY, self.clock.now())
        under.lost(note.attempt, note.stage, peer, note.why)

    async def _on_receipts(self, peer: PeerId, note: Receipts) -> None:
        under = self._under_way.get(note.sequence) or self._late.get(note.sequence)
        if under is None or under.witness is None:
            return
        self._collected.tell(under.witness.told(peer, note) + under.compared())
        if peer in under.peers and under.round is not None:
            self._collected.named(peer, under.round, note)

    def tell(self, event: Event) -> None:
        """Emit what happened; where members have the whole model, without a stage."""
        self.emit(replace(event, stage=UNSET) if self.num_stages == 1 else event)

    async def _end_receipts(self, under: UnderWay) -> None:
        """Keep a text's receipts, once those under way should be here."""
        await asyncio.sleep(LATE_S)
        del self._late[under.id]
        self._collected.tell(under.compared() + under.missing())
        if under.witness is not None:
            self._collected.keep(under.id, under.witness.kept)

    @property
    def receipts(self) -> dict[bytes, tuple[Kept, ...]]:
        """Return the receipts of the texts that ended last, by text: all that a later audit needs beside the tokens."""
        return self._collected.kept

    def _on_parted(self, peer: PeerId) -> None:
        self.paths.gone(peer)
        for under in list(self._under_way.values()):
            under.parted(peer)


def _key_of(under: UnderWay) -> str:
    return under.text.wanted.key
