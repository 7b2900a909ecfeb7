"""How much of the data each member is leased, and what a leader may not propose."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charters import charter
from model.world import first_base
from weft.data.assign import Lease, leases
from weft.ids import PeerId
from weft.peer.chain import open_branch
from weft.sync.charter import Charter
from weft.sync.messages import Manifest
from weft.sync.shares import EVEN, MAX_LEAD, are_fair, shares

EVENLY = msgspec.structs.replace(charter(10, batch_size=4), has_even_leases=True)
CHARTER = charter(10, batch_size=4)
A, B, C, D = MEMBERS = first_base(4).electorate
CURSOR = 1000


def proposed(leased: tuple[Lease, ...], cursor: int) -> Manifest:
    base = first_base(4)
    opening = open_branch(base, MEMBERS, A, base.branch)
    return msgspec.structs.replace(opening, leases=leased, cursor=cursor)


def given_by(charter: Charter, wanted: dict[PeerId, int]) -> bool:
    return are_fair(CURSOR, charter, proposed(*leases(CURSOR, wanted)))


def test_who_is_slower_is_leased_as_much_less() -> None:
    speeds = {A: 100.0, B: 50.0, C: 10.0, D: 1.0}
    assert shares(CHARTER, MEMBERS, speeds) == {A: 40, B: 20, C: 4, D: 4}  # one unit at least


def test_one_that_claims_to_be_fast_beyond_belief_starves_nobody() -> None:
    speeds = {A: 1e18, B: 50.0, C: 50.0, D: 50.0}
    assert shares(CHARTER, MEMBERS, speeds) == {A: 40, **dict.fromkeys((B, C, D), 4 * int(10 / MAX_LEAD))}


def test_who_is_about_as_fast_is_leased_as_much() -> None:
    assert set(shares(CHARTER, MEMBERS, {A: 100.0, B: 100.0 * EVEN, C: 90.0}).values()) == {40}


def test_who_was_not_measured_is_leased_a_whole_quota() -> None:
    assert shares(CHARTER, MEMBERS, {A: 100.0, B: 10.0}) == {A: 40, B: 4, C: 40, D: 40}
    assert set(shares(CHARTER, MEMBERS, {}).values()) == {40}


def test_who_is_no_member_any_more_sets_no_pace() -> None:
    assert shares(CHARTER, (A, B), {A: 10.0, B: 10.0, C: 1000.0}) == {A: 40, B: 40}


def test_a_run_with_even_leases_leases_all_the_same() -> None:
    assert set(shares(EVENLY, MEMBERS, {A: 100.0, B: 1.0}).values()) == {40}


@given(st.lists(st.floats(min_value=1e-6, max_value=1e9), min_size=4, max_size=4))
def test_whatever_was_measured_the_shares_are_fair(speeds: list[float]) -> None:
    for each in (CHARTER, EVENLY):
        assert given_by(each, shares(each, MEMBERS, dict(zip(MEMBERS, speeds, strict=True))))


@pytest.mark.parametrize(
    ("charter", "wanted"),
    [
        (CHARTER, {A: 40, B: 40, C: 40, D: 44}),  # more than a quota
        (CHARTER, {A: 40, B: 40, C: 40, D: 6}),  # no whole inner step
        (CHARTER, {A: 40, B: 40, C: 40}),  # nothing for a member
        (CHARTER, {A: 40, B: 40, C: 40, D: 40, PeerId("ee" * 32): 4}),  # something for a stranger
        (EVENLY, {A: 40, B: 40, C: 40, D: 36}),
    ],
)
def test_a_leader_may_not_lease_otherwise(charter: Charter, wanted: dict[PeerId, int]) -> None:
    assert not given_by(charter, wanted)


def test_leases_join_and_end_at_the_cursor() -> None:
    leased, cursor = leases(CURSOR, dict.fromkeys(MEMBERS, 40))
    assert are_fair(CURSOR, CHARTER, proposed(leased, cursor))
    assert not are_fair(CURSOR, CHARTER, proposed(leased, cursor + 4))
    moved = tuple(msgspec.structs.replace(lease, start=lease.start + 4, stop=lease.stop + 4) for lease in leased)
    assert not are_fair(CURSOR, CHARTER, proposed(moved, cursor + 4))
    assert not are_fair(CURSOR, CHARTER, proposed((leased[0], *leased), cursor))
