"""Which false works a round may take out, and that it is done once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from model.world import first_base
from weft.ids import BranchId, PeerId, Round, Tokens
from weft.sync.governance import Void, enacted
from weft.sync.method.choices import AdamWConfig, Choices, DelayedNesterovConfig, NesterovConfig, SgdConfig
from weft.sync.method.presets import DdpConfig, spell_out
from weft.sync.records.acts import Weighed
from weft.sync.records.ancestry import Fork
from weft.sync.records.charter import Charter, FalseWork
from weft.sync.records.counters import WITHIN, are_due, due, is_mixed, of, planned, why_none, with_false
from weft.sync.records.messages import MAX_COUNTERS, Base
from weft.wire import digest, digest_of

PLAIN = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0))
START = first_base(3)
METHOD = replace(START.charter.settings, method=PLAIN)
LIARS = [PeerId(f"{number:064x}") for number in range(6)]
FALSE = Round(8)


def weighed(method: Choices = PLAIN, branch: BranchId = START.branch) -> Weighed:
    return Weighed(branch=branch, manifest=digest(b"of it"), weights=(3, 5), late=2, method=digest_of(method))


def struck(*liars: PeerId, **given: BranchId) -> Charter:
    charter = replace(START.charter, settings=METHOD)
    for liar in liars:
        charter = with_false(charter, liar, FALSE, weighed(**given))
    return charter


def base_of(charter: Charter, round: int = FALSE + 2) -> Base:
    return replace(START, round=Round(round), charter=charter)


def peers(works: tuple[FalseWork, ...]) -> list[str]:
    return [each.peer for each in works]


def test_a_false_work_is_due_for_as_long_as_payloads_are_kept() -> None:
    charter = struck(LIARS[1], LIARS[0])
    assert peers(due(base_of(charter))) == LIARS[:2]
    assert peers(due(base_of(charter, FALSE + WITHIN))) == LIARS[:2]
    assert due(base_of(charter, FALSE + WITHIN + 1)) == ()
    assert due(base_of(replace(START.charter, settings=METHOD))) == ()


def test_it_is_due_in_rounds_of_the_same_fragment_by_the_same_method() -> None:
    charter = struck(LIARS[0])
    changed = replace(METHOD, method=replace(PLAIN, apply=SgdConfig(lr=0.5)))
    assert due(base_of(replace(charter, settings=changed))) == ()
    streamed = replace(PLAIN, fragments=3)
    charter = with_false(
        replace(charter, settings=replace(METHOD, method=streamed)), LIARS[0], FALSE, weighed(streamed)
    )
    assert [round for round in range(9, 16) if due(base_of(charter, round))] == [11, 14]


def test_what_another_branch_has_counted_is_not_due_and_what_both_have_is() -> None:
    other = BranchId(digest(b"another"))
    charter = struck(LIARS[0], branch=other)
    assert due(base_of(charter)) == ()
    fork = Fork(branch=other, round=FALSE, manifest=digest(b"common"), members=(), committed_tokens=Tokens(0))
    assert due(base_of(replace(charter, forks=(fork,)))) == ()
    shared = replace(fork, round=Round(FALSE + 1))
    assert peers(due(base_of(replace(charter, forks=(shared,))))) == [LIARS[0]]


def test_a_leader_plans_what_it_knows_and_can_have_and_no_more_than_a_manifest_holds() -> None:
    base = base_of(struck(*LIARS))
    assert planned(base, LIARS, set()) == tuple(LIARS[:MAX_COUNTERS])
    assert planned(base, {LIARS[5], LIARS[2], PeerId("ff" * 32)}, {LIARS[2]}) == (LIARS[5],)
    assert planned(base, (), set()) is UNSET
    assert are_due(base, LIARS[:3])
    assert not are_due(base, [LIARS[1], LIARS[0]])
    assert not are_due(base, [LIARS[0], LIARS[0]])
    assert not are_due(base, [PeerId("ff" * 32)])


def test_a_round_takes_a_false_work_out_and_no_other_does_again() -> None:
    base = base_of(struck(*LIARS[:2]))
    after = enacted(base, (), (), countered=(LIARS[0],)).charter
    assert [each.taken_out for each in after.false_works or ()] == [base.round, UNSET]
    assert peers(due(base_of(after, base.round + 1))) == [LIARS[1]]
    assert (of(after, LIARS[0]), of(after, LIARS[1]) is not None) == (None, True)
    with pytest.raises(Void, match="no such false work"):
        enacted(base_of(after, base.round + 1), (), (), countered=(LIARS[0],))
    with pytest.raises(Void, match="no such false work"):
        enacted(base, (), (), countered=(LIARS[0], LIARS[0]))
    assert enacted(base, (), ()).charter == base.charter


def test_of_two_works_of_one_key_neither_pushes_out_the_other() -> None:
    charter = with_false(struck(LIARS[0]), LIARS[0], Round(FALSE + 1), weighed())
    charter = with_false(charter, LIARS[0], Round(FALSE + 1), weighed())
    assert [each.round for each in charter.false_works or ()] == [FALSE, FALSE + 1]
    base = base_of(charter, FALSE + 3)
    first = enacted(base, (), (), countered=(LIARS[0],)).charter
    second = enacted(base_of(first, FALSE + 4), (), (), countered=(LIARS[0],)).charter
    assert [each.taken_out for each in second.false_works or ()] == [FALSE + 4, FALSE + 3], "the newest first"
    assert due(base_of(second, FALSE + 5)) == ()


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (PLAIN, ""),
        (replace(PLAIN, apply=NesterovConfig()), ""),
        (replace(PLAIN, apply=DelayedNesterovConfig(delay=4)), ""),
        (replace(PLAIN, apply=AdamWConfig()), "not linear"),
        (spell_out(DdpConfig(), 4), "not linear"),
        (replace(PLAIN, merge="senders_mean"), "merged by senders_mean"),
        (replace(PLAIN, merged_by="all"), "nobody keeps"),
    ],
)
def test_what_cannot_be_taken_out_says_why(method: Choices, why: str) -> None:
    assert why in why_none(method)
    assert bool(why) == bool(why_none(method))


def test_a_branch_that_has_taken_out_what_others_have_too_brings_nothing() -> None:
    base = base_of(struck(LIARS[0]), 12)
    after = enacted(base, (), (), countered=(LIARS[0],)).charter
    fork = Fork(
        branch=START.branch, round=Round(10), manifest=digest(b"common"), members=(), committed_tokens=Tokens(0)
    )
    assert is_mixed(after, fork)
    assert not is_mixed(base.charter, fork)
    assert not is_mixed(after, replace(fork, round=FALSE)), "the branch has counted it, too"
    assert not is_mixed(after, replace(fork, round=Round(13))), "it was taken out before they parted"


def test_runs_without_false_works_have_the_bytes_that_they_had() -> None:
    fields = msgspec.to_builtins(START.charter)
    assert "false_works" not in fields


@given(
    at=st.integers(2, 12),
    found=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=6),
    said=st.lists(st.tuples(st.integers(0, 3), st.sets(st.sampled_from(LIARS[:3]))), max_size=24),
)
def test_what_is_in_the_model_was_taken_out_of_it_once_at_most(
    at: int, found: list[tuple[int, int]], said: list[tuple[int, set[PeerId]]]
) -> None:
    """Two branches part, find false works, and take them out in any order; then what one has done is brought to the
    other.

    Args:
        at: the first round that they do not share.
        found: liars, and the rounds that have counted their works: by both branches, as far as both have these rounds.
        said: what rounds say, one after the other, on one branch or the other, that they take out.
    """
    fork = Fork(
        branch=START.branch, round=Round(at), manifest=digest(b"common"), members=(), committed_tokens=Tokens(0)
    )
    own, other = START.branch, BranchId(digest(b"other"))
    charters = {own: replace(START.charter, settings=METHOD)}
    charters[other] = replace(charters[own], forks=(fork,))
    for liar, round in found:
        for branch in charters if round < at else (own,):
            charters[branch] = with_false(charters[branch], LIARS[liar], Round(round), weighed())
        if round >= at:  # a verdict on what one branch has counted may come to the other
            charters[other] = with_false(charters[other], LIARS[liar], Round(round), weighed())
    taken, head = [], dict.fromkeys(charters, max(at, 13))
    for turn, peers in said:
        branch = other if turn % 2 else own
        base = replace(base_of(charters[branch], head[branch]), branch=branch)
        try:
            after = enacted(base, (), (), countered=tuple(sorted(peers))).charter if peers else base.charter
        except Void:
            continue
        charters[branch], head[branch] = after, head[branch] + 1
        taken += [(branch, peer, of(base.charter, peer)) for peer in peers]
    common = [(branch, peer, work.round) for branch, peer, work in taken if work is not None and work.round < at]
    foreign = [work for branch, _, work in taken if work is not None and work.round >= at and branch == other]
    assert len(set(common)) == len(common)
    assert not foreign, "what it has not counted"
    if not is_mixed(charters[other], fork):  # it is brought to the first
        assert not [each for each in common if each[0] == other]
