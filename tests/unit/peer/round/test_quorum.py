"""What follows from how the members of an electorate stand."""

from pathlib import Path

import msgspec
import pytest

from charters import charter
from weft.ids import Attempt, BranchId, PeerId, Round, RunId
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.messages import StandingNote
from weft.peer.round.quorum import Standing
from weft.store.votes import Promises
from weft.sync.round import round
from weft.sync.round.machine import State, replace
from weft.sync.round.rules import Durable, leader

RUN = RunId("cc" * 32)
PEERS = tuple(PeerId(letter * 64) for letter in "abc")


class Case:
    """How one of three members sees the others, in the second round of a run."""

    def __init__(self, folder: Path) -> None:
        self.chain = Chain(open_branch(genesis(RUN, PEERS[0], charter(4)), PEERS, PEERS[0], BranchId(RUN)), charter(4))
        base = self.chain.base
        self.order = [leader(base, Attempt(turn)) for turn in range(3)]
        self.me = self.order[2]
        self.promises = Promises(folder / "durable.bin")
        self.state: State | None = round.begin(self.me, base)
        self.standing = Standing(self.me, self.chain, self.promises, lambda: self.state)

    def hear(self, peer: PeerId, attempt: int = 0, *, has_vote: bool = True, after: int = 0) -> None:
        base = self.chain.base
        note = StandingNote(
            branch=base.branch, round=Round(base.round + after), attempt=Attempt(attempt), has_vote=has_vote
        )
        self.standing.take(peer, note)

    def is_over(self) -> bool:
        assert self.state is not None
        return self.standing.is_attempt_over(self.state)


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


def test_what_is_told_of_another_round_counts_for_nothing(case: Case) -> None:
    case.hear(case.order[0], attempt=5, has_vote=False, after=1)
    assert not case.is_over()
    assert case.standing.has_majority()


def test_members_without_a_vote_are_no_majority(case: Case) -> None:
    assert case.standing.has_majority()
    for peer in case.order[:2]:
        case.hear(peer, has_vote=False)
    assert not case.standing.has_majority()
    assert not case.standing.sees_majority()


def test_who_lost_the_results_of_what_it_accepted_has_no_vote_and_says_so(case: Case) -> None:
    assert case.standing.note() is None
    case.standing.lose_results(case.chain.base)
    assert not case.standing.has_majority()
    note = case.standing.note()
    assert note is not None
    assert not note.has_vote
    case.standing.find_results()
    assert case.standing.note() is None
    case.standing.lose_results(msgspec.structs.replace(case.chain.base, round=Round(9)))
    assert case.standing.note() is None


def test_who_comes_back_from_an_older_state_has_no_vote_and_says_so(case: Case) -> None:
    later = msgspec.structs.replace(case.chain.base, round=Round(9))
    case.promises.write(Durable(base=later))
    case.state = None
    assert case.standing.abstains
    note = case.standing.note()
    assert note is not None
    assert not note.has_vote


def test_to_who_is_no_member_the_round_is_decidable_while_a_member_is_there(case: Case) -> None:
    outsider = Standing(PeerId("d" * 64), case.chain, case.promises, lambda: None)
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
    case.standing.statuses[newcomer] = "joining"
    case.standing.go_to(case.chain.head.branch)
    assert case.standing.statuses[newcomer] == "joining"
    case.standing.statuses[PEERS[0]] = "gone"
    case.standing.go_to(BranchId("e" * 64))
    assert case.standing.statuses == {PEERS[0]: "gone"}
