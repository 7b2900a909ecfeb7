"""Which two notes of one member prove that it lies, and which an honest one may sign."""

import pytest

from model.world import first_base
from weft.ids import Attempt, BranchId, Digest, Round, Tokens
from weft.peer.chain import open_branch
from weft.sync.equivocation import binds, equivocation
from weft.sync.records.messages import (
    Accept,
    AnyRoundMessage,
    Collect,
    Contribution,
    Goodbye,
    Holding,
    Manifest,
    Merged,
    Pass,
    Prepare,
    Promise,
    Propose,
    Ready,
    Refuse,
    RoundNote,
    Stuck,
    Vote,
)
from weft.wire import digest_of

BASE = first_base(3)
X, Y = (open_branch(BASE, BASE.electorate[:num], BASE.electorate[0], BASE.branch) for num in (2, 3))
MINE, OTHER = (Contribution(peer=BASE.electorate[0], tokens=Tokens(8), parts=(Digest(digit * 64),)) for digit in "ab")


def note(message: AnyRoundMessage, round: int = 3, branch: BranchId = BASE.branch) -> RoundNote:
    return RoundNote(branch=branch, round=Round(round), message=message)


def propose(attempt: int, manifest: Manifest) -> Propose:
    return Propose(attempt=Attempt(attempt), manifest=manifest)


def accept(attempt: int, manifest: Manifest) -> Accept:
    return Accept(attempt=Attempt(attempt), manifest=digest_of(manifest))


def vote(accepted: tuple[int, Manifest] | None) -> Vote | None:
    return None if accepted is None else Vote(attempt=Attempt(accepted[0]), manifest=accepted[1])


def promise(attempt: int, accepted: tuple[int, Manifest] | None = None) -> Promise:
    return Promise(attempt=Attempt(attempt), accepted=vote(accepted))


def goodbye(promised: int, accepted: tuple[int, Manifest] | None = None) -> Goodbye:
    return Goodbye(promised=Attempt(promised), accepted=vote(accepted))


def plan(attempt: int, revision: int, contribution: Contribution) -> Collect:
    return Collect(
        attempt=Attempt(attempt), revision=revision, contributions=(contribution,), owners=(BASE.electorate[0],)
    )


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (accept(2, X), accept(2, Y), "accepted two manifests in attempt 2"),
        (propose(2, X), propose(2, Y), "accepted two manifests in attempt 2"),
        (propose(0, X), accept(0, Y), "accepted two manifests in attempt 0"),
        (accept(2, X), promise(3, (2, Y)), "accepted two manifests in attempt 2"),
        (promise(4, (2, X)), promise(3, (2, Y)), "accepted two manifests in attempt 2"),
        (goodbye(4, (2, X)), accept(2, Y), "accepted two manifests in attempt 2"),
        (accept(0, X), promise(1), "denied what it accepted in attempt 0"),
        (propose(1, X), promise(5, (0, X)), "denied what it accepted in attempt 1"),
        (promise(1, (0, X)), promise(3), "denied what it accepted in attempt 0"),
        (promise(5, (1, X)), promise(5, (3, X)), "denied what it accepted in attempt 3"),
        (accept(2, X), goodbye(2), "denied what it accepted in attempt 2"),
        (accept(2, X), goodbye(2, (1, X)), "denied what it accepted in attempt 2"),
        (goodbye(2), promise(3), "went on after its last word"),
        (goodbye(2), Prepare(attempt=Attempt(3)), "went on after its last word"),
        (goodbye(2), goodbye(3), "went on after its last word"),
        (plan(1, 0, MINE), plan(1, 0, OTHER), "two plans of one revision in attempt 1"),
    ],
    ids=str,
)
def test_what_no_honest_member_signs(one: AnyRoundMessage, other: AnyRoundMessage, what: str) -> None:
    assert what in (equivocation(note(one), note(other)) or "")
    assert what in (equivocation(note(other), note(one)) or "")
    assert equivocation(note(one), note(other, round=4)) is None
    assert equivocation(note(one), note(other, branch=BranchId("bb" * 32))) is None
    assert binds(one)
    assert binds(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (accept(1, X), accept(2, Y)),  # another was accepted by more, later
        (accept(1, X), promise(1)),  # promised first
        (promise(3), promise(3, (3, X))),  # asked again, after it accepted
        (accept(3, X), promise(2)),  # accepted later
        (promise(2), promise(4, (3, X))),
        (accept(1, X), promise(5, (3, Y))),
        (accept(2, X), goodbye(4, (2, X))),
        (accept(1, X), goodbye(4, (2, Y))),
        (plan(0, 0, MINE), plan(0, 0, OTHER)),  # a first leader that was restarted
        (plan(1, 0, MINE), plan(1, 1, OTHER)),
        (plan(1, 0, MINE), plan(2, 0, OTHER)),
        (Prepare(attempt=Attempt(1)), Prepare(attempt=Attempt(2))),
        (plan(1, 0, MINE), accept(1, X)),
    ],
    ids=str,
)
def test_what_an_honest_member_may_sign(one: AnyRoundMessage, other: AnyRoundMessage) -> None:
    for first in (one, other):
        for second in (one, other):
            assert equivocation(note(first), note(second)) is None


def test_what_is_on_no_disk_proves_nothing() -> None:
    place = {"attempt": Attempt(1), "revision": 0}
    unwritten: list[AnyRoundMessage] = [
        Ready(tokens=Tokens(8), parts=MINE.parts),
        Ready(tokens=Tokens(9), parts=OTHER.parts),
        Pass(),
        Merged(part=0, result=MINE.parts[0], **place),
        Merged(part=0, result=OTHER.parts[0], **place),
        Holding(results=MINE.parts, **place),
        Holding(results=OTHER.parts, **place),
        Stuck(part=0, missing=(), **place),
        Refuse(attempt=Attempt(1), promised=Attempt(7)),
        plan(0, 0, MINE),
    ]
    for one in unwritten:
        assert not binds(one)
        for other in (*unwritten, accept(1, X), goodbye(0)):
            assert equivocation(note(one), note(other)) is None
