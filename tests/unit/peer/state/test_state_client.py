"""Whom to ask, and what is believed of what they offer."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from charters import charter
from weft.clock import VirtualClock
from weft.ids import BranchId, Digest, PeerId, Round, RunId
from weft.peer.chain import genesis, open_branch
from weft.peer.messages import StateOffer
from weft.peer.state.state_client import FAILED_S, Offered, Ranking, most_offered, opened
from weft.sync.records.messages import Entry
from weft.sync.round.machine import replace

RUN = RunId("cc" * 32)
A, B, C, D = (PeerId(digit * 64) for digit in "abcd")
HEAD = open_branch(genesis(RUN, A, charter()), [A, B], A, BranchId(RUN))
X, Y = Digest("1" * 64), Digest("2" * 64)


def test_who_tells_of_the_most_is_asked_first_and_who_just_failed_last() -> None:
    clock, beats = VirtualClock(), {}
    for peer, tokens, round in ((A, 10, 1), (B, 30, 2), (C, 30, 3)):
        beats[peer] = SimpleNamespace(committed_tokens=tokens, round=round, manifest=X)
    members: Any = SimpleNamespace(heartbeat_of=beats.get)
    node: Any = SimpleNamespace(peers=(A, B, C, D))
    asking = Ranking(node, members, clock)
    assert asking.furthest_first() == [C, B, A, D]
    asking.note_failure(C, B)
    assert asking.furthest_first() == [A, D, C, B]
    clock.advance(FAILED_S - 1)
    asking.note_failure(A)
    clock.advance(1)
    assert asking.furthest_first() == [C, B, D, A]


def test_what_most_offer_is_believed() -> None:
    one, other, another = (
        Offered(head=HEAD, charter=charter(), index=index, donors=(peer,)) for peer, index in ((A, X), (B, Y), (C, Y))
    )
    chosen = most_offered([one, other, another])
    assert (chosen.index, chosen.donors) == (Y, (B, C))
    assert most_offered([one, another]).index == Y, "however they came"
    assert most_offered([another, one]).index == Y


@pytest.mark.parametrize("what", ["nothing", "charter", "run", ""])
def test_an_offer_is_of_this_run_and_whole(what: str) -> None:
    offer = StateOffer(head=HEAD, index=X, charter=charter())
    if what == "nothing":
        offer = replace(offer, index=None)
    if what == "charter":
        offer = replace(offer, charter=replace(charter(), max_seq_len=8))
    found = opened(A, offer, RunId("dd" * 32) if what == "run" else RUN)
    said = {"nothing": "no state of this run", "charter": "another charter", "run": "no state of this run"}
    if what:
        assert said[what] in str(found)
    else:
        assert found == Offered(head=HEAD, charter=charter(), index=X, donors=(A,))


RECORDED = replace(charter(), is_recorded=True)


@pytest.mark.parametrize("what", ["no entry", "too few tops", "an entry where none is due", ""])
def test_an_offer_is_one_that_a_next_round_can_follow_on(what: str) -> None:
    head = open_branch(genesis(RUN, A, RECORDED), [A, B], A, BranchId(RUN))
    assert isinstance(head.entry, Entry)
    entry = replace(head.entry, past=b"\1" * 64)  # of round 3 or 5
    head = replace(head, round=Round(5), entry=entry)
    if what == "no entry":
        head = replace(head, entry=UNSET)
    if what == "too few tops":
        head = replace(head, entry=replace(entry, past=b"\1" * 32))
    if what == "an entry where none is due":
        head = replace(HEAD, entry=entry)
    held = charter() if head.charter == HEAD.charter else RECORDED
    found = opened(A, StateOffer(head=head, index=X, charter=held), RUN)
    assert isinstance(found, str if what else Offered)
