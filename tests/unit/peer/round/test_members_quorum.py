"""What follows from how the members of an electorate stand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from charters import charter
from weft.ids import Attempt, BranchId, PeerId, Round, RunId
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.messages import StandingNote
from weft.peer.round.members import Quorum
from weft.store.journal import Votes
from weft.sync.round import round
from weft.sync.round.machine import State, replace
from weft.sync.round.rules import Durable, leader

RUN = RunId("cc" * 32)
PEERS = tuple(PeerId(letter * 64) for letter in "abc")


def quorum_of(member: Any, promises: Votes) -> Quorum:
    return Quorum(member, promises)


class Case:
    """How one of three members sees the others, in the second round of a run."""

    def __init__(self, folder: Path) -> None:
        self.chain = Chain(open_branch(genesis(RUN, PEERS[0], charter(4)), PEERS, PEERS[0], BranchId(RUN)), charter(4))
        base = self.chain.base
        self.order = [leader(base, Attempt(turn)) for turn in range(3)]
        self.me = self.peer = self.order[2]
        self.promises = Votes(folder / "durable.bin")
        self.state: State | None = round.begin(self.me, base)
        self.quorum = quorum_of(self, self.promises)

    def hear(self, peer: PeerId, attempt: int = 0, *, has_vote: bool = True, after: int = 0) -> None:
        base = self.chain.base
        note = StandingNote(
            branch=base.branch, round=Round(base.round + after), attempt=Attempt(attempt), has_vote=has_vote
        )
        self.quorum.take(peer, note)

    def is_over(self) -> bool:
        assert self.state is not None
        return self.quorum.is_attempt_over(self.state)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_an_attempt_lasts_while_its_leader_follows_it(case: Case) -> None:
    assert not case.is_over()
    case.hear(case.order[0])
    case.hear(case.order[1], attempt=7)
    assert not case.is_over()


def test_an_attempt_is_over_when_its_leader_follows_a_later_one(case: Case) -> None:
    case.hear(case.order[0], attempt=1)
    assert case.is_over()


def test_an_attempt_is_over_when_its_leader_has_no_vote(case: Case) -> None:
    case.hear(case.order[0], has_vote=False)
    assert case.is_over()


def test_an_attempt_is_over_when_a_quorum_follows_later_ones(case: Case) -> None:
    assert case.state is not None
    case.state = replace(case.state, attempt=Attempt(2))  # led by this peer
    case.hear(case.order[0], attempt=4)
    assert not case.is_over()
    case.hear(case.order[1], attempt=3)
    assert case.is_over()


def test_an_attempt_is_over_when_without_those_who_are_further_there_is_no_quorum(case: Case) -> None:
    """As where one of three is gone, another ran ahead, and this peer, which has measured nothing yet, waits long."""
    assert case.state is not None
    case.state = replace(case.state, attempt=Attempt(2), gone=frozenset({case.order[1]}))
    assert not case.is_over()
    case.hear(case.order[0], attempt=4)
    assert case.is_over()
    case.state = replace(case.state, attempt=Attempt(4))
    assert not case.is_over()


def test_what_is_told_of_another_round_counts_for_nothing(case: Case) -> None:
    case.hear(case.order[0], attempt=5, has_vote=False, after=1)
    assert not case.is_over()
    assert case.quorum.has_majority()


def test_members_without_a_vote_are_no_majority(case: Case) -> None:
    assert case.quorum.has_majority()
    for peer in case.order[:2]:
        case.hear(peer, has_vote=False)
    assert not case.quorum.has_majority()
    assert not case.quorum.sees_majority()


def test_who_lost_the_results_of_what_it_accepted_has_no_vote_and_says_so(case: Case) -> None:
    assert case.quorum.note() is None
    case.quorum.lose_results(case.chain.base)
    assert not case.quorum.has_majority()
    note = case.quorum.note()
    assert note is not None
    assert not note.has_vote
    case.quorum.find_results()
    assert case.quorum.note() is None
    case.quorum.lose_results(msgspec.structs.replace(case.chain.base, round=Round(9)))
    assert case.quorum.note() is None


def test_who_comes_back_from_an_older_state_has_no_vote_and_says_so(case: Case) -> None:
    later = msgspec.structs.replace(case.chain.base, round=Round(9))
    case.promises.write(Durable(base=later))
    case.state = None
    assert case.quorum.abstains
    note = case.quorum.note()
    assert note is not None
    assert not note.has_vote


def test_to_who_is_no_member_the_round_is_decidable_while_a_member_is_there(case: Case) -> None:
    outsider = quorum_of(SimpleNamespace(peer=PeerId("d" * 64), chain=case.chain, state=None), case.promises)
    assert outsider.has_majority()
    assert outsider.sees_majority()
    outsider.statuses.update(dict.fromkeys(PEERS[:2], "gone"))
    assert outsider.has_majority()
    assert not outsider.sees_majority()
    outsider.statuses[PEERS[2]] = "gone"
    assert not outsider.has_majority()
    assert not outsider.abstains


def test_who_asked_on_another_branch_asks_no_more(case: Case) -> None:
    newcomer = PeerId("d" * 64)
    case.quorum.statuses[newcomer] = "joining"
    case.quorum.go_to(case.chain.head.branch)
    assert case.quorum.statuses[newcomer] == "joining"
    case.quorum.statuses[PEERS[0]] = "gone"
    case.quorum.go_to(BranchId("e" * 64))
    assert case.quorum.statuses == {PEERS[0]: "gone"}


def test_who_was_not_heard_of_is_not_counted_as_reached_and_is_named_where_it_is_missing(case: Case) -> None:
    assert case.quorum.present() == PEERS  # nobody is known to be gone
    assert case.quorum.heard() == (case.me,)
    case.quorum.statuses[case.order[0]] = "alive"
    case.hear(case.order[0], has_vote=False)
    assert len(case.quorum.heard()) == 2
    said = "1 member is away, and this round needs it, because others were stopped in the middle of it"
    assert case.quorum.why_undecidable() == said
    case.hear(case.order[1])
    assert case.quorum.why_undecidable() == "1 member was stopped in the middle of this round, so it cannot end"
