"""The observer: it shows what peers have signed of themselves, once and in order, and what cannot be not at all."""

import asyncio
from collections.abc import Callable
from functools import reduce
from itertools import permutations
from typing import Any

import msgspec
import pytest

from commits import committed
from weft.clock import VirtualClock
from weft.dashboard.view import View, update
from weft.errors import Unreachable, WireError
from weft.events import (
    VERSION,
    Entry,
    Event,
    LinkDown,
    LinkUp,
    MemberGone,
    MemberJoined,
    MemberLeft,
    MemberProgress,
    Notice,
    RoundCommitted,
    RoundMissed,
    StepDone,
)
from weft.ids import PeerId, Round, RunId, Step, Tokens
from weft.keys import Identity
from weft.observe.observer import (
    DEAF_S,
    MAX_ANSWERS,
    MAX_HEARD,
    MAX_LINKED,
    MAX_RELAYED,
    MOST_AHEAD_S,
    ONCE_S,
    Observer,
    note_links,
)
from weft.observe.telemetry import WINDOW_S, Bulletin, BulletinAnswer, BulletinRequest, Bulletins
from weft.wire import Record, Signed, seal

RUN = RunId("ab" * 32)
VISITOR = Identity.from_seed(bytes([99]) * 32).peer

Answer = Callable[[BulletinRequest], BulletinAnswer]


class Peers:
    """Stands for a node that is linked to peers, each of which answers as a test says."""

    def __init__(self, **answers: Answer) -> None:
        self.peer = VISITOR
        self.answers = {identity(int(name[1:])).peer: answer for name, answer in answers.items()}
        self.asked: list[PeerId] = []
        self.requests: list[tuple[PeerId, BulletinRequest]] = []

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(self.answers)

    async def call(self, peer: PeerId, request: Record, _kind: Any, *, deadline_s: float) -> BulletinAnswer:
        assert deadline_s > 0
        assert isinstance(request, BulletinRequest)
        self.asked.append(peer)
        self.requests.append((peer, request))
        return self.answers[peer](request)


def identity(number: int) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


class Watched:
    def __init__(self, **answers: Answer) -> None:
        self.clock = VirtualClock()
        self.entries: list[Entry] = []
        self.node = Peers(**answers)
        self.observer = Observer(self.node, RUN, self.clock, self.entries.append)  # type: ignore[arg-type]

    def look(self) -> list[Event]:
        """Return what one look at all peers shows."""
        self.entries.clear()
        self.clock.run(self.observer.once())
        return [entry.event for entry in self.entries]

    @property
    def texts(self) -> list[str]:
        return [entry.event.text for entry in self.entries if isinstance(entry.event, Notice)]


def line(at: float, event: Event | dict[str, Any]) -> bytes:
    return msgspec.json.encode({"at": at, "event": event})


def bulletin(number: int, *lines: bytes, began_ms: int = 5, run: RunId = RUN, num_dropped: int = 0) -> Bulletin:
    return Bulletin(run=run, began_ms=began_ms, number=number, lines=lines, num_dropped=num_dropped)


def answering(*told: Signed) -> Answer:
    return lambda _request: BulletinAnswer(bulletins=told, has_more=False)


def missed(round: int = 3) -> RoundMissed:
    return RoundMissed(round=Round(round), carried_tokens=Tokens(5), reason="late")


def test_it_shows_what_a_peer_has_signed_and_whose_word_it_is() -> None:
    said = seal(identity(1), bulletin(0, line(7.0, missed())))
    watched = Watched(p1=answering(said))
    assert watched.look() == [missed()]
    (entry,) = watched.entries
    assert (entry.peer, entry.at) == (identity(1).peer, 7.0)
    assert watched.observer.heard == (identity(1).peer,)


def test_it_hears_a_production_peer_to_the_end_and_nothing_twice() -> None:
    clock = VirtualClock()
    bulletins = Bulletins(identity(1), RUN, clock)
    watched = Watched(p1=bulletins.told)
    watched.clock = clock
    watched.observer = Observer(watched.node, RUN, clock, watched.entries.append)  # type: ignore[arg-type]
    at = clock.wall()
    for number in range(40):  # more than one answer holds
        bulletins.write(Entry(v=VERSION, at=at + WINDOW_S * number, peer=identity(1).peer, event=missed(number)))
    assert watched.look() == [missed(number) for number in range(40)]
    assert watched.look() == []


def altered(signed: Signed) -> Signed:
    return msgspec.structs.replace(signed, body=signed.body[:-1] + bytes([signed.body[-1] ^ 1]))


@pytest.mark.parametrize(
    "told",
    [
        altered(seal(identity(1), bulletin(0, line(1.0, missed())))),
        seal(identity(2), bulletin(0, line(1.0, missed()))),
        msgspec.structs.replace(seal(identity(2), bulletin(0)), signer=identity(1).peer),
        seal(identity(1), bulletin(0, line(1.0, missed()), run=RunId("cd" * 32))),
        seal(identity(1), BulletinRequest(run=RUN)),
    ],
    ids=["altered", "another's", "in another's name", "of another run", "no bulletin"],
)
def test_who_tells_what_it_has_not_signed_is_not_heard_for_a_while(told: Signed) -> None:
    watched = Watched(p1=answering(told), p2=answering(seal(identity(2), bulletin(0, line(1.0, missed())))))
    assert [event for event in watched.look() if not isinstance(event, Notice)] == [missed()]
    assert [text for text in watched.texts if "ignores it for a minute" in text]
    watched.node.asked.clear()
    watched.look()
    assert watched.node.asked == [identity(2).peer]
    watched.clock.run(asyncio.sleep(DEAF_S))
    watched.node.asked.clear()
    watched.look()
    assert identity(1).peer in watched.node.asked


STEP = StepDone(step=Step(1), loss=1e300, learning_rate=0.0, gradient_norm=0.0, num_tokens=1, duration_s=1.0)
HOSTILE: dict[str, dict[str, Any]] = {
    "more tokens than there are": {"type": "RoundMissed", "round": 1, "carried_tokens": 1 << 60, "reason": ""},
    "fewer than none": {"type": "RoundMissed", "round": 1, "carried_tokens": -1, "reason": ""},
    "a loss without bounds": msgspec.to_builtins(STEP),
    "a name that is none": {"type": "MemberLeft", "member": "<script>alert(1)</script>"},
    "no event": {"type": "Script", "text": "alert(1)"},
    "another's field": {"type": "MemberLeft", "who": "ab" * 32},
    "nothing": {},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_is_left_out_and_counted(name: str) -> None:
    told = bulletin(0, line(1.0, missed()), line(2.0, HOSTILE[name]), b"{", b"[[[[", line(3.0, missed(4)))
    watched = Watched(p1=answering(seal(identity(1), told)))
    assert [event for event in watched.look() if not isinstance(event, Notice)] == [missed(), missed(4)]
    assert watched.texts[0].startswith("left out: 3 events of ")


def test_addresses_that_a_peer_tells_are_hidden_here_too() -> None:
    link = LinkUp(remote=identity(2).peer, transport="tls", address="tls://10.1.2.3:4", tried=("10.9.9.9:1 reset",))
    text = Notice(text="dial 10.1.2.3:4 or /home/anna/key.pem")
    watched = Watched(p1=answering(seal(identity(1), bulletin(0, line(1.0, link), line(1.0, text)))))
    shown = str(watched.look())
    for private in ("10.1.2.3", "10.9.9.9", "/home/anna"):
        assert private not in shown


def test_times_are_held_to_this_clock() -> None:
    watched = Watched(p1=answering(seal(identity(1), bulletin(0, line(1e12, missed()), line(-5.0, missed())))))
    now = watched.clock.wall()
    watched.look()
    assert [entry.at for entry in watched.entries] == [0.0, pytest.approx(now + MOST_AHEAD_S, abs=60)]


def test_a_gap_is_said_and_another_process_counts_anew() -> None:
    answers = iter(
        [
            (seal(identity(1), bulletin(0, line(1.0, missed(1)))),),
            (seal(identity(1), bulletin(5, line(2.0, missed(2)))),),
            (seal(identity(1), bulletin(0, line(3.0, missed(3)), began_ms=9)),),
        ]
    )
    watched = Watched(p1=lambda _request: BulletinAnswer(bulletins=next(answers), has_more=False))
    assert watched.look() == [missed(1)]
    assert watched.look()[0] == missed(2)
    assert watched.texts == [f"{4 * WINDOW_S:g} s of {identity(1).peer[:8]} are not shown: it no longer keeps them"]
    assert watched.look() == [missed(3)]


def test_what_had_no_room_is_said() -> None:
    watched = Watched(p1=answering(seal(identity(1), bulletin(0, num_dropped=7))))
    watched.look()
    assert watched.texts[0].startswith("left out: 7 events of ")


def test_it_asks_a_few_of_many_and_stays_with_them() -> None:
    many = {f"p{n}": answering(seal(identity(n), bulletin(0, line(1.0, missed(n))))) for n in range(1, 21)}
    watched = Watched(**many)
    watched.look()
    first = set(watched.node.asked)
    assert len(first) == MAX_HEARD
    watched.node.asked.clear()
    watched.look()
    assert set(watched.node.asked) == first


def sees(number: int, link: str = "tls") -> bytes:
    """Return a line in which its teller says how it is linked to a member."""
    told = MemberProgress(
        member=identity(number).peer, name="", round=Round(1), state="training", loss=None, tokens_per_s=1.0, link=link
    )
    return line(1.0, told)


def broadcast(author: int, own: Bulletin, *others: tuple[int, Signed]) -> Answer:
    """Return a peer that hands on what it is asked for."""
    handed = {identity(number).peer: signed for number, signed in others}

    def answer(request: BulletinRequest) -> BulletinAnswer:
        found = seal(identity(author), own) if request.of is None else handed.get(request.of)
        return BulletinAnswer(bulletins=() if found is None else (found,), has_more=False)

    return answer


def test_those_that_no_link_leads_to_are_heard_through_others_in_their_own_words() -> None:
    theirs = seal(identity(5), bulletin(0, line(2.0, missed(9))))
    watched = Watched(p1=broadcast(1, bulletin(0, sees(5), sees(6), sees(7, link="")), (5, theirs)))
    watched.look()
    own = [entry for entry in watched.entries if not isinstance(entry.event, MemberProgress)]
    assert [(entry.peer, entry.event) for entry in own] == [(identity(5).peer, missed(9))]
    asked = [request.of for _, request in watched.node.requests]
    assert asked == [None, *sorted((identity(5).peer, identity(6).peer))]  # nobody says that 7 can be asked
    watched.node.requests.clear()
    watched.clock.run(asyncio.sleep(WINDOW_S))
    assert watched.look() == []
    after = {request.of: request.after for _, request in watched.node.requests}
    assert after[identity(5).peer] == 0


def test_who_hands_on_what_another_said_in_an_earlier_process_is_not_believed() -> None:
    told = iter([bulletin(3, line(2.0, missed(9)), began_ms=9), bulletin(0, line(1.0, missed(1)))])
    own = bulletin(0, sees(5))

    def answer(request: BulletinRequest) -> BulletinAnswer:
        found = seal(identity(1), own) if request.of is None else seal(identity(5), next(told))
        return BulletinAnswer(bulletins=(found,), has_more=False)

    watched = Watched(p1=answer)
    assert missed(9) in watched.look()
    watched.clock.run(asyncio.sleep(WINDOW_S))
    assert watched.look() == []
    assert next(told, None) is None


def test_who_says_there_is_more_and_tells_nothing_new_holds_nobody_up() -> None:
    same = seal(identity(1), bulletin(0, line(1.0, missed())))
    watched = Watched(p1=lambda _request: BulletinAnswer(bulletins=(same,), has_more=True))
    assert watched.look() == [missed()]
    assert len(watched.node.asked) == 2


def test_whoever_never_ends_holds_nobody_up() -> None:
    numbers = iter(range(10**9))

    def endless(_request: BulletinRequest) -> BulletinAnswer:
        told = seal(identity(1), bulletin(next(numbers), line(1.0, missed())))
        return BulletinAnswer(bulletins=(told,), has_more=True)

    watched = Watched(p1=endless)
    assert watched.look() == [missed()] * MAX_ANSWERS


class Slow(Peers):
    """A minute passes before each answer."""

    async def call(self, peer: PeerId, request: Record, kind: Any, *, deadline_s: float) -> BulletinAnswer:
        await asyncio.sleep(60.0)
        return await super().call(peer, request, kind, deadline_s=deadline_s)


def test_a_look_ends_however_slow_some_are() -> None:
    watched = Watched()
    slow = Slow(p1=answering())
    watched.observer = Observer(slow, RUN, watched.clock, watched.entries.append)  # type: ignore[arg-type]
    began = watched.clock.now()
    assert watched.look() == []
    assert watched.clock.now() - began == pytest.approx(ONCE_S)


def test_to_whom_a_peer_is_linked_no_more_is_forgotten_and_one_can_name_only_so_many() -> None:
    linked: dict[PeerId, None] = {}

    def tell(*events: Event) -> list[PeerId]:
        for event in events:
            note_links(linked, event)
        return list(linked)

    names = [PeerId(f"{number:064x}") for number in range(MAX_LINKED + 10)]
    links = [
        MemberProgress(member=name, name="", round=Round(1), state="training", loss=None, tokens_per_s=1.0, link="tls")
        for name in names
    ]
    assert tell(*links) == names[:MAX_LINKED]
    away = MemberGone(member=names[0], silent_s=9.0), MemberLeft(member=names[1]), LinkDown(remote=names[2], reason="")
    assert tell(*away, msgspec.structs.replace(links[3], link="")) == names[4:MAX_LINKED]


def test_of_many_a_few_at_a_time_are_asked_for_and_all_in_turn() -> None:
    numbers = range(2, 2 + 3 * MAX_RELAYED)
    watched = Watched(p1=broadcast(1, bulletin(0, *map(sees, numbers))))
    for look in range(1, 4):
        watched.look()
        watched.clock.run(asyncio.sleep(WINDOW_S))
        asked = [request.of for _, request in watched.node.requests if request.of is not None]
        assert len(asked) == len(set(asked)) == look * MAX_RELAYED


def test_who_hands_on_what_another_has_not_signed_is_not_heard_for_a_while() -> None:
    for lie in (seal(identity(1), bulletin(0)), altered(seal(identity(5), bulletin(0, line(1.0, missed()))))):
        watched = Watched(p1=broadcast(1, bulletin(0, sees(5)), (5, lie)))
        watched.look()
        assert [text for text in watched.texts if f"what {identity(5).peer[:8]} did not sign" in text]
        watched.node.asked.clear()
        watched.look()
        assert watched.node.asked == []


def test_who_does_not_answer_is_asked_again_and_a_reply_that_is_none_is_said() -> None:
    def gone(_request: BulletinRequest) -> BulletinAnswer:
        raise Unreachable("gone")

    def torn(_request: BulletinRequest) -> BulletinAnswer:
        raise WireError("a message of 10000000 bytes")

    watched = Watched(p1=gone, p2=torn)
    watched.look()
    assert watched.node.asked.count(identity(1).peer) > 1
    assert watched.node.asked.count(identity(2).peer) == 1
    assert "10000000 bytes" in watched.texts[0]


def test_a_first_look_is_told_as_it_happened_whoever_tells_it_last() -> None:
    gone = MemberGone(member=identity(2).peer, silent_s=9.0)
    first = seal(identity(1), bulletin(0, line(10.0, missed(1)), line(20.0, gone), line(40.0, missed(4))))
    second = seal(identity(2), bulletin(0, line(6.0, missed(1)), line(30.0, missed(3))))
    third = seal(identity(3), bulletin(0, line(50.0, missed(9)), line(25.0, missed(10))))  # the newest word comes first
    answers = {"p1": answering(first), "p2": answering(second), "p3": answering(third)}
    once = Watched(**answers)
    once.look()
    following = Watched(**answers)

    async def follow() -> None:
        watching = asyncio.ensure_future(following.observer.watch())
        await asyncio.sleep(WINDOW_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    following.clock.run(follow())
    for watched in (once, following):
        told = [(entry.at, entry.event) for entry in watched.entries if not isinstance(entry.event, Notice)]
        first_half = [(6.0, missed(1)), (10.0, missed(1)), (20.0, gone), (25.0, missed(10))]
        assert told == [*first_half, (30.0, missed(3)), (40.0, missed(4)), (50.0, missed(9))]


@pytest.mark.parametrize("numbers", list(permutations((1, 2, 3))))
def test_of_peers_that_came_back_a_first_look_shows_that_they_are_here_and_a_loss_that_fell(
    numbers: tuple[int, ...],
) -> None:
    anna, bert, carl = numbers
    member = identity(carl).peer
    away = {
        35.0: MemberGone(member=member, silent_s=9.0),
        45.0: MemberJoined(member=member, name="carl"),
        46.0: MemberProgress(
            member=member, name="carl", round=Round(4), state="training", loss=None, tokens_per_s=1.0, link="tls"
        ),
    }

    def told(number: int, rounds: range, more: dict[float, Event]) -> Answer:
        events: dict[float, Event] = {**more}
        for each in rounds:
            events[10.0 * each + number / 10] = msgspec.structs.replace(STEP, loss=3.0 - each / 4)
            events[10.0 * each + 5 + number / 10] = commit(each)
        return answering(seal(identity(number), bulletin(0, *(line(at, events[at]) for at in sorted(events)))))

    answers = {
        anna: told(anna, range(1, 8), away),
        bert: told(bert, range(1, 8), away),
        carl: told(carl, range(5, 8), {}),
    }
    watched = Watched(**{f"p{number}": answer for number, answer in answers.items()})
    watched.look()
    view = reduce(update, watched.entries, View())
    assert [line.state for line in view.lines.values()] == ["training"] * 3
    assert view.losses.points == tuple((100 * each, 3.0 - each / 4) for each in range(1, 8))
    assert [news.at for news in view.notables] == sorted(news.at for news in view.notables)


def commit(number: int) -> RoundCommitted:
    return committed(
        round=Round(number),
        contributors=tuple(identity(each).peer for each in (1, 2, 3)),
        committed_tokens=Tokens(100 * number),
    )


def test_that_it_looks_itself_is_no_news() -> None:
    link = LinkUp(remote=VISITOR, transport="tls", address="")
    progress = MemberProgress(
        member=identity(2).peer, name="b", round=Round(1), state="training", loss=None, tokens_per_s=1.0, link="tls"
    )
    watched = Watched(p1=broadcast(1, bulletin(0, line(1.0, link), line(1.0, progress))))
    assert watched.look() == [progress]
