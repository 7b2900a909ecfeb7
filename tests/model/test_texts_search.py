"""Every interleaving of a short text's life along two stages of few members: it comes whole, or ends in an error.

A world holds who asks for the text, the members, and what was said. What was said stays said: it may come at any time,
again, or never. Members draw other tokens at the same place, as rounding may let them, so what two paths make must not
be mixed: with each row goes what it was really made of, and with a token that must be the text that was told. The first
stage may take a token before it is told: the one that the last member would draw, which is wrong where another draws.

From every world the text is then brought to its end: nothing more is lost, and whatever was said before comes again
before each message that is new. There has to be an end, and nothing may be left at the members.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from model.search import break_rules, num_reached
from weft.engine.draw import Drawn
from weft.ids import PeerId
from weft.texts import sequence as members
from weft.texts.asking import text as texts
from weft.texts.asking.text import Text
from weft.texts.chain import Chain, chain_of
from weft.texts.sequence import Held, Marks, Rows, Sequence

KEY = bytes(32)
PROMPT = (7,)
Ghost = tuple[Any, ...]


class Open(NamedTuple):
    attempt: int
    path: tuple[PeerId, ...]
    marks: Marks


class Resume(NamedTuple):
    attempt: int
    keep: int
    send_from: int


class Given(NamedTuple):
    rows: Rows
    made_of: Ghost


class Closed(NamedTuple):
    attempt: int


class Answer(NamedTuple):
    attempt: int
    stage: int
    held: Held | None


class Drew(NamedTuple):
    attempt: int
    place: int
    chain: bytes
    token: int
    made_of: Ghost


Said = Open | Resume | Given | Closed | Answer | Drew


class Mail(NamedTuple):
    to: int
    """The number of a member, or `ASKER`."""
    said: Said


ASKER = -1


class Member(NamedTuple):
    """
    Args:
        read: what its keys and values are made of, by place.
        log: what came out, by place.
        early: what rows are made of that came before they were due.
    """

    sequence: Sequence
    onward: int
    read: Ghost = ()
    log: Ghost = ()
    early: Ghost = ()


DEAD, NOTHING = "dead", None
State = Member | str | None


class Asker(NamedTuple):
    text: Text
    told: tuple[int, ...] = ()
    ended: str | None = None


class World(NamedTuple):
    """Numbers of what the search has seen: the asker's state, the members', and a bit for each piece of mail."""

    asker: int
    members: tuple[int, ...]
    sent: int
    num_kills: int = 0
    num_logs_lost: int = 0


class Bounds(NamedTuple):
    stages: tuple[int, ...] = (0, 1, 1)  # of each member
    num_tokens: int = 1
    num_attempts: int = 2
    num_kills: int = 1
    num_logs_lost: int = 0
    has_guesses: bool = False
    rests: bool = False  # whether the reader may be behind


class Wrong(AssertionError):
    pass


class Mixed(Wrong):
    """A token was told that rests on others than those before it."""


class Again(Wrong):
    """A token was told twice, or taken back."""


class HeldUp(Wrong):
    """The text does not come to its end, or something stays behind."""


class Numbers:
    """Gives each thing a number, in the order in which they come."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        number = self._numbers.setdefault(thing, len(self.things))
        if number == len(self.things):
            self.things.append(thing)
        return number


def ones(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


class Search:
    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.peers = [PeerId(f"{number:02x}" * 32) for number in range(len(bounds.stages))]
        self.num_stages = max(bounds.stages) + 1
        self.most = len(PROMPT) + bounds.num_tokens
        self._askers, self._states, self._mail = Numbers(), Numbers(), Numbers()
        self._taken: dict[tuple[int, int], tuple[int, int]] = {}
        self._heard: dict[tuple[int, Any, tuple[bool, ...]], tuple[int, int]] = {}
        self._dead = self._states.of(DEAD)

    def run(self) -> int:
        """Look at every world within bounds; return how many there are.

        Raises:
            Wrong: in one of them.
        """
        return num_reached(
            self._first(),
            self._check_end,
            lambda world: self._following(world) if self._asker(world).ended is None else (),
        )

    def _first(self) -> World:
        text, effects = texts.begun(PROMPT, self.bounds.num_tokens, KEY)
        asker, sent = self._carried_out(Asker(text), effects, (True,) * len(self.peers))
        return World(self._askers.of(asker), (self._states.of(NOTHING),) * len(self.peers), sent)

    # --- what may happen ---

    def _following(self, world: World) -> Iterator[World]:
        bounds, text = self.bounds, self._asker(world).text
        for mail in ones(world.sent):
            yield self._delivered(world, mail)
        if text.attempt < bounds.num_attempts - 1:
            yield self._told(world, texts.Overdue(text.attempt))
            for peer in text.path:  # its link has gone down, whether or not it lives
                yield self._told(world, texts.Lost(text.attempt, peer))
            if bounds.rests:
                yield self._told(world, texts.Unread())
        if text.phase == "resting":
            yield self._told(world, texts.Read())
        for number, state in enumerate(world.members):
            if state != self._dead and world.num_kills < bounds.num_kills:
                yield self._with(world, number, self._dead)._replace(num_kills=world.num_kills + 1)
            member = self._states.things[state]
            if isinstance(member, Member) and world.num_logs_lost < bounds.num_logs_lost and not bounds.stages[number]:
                forgot = members.forgot_log(member.sequence, member.sequence.num_computed)
                after = self._with(world, number, self._states.of(member._replace(sequence=forgot)))
                yield after._replace(num_logs_lost=world.num_logs_lost + 1)

    def _check_end(self, world: World) -> None:
        old = list(ones(world.sent))
        for _ in range(4):  # a member that is dead does not answer, and another is asked; of two stages
            text = self._asker(world).text
            if text.phase == "ended":
                break
            event = texts.Read() if text.phase == "resting" else texts.Overdue(text.attempt)
            before, world = world.sent, self._told(world, event)
            new = deque(ones(world.sent & ~before))
            while new and self._asker(world).ended is None:
                for mail in old:
                    world = self._delivered(world, mail)
                before, world = world.sent, self._delivered(world, new.popleft())
                new += ones(world.sent & ~before)
        asker, left = self._asker(world), [self._states.things[state] for state in world.members]
        stages = {self.bounds.stages[number] for number, state in enumerate(left) if state != DEAD}
        if asker.ended != "length" and (asker.ended != "no path" or len(stages) == self.num_stages):
            raise HeldUp(asker, left)
        mails = map(self._mail.things.__getitem__, ones(world.sent))
        closed = dict(sorted((mail.to, mail.said.attempt) for mail in mails if isinstance(mail.said, Closed)))
        for number, state in enumerate(left):
            if isinstance(state, Member) and members.closed(state.sequence, closed.get(number, -2)) is not None:
                raise HeldUp("it is not told that the text has ended", number, asker, left)
            if isinstance(state, Member) and not members.is_idle(state.sequence, members.IDLE_S):
                raise HeldUp("what nobody asks for stays", number)

    # --- who asks ---

    def _asker(self, world: World) -> Asker:
        asker: Asker = self._askers.things[world.asker]
        return asker

    def _told(self, world: World, event: Any, made_of: Ghost | None = None) -> World:
        alive = tuple([state != self._dead for state in world.members])
        key = (world.asker, (event, made_of), alive)
        if key not in self._heard:
            before = self._asker(world)
            asker, sent = self._step(before, event, alive)
            if len(asker.told) > len(before.told) and made_of != before.text.tokens:
                raise Mixed(before, event, made_of)
            self._heard[key] = self._askers.of(asker), sent
        after, sent = self._heard[key]
        return self._changed(world, after, world.members, sent)

    def _step(self, asker: Asker, event: texts.Event, alive: tuple[bool, ...]) -> tuple[Asker, int]:
        text, effects = texts.step(asker.text, event)
        if text.tokens[: len(asker.text.tokens)] != asker.text.tokens:
            raise Again(asker, event)
        return self._carried_out(asker._replace(text=text), effects, alive)

    def _carried_out(self, asker: Asker, effects: list[texts.Effect], alive: tuple[bool, ...]) -> tuple[Asker, int]:
        sent = 0
        for effect in effects:
            match effect:
                case texts.Seek():
                    asker, more = self._step(asker, texts.Found(self._path(effect, alive)), alive)
                    sent |= more
                case texts.Open(attempt=attempt, path=path):
                    opening = Open(attempt, path, texts.marks_of(asker.text))
                    sent |= self._post(opening, *path)
                case texts.Resume(attempt=attempt, peer=peer, keep=keep, send_from=send_from):
                    sent |= self._post(Resume(attempt, keep, send_from), peer)
                case texts.Feed(attempt=attempt, peer=peer, start=start):
                    tokens, chain = asker.text.tokens[start:], asker.text.chain[start:]
                    sent |= self._post(Given(Rows(attempt, start, chain), tokens), peer) if tokens else 0
                case texts.Close(attempt=attempt, members=left):
                    sent |= self._post(Closed(attempt), *(peer for _, peer in left))
                case texts.Tell(drawn=drawn):
                    asker = asker._replace(told=(*asker.told, drawn.token))
                    if asker.told != asker.text.tokens[len(PROMPT) :]:
                        raise Again(asker)
                case texts.End(ending=ending):
                    asker = asker._replace(ended=ending)
                case texts.Fail(why=why):
                    asker = asker._replace(ended=why)
        return asker, sent

    def _path(self, seek: texts.Seek, alive: tuple[bool, ...]) -> tuple[PeerId, ...] | None:
        path = list[PeerId]()
        for stage in range(self.num_stages):
            here = [self.peers[n] for n, each in enumerate(self.bounds.stages) if each == stage and alive[n]]
            free = [peer for peer in here if peer not in seek.without]
            if not here:
                return None
            path.append((free or here)[0])
        return tuple(path)

    def _post(self, said: Said, *to: PeerId) -> int:
        bits = 0
        for peer in to:
            bits |= 1 << self._mail.of(Mail(self.peers.index(peer), said))
        return bits

    def _reply(self, said: Said) -> int:
        return 1 << self._mail.of(Mail(ASKER, said))

    def _changed(self, world: World, asker: int, states: tuple[int, ...], sent: int) -> World:
        """Return the world after that; itself where nothing is new, as mostly where what was said comes again."""
        sent |= world.sent
        if asker == world.asker and states is world.members and sent == world.sent:
            return world
        return World(asker, states, sent, world.num_kills, world.num_logs_lost)

    # --- members ---

    def _with(self, world: World, number: int, state: int) -> World:
        return world._replace(members=(*world.members[:number], state, *world.members[number + 1 :]))

    def _delivered(self, world: World, number: int) -> World:
        mail: Mail = self._mail.things[number]
        match mail.said:
            case Answer(attempt=attempt, stage=stage, held=held):
                return self._told(world, texts.Answered(attempt, stage, held))
            case Drew(attempt=attempt, place=place, chain=chain, token=token, made_of=made_of):
                return self._told(world, texts.Drew(attempt, place, chain, Drawn(token)), made_of)
        key = (world.members[mail.to], number)
        if key not in self._taken:
            state, sent = self._take(self._states.things[key[0]], mail.to, mail.said)
            self._taken[key] = self._states.of(state), sent
        after, sent = self._taken[key]
        if after == world.members[mail.to]:
            return self._changed(world, world.asker, world.members, sent)
        states = (*world.members[: mail.to], after, *world.members[mail.to + 1 :])
        return self._changed(world, world.asker, states, sent)

    def _take(self, state: State, number: int, said: Said) -> tuple[State, int]:
        match said:
            case _ if state == DEAD:
                return state, 0
            case Closed(attempt=attempt) if isinstance(state, Member):
                return (state, 0) if members.closed(state.sequence, attempt) is not None else (NOTHING, 0)
            case Open():
                return self._opened(state, number, said)
            case Resume() if isinstance(state, Member):
                moved = members.resumed(state.sequence, said.attempt, said.keep, said.send_from, 0.0)
                given = dict(zip(state.sequence.early, state.early, strict=True))
                return self._moved(state, number, moved, given)
            case Given() if isinstance(state, Member):
                moved = members.taken(state.sequence, said.rows, 0.0)
                is_early = len(moved.sequence.early) > len(state.sequence.early)
                state = state._replace(early=(*state.early, said.made_of) if is_early else state.early)
                return self._moved(state, number, moved, {said.rows: said.made_of})
        return state, 0

    def _opened(self, state: State, number: int, said: Open) -> tuple[State, int]:
        stage = self.bounds.stages[number]
        member = state
        if not isinstance(member, Member):
            member = Member(members.begun(Marks(said.marks.places[:1], said.marks.chain[:1]), 0), -1)
        sequence, held = members.opened(member.sequence, said.attempt, said.marks, 0.0)
        if held is not None:
            member = member._replace(onward=self.peers.index(said.path[(stage + 1) % len(said.path)]))
        early = member.early if sequence.early else ()
        return member._replace(sequence=sequence, early=early), self._reply(Answer(said.attempt, stage, held))

    def _moved(self, member: Member, number: int, moved: members.Moved, given: dict[Rows, Ghost]) -> tuple[Member, int]:
        """Let rows be computed at once, and send on what comes out."""
        sent = self._sent_on(member, number, moved)
        member = member._replace(sequence=moved.sequence, early=member.early if moved.sequence.early else ())
        member, more = self._computed(member, number, moved, given)
        sent |= more
        if moved.taken and self.bounds.has_guesses and self.bounds.stages[number] == 0:
            place, chain = member.sequence.num_taken, member.sequence.chain
            if place < self.most - 1 and chain[-1] is not None:
                token = 100 * (len(self.peers) - 1) + place - 1
                moved = members.guessed(member.sequence, chain_of(KEY, (token,), chain[-1])[1:], 0.0)
                given = dict.fromkeys(moved.taken, (token,))
                member, more = self._computed(member._replace(sequence=moved.sequence), number, moved, given)
                sent |= more
        return member, sent

    def _computed(
        self, member: Member, number: int, moved: members.Moved, given: dict[Rows, Ghost]
    ) -> tuple[Member, int]:
        sent = 0
        for rows in moved.taken:
            read = member.read[: rows.start] + given[rows]
            log = (*member.log[: rows.start], *(self._output(number, read, at) for at in range(rows.start, rows.stop)))
            member = member._replace(read=read, log=log)
            over = members.computed(member.sequence, rows.start, rows.chain[1:])
            sent |= self._sent_on(member, number, over)
            member = member._replace(sequence=over.sequence)
        return member, sent

    def _output(self, number: int, read: Ghost, place: int) -> Any:
        if self.bounds.stages[number] < self.num_stages - 1:
            return read[: place + 1]
        return 100 * number + place

    def _sent_on(self, member: Member, number: int, moved: members.Moved) -> int:
        if moved.sent is None:
            return 0
        (start, stop), sequence = moved.sent, moved.sequence
        chain: tuple[bytes, ...] = sequence.chain  # type: ignore[assignment]  # no page was here of another text
        if self.bounds.stages[number] < self.num_stages - 1:
            rows = Rows(sequence.attempt, start, chain[start : stop + 1])
            return self._post(Given(rows, member.log[start:stop]), self.peers[member.onward])
        sent = 0
        for place in range(start, stop):
            token, made_of = member.log[place], member.read[place]
            is_whole = all(member.read[at] == made_of[: at + 1] for at in range(place + 1))
            drew = Drew(sequence.attempt, place + 1, chain[place + 1], token, made_of if is_whole else ("mixed",))
            sent |= self._reply(drew)
            if place + 2 < self.most:
                rows = Rows(sequence.attempt, place + 1, chain_of(KEY, (token,), chain[place + 1]))
                sent |= self._post(Given(rows, (token,)), self.peers[member.onward])
        return sent


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(Bounds(), marks=pytest.mark.full),
        pytest.param(Bounds(num_tokens=2, num_attempts=2, num_kills=0), marks=pytest.mark.full),
        pytest.param(Bounds(num_tokens=3, num_attempts=1, has_guesses=True), marks=pytest.mark.full),
        pytest.param(Bounds(num_tokens=1, num_kills=0, rests=True), marks=pytest.mark.full),
        pytest.param(Bounds(num_tokens=2, num_kills=0, rests=True), marks=pytest.mark.slow),
        pytest.param(Bounds(num_tokens=2, num_kills=0, has_guesses=True), marks=pytest.mark.slow),
        pytest.param(Bounds(num_tokens=2, has_guesses=True), marks=pytest.mark.slow),
        pytest.param(Bounds(num_tokens=2), marks=pytest.mark.slow),
        pytest.param(Bounds(num_tokens=1, num_attempts=3), marks=pytest.mark.slow),
        pytest.param(Bounds(num_tokens=2, rests=True), marks=pytest.mark.slow),
        pytest.param(Bounds(stages=(0, 0, 1, 1), num_tokens=2), marks=pytest.mark.slow),
        pytest.param(Bounds(num_tokens=2, num_logs_lost=1), marks=pytest.mark.slow),
    ],
)
def test_a_text_comes_whole_whatever_is_lost_late_or_said_twice(bounds: Bounds) -> None:
    assert Search(bounds).run() > 1000


def is_in_place(chain: Chain, rows: Rows) -> bool:
    return rows.start < len(chain)


def as_long_as_here(chain: Chain, marks: Marks) -> int:
    return max(place for place in marks.places if place < len(chain))


def anyway(*_: object) -> bool:
    return True


BLIND = {(members, "attaches"): is_in_place, (members, "num_agreed"): as_long_as_here}
BROKEN: dict[str, tuple[dict[tuple[Any, str], Any], type[Wrong]]] = {
    "(1) members do not compare tokens": (BLIND, HeldUp),
    "(1) nobody compares tokens": (BLIND | {(texts, "is_same"): anyway}, Mixed),
    "(3) what is said in an older attempt counts": ({(members, "is_older"): lambda *_: False}, HeldUp),
}


FEW_WITH_GUESSES = Bounds(num_tokens=2, num_attempts=1, has_guesses=True)


@pytest.mark.parametrize(
    ("rule", "bounds"),
    [
        *(pytest.param(rule, Bounds(num_tokens=2), marks=() if "(3)" in rule else pytest.mark.slow) for rule in BROKEN),
        *((rule, FEW_WITH_GUESSES) for rule in BROKEN),
    ],
)
def test_each_rule_is_needed(rule: str, bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, found = BROKEN[rule]
    break_rules(monkeypatch, broken)
    with pytest.raises(found):
        Search(bounds).run()
