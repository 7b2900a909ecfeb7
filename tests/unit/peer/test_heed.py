"""One peer's word about progress is one of several: it takes nobody from where most stand."""

import msgspec
import pytest

from charters import charter
from weft.ids import BranchId, PeerId, Round, RunId
from weft.peer.chain import genesis, open_branch
from weft.peer.heed import NEAR, Told, furthest, is_credible, preferred, told
from weft.sync.messages import Base

MAIN, OTHER = BranchId("a" * 64), BranchId("b" * 64)
A, B, C, D = (PeerId(letter * 64) for letter in "1234")


def at(branch: BranchId, tokens: int, round: int = 5, *, holds: bool = True) -> Told:
    return Told(branch, Round(round), tokens, holds)


@pytest.mark.parametrize("num", [2, 3, 7])
def test_one_that_claims_a_quintillion_tokens_is_not_preferred_to_two(num: int) -> None:
    assert preferred([at(OTHER, 10**18), *num * [at(MAIN, 1000)]]) == MAIN


@pytest.mark.parametrize(("here", "there"), [(5, 3), (3, 2), (4, 4), (1, 1), (3, 5)])
def test_of_branches_held_by_about_as_many_the_one_that_counts_most_is_preferred(here: int, there: int) -> None:
    assert preferred([*here * [at(MAIN, 1000)], *there * [at(OTHER, 1001)]]) == OTHER
    assert preferred([*here * [at(MAIN, 1001)], *there * [at(OTHER, 1000)]]) == MAIN


def test_a_claim_within_a_branch_adds_nothing_to_what_the_others_there_tell() -> None:
    assert preferred([*3 * [at(MAIN, 1000)], *2 * [at(OTHER, 900)], at(OTHER, 10**18)]) == MAIN


def test_where_nobody_holds_a_branch_tokens_decide() -> None:
    """One trained on alone while seven slept: they wake, and go on from what it has."""
    asleep = 7 * [at(MAIN, 1000, holds=False)]
    assert preferred([*asleep, at(OTHER, 5000)]) == OTHER
    assert preferred([*asleep, at(OTHER, 5000, holds=False)]) == OTHER


def test_a_later_round_and_then_a_lower_name_break_ties() -> None:
    assert preferred([at(MAIN, 1000, 5), at(OTHER, 1000, 6)]) == OTHER
    assert preferred([at(MAIN, 1000), at(OTHER, 1000)]) == MAIN


def test_of_one_branch_no_later_round_is_believed_in_than_those_that_hold_it_may_have_reached() -> None:
    behind = 5 * [at(MAIN, 0, 1, holds=False)]
    assert furthest([*behind, at(MAIN, 0, 40), at(MAIN, 0, 41), at(MAIN, 0, 10**6)], MAIN) == 41 + NEAR
    assert furthest([at(MAIN, 0, 40), at(MAIN, 0, 10**6), at(OTHER, 0, 50)], MAIN) == 40 + NEAR
    assert furthest(behind, MAIN) == 1 + NEAR


@pytest.fixture
def base() -> Base:
    first = genesis(RunId(MAIN), A, charter(4))
    return msgspec.structs.replace(first, electorate=(A, B, C, D), uplinks=4 * first.uplinks, round=Round(6))


def test_what_a_quorum_has_not_decided_nobody_has(base: Base) -> None:
    standing = {A: at(MAIN, 1000), B: at(MAIN, 1000), C: at(MAIN, 1000), D: at(MAIN, 1000, 10**6)}
    assert not is_credible(base, Round(10**6), standing)
    assert is_credible(base, Round(10**6), standing | {C: at(MAIN, 1000, 10**6), B: at(OTHER, 1000)})


def test_who_has_forgotten_its_votes_does_not_gainsay(base: Base) -> None:
    standing = {A: at(MAIN, 1000), B: at(MAIN, 1000), C: at(MAIN, 1000), D: at(MAIN, 1000, 40)}
    assert not is_credible(base, Round(40), standing)
    assert is_credible(base, Round(40), standing, voteless=(A, B))


@pytest.mark.parametrize("name", ["00" * 32, "ff" * 32])
def test_a_branch_just_opened_is_preferred_to_the_one_it_leaves(base: Base, name: str) -> None:
    left = open_branch(msgspec.structs.replace(base, round=Round(5)), base.electorate, A, base.branch)
    opening = open_branch(base, base.electorate, A, BranchId(name))
    assert preferred([told(left, is_holding=False), told(opening, is_holding=False)]) == opening.branch
