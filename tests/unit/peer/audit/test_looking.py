"""One audit, step by step."""

from collections.abc import Container
from functools import partial

import pytest
from msgspec.structs import replace

from charters import charter
from unit.peer.snapshots import manifest
from weft.ids import Digest, PeerId, Round, Tokens
from weft.ledger.tree import Tree
from weft.peer.audit.looking import (
    MOST_FALSE,
    MOST_LOOKS,
    Came,
    Event,
    Looking,
    Looks,
    Made,
    Measured,
    Missing,
    Opened,
    Unable,
    Untrue,
    chosen,
    is_heard,
    is_named,
    is_told,
    step,
)
from weft.peer.audit.outcome import Found
from weft.peer.messages import NamedState
from weft.sync.records import quarantine
from weft.sync.records.charter import UNANSWERED_FOR, AuditTerms, Quarantined
from weft.sync.records.messages import Counted, HeldWork
from weft.sync.records.work import Segment
from weft.wire import Signed, digest

MINE, OTHER = digest(b"mine"), digest(b"other")
ME, A, B = (PeerId(name * 64) for name in "dab")


def come_to(*events: Event) -> Looking:
    looking = Looking()
    for event in events:
        looking = step(looking, event)
    return looking


def missing(*, is_over: bool = False, is_old: bool = False, has_vote: bool = True) -> Missing:
    return Missing("not today", has_vote, is_over, is_old)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ((Came(), Made(MINE), Opened(MINE)), Found("equal")),
        ((Came(), Made(MINE), Opened(OTHER), Measured(Found("equal", distance=1e-6))), Found("equal", distance=1e-6)),
        ((Came(), Made(MINE), Opened(OTHER), Measured(Found("differs", "far"))), Found("differs", "far")),
        ((Came(), Untrue("it began elsewhere")), Found("differs", "it began elsewhere")),
        ((missing(), missing(is_over=True)), Found("unanswered", "not today")),
        ((Came(), Made(MINE), missing(is_over=True)), Found("unanswered", "not today")),
        ((Came(), missing(is_over=True, has_vote=False)), None),
        ((Came(), Unable()), None),
    ],
)
def test_an_audit_comes_to(events: tuple[Event, ...], found: Found | None) -> None:
    assert come_to(*events) == Looking("ended", found=found)


def test_what_does_not_come_is_asked_for_again_from_what_is_still_there() -> None:
    assert come_to(missing()) == Looking("asking")
    assert come_to(Came(), Made(MINE), missing()) == Looking("making"), "what it made is made anew"
    assert come_to(Came(), Made(MINE), Opened(OTHER), missing(is_old=True)) == Looking("asking")


def test_only_what_was_named_at_its_place_is_taken() -> None:
    segments = (Segment(head=OTHER, round=0, holder=A, num_steps=2),)
    states = [digest(b"%d" % number) for number in range(3)]
    tree = Tree(bytes.fromhex(state) for state in states)

    def shown(state: Digest, number: int) -> bool:
        return is_named(tree.root(), segments, 1, 1, NamedState(state=state, path=tree.path(number)))

    assert shown(states[1], 1)
    assert not shown(states[2], 2), "another place"
    assert not shown(MINE, 1)


def test_a_member_looks_into_what_others_say_of_others_until_they_were_wrong_too_often() -> None:
    assert is_heard(ME, A, B, {A: MOST_FALSE - 1})
    assert not is_heard(ME, A, B, {A: MOST_FALSE})
    assert not is_heard(ME, ME, B, {})
    assert not is_heard(ME, A, ME, {})
    assert [is_told(Found(outcome)) for outcome in ("equal", "differs", "unanswered")] == [False, True, True]


# --- what one looks at ---

C, NEW, OLD = (PeerId(name * 64) for name in "cef")
WORKS = {peer: digest(peer.encode()) for peer in (A, B, C)}


def looks_at(me: PeerId, rate: float, often: Container[PeerId] = (), waited: Container[Digest] = ()) -> str:
    """Return at whose works a member looks, of a round of 4 that counts those of a and b, and holds that of c.

    Args:
        often: whom it looks at three times as often.
    """
    counted = (Counted(peer=peer, tokens=Tokens(1), payload=WORKS[peer], work=WORKS[peer]) for peer in (A, B))
    round = replace(manifest(3), contributions=tuple(counted), held=(HeldWork(peer=C, work=WORKS[C]),))
    terms = AuditTerms(rate=rate, trace_every=1, quarantine=3)
    after = replace(charter(), audits=terms, quarantined=tuple(Quarantined(peer=each, left=3) for each in (C, NEW)))
    ticket = Signed(kind="Draw", body=b"", signer=me, signature=bytes(64))
    judges = partial(quarantine.judges, after, (A, B, ME, OLD, C, NEW))
    some = chosen(round, after, ticket, judges, lambda peer: 3.0 if peer in often else 1.0, lambda work: work in waited)
    return "".join(peer[0] for peer, work, _, num in some if work == WORKS[peer] and num == 4)


def test_a_member_looks_at_what_it_is_drawn_for_of_others_and_at_all_that_waits() -> None:
    assert looks_at(ME, 1e-9) == "c"
    assert looks_at(ME, 1.0, often={A, B}) == "abc", "three times a chance of a third"
    assert looks_at(ME, 1e-9, often={A, B}) == "c"
    assert looks_at(A, 1.0, often={A, B}) == "bc", "its own work is not its"
    assert looks_at(ME, 1.0, often={A, B}, waited={WORKS[B]}) == "ac", "that was looked at as it waited"


def test_who_is_in_quarantine_looks_at_nothing() -> None:
    assert looks_at(NEW, 1.0, often={A, B}) == ""


def test_who_says_of_all_that_they_do_not_answer_makes_others_look_some_times_only() -> None:
    looks, one, other = Looks(), PeerId("ab" * 32), PeerId("cd" * 32)
    told = [looks.may(one, Round(round)) for round in range(8) for _ in range(4)]
    assert told == [True] * MOST_LOOKS + [False] * (32 - MOST_LOOKS)
    assert looks.may(other, Round(8))
    assert not looks.may(one, Round(UNANSWERED_FOR - 1))
    assert looks.may(one, Round(UNANSWERED_FOR)), "one of that many may look in vain"
