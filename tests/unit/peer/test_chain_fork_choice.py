"""One peer's word about progress, or its signature, moves nobody who is in a round with others."""

import msgspec
import pytest

from charters import charter
from weft.ids import Attempt, BranchId, PeerId, Round, RunId, Tokens
from weft.keys import Identity
from weft.net.messages import Heartbeat
from weft.peer.chain import (
    NEAR,
    Chain,
    Proof,
    chosen,
    furthest,
    genesis,
    is_followed,
    is_further,
    num_there,
    open_branch,
)
from weft.sync.governance import signers
from weft.sync.records.ancestry import Fork
from weft.sync.records.charter import AuditTerms, Charter, Quarantined
from weft.sync.records.messages import Accept, Certificate, Manifest, RoundNote
from weft.wire import digest_of, seal

MAIN, OTHER = BranchId("a" * 64), BranchId("b" * 64)
A = PeerId("1" * 64)
OPENING = open_branch(genesis(RunId(MAIN), A, charter(4)), [A], A, MAIN)


def at(branch: BranchId, tokens: int, round: int = 5) -> Manifest:
    return msgspec.structs.replace(OPENING, branch=branch, committed_tokens=Tokens(tokens), round=Round(round))


def forked_at(round: int, left: BranchId = MAIN) -> Charter:
    fork = Fork(branch=left, round=Round(round), manifest="0" * 64, members=(A,), committed_tokens=Tokens(100))
    return msgspec.structs.replace(charter(4), forks=(fork,))


def goes_over(mine: Manifest, in_sight: int, other: Manifest, num_signers: int, after: Charter | None = None) -> bool:
    return is_followed(mine, after or charter(4), in_sight, Proof(other, num_signers))


@pytest.mark.parametrize("in_sight", [2, 3, 7])
@pytest.mark.parametrize("branch", [MAIN, OTHER])
def test_what_one_has_signed_moves_nobody_who_has_another_in_sight(in_sight: int, branch: BranchId) -> None:
    assert not goes_over(at(MAIN, 1000), in_sight, at(branch, 10**18, 10**6), 1)


@pytest.mark.parametrize(("in_sight", "num_signers"), [(5, 3), (2, 2), (3, 9), (1, 1)])
def test_of_branches_that_as_many_stand_on_the_one_that_counts_more_goes_on(in_sight: int, num_signers: int) -> None:
    assert goes_over(at(MAIN, 1000), in_sight, at(OTHER, 1001), num_signers)
    assert not goes_over(at(MAIN, 1000), in_sight, at(OTHER, 999), num_signers)


def test_one_alone_goes_over_to_two_whatever_it_counts() -> None:
    assert goes_over(at(OTHER, 5000, 90), 1, at(MAIN, 1000, 20), 2, forked_at(12))


def test_one_alone_does_not_go_back_to_what_its_branch_began_from() -> None:
    assert not goes_over(at(OTHER, 5000, 90), 1, at(MAIN, 1000, 11), 2, forked_at(12))


def test_who_comes_goes_where_two_are_and_else_where_most_is_counted() -> None:
    assert chosen([at(OTHER, 10**18), at(MAIN, 1000), at(MAIN, 1001)]) == MAIN
    assert chosen([at(OTHER, 1001), at(MAIN, 1000)]) == OTHER
    assert chosen([*3 * [at(MAIN, 1000)], *2 * [at(OTHER, 900)], at(OTHER, 10**18)]) == MAIN
    assert chosen([at(MAIN, 1000), at(OTHER, 1000)]) == MAIN


def test_no_later_round_is_believed_in_than_most_may_have_reached() -> None:
    assert furthest([Round(40), Round(41), Round(10**6)]) == 41 + NEAR
    assert furthest([Round(40), Round(10**6)]) == 40 + NEAR


@pytest.mark.parametrize("name", ["00" * 32, "ff" * 32])
def test_a_branch_just_opened_is_preferred_to_the_one_it_leaves(name: str) -> None:
    opened, left = at(BranchId(name), 1000, 6), at(MAIN, 1000, 5)
    assert is_further(opened, left)
    assert not is_further(left, opened)


def test_a_heartbeat_is_further_as_a_head_is() -> None:
    beat = Heartbeat(
        name="x", branch=OTHER, round=Round(3), manifest=None, state="", loss=None, tokens_per_s=0.0, committed_tokens=9
    )
    assert is_further(beat, at(MAIN, 8, 7))
    assert not is_further(beat, at(MAIN, 10, 2))


def test_of_a_certificate_valid_votes_of_those_known_count() -> None:
    one, other, stranger, late = (Identity.generate() for _ in range(4))
    manifest = at(OTHER, 1000)

    def vote(voter: Identity, attempt: int = 0, of: Manifest = manifest) -> object:
        accept = Accept(attempt=Attempt(attempt), manifest=digest_of(of))
        return seal(voter, RoundNote(branch=OTHER, round=Round(5), message=accept))

    forged = msgspec.structs.replace(vote(other, of=at(OTHER, 5)), signer=late.peer)  # type: ignore[type-var]
    votes = (vote(one), vote(stranger), vote(other, attempt=1), forged)
    certificate = Certificate(attempt=Attempt(0), manifest=manifest, votes=votes, farewells=())  # type: ignore[arg-type]
    assert signers(certificate, [one.peer, other.peer, late.peer]) == {one.peer}


def test_of_those_known_none_is_in_quarantine_or_banned() -> None:
    """Two of them could else show a branch of their own, and all others would take its parameters."""
    settled, newcomer, liar = (PeerId(digit * 64) for digit in "123")
    opening = open_branch(genesis(RunId(MAIN), settled, charter(4)), [settled, newcomer, liar], settled, MAIN)
    held = msgspec.structs.replace(charter(4), quarantined=(Quarantined(peer=newcomer, left=1),))
    known = Chain(opening, held)
    assert known.electors == {settled, liar}
    known.restart(opening, msgspec.structs.replace(charter(4), banned=(liar,)))
    assert known.electors == {settled, newcomer}, "what it brought has counted"
    forked = Fork(branch=OTHER, round=Round(5), manifest="0" * 64, members=(newcomer, A), committed_tokens=Tokens(0))
    assert Chain(opening, msgspec.structs.replace(held, forks=(forked,))).electors == {settled, liar}


NINE = [PeerId(f"{number:064x}") for number in range(9)]
AUDITED = msgspec.structs.replace(charter(4), audits=AuditTerms(rate=0.1, trace_every=1))


def audited_goes_over(
    beside: int, signers: int, named: int, tokens: int = 10**18, forks: tuple[Fork, ...] = (), branch: BranchId = OTHER
) -> bool:
    """Return whether members of whom so many stand where this one does, with a branch of 9 tokens, go over to one that
    others have signed, and that names more.

    Args:
        forks: that led to this one's branch.
    """
    mine, theirs = set(NINE[:beside]), set(NINE[-signers:])
    there = msgspec.structs.replace(at(branch, tokens, 9), members=tuple(NINE[-named:]))
    proof = Proof(there, signers, num_there(there, theirs, set(NINE), mine))
    return is_followed(at(MAIN, 9), msgspec.structs.replace(AUDITED, forks=forks), beside, proof)


def fork_of(branch: BranchId) -> Fork:
    return Fork(branch=branch, round=Round(3), manifest="0" * 64, members=(), committed_tokens=Tokens(4))


@pytest.mark.parametrize("branch", [MAIN, OTHER])
def test_where_members_audit_each_other_few_lead_nobody_away_whatever_they_count(branch: BranchId) -> None:
    for beside, num_signers, named in ((7, 2, 2), (7, 2, 9), (3, 2, 3), (3, 2, 9), (6, 3, 3)):
        assert not audited_goes_over(beside, num_signers, named, branch=branch)
    assert goes_over(at(MAIN, 9), 7, at(branch, 10**18, 9), 2), "others believe two"


@pytest.mark.parametrize(("here", "there", "signers"), [(3, 6, 4), (4, 5, 3), (2, 7, 4), (1, 2, 2)])
def test_of_two_sides_of_such_a_run_the_smaller_goes_over(here: int, there: int, signers: int) -> None:
    assert audited_goes_over(here, signers, there, tokens=10)
    assert not audited_goes_over(there, here // 2 + 1, here), "whatever the smaller one counts"


def test_of_two_equal_sides_of_such_a_run_the_one_that_left_the_other_goes_over() -> None:
    assert not audited_goes_over(4, 3, 4)
    assert audited_goes_over(4, 3, 4, tokens=1, forks=(fork_of(OTHER),))
    apart = (fork_of(BranchId("c" * 64)),)
    assert audited_goes_over(4, 3, 4, tokens=10, forks=apart)
    assert not audited_goes_over(4, 3, 4, tokens=8, forks=apart)
    assert not audited_goes_over(4, 3, 4, tokens=10, forks=(fork_of(OTHER),), branch=MAIN), (
        "no round later, and no more"
    )


def test_who_lags_behind_on_a_branch_of_such_a_run_goes_where_more_stand() -> None:
    assert audited_goes_over(2, 3, 5, branch=MAIN)
    assert audited_goes_over(1, 2, 2, branch=MAIN)
