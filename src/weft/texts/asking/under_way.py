"""One text that members compute: a machine (`text.step`) whose effects are carried out here: calls, notes, a timer."""

import asyncio
import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any, Protocol

from msgspec import UNSET

from weft.chat.grammar import Form, GrammarFault
from weft.clock import Clock
from weft.engine.draw import Drawn
from weft.engine.engine import Totals
from weft.engine.text import Text
from weft.errors import NetError, PeerError, Refused, WeftError
from weft.events import Emit, Event, TextChanged, TextMoved
from weft.ids import PeerId, Round
from weft.keys import verify
from weft.pipeline.link import StageLink
from weft.pipeline.routing import Failure
from weft.tasks import Tasks
from weft.texts.asking import text as machine
from weft.texts.asking.course import Course
from weft.texts.asking.no_path import NoPath, no_path
from weft.texts.asking.path import Paths, Reserved
from weft.texts.asking.path import Wanted as Asked
from weft.texts.asking.patience import Patience
from weft.texts.chain import joined, key_of
from weft.texts.messages import (
    MAX_INLINE_NBYTES,
    TOKEN_NBYTES,
    CloseSequence,
    OpenSequence,
    ReceiptWanted,
    ResumeSequence,
    RowsOfText,
    SequenceOpened,
    TextRows,
    drawn_how,
    id_of,
    looks_back,
)
from weft.texts.receipts.witness import Witness
from weft.texts.section import packed
from weft.texts.sequence import Held

LOOK_S = 0.25  # between two looks for one
ANYWAY_S = 2.0  # for anybody else than who is passed over
STAY_S = 3.0  # for a member that lacks the weights that a text is drawn with, and soon has them
OPEN_S = 1.0  # for a member to say what it has
IN_COMMON = 3.0  # times as long as for somebody, for members to have weights in common: that takes a round or two
EXPECTED = 256  # tokens of an answer, as paths are chosen for


class TextOfMembers(Text):
    """A text that members compute: it says whom it has come by.

    Args:
        course: so far.
    """

    def __init__(self, *args: Any, course: Course) -> None:
        super().__init__(*args)
        self.course = course
        self.on_moved: Callable[[], None] | None = None  # called where `course` has other members, or other weights


class Asks(Protocol):
    """What a text needs of who asks for it (`entry.Entry`)."""

    link: StageLink
    clock: Clock
    emit: Emit
    tasks: Tasks
    paths: Paths
    totals: Totals
    context: int
    row_nbytes: int
    wait_s: float

    def tell(self, event: Event) -> None:
        """Emit what happened."""
        ...

    def drew(self) -> None:
        """A token was told."""
        ...

    def waits_for_reader(self, under: "UnderWay") -> None:
        """A text rests."""
        ...

    def has_ended(self, under: "UnderWay") -> None:
        """It draws no more."""
        ...


class UnderWay:
    """One text, and what is said for it.

    Args:
        form: that it is to follow, after the tokens that were told.
    """

    def __init__(self, entry: Asks, secret: bytes, text: TextOfMembers, form: Form | None) -> None:
        self.id, self.text = id_of(entry.link.me, secret), text
        self._secret, self._form = secret, form
        self.has_drawn = False
        self.lasts: set[PeerId] = set()  # members of the last stage that may have drawn
        self._entry = entry
        self._state: machine.Text | None = None
        self._reserved: Reserved | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._patience = Patience()
        self._told_at: float | None = None
        self._drawn_in = -1  # the attempt that the last token came of
        self._is_refused = False  # whether a member does not take its form
        self._stuck_since: float | None = None  # since then a stage has only those that are passed over, or nobody
        self._is_over = False
        self.witness: Witness | None = None
        self._stopped: tuple[int, int, int | None] | None = None  # attempt, rows, and the token that ended it

    @property
    def round(self) -> int | None:
        return None if self._reserved is None else self._reserved.round

    def compared(self) -> list[Event]:
        """Return where receipts are not of what went between two of those that the text went through."""
        if self.witness is None or self._state is None:
            return []
        return self.witness.compared(self._state.tokens, self._stopped[2] if self._stopped else None)

    def missing(self) -> list[Event]:
        if self.witness is None or self._stopped is None:
            return []
        return self.witness.missing(*self._stopped[:2])

    @property
    def num_tokens(self) -> int:
        return 0 if self._state is None else len(self._state.tokens)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return () if self._state is None else self._state.path

    async def begin(self) -> None:
        reserved = await self._sought(frozenset())
        if self._is_over:
            return
        if reserved is None:
            self._end(self._no_path("no path"))
            return
        wanted = self.text.wanted
        key = key_of(wanted.salt, reserved.round)
        self._state, effects = machine.begun(
            wanted.prompt, wanted.max_new_tokens, key, wanted.stop_ids, self._entry.context
        )
        if self._state.phase == "ended":
            self._carry_out(effects)
        else:
            self.hear(machine.Found(reserved.peers))

    def end(self, ending: "machine.Ending | WeftError") -> None:
        """Draw no more of it."""
        self._end(ending)
        self.hear(machine.Cancelled())

    def hear(self, event: machine.Event) -> None:
        if self._state is None or self._state.phase == "ended":
            return
        before = self._state
        self._state, effects = machine.step(before, event)
        is_left = self._state.phase in ("seeking", "resting") or self._state.attempt > before.attempt
        if is_left and before.phase in ("opening", "running"):
            self.text.course.stopped(machine.why(event), self._entry.clock.now())
        has_ended = self._state.phase == "ended" and self._state.path  # not in a rest: members have forgotten it
        if isinstance(event, machine.Drew) and has_ended and event.attempt == self._state.attempt:
            num = len(self._state.tokens)
            is_stopped = event.drawn.token in self._state.stop_ids
            self._stopped = event.attempt, num if is_stopped else num - 1, event.drawn.token if is_stopped else None
        self._carry_out(effects)

    def drew(self, peer: PeerId, event: machine.Drew) -> None:
        """A token has come. Where the form forbids it, its member is passed over, and another draws it."""
        form, state = self._form, self._state
        if form is not None and state is not None and machine.is_next(state, event):
            if not form.may_take(event.drawn.token):
                self._entry.paths.failed(peer, Failure.ERROR, self._entry.clock.now())
                self.hear(machine.Lost(event.attempt, peer, "no form"))
                return
            if event.drawn.token not in state.stop_ids:
                try:
                    form.take(event.drawn.token)
                except GrammarFault as error:
                    self.end(error)
                    return
                event = dataclasses.replace(event, is_whole=form.is_complete)
        self.hear(event)

    def lost(self, attempt: int, stage: int, peer: PeerId, why: str) -> None:
        """A member cannot go on; where it says that rows are none, whoever sent them is to be passed over."""
        peers = self.peers
        if why == "no form" and self._form is not None and peers and peers[-1] == peer:
            try:
                self._form.allowed()
            except GrammarFault as error:  # as on one machine
                self.end(error)
                return
            self._entry.paths.failed(peer, Failure.ERROR, self._entry.clock.now())
        if why == "wrong rows" and 0 < stage < len(peers) and peers[stage] == peer:
            peer = peers[stage - 1]
            self._entry.paths.failed(peer, Failure.ERROR, self._entry.clock.now())
        self.hear(machine.Lost(attempt, peer, why))

    def parted(self, peer: PeerId) -> None:
        if self._state is not None:
            self.hear(machine.Lost(self._state.attempt, peer))

    def _carry_out(self, effects: list[machine.Effect]) -> None:
        for effect in effects:
            match effect:
                case machine.Seek(without=without):
                    self._stop_waiting()
                    self._entry.tasks.spawn(self._seek(without))
                case machine.Open(attempt=attempt, path=path):
                    self._open(attempt, path)
                case machine.Resume():
                    if self.witness is not None:
                        self.witness.ordered(effect.attempt, effect.stage, effect.keep, effect.send_from)
                    note = ResumeSequence(
                        sequence=self.id,
                        attempt=effect.attempt,
                        stage=effect.stage,
                        keep=effect.keep,
                        send_from=effect.send_from,
                    )
                    self._post(effect.peer, note)
                case machine.Feed(attempt=attempt, peer=peer, start=start):
                    self._feed(attempt, peer, start)
                    self._began()
                case machine.Close(attempt=attempt, members=members):
                    for stage, peer in members:
                        self._ask_receipt(attempt, stage, peer)
                        self._post(peer, CloseSequence(sequence=self.id, attempt=attempt, stage=stage))
                case machine.Tell(drawn=drawn):
                    self._tell(drawn)
                case machine.End(ending=ending):
                    self._end(ending)
                case machine.Fail(why=why):
                    self._end(self._no_path(why))

    def _ask_receipt(self, attempt: int, stage: int, peer: PeerId) -> None:
        """Have what is left signed, before a member forgets the text."""
        if self._stopped is not None and peer in self.peers:
            wanted = ReceiptWanted(sequence=self.id, attempt=attempt, stage=stage, stop=self._stopped[1])
            self._post(peer, wanted)

    def _post(self, peer: PeerId, note: "ResumeSequence | CloseSequence | ReceiptWanted | TextRows") -> None:
        self._entry.tasks.spawn(self._entry.link.post(peer, note))

    # --- paths ---

    async def _seek(self, without: frozenset[PeerId]) -> None:
        was = self._reserved
        before = self.peers or (() if was is None else was.peers)  # none, after a rest
        state = self._state
        assert state is not None
        reserved = await self._sought(without)
        if reserved is None:
            self.hear(machine.Found(None))
            return
        if was is not None and reserved.round != was.round:
            self._state = machine.with_key(self._state or state, key_of(self.text.wanted.salt, reserved.round))
        for stage, (old, new) in enumerate(zip(before or reserved.peers, reserved.peers, strict=True)):
            if old != new:
                self._entry.tell(TextMoved(stage=stage, before=old, member=new))
        is_exact = was is None or reserved.is_exact or not was.is_exact
        if was is not None and self.has_drawn and (reserved.round != was.round or not is_exact):
            changed = TextChanged(before=Round(was.round), round=Round(reserved.round), is_exact=is_exact)
            self._entry.emit(changed)
        self.hear(machine.Found(reserved.peers))

    async def _sought(self, without: frozenset[PeerId]) -> Reserved | None:
        """Return a path, with the weights and numbers of the one before if there is one, or soon will be; wait where a
        stage has nobody."""
        entry, wanted, was = self._entry, self.text.wanted, self._reserved
        round, is_exact = (None, False) if was is None else (was.round, was.is_exact)
        if was is not None:
            entry.paths.ended(was)
        state = self._state
        num_drawn = min(EXPECTED, wanted.max_new_tokens)
        num_prompt = len(wanted.prompt) if state is None else len(state.tokens)
        asked = Asked(num_prompt, num_drawn, entry.row_nbytes, has_form=self._form is not None)
        held = {} if state is None else machine.held_by(state)
        if state is not None and was is not None and not state.path:  # it has rested: they may have its pages yet
            held = dict.fromkeys(was.peers, len(state.tokens))
        began = entry.clock.now()
        while not self._is_over:
            now = entry.clock.now()
            ways: list[tuple[int | None, bool]] = [(round, is_exact)]
            has_time = round is not None and self.has_drawn and now - began < STAY_S
            lags = round is not None and entry.paths.may_come(
                round, without, is_exact=is_exact, has_form=asked.has_form
            )
            if not has_time or not lags:
                ways += [(round, False), (None, is_exact), (None, False)]
            for has_barred in (False, True) if now - began >= ANYWAY_S else (False,):
                for (weights, exact), avoided in product(dict.fromkeys(ways), (without, frozenset[PeerId]())):
                    found = entry.paths.reserve(
                        *(asked, now),
                        without=avoided,
                        held=held,
                        round=weights,
                        is_exact=exact,
                        has_barred=has_barred,
                        was=was if self.peers else None,  # members that it has rested at do not draw it any more
                        tie=self.id.hex(),
                    )
                    if found is not None:
                        self._reserved, self._stuck_since = found, self._stuck_since if has_barred else None
                        return found
            self._stuck_since = now if self._stuck_since is None else self._stuck_since
            lacks_weights = entry.paths.lacks_weights_alone(without, now, has_form=asked.has_form)
            if now - self._stuck_since >= entry.wait_s * (IN_COMMON if lacks_weights else 1.0):
                break
            await asyncio.sleep(LOOK_S)
        return None

    def _open(self, attempt: int, path: tuple[PeerId, ...]) -> None:
        self._stop_waiting()
        self.lasts.add(path[-1])
        state = self._state
        assert state is not None
        wanted = self.text.wanted
        drawing, form = wanted.drawing, UNSET if self._form is None else self._form.text
        if self.witness is None:
            self.witness = Witness(self.id, state.most, verify)
        self.witness.opened(attempt, self._reserved.round if self._reserved is not None else 0, path)
        marks = machine.marks_of(state)
        for stage, peer in enumerate(path):
            is_last = stage == len(path) - 1
            call = OpenSequence(
                sequence=self.id,
                secret=self._secret,
                attempt=attempt,
                stage=stage,
                round=self._reserved.round if self._reserved is not None else 0,
                inward=path[stage - 1],
                onward=path[(stage + 1) % len(path)],
                most=state.most,
                places=marks.places,
                chain=joined(marks.chain),
                key=state.key if stage == 0 else None,
                drawing=drawn_how(drawing) if is_last else None,
                tokens=packed(state.tokens) if is_last and looks_back(drawing, form) else b"",
                num_prompt=state.num_prompt,
                stop_ids=tuple(sorted(state.stop_ids)) if is_last else (),
                form=form if is_last else UNSET,
            )
            self._entry.tasks.spawn(self._ask(peer, call))

    async def _ask(self, peer: PeerId, call: OpenSequence) -> None:
        entry = self._entry
        held = None
        try:
            answer = await entry.link.call(peer, call, SequenceOpened, deadline_s=OPEN_S)
        except (PeerError, NetError, Refused):
            entry.paths.failed(peer, Failure.UNREACHABLE, entry.clock.now())
        else:
            if answer.word == "held":
                held = Held(answer.num, answer.log_from)
            elif answer.word != "older":
                self._is_refused |= answer.word == "no form"
                entry.paths.failed(peer, Failure.BUSY, entry.clock.now())
                if answer.word == "busy":  # there may soon be room
                    self._stuck_since = None
        self.hear(machine.Answered(call.attempt, call.stage, held))

    def _began(self) -> None:
        """All members have answered, and have been told what to do."""
        state = self._state
        assert state is not None
        if self.text.began_s is None:
            self.text.began_s = self._entry.clock.now()
            self.text.num_shared = min((each.num for each in state.held if each is not None), default=0)
            self._entry.totals.num_asked += state.num_prompt
            self._entry.totals.num_shared += self.text.num_shared
            self._entry.totals.num_read += state.num_prompt - self.text.num_shared
        self._stuck_since = None
        num_drawn = len(state.tokens) - state.num_prompt
        is_new = self.text.course.runs(state.path, self.round or 0, num_drawn)
        if is_new and self.text.on_moved is not None:
            self.text.on_moved()
        self._wait()

    def _feed(self, attempt: int, peer: PeerId, start: int) -> None:
        state = self._state
        assert state is not None
        per_note = MAX_INLINE_NBYTES // TOKEN_NBYTES
        for at in range(start, len(state.tokens), per_note):
            rows = RowsOfText(
                sequence=self.id,
                attempt=attempt,
                start=at,
                chain=state.chain[at],
                data=packed(state.tokens[at : at + per_note]),
            )
            self._post(peer, TextRows(stage=0, rows=(rows,)))

    # --- time ---

    def _wait(self) -> None:
        """Let a new attempt be made if nothing comes for longer than it should take."""
        self._stop_waiting()
        state = self._state
        assert state is not None
        loop, patience_s = asyncio.get_running_loop(), self._patience_s(state)
        self._timer = loop.call_later(patience_s, self.hear, machine.Overdue(state.attempt))
        self.text.busy_s = self._entry.clock.now() + patience_s

    def _patience_s(self, state: machine.Text) -> float:
        paths = self._entry.paths
        if self._drawn_in != state.attempt:
            least = min((each.num for each in state.held if each is not None), default=0)
            first_s = paths.ring_s(state.path, len(state.tokens) - least)
            return self._patience.until_first_s(first_s, paths.ring_s(state.path))
        return self._patience.until_next_s(paths.gap_s(state.path), paths.ring_s(state.path))

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- what is told ---

    def _tell(self, drawn: Drawn) -> None:
        now = self._entry.clock.now()
        if self._told_at is not None:
            self._patience.came(now - self._told_at)
            self._entry.paths.came(now - self._told_at)
        phase = None if self._state is None else self._state.phase
        self._told_at = None if phase == "resting" else now  # a rest is no pause of the members'
        self.text.course.came(now)
        self.has_drawn = True
        if phase in ("running", "ended") and self._state is not None and self._drawn_in != self._state.attempt:
            self._drawn_in = self._state.attempt
            if self._reserved is not None:
                self._entry.paths.drew(self._reserved)
        self.text.tell(drawn)
        self._entry.drew()
        if phase == "running":
            self._wait()
            if self.text.is_behind():
                self._rest()

    def _rest(self) -> None:
        self.hear(machine.Unread())
        self._stop_waiting()
        self._told_at = None
        if self._reserved is not None:
            self._entry.paths.ended(self._reserved)
        self._entry.waits_for_reader(self)

    def _end(self, ending: "machine.Ending | WeftError") -> None:
        if self._is_over:
            return
        self._is_over = True
        self._stop_waiting()
        if self._reserved is not None:
            self._entry.paths.ended(self._reserved)
        self._entry.has_ended(self)
        self.text.tell(ending)

    def _no_path(self, why: machine.Failed) -> NoPath:
        return no_path(self._entry.paths, why, has_form=self._form is not None, is_refused=self._is_refused)
