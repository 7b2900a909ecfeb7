"""How much of the data each member is leased, and what a leader may not propose."""

from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charters import charter
from model.world import first_base
from weft.data.assign import Lease, leases
from weft.ids import PeerId, Tokens
from weft.peer.chain import open_branch
from weft.sync.method.choices import SampleConfig
from weft.sync.records.charter import Charter, Quarantined
from weft.sync.records.messages import MAX_UNCOUNTED, Base, Contribution, Manifest
from weft.sync.round.rules import is_quorum, is_under_way
from weft.sync.round.shares import EVEN, MAX_LEAD, are_fair, drawn, lease, shares

EVENLY = msgspec.structs.replace(charter(10, batch_size=4), has_even_leases=True)
CHARTER = charter(10, batch_size=4)
A, B, C, D = MEMBERS = first_base(4).electorate
CURSOR = 1000


def proposed(leased: tuple[Lease, ...], cursor: int) -> Manifest:
    base = first_base(4)
    opening = open_branch(base, MEMBERS, A, base.branch)
    return msgspec.structs.replace(opening, leases=leased, cursor=cursor)


def base_of(charter: Charter, *uncounted: Lease) -> Base:
    return msgspec.structs.replace(first_base(4), cursor=CURSOR, charter=charter, uncounted=uncounted)


def given_by(charter: Charter, wanted: dict[PeerId, int]) -> bool:
    return are_fair(base_of(charter), charter, proposed(*leases(CURSOR, wanted)))


def test_who_is_slower_is_leased_as_much_less() -> None:
    speeds = {A: 100.0, B: 50.0, C: 10.0, D: 1.0}
    assert shares(CHARTER, MEMBERS, speeds) == {A: 40, B: 20, C: 4, D: 4}  # one unit at least


def test_one_that_claims_to_be_fast_beyond_belief_starves_nobody() -> None:
    speeds = {A: 1e18, B: 50.0, C: 50.0, D: 50.0}
    assert shares(CHARTER, MEMBERS, speeds) == {A: 40, **dict.fromkeys((B, C, D), 4 * int(10 / MAX_LEAD))}


def test_who_is_in_quarantine_sets_no_pace() -> None:
    """Who has just come could else have all others train on an eighth."""
    waiting = msgspec.structs.replace(CHARTER, quarantined=(Quarantined(peer=A, left=3),))
    assert set(shares(waiting, MEMBERS, {A: 1e18, B: 50.0, C: 50.0, D: 50.0}).values()) == {40}
    assert shares(waiting, MEMBERS, {A: 5.0, B: 50.0}) == {A: 4, B: 40, C: 40, D: 40}
    assert shares(waiting, MEMBERS, {A: 5.0})[A] == 40, "nobody else is known"


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
    assert are_fair(base_of(CHARTER), CHARTER, proposed(leased, cursor))
    assert not are_fair(base_of(CHARTER), CHARTER, proposed(leased, cursor + 4))
    moved = tuple(msgspec.structs.replace(lease, start=lease.start + 4, stop=lease.stop + 4) for lease in leased)
    assert not are_fair(base_of(CHARTER), CHARTER, proposed(moved, cursor + 4))
    assert not are_fair(base_of(CHARTER), CHARTER, proposed((leased[0], *leased), cursor))


# --- leases of those that left ---

DEAD = PeerId("dd" * 32)


def brought(*peers: PeerId) -> list[Contribution]:
    return [Contribution(peer=peer, tokens=Tokens(8), parts=()) for peer in peers]


def test_what_was_leased_to_who_left_is_leased_first() -> None:
    base = base_of(CHARTER, Lease(peer=DEAD, start=880, stop=920), Lease(peer=A, start=920, stop=960))
    leased = lease(base, CHARTER, brought(B, C), {A: 16, B: 16, C: 16, D: 16})
    assert leased.leases == (
        Lease(peer=A, start=880, stop=896),
        Lease(peer=B, start=896, stop=912),
        Lease(peer=C, start=912, stop=920),
        Lease(peer=C, start=1000, stop=1008),
        Lease(peer=D, start=1008, stop=1024),
    )
    assert (leased.cursor, leased.leased_again) == (1024, 40 * 8)
    assert leased.uncounted == (Lease(peer=A, start=920, stop=960),)  # A's carry


def test_what_was_counted_is_not_leased_again() -> None:
    base = base_of(CHARTER, Lease(peer=DEAD, start=880, stop=920))
    leased = lease(base, CHARTER, brought(DEAD), dict.fromkeys(MEMBERS, 40))
    assert (leased.leases, leased.cursor) == leases(CURSOR, dict.fromkeys(MEMBERS, 40))
    assert leased.uncounted == ()


def test_what_nobody_has_time_for_waits() -> None:
    base = base_of(CHARTER, Lease(peer=DEAD, start=800, stop=1000))
    leased = lease(base, CHARTER, [], {A: 40, B: 40})
    assert leased.cursor == CURSOR
    assert leased.uncounted == (Lease(peer=DEAD, start=880, stop=1000),)


def test_of_many_leases_that_were_not_counted_the_newest_are_remembered() -> None:
    old = [Lease(peer=A, start=4 * number, stop=4 * number + 4) for number in range(MAX_UNCOUNTED + 1)]
    leased = lease(base_of(CHARTER, *old), CHARTER, [], {A: 40})
    assert leased.uncounted == tuple(old[1:])


@pytest.mark.parametrize("amended", [{"seq_len": 16}, {"batch_size": 8}])
def test_samples_of_another_length_are_not_leased_again(amended: dict[str, int]) -> None:
    after = charter(10, **({"batch_size": 4} | amended))
    leased = lease(base_of(CHARTER, Lease(peer=DEAD, start=880, stop=920)), after, [], {A: 40})
    assert (leased.leases, leased.uncounted) == ((Lease(peer=A, start=1000, stop=1040),), ())


@pytest.mark.parametrize("change", [{"uncounted": ()}, {"leased_again": 0}, {"cursor": 1040}])
def test_a_leader_may_not_forget_what_is_to_be_leased_again(change: dict[str, Any]) -> None:
    base = base_of(CHARTER, Lease(peer=DEAD, start=880, stop=920), Lease(peer=A, start=920, stop=960))
    leased = lease(base, CHARTER, [], dict.fromkeys(MEMBERS, 40))
    manifest = msgspec.structs.replace(
        proposed(leased.leases, leased.cursor), uncounted=leased.uncounted, leased_again=leased.leased_again
    )
    assert are_fair(base, CHARTER, manifest)
    assert not are_fair(base, CHARTER, msgspec.structs.replace(manifest, **change))


# --- members that are drawn ---


def sampled(share: float, charter: Charter = EVENLY) -> Charter:
    method = msgspec.structs.replace(charter.settings.method, among=SampleConfig(share=share))
    return msgspec.structs.replace(charter, settings=msgspec.structs.replace(charter.settings, method=method))


@pytest.mark.parametrize(("share", "num"), [(0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (1.0, 4)])
def test_a_share_of_the_members_is_drawn_rounded_up(share: float, num: int) -> None:
    assert len(drawn(first_base(4), sampled(share), MEMBERS)) == num
    assert drawn(first_base(4), EVENLY, MEMBERS) == set(MEMBERS)


def test_over_many_rounds_all_are_drawn_about_equally_often() -> None:
    often = dict.fromkeys(MEMBERS, 0)
    for number in range(400):
        for peer in drawn(msgspec.structs.replace(first_base(4), round=number), sampled(0.5), MEMBERS):
            often[peer] += 1
    assert all(160 < num < 240 for num in often.values())


@pytest.mark.parametrize("charter", [sampled(0.5), sampled(0.5, CHARTER)], ids=["even", "by speed"])
def test_a_leader_leases_to_those_that_are_drawn_and_to_nobody_else(charter: Charter) -> None:
    right = drawn(base_of(charter), charter, MEMBERS)
    (first, *_), others = sorted(right), sorted(set(MEMBERS) - right)
    assert given_by(charter, dict.fromkeys(right, 40))
    assert not given_by(charter, dict.fromkeys(MEMBERS, 40))
    assert not given_by(charter, {first: 40})
    assert not given_by(charter, dict.fromkeys([first, others[0]], 40))


def test_a_round_is_under_way_once_half_of_those_that_were_drawn_are_ready() -> None:
    base = msgspec.structs.replace(first_base(4), resting=(A, D))
    assert not is_under_way(base, [])
    assert not is_under_way(base, [A, D])
    assert is_under_way(base, [B])
    assert is_under_way(base, [B, C])
    all_train = first_base(4)
    for num in range(5):
        for heard in combinations(MEMBERS, num):
            assert is_under_way(all_train, heard) == is_quorum(all_train, heard)
