import hashlib

from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.net.membership.members import (
    MAX_GIVEN,
    Accused,
    Lives,
    Members,
    believe,
    bury,
    differing,
    everything,
    is_behind,
    listing,
    newer,
    sums,
)
from weft.net.messages import MAX_LISTED, NUM_BUCKETS

PEERS = [PeerId(hashlib.sha256(f"peer {number}".encode()).hexdigest()) for number in range(600)]


def members(me, known, gone=()):
    """Return a view of `known` (number -> incarnation), in which some were accused and are gone."""
    made = Members(me=PEERS[me], instance=b"i" * 8, own=life(me, 0))
    for number, incarnation in known.items():
        made, _ = believe(made, life(number, incarnation), None, 0.0)
    for number in gone:
        accused = Accused(PEERS[number], b"i" * 8, known[number], PEERS[-1], ("accused", number, known[number]))
        made, _ = believe(made, accused, None, 0.0)
    return bury(made, 60.0)[0]


def life(number, incarnation):
    return Lives(PEERS[number], b"i" * 8, incarnation, ("life", number, incarnation))


def exchange(mine, theirs):
    """Return what the side that compares learns, and what the other does."""
    empty, others = differing(theirs, sums(mine))
    learnt = everything(theirs, empty)
    buckets, listed = listing(theirs, others)
    told = newer(mine, buckets, listed)
    if is_behind(mine, listed):
        learnt += newer(theirs, *listing(mine, buckets))
    return set(learnt), set(told)


def test_equal_views_differ_in_nothing():
    a, b = members(0, {1: 0, 2: 5, 3: 0}), members(1, {0: 0, 3: 0, 2: 5})
    assert sums(a) == sums(b)
    assert differing(a, sums(b)) == ([], [])


def test_one_incarnation_more_is_found_by_either_side():
    old, new = (
        members(0, dict.fromkeys(range(1, 300), 0)),
        members(0, {number: int(number == 7) for number in range(1, 300)}),
    )
    assert exchange(old, new) == ({("life", 7, 1)}, set())
    assert exchange(new, old) == (set(), {("life", 7, 1)})


def test_a_newcomer_learns_everybody_within_bounds():
    newcomer, member = members(0, {}), members(1, dict.fromkeys(range(2, 500), 0))
    learnt, _ = exchange(newcomer, member)
    assert MAX_GIVEN <= len(learnt) <= MAX_GIVEN + MAX_LISTED
    assert all(number != 0 for _, number, _ in learnt)  # nobody is told of itself
    assert len(differing(member, sums(newcomer))[0]) == NUM_BUCKETS - 1  # all but the newcomer's own


def test_why_a_peer_is_gone_here_is_told_to_who_lists_it():
    # Two in one bucket, so that it is not empty on either side.
    first, second = same_bucket()
    here, there = members(0, {first: 3, second: 0}, gone=[first]), members(0, {first: 3, second: 0})
    assert ("accused", first, 3) in exchange(here, there)[1]
    assert exchange(there, here) == (set(), {("life", first, 3)})  # which net/membership/swim.py contests


def same_bucket():
    seen = {}
    for number, peer in enumerate(PEERS[1:], start=1):
        other = seen.setdefault(int(peer[:2], 16) % NUM_BUCKETS, number)
        if other != number:
            return other, number
    raise AssertionError


VIEWS = st.dictionaries(st.integers(2, 60), st.integers(0, 3), max_size=30)


@given(VIEWS, VIEWS)
def test_after_comparing_both_know_the_newest_of_both(first, second):
    a, b = members(0, first), members(1, second)
    learnt, told = exchange(a, b)
    newest = {**second, **{n: max(i, second.get(n, -1)) for n, i in first.items()}}
    for number, incarnation in newest.items():
        if first.get(number, -1) < incarnation:
            assert ("life", number, incarnation) in learnt
        if second.get(number, -1) < incarnation and shares_bucket(b, number):
            assert ("life", number, incarnation) in told


def shares_bucket(view, number):
    bucket = int(PEERS[number][:2], 16) % NUM_BUCKETS
    known = [view.me, *view.entries]
    return any(int(peer[:2], 16) % NUM_BUCKETS == bucket for peer in known)
