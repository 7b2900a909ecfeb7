"""What a witness keeps, shows and proves, and that forged notes prove nothing and crowd nothing out."""

from types import SimpleNamespace
from typing import Any

import pytest

from model.world import first_base
from weft.ids import Attempt, Digest, Round
from weft.keys import Identity
from weft.peer.chain import open_branch
from weft.peer.messages import Shown
from weft.peer.witness import MAX_KEPT, Witness
from weft.sync.acts import Warrant
from weft.sync.machine import replace
from weft.sync.messages import Accept, AnyRoundMessage, Certificate, Prepare, Promise, Ready, RoundNote
from weft.wire import Signed, seal

IDENTITIES = sorted((Identity.from_seed(bytes([number] * 32)) for number in range(3)), key=lambda each: each.peer)
ME, LIAR, LEADER = IDENTITIES
BASE = replace(first_base(3), electorate=tuple(each.peer for each in IDENTITIES), round=Round(5))


class FakeNode:
    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []

    def on_note(self, kind: type[Any], handler: Any) -> None:
        self.handler = handler

    def post(self, peer: str, record: Any) -> bool:
        self.posted.append((peer, record))
        return True


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def proven() -> list[Warrant]:
    return []


@pytest.fixture
def witness(node: FakeNode, proven: list[Warrant]) -> Witness:
    return Witness(node, SimpleNamespace(base=BASE), proven.append)  # type: ignore[arg-type]


def noted(message: AnyRoundMessage, who: Identity = LIAR, round: int = 5) -> tuple[Signed, RoundNote]:
    note = RoundNote(branch=BASE.branch, round=Round(round), message=message)
    return seal(who, note), note


def accept(attempt: int, digit: str = "a", **options: Any) -> tuple[Signed, RoundNote]:
    return noted(Accept(attempt=Attempt(attempt), manifest=Digest(digit * 64)), **options)


def forged(pair: tuple[Signed, RoundNote]) -> tuple[Signed, RoundNote]:
    return replace(pair[0], signature=bytes(64)), pair[1]


@pytest.mark.parametrize("round", [4, 5, 6])
def test_two_notes_of_a_round_near_by_prove_a_lie(witness: Witness, proven: list[Warrant], round: int) -> None:
    one, other = accept(1, "a", round=round), accept(1, "b", round=round)
    witness.hear(*one)
    witness.hear(*one)
    assert proven == []
    witness.hear(*other)
    assert proven == [Warrant(letters=(one[0], other[0]))]


def test_nothing_is_kept_of_rounds_far_off_or_of_strangers(witness: Witness, proven: list[Warrant]) -> None:
    stranger = Identity.from_seed(bytes([9] * 32))
    for options in ({"round": 3}, {"round": 7}, {"who": stranger}):
        for digit in "ab":
            witness.hear(*accept(1, digit, **options))
    assert proven == []
    assert witness._kept == {}


def certificate(*letters: Signed) -> Certificate:
    manifest = open_branch(BASE, BASE.electorate, ME.peer, BASE.branch)
    return Certificate(attempt=Attempt(0), manifest=manifest, votes=letters, farewells=())


def test_a_forged_note_proves_nothing_and_is_not_kept(witness: Witness, proven: list[Warrant]) -> None:
    witness.read(certificate(forged(accept(1, "a"))[0]))
    witness.hear(*accept(1, "b"))
    witness.read(certificate(forged(accept(1, "c"))[0]))
    assert proven == []
    witness.read(certificate(accept(1, "d")[0]))
    assert [letter.body for letter in proven[0].letters] == [accept(1, digit)[0].body for digit in "bd"]


def test_forged_notes_push_out_none_that_is_signed(witness: Witness, proven: list[Warrant]) -> None:
    witness.hear(*accept(0, "a"))
    witness.read(certificate(*(forged(accept(attempt))[0] for attempt in range(1, MAX_KEPT + 1))))
    witness.hear(*accept(0, "b"))
    assert len(proven) == 1


def test_of_many_notes_of_one_member_the_oldest_are_forgotten(witness: Witness, proven: list[Warrant]) -> None:
    for attempt in range(MAX_KEPT + 1):
        witness.hear(*accept(attempt, "a"))
    witness.hear(*accept(0, "b"))
    assert proven == []
    witness.hear(*accept(MAX_KEPT, "b"))
    assert len(proven) == 1


def test_the_leader_of_a_later_attempt_is_shown_what_others_voted(node: FakeNode, witness: Witness) -> None:
    vote = accept(0)
    witness.hear(*vote)
    witness.hear(*accept(0, who=LEADER))
    witness.hear(*noted(Promise(attempt=Attempt(1), accepted=None), who=ME))
    witness.hear(*noted(Prepare(attempt=Attempt(1))))
    witness.hear(*noted(Ready(tokens=8, parts=())))  # type: ignore[arg-type]
    witness.show(LEADER.peer)
    assert node.posted == [(LEADER.peer, Shown(signed=vote[0]))]
