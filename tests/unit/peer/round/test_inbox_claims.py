"""What members and aggregators are believed, played over manifests of rounds in which some are late, leave and come."""

from collections.abc import Collection, Mapping, Set

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charters import charter
from weft.events import Event, Notice
from weft.ids import BranchId, Digest, PeerId, RunId, Tokens
from weft.peer.chain import genesis, open_branch
from weft.peer.round.inbox import Claims
from weft.sync.records.messages import Base, Contribution, GroupRecord, Manifest, Ready, Stake, counted, next_base
from weft.sync.round.groups import record_of
from weft.sync.round.shares import claim_of, lease

CHARTER = charter(1)
QUOTA = CHARTER.settings.quota
LEASE = CHARTER.settings.quota_tokens  # of one peer
RUN = RunId("00" * 32)
MEMBERS = tuple(PeerId(f"{number:064x}") for number in range(1, 5))
A, B, C, D = MEMBERS
ABSURD = Tokens(10**18)

OPENING = open_branch(genesis(RUN, A, CHARTER), MEMBERS, A, BranchId(RUN))


def group(base: Base, aggregator: PeerId, num_leaves: int = 1) -> GroupRecord:
    leaves = [PeerId(f"{100 + number:064x}") for number in range(num_leaves)]
    stakes = [Stake(peer=peer, tokens=Tokens(LEASE), samples=QUOTA) for peer in (aggregator, *leaves)]
    return record_of(base, aggregator, stakes, [Digest("00" * 32)] * len(stakes))


def after(
    head: Manifest,
    tokens: Mapping[PeerId, int],
    members: Collection[PeerId] = MEMBERS,
    aggregators: Set[PeerId] = frozenset(),
) -> Manifest:
    """Return the manifest after `head` that counts so many tokens, and leases to `members` and two to `aggregators`."""
    base = next_base(head, CHARTER)
    brought = [
        Contribution(
            peer=peer,
            tokens=Tokens(num),
            parts=(),
            group=claim_of(group(base, peer), CHARTER) if peer in aggregators else None,
        )
        for peer, num in sorted(tokens.items())
    ]
    leased = lease(base, CHARTER, brought, {peer: QUOTA * (1 + (peer in aggregators)) for peer in members})
    return msgspec.structs.replace(
        head,
        round=base.round,
        previous=base.previous,
        contributions=tuple(map(counted, brought)),
        members=tuple(sorted(members)),
        joined=tuple(sorted(set(members) - set(head.members))),
        left=tuple(sorted(set(head.members) - set(members))),
        leases=leased.leases,
        cursor=leased.cursor,
        uncounted=leased.uncounted,
        leased_again=leased.leased_again,
        committed_tokens=Tokens(head.committed_tokens + sum(tokens.values())),
    )


def claims_from(*manifests: Manifest) -> Claims:
    """Return what a process knows that took over the first, and has followed the others."""
    claims = Claims(manifests[0], CHARTER, lambda event: None)
    for manifest in manifests[1:]:
        claims.follow(manifest, CHARTER)
    return claims


def believed(claims: Claims, head: Manifest, peer: PeerId) -> int:
    """Return how many tokens a peer is believed that announces for a group in the round after `head`."""
    base = next_base(head, CHARTER)
    return claims.believed(base, peer, Ready(tokens=ABSURD, parts=(), group=group(base, peer))).tokens


def all_brought(head: Manifest) -> dict[PeerId, int]:
    return {each.peer: each.num_windows * CHARTER.settings.seq_len for each in head.leases}


def test_a_member_brings_what_was_leased_to_it_since_it_was_counted_and_no_more() -> None:
    told: list[Event] = []
    claims = Claims(OPENING, CHARTER, told.append)
    late = after(OPENING, {A: LEASE, B: LEASE, C: LEASE})
    claims.follow(late, CHARTER)
    base = next_base(late, CHARTER)
    assert claims.believed(base, D, Ready(tokens=Tokens(2 * LEASE), parts=())).tokens == 2 * LEASE
    assert told == []
    assert claims.believed(base, A, Ready(tokens=Tokens(2 * LEASE), parts=())).tokens == LEASE
    assert isinstance(told[0], Notice)


def test_where_all_was_brought_a_group_brings_its_lease_alone() -> None:
    first = after(OPENING, all_brought(OPENING), aggregators={B})
    assert believed(claims_from(OPENING), OPENING, B) == LEASE
    assert believed(claims_from(OPENING, first), first, B) == 2 * LEASE


def test_what_was_leased_to_who_has_left_another_group_may_bring_once() -> None:
    left = after(OPENING, dict.fromkeys((A, B, C), LEASE), members=(A, B, C))
    claims = claims_from(OPENING, left)
    assert believed(claims, left, A) == 2 * LEASE
    brought = after(left, {A: 2 * LEASE, B: LEASE, C: LEASE}, members=(A, B, C), aggregators={A})
    claims.follow(brought, CHARTER)
    assert believed(claims, brought, B) == LEASE


def test_a_group_may_bring_twice_its_lease_of_what_has_not_come() -> None:
    late = after(OPENING, dict.fromkeys((A, B, C), LEASE))  # D may have died, and its leaves have gone to A
    assert believed(claims_from(OPENING, late), late, A) == 3 * LEASE
    later = after(late, dict.fromkeys((A, B, C), LEASE))
    assert believed(claims_from(OPENING, late, later), later, A) == 3 * LEASE


def test_who_was_just_started_believes_what_a_leaf_brings_of_a_group_whose_aggregator_died() -> None:
    first = after(OPENING, all_brought(OPENING), aggregators={A, B})
    missed = after(first, {B: 2 * LEASE, C: LEASE, D: LEASE}, aggregators={B})  # A has died
    back = after(missed, {A: LEASE, B: 2 * LEASE, C: LEASE, D: LEASE}, aggregators={B})  # its leaf has gone to B
    wanted = 3 * LEASE
    assert claims_from(OPENING, first, missed, back).allowance(next_base(back, CHARTER), B) >= wanted
    assert believed(claims_from(back), back, B) >= wanted


@st.composite
def histories(draw: st.DrawFn) -> list[Manifest]:
    """Draw manifests of rounds in which members are late, leave, come back, and bring what was leased to others."""
    chain = [OPENING]
    for _ in range(draw(st.integers(1, 8))):
        head = chain[-1]
        left = next_base(head, CHARTER).unclaimed
        tokens = dict[PeerId, int]()
        for peer in draw(st.sets(st.sampled_from(head.members), min_size=1)):
            tokens[peer] = min(draw(st.integers(1, 4)) * LEASE, left - sum(tokens.values()))
        members = set(MEMBERS) - draw(st.sets(st.sampled_from(MEMBERS), max_size=1))
        aggregators = draw(st.sets(st.sampled_from(MEMBERS)))
        chain.append(after(head, {peer: num for peer, num in tokens.items() if num}, members, aggregators))
    return chain


@pytest.mark.full
@given(histories(), st.data())
def test_nobody_brings_of_a_group_what_another_would_not_believe(chain: list[Manifest], data: st.DataObject) -> None:
    mine, theirs = (claims_from(*chain[data.draw(st.integers(0, len(chain) - 1)) :]) for _ in range(2))
    for peer in chain[-1].members:
        assert mine.allowance(next_base(chain[-1], CHARTER), peer) <= believed(theirs, chain[-1], peer)
