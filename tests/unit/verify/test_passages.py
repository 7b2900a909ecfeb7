"""What members of a stage sign of micro-batches, who looks at what, and how far apart honest machines are."""

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from weft.ids import Digest, PeerId, RunId
from weft.verify.passages import (
    LOSS,
    MAX_EARLY,
    MAX_EARLY_OF,
    MOST_FALSE,
    NUMBERS,
    Accuse,
    Accused,
    Asked,
    Clear,
    Closed,
    Key,
    Look,
    Looked,
    Opened,
    Output,
    Passage,
    Told,
    Watch,
    is_joined,
    is_near,
    is_wanted,
    is_whole,
    step,
    why_refused,
)
from weft.verify.suspicion import LASTS
from weft.wire import digest

ORIGIN, BEFORE, AUTHOR, AFTER = (PeerId(digit * 64) for digit in "0123")
ME, OTHER = PeerId("a" * 64), PeerId("b" * 64)
RUN = RunId(digest(b"run"))
HEAD, NEXT = digest(b"head"), digest(b"next")
PLACE: dict[str, Any] = {"run": RUN, "head": HEAD, "origin": ORIGIN, "number": 7, "attempt": 0, "round": 3, "step": 0}
MIDDLE = Passage(
    **PLACE,
    stage=1,
    num_samples=2,
    sender=BEFORE,
    tokens=digest(b"tokens"),
    given=digest(b"x"),
    output=digest(b"y"),
    member=AFTER,
    returned=digest(b"dy"),
    gradient=digest(b"dx"),
    loss=2.5,
)
LAST = replace(
    MIDDLE,
    stage=2,
    attempt=9,
    sender=AUTHOR,
    given=digest(b"y"),
    gradient=digest(b"dy"),
    output=UNSET,
    member=UNSET,
    returned=UNSET,
)
ASKED = Asked(
    run=RUN,
    stage=1,
    origin=ORIGIN,
    number=7,
    attempt=0,
    round=3,
    step=0,
    num_samples=2,
    sender=BEFORE,
    tokens=digest(b"tokens"),
    given=digest(b"x"),
    gradient=digest(b"dx"),
    loss=2.5,
)


def test_what_was_sent_and_came_back_is_accepted() -> None:
    assert why_refused(MIDDLE, ASKED, is_last=False) is None
    assert is_joined(MIDDLE, AUTHOR, LAST, AFTER)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", RunId(digest(b"other"))),
        ("stage", 2),
        ("origin", BEFORE),
        ("number", 8),
        ("attempt", 1),
        ("round", 4),
        ("step", 1),
        ("num_samples", 3),
        ("sender", AFTER),
        ("tokens", digest(b"others")),
        ("given", digest(b"z")),
        ("given", UNSET),
        ("gradient", digest(b"z")),
        ("gradient", UNSET),
        ("loss", 2.0),
        ("loss", float("nan")),
    ],
)
def test_a_passage_that_says_something_else_than_its_sender_knows_is_refused(name: str, value: Any) -> None:
    assert why_refused(replace(MIDDLE, **{name: value}), ASKED, is_last=False) == f"it names another {name}"


@pytest.mark.parametrize("name", ["output", "member", "returned"])
def test_a_passage_that_leaves_out_what_went_on_is_refused(name: str) -> None:
    assert why_refused(replace(MIDDLE, **{name: UNSET}), ASKED, is_last=False) is not None
    assert why_refused(MIDDLE, ASKED, is_last=True) is not None
    assert is_whole(MIDDLE, is_last=False) and is_whole(LAST, is_last=True)  # noqa: PT018
    first = replace(MIDDLE, stage=0, given=UNSET, gradient=UNSET)
    assert is_whole(first, is_last=False)
    assert not is_whole(replace(first, given=digest(b"x")), is_last=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("given", digest(b"z")),
        ("gradient", digest(b"z")),
        ("loss", 2.0),
        ("sender", BEFORE),
        ("stage", 3),
        ("tokens", digest(b"z")),
        ("number", 8),
        ("origin", BEFORE),
        ("round", 4),
        ("step", 1),
        ("num_samples", 3),
    ],
)
def test_neighbours_that_say_different_things_of_what_went_between_them_are_not_joined(name: str, value: Any) -> None:
    assert not is_joined(MIDDLE, AUTHOR, replace(LAST, **{name: value}), AFTER)
    assert not is_joined(MIDDLE, AUTHOR, LAST, ORIGIN)
    assert not is_joined(MIDDLE, ORIGIN, LAST, AFTER)


# --- who looks ---


def key(number: int, author: PeerId = AUTHOR) -> Key:
    return Key(author, digest(f"{author} {number}".encode()))


def fed(watch: Watch, *events: Any) -> tuple[Watch, list[Output]]:
    found = list[Output]()
    for event in events:
        watch, outputs = step(watch, event)
        found += outputs
    return watch, found


def opened(head: Digest = HEAD, round: int = 5, num: int = 3) -> Opened:
    return Opened(head, b"a signature", num, round)


ALL = fed(Watch(ME, 2.0), opened())[0]  # of three, two others: each looks at everything
NONE = fed(Watch(ME, 0.0), opened())[0]


def test_what_is_drawn_is_looked_at_once_and_told_where_it_is_something_else() -> None:
    watch, found = fed(ALL, Told(BEFORE, key(1), HEAD), Told(BEFORE, key(1), HEAD))
    assert found == [Look(key(1))]
    assert fed(watch, Looked(key(1), "equal"))[1] == []
    watch, found = fed(watch, Looked(key(1), "differs"), Looked(key(1), "differs"))
    assert found == [Accuse(key(1))]
    assert fed(watch, Told(BEFORE, key(1), HEAD))[1] == []
    assert fed(ALL, Told(BEFORE, key(1, ME), HEAD))[1] == [], "its own"


def test_as_many_look_as_the_rate_says() -> None:
    watch = fed(Watch(ME, 0.4), opened())[0]
    found = fed(watch, *(Told(BEFORE, key(number), HEAD) for number in range(1000)))[1]
    assert 150 < len(found) < 250, "one of two others that look at 0.4 together"


def test_what_is_of_a_later_state_waits_for_it_and_of_an_earlier_one_is_not_looked_at() -> None:
    watch, found = fed(ALL, Told(BEFORE, key(1), NEXT))
    assert found == []
    watch, found = fed(watch, Looked(key(1), None), Closed(), Told(BEFORE, key(2), NEXT), opened(NEXT, 6))
    assert found == [Look(key(1)), Look(key(2))]
    assert fed(watch, Told(BEFORE, key(3), HEAD))[1] == []
    told = Told(BEFORE, key(4), HEAD)
    flood = (Told(OTHER, key(number), HEAD) for number in range(10, 10 + MAX_EARLY))
    early = fed(watch, told, *flood)[0].early
    assert (len(early), early[0]) == (1 + MAX_EARLY_OF, told), "who tells much pushes out nothing of another"
    many = (Told(PeerId(f"{by:064x}"), key(10 * by + n), HEAD) for by in range(MAX_EARLY) for n in range(2))
    assert len(fed(watch, *many)[0].early) == MAX_EARLY


def test_what_is_told_of_is_wanted_while_it_is_looked_at_or_may_be() -> None:
    wanted = {
        "drawn": fed(ALL, Told(BEFORE, key(1), HEAD))[0],
        "early": fed(ALL, Told(BEFORE, key(1), NEXT))[0],
        "accused": fed(NONE, Accused(OTHER, key(1), HEAD, 5))[0],
    }
    assert all(is_wanted(watch, key(1)) for watch in wanted.values())
    assert not is_wanted(fed(NONE, Told(BEFORE, key(1), HEAD))[0], key(1)), "it was not drawn"
    assert not is_wanted(ALL, key(1))


def test_nothing_is_looked_at_while_the_state_changes() -> None:
    watch, found = fed(ALL, Closed(), Told(BEFORE, key(1), HEAD), Accused(OTHER, key(2), HEAD, 5))
    assert found == []
    assert fed(watch, opened(NEXT, 6))[1] == []


def test_what_another_accuses_is_looked_at_whether_drawn_or_not_and_its_author_more_often() -> None:
    watch, found = fed(NONE, Told(BEFORE, key(1), HEAD), Accused(OTHER, key(1), HEAD, 5))
    assert found == [Look(key(1))]
    assert fed(watch, Looked(key(1), "differs"))[1] == [Accuse(key(1))]
    rare = fed(Watch(ME, 0.2), opened())[0]
    many = [Told(BEFORE, key(number), HEAD) for number in range(1000)]
    usual, doubted = (len(fed(each, *many)[1]) for each in (rare, fed(rare, Accused(OTHER, key(-1), NEXT, 5))[0]))
    assert 3 < doubted / usual < 5
    later = fed(rare, Accused(OTHER, key(-1), NEXT, 5), Closed(), opened(NEXT, 5 + LASTS))[0]
    assert later.doubted == {}, "not for ever"


def test_who_accuses_others_of_what_is_right_is_believed_no_more() -> None:
    watch = NONE
    for number in range(MOST_FALSE):
        watch, found = fed(watch, Accused(OTHER, key(number), HEAD, 5), Looked(key(number), "equal"))
        assert found == [Look(key(number)), Clear(OTHER, key(number))]
        watch, found = fed(watch, Accused(OTHER, key(number), HEAD, 5))  # it says so again
        assert found == []
    assert fed(watch, Accused(OTHER, key(9), HEAD, 5))[1] == []
    third = PeerId("c" * 64)
    assert fed(watch, Accused(third, key(9), HEAD, 5))[1] == [Look(key(9))]
    assert fed(watch, Accused(third, key(1), HEAD, 5))[1] == [Clear(third, key(1))], "known to be right"


def test_nobody_is_heard_about_itself_or_about_who_hears() -> None:
    assert fed(NONE, Accused(AUTHOR, key(1), HEAD, 5))[1] == []
    assert fed(NONE, Accused(OTHER, key(1, ME), HEAD, 5))[1] == []
    assert fed(NONE, Accused(ME, key(1), HEAD, 5))[1] == []


def test_what_could_not_be_looked_at_is_looked_at_when_it_is_told_again() -> None:
    watch, found = fed(ALL, Told(BEFORE, key(1), HEAD), Looked(key(1), None), Told(BEFORE, key(1), HEAD))
    assert found == [Look(key(1)), Look(key(1))]
    assert fed(watch, Looked(key(2), "differs"))[1] == [], "nobody asked"


# --- how far apart ---


@pytest.mark.parametrize("name", NUMBERS)
def test_up_to_the_threshold_members_are_honest_and_beyond_or_without_a_number_they_are_not(name: str) -> None:
    limit = NUMBERS[name]
    assert is_near((limit, -1.0), (2.0, 2.0), name, "fp32")
    assert not is_near((1.01 * limit, -1.0), (2.0, 2.0), name, "fp32")
    assert not is_near((0.0, 1.01 * limit), (2.0, 2.0), "fp32", name)
    assert not is_near((float("nan"), 0.0), (2.0, 2.0), name, name)


def test_losses_have_to_be_near_too() -> None:
    assert is_near((-1.0, 0.0), (2.0 + LOSS, 2.0), "fp32", "fp32")
    assert not is_near((-1.0, 0.0), (2.0 + 3 * LOSS, 2.0), "fp32", "fp32")
    assert not is_near((-1.0, 0.0), (float("nan"), 2.0), "fp32", "fp32")
