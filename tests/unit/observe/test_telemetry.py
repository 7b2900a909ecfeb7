"""Bulletins: what happened in two seconds, bounded, signed, in order, and kept for who comes a little later."""

import msgspec
import pytest

from weft.clock import VirtualClock
from weft.events import VERSION, Entry, Event, MemberProgress, Notice, StepDone, TransportUp
from weft.ids import PeerId, Round, RunId, Step
from weft.keys import Identity, verify
from weft.log import read_lines
from weft.observe.telemetry import (
    MAX_KEPT,
    MAX_LINES,
    MAX_NBYTES,
    MAX_TOLD,
    WINDOW_S,
    Bulletin,
    BulletinAnswer,
    BulletinRequest,
    Bulletins,
)
from weft.wire import unseal

RUN = RunId("ab" * 32)
ME = Identity.from_seed(bytes(32))


class Told:
    """Bulletins on a clock that a test moves."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.bulletins = Bulletins(ME, RUN, self.clock)

    def tell(self, *events: Event) -> None:
        for event in events:
            self.bulletins.write(Entry(v=VERSION, at=self.clock.wall(), peer=ME.peer, event=event))

    def after(self, number: int = -1, began_ms: int | None = None) -> tuple[list[Bulletin], BulletinAnswer]:
        began_ms = self.bulletins._began_ms if began_ms is None else began_ms
        answer = self.bulletins.told(BulletinRequest(run=RUN, began_ms=began_ms, after=number))
        return [unseal(signed, Bulletin, verify) for signed in answer.bulletins], answer


def events_of(bulletin: Bulletin) -> list[Event]:
    told = [msgspec.json.decode(line) for line in bulletin.lines]
    lines = [msgspec.json.encode({"v": VERSION, "peer": ME.peer, **each}) + b"\n" for each in told]
    return [entry.event for entry in read_lines(lines, "here")]


def step(number: int, loss: float, num_tokens: int = 10) -> StepDone:
    return StepDone(
        step=Step(number), loss=loss, learning_rate=0.1, gradient_norm=1.0, num_tokens=num_tokens, duration_s=0.5
    )


def progress(member: str, round: int = 1) -> MemberProgress:
    return MemberProgress(
        member=PeerId(member * 32),
        name=member,
        round=Round(round),
        state="training",
        loss=1.0,
        tokens_per_s=5.0,
        link="tls",
    )


@pytest.fixture
def told() -> Told:
    return Told()


def test_two_seconds_are_one_bulletin_and_inner_steps_one_step(told: Told) -> None:
    told.tell(step(1, 4.0, 10), Notice(text="a"), step(2, 1.0, 20))
    assert told.after() == ([], BulletinAnswer(bulletins=(), has_more=False))
    told.clock.advance(WINDOW_S)
    (bulletin,), answer = told.after()
    assert not answer.has_more
    assert (bulletin.number, bulletin.run, bulletin.num_dropped) == (0, RUN, 0)
    folded = msgspec.structs.replace(step(2, 2.0, 30), duration_s=1.0)  # 40 + 20 over 30
    assert events_of(bulletin) == [folded, Notice(text="a")]
    assert answer.bulletins[0].signer == ME.peer
    assert told.after(0)[0] == []


def test_who_asks_again_is_told_what_came_since_and_the_same_bytes(told: Told) -> None:
    for text in "abc":
        told.tell(Notice(text=text))
        told.clock.advance(WINDOW_S)
    whole, answer = told.after()
    assert [events_of(each) for each in whole] == [[Notice(text=text)] for text in "abc"]
    assert told.after(1)[1].bulletins == answer.bulletins[2:]


def test_of_another_process_all_that_is_kept_is_told(told: Told) -> None:
    told.tell(Notice(text="a"))
    told.clock.advance(WINDOW_S)
    assert len(told.after(7, began_ms=1)[0]) == 1
    assert told.after(7)[0] == []


def test_of_a_member_the_newest_word_is_told_and_who_has_no_room_comes_next(told: Told) -> None:
    names = [f"{number:02x}" for number in range(200)]
    told.tell(*(progress(name) for name in names), *(progress(name, round=2) for name in names))
    told.clock.advance(WINDOW_S)
    told.tell(Notice(text="a"))
    told.clock.advance(WINDOW_S)
    first, second = (events_of(each) for each in told.after()[0])
    heard = [event for event in first + second if isinstance(event, MemberProgress)]
    assert 20 < len(first) < 200
    assert {event.round for event in heard} == {2}
    assert [event.name for event in heard] == names[: len(heard)]
    assert len(heard) > len(first)


def test_a_bulletin_is_bounded_and_says_what_had_no_room(told: Told) -> None:
    told.tell(*(Notice(text="word " * 70) for _ in range(MAX_LINES + 50)), step(1, 3.0))
    told.clock.advance(WINDOW_S)
    (bulletin,), _ = told.after()
    assert sum(map(len, bulletin.lines)) <= MAX_NBYTES
    assert step(1, 3.0) in events_of(bulletin)
    assert len(bulletin.lines) - 1 + bulletin.num_dropped == MAX_LINES + 50


def test_the_oldest_go_and_an_answer_is_bounded(told: Told) -> None:
    for number in range(MAX_KEPT + 3):
        told.tell(Notice(text=str(number)))
        told.clock.advance(WINDOW_S)
    found, answer = told.after()
    assert [each.number for each in found] == list(range(3, 3 + MAX_TOLD))
    assert answer.has_more
    last, answer = told.after(MAX_KEPT + 1)
    assert [each.number for each in last] == [MAX_KEPT + 2]
    assert not answer.has_more


def test_what_is_private_is_not_told_and_takes_no_room(told: Told) -> None:
    told.tell(TransportUp(transport="tls", addresses=("10.0.0.1:5",)))
    told.clock.advance(WINDOW_S)
    (bulletin,), _ = told.after()
    assert (bulletin.lines, bulletin.num_dropped) == ((), 0)


def test_a_clock_that_is_set_back_ends_a_window(told: Told) -> None:
    now = told.clock.wall()
    for at in (now, now - 3600.0, now - 3599.0):
        told.bulletins.write(Entry(v=VERSION, at=at, peer=ME.peer, event=Notice(text="a")))
    assert [len(each.lines) for each in told.after()[0]] == [1, 2]
