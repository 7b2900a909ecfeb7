"""What came before its turn, and comes again when it is due."""

from typing import Any

import pytest

from weft.ids import Attempt, BranchId, Digest, PeerId, Round, Tokens
from weft.peer.round.inbox import NUM_KEPT, NUM_OTHERS, Early
from weft.sync.records.messages import Collect, Merged, Ready, RoundNote

A, B = PeerId("a" * 64), PeerId("b" * 64)
SIGNED: Any = object()  # not looked at


class Base:
    num_parts = 2


def plan(attempt: int = 0, revision: int = 0) -> Collect:
    return Collect(attempt=Attempt(attempt), revision=revision, contributions=(), owners=(A, B))


def merged(part: int, attempt: int = 0, revision: int = 0, result: str = "0") -> Merged:
    return Merged(attempt=Attempt(attempt), revision=revision, part=part, result=Digest(64 * result))


def is_kept(early: Early, known: Collect | None, sender: PeerId, message: object) -> bool:
    base: Any = Base
    return early.is_kept(base, known, sender, SIGNED, message)


def test_a_result_waits_for_its_plan_and_comes_once() -> None:
    early = Early()
    assert is_kept(early, None, B, merged(1))
    assert is_kept(early, plan(), A, merged(0, revision=1))
    assert early.of_plan(plan()) == [(B, SIGNED, merged(1))]
    assert early.of_plan(plan()) == []
    assert early.of_plan(plan(revision=1)) == [(A, SIGNED, merged(0, revision=1))]


def test_what_belongs_to_a_plan_that_is_here_or_to_no_part_does_not_wait() -> None:
    early = Early()
    assert not is_kept(early, plan(), B, merged(1))
    assert not is_kept(early, plan(attempt=1), B, merged(1, revision=5))
    assert not is_kept(early, None, B, merged(2))
    assert not is_kept(early, None, B, plan())


def test_of_an_owner_and_a_part_the_latest_result_is_kept() -> None:
    early = Early()
    for message in (merged(0, attempt=1, result="1"), merged(0, result="2"), merged(0, attempt=2, result="3")):
        assert is_kept(early, None, A, message)
    assert early.of_plan(plan(attempt=2)) == [(A, SIGNED, merged(0, attempt=2, result="3"))]


def test_another_round_begins_with_the_letters_kept_for_it_and_no_results() -> None:
    early = Early()
    note = RoundNote(branch=BranchId("c" * 64), round=Round(2), message=Ready(tokens=Tokens(1), parts=()))
    for _ in range(3 * NUM_KEPT):
        early.keep_for_next(A, SIGNED, note, members=(A,))
    is_kept(early, None, B, merged(1))
    assert early.begin() == NUM_KEPT * [(A, SIGNED, note)]
    assert early.of_plan(plan()) == []
    assert early.begin() == []


@pytest.mark.parametrize("num", [1, 3 * NUM_OTHERS])
def test_who_floods_pushes_out_no_members_letter(num: int) -> None:
    early = Early()
    note = RoundNote(branch=BranchId("c" * 64), round=Round(2), message=Ready(tokens=Tokens(1), parts=()))
    others = [PeerId(f"{number:064x}") for number in range(num)]
    early.keep_for_next(A, SIGNED, note, members=(A, B))
    for other in others:
        for _ in range(100):
            early.keep_for_next(other, SIGNED, note, members=(A, B))
    early.keep_for_next(B, SIGNED, note, members=(A, B))
    kept = early.begin()
    assert [each[0] for each in kept if each[0] in (A, B)] == [A, B]
    assert {each[0] for each in kept} == {A, B, *others[-NUM_OTHERS:]}
    assert len(kept) <= 2 + NUM_KEPT * NUM_OTHERS
