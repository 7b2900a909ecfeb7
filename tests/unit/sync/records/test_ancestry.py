"""Random trees of branches that meet in any order: what is brought where, and that no round is ever counted twice."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.ids import BranchId, Digest, Round, Tokens
from weft.sync.records.ancestry import (
    Fork,
    ForkPoint,
    History,
    Stretch,
    fork_point,
    is_ahead,
    lacking,
    with_fork,
    with_taken,
)

RUN = "0" * 64


def name(number: int) -> BranchId:
    return BranchId(f"{number:064x}")


@dataclass(frozen=True)
class Side:
    """One side of a run, and by hand what its parameters are the sum of: (branch, round) -> how often."""

    history: History
    holds: tuple[tuple[BranchId, Round], ...]
    forks: dict[Digest, tuple[tuple[BranchId, Round], ...]] = field(default_factory=dict)  # what was held there

    def commit(self) -> "Side":
        history = self.history
        done = (history.branch, history.round)
        next_round = Round(history.round + 1)
        return Side(History(history.branch, history.forks, next_round, history.taken), (*self.holds, done), self.forks)

    def leave(self, branch: BranchId) -> "Side":
        history = self.history
        last = Digest(f"{history.branch[-32:]}{history.round - 1:032x}")
        fork = Fork(branch=history.branch, round=history.round, manifest=last, members=(), committed_tokens=Tokens(0))
        opened = History(branch, with_fork(history.forks, fork), Round(history.round + 1), history.taken)
        return Side(opened, self.holds, {**self.forks, last: self.holds})

    def take_in(self, found: ForkPoint, piece: tuple[tuple[BranchId, Round], ...]) -> "Side":
        history = self.history
        taken = with_taken(history, found.stretches)
        return Side(
            History(history.branch, history.forks, Round(history.round + 1), taken),
            (*self.holds, *piece, (history.branch, history.round)),
            self.forks,
        )


def brought(mine: Side, theirs: Side) -> tuple[ForkPoint, tuple[tuple[BranchId, Round], ...]] | None:
    """Return what `mine` brings to `theirs`: the difference between what it holds and what was held at the fork."""
    found = fork_point(mine.history, theirs.history)
    if found is None:
        return None
    at_fork = {**theirs.forks, **mine.forks}[found.fork.manifest]
    assert set(at_fork) <= set(mine.holds)
    return found, tuple(each for each in mine.holds if each not in at_fork)


def assert_what_is_lacking_is_told(mine: Side, theirs: Side) -> None:
    """Every round that goes with `mine` is named, and was not held yet at the fork from which tokens are reckoned."""
    gone = set(mine.holds) - set(theirs.holds)
    found = lacking(mine.history, theirs.history)
    assert (found is None) <= (not gone)
    if found is None:
        return
    at_fork = {**theirs.forks, **mine.forks}[found.fork.manifest]
    assert not gone & set(at_fork)
    for branch, round in gone:
        assert any(each.branch == branch and each.start <= round < each.stop for each in found.stretches)


moves = st.lists(
    st.tuples(st.sampled_from(("commit", "split", "meet")), st.integers(0, 7), st.integers(0, 7)), max_size=40
)


@pytest.mark.full
@settings(max_examples=600, deadline=None)
@given(moves)
def test_no_round_is_ever_counted_twice(script: list[tuple[str, int, int]]) -> None:
    sides = [Side(History(name(0), (), Round(1), ()), ())]
    num_branches = 1
    for move, one, other in script:
        one %= len(sides)
        match move:
            case "commit":
                sides[one] = sides[one].commit()
            case "split" if len(sides) < 5:
                sides.append(sides[one].leave(name(num_branches)))
                num_branches += 1
            case "meet" if len(sides) > 1:
                other = [number for number in range(len(sides)) if number != one][other % (len(sides) - 1)]
                found = brought(sides[one], sides[other])
                assert_what_is_lacking_is_told(sides[one], sides[other])
                if found is not None:
                    sides[other] = sides[other].take_in(*found)
                del sides[one]
        for side in sides:
            assert len(set(side.holds)) == len(side.holds)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 4))
def test_of_two_sides_that_part_each_brings_all_that_it_alone_has(before: int, mine: int, theirs: int) -> None:
    stays = Side(History(name(0), (), Round(1), ()), ())
    for _ in range(before):
        stays = stays.commit()
    leaves = stays.leave(name(1))
    for _ in range(mine):
        leaves = leaves.commit()
    for _ in range(theirs):
        stays = stays.commit()
    found = brought(leaves, stays)
    assert found is not None
    assert {branch for branch, _ in found[1]} == {name(1)}
    assert len(found[1]) == mine
    back = brought(stays, leaves)
    assert (back is None) == (theirs == 0)
    if back is not None:
        assert len(back[1]) == theirs
    healed = stays.take_in(*found)
    assert brought(leaves, healed) is None


def test_a_branch_of_a_branch_brings_what_its_parent_has_not_brought() -> None:
    run = Side(History(name(0), (), Round(1), ()), ()).commit()
    first = run.leave(name(1)).commit()
    second = first.leave(name(2)).commit()
    whole = brought(second, run)
    assert whole is not None
    assert [each.branch for each in whole[0].stretches] == [name(1), name(2)]
    after = run.take_in(*brought(first, run))  # type: ignore[misc]
    rest = brought(second, after)
    assert rest is not None
    assert [each.branch for each in rest[0].stretches] == [name(2)]
    assert brought(first.commit(), run.take_in(*whole)) is None  # what its child has brought it cannot take out


def test_what_a_branch_brings_is_the_same_to_a_state_of_before_it_left_and_lies_ahead_of_that() -> None:
    before = Side(History(name(0), (), Round(1), ()), ()).commit()
    run = before.commit().commit()
    branch = run.leave(name(1)).commit()
    early, late = brought(branch, before), brought(branch, run)
    assert early == late is not None
    fork = early[0].fork  # type: ignore[index]
    assert is_ahead(fork, before.history)
    assert not is_ahead(fork, run.history)
    assert not is_ahead(fork, branch.history)


def test_what_follows_a_piece_that_was_taken_in_is_lacking_and_cannot_be_brought() -> None:
    run = Side(History(name(0), (), Round(1), ()), ()).commit()
    branch = run.leave(name(1)).commit()
    after = run.take_in(*brought(branch, run))  # type: ignore[misc]
    later = branch.commit()
    assert lacking(branch.history, after.history) is None
    assert fork_point(later.history, after.history) is None
    found = lacking(later.history, after.history)
    assert found is not None
    assert found.stretches == (Stretch(branch=name(1), start=Round(2), stop=Round(5)),)


def test_stretches_overlap_where_they_share_a_round() -> None:
    here = Stretch(branch=name(1), start=Round(3), stop=Round(6))
    for start, stop, is_shared in ((0, 3, False), (5, 9, True), (6, 9, False), (4, 5, True), (0, 9, True)):
        there = msgspec.structs.replace(here, start=Round(start), stop=Round(stop))
        assert here.overlaps(there) == there.overlaps(here) == is_shared
    assert not here.overlaps(msgspec.structs.replace(here, branch=name(2)))
