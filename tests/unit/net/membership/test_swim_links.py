import hashlib
import random

import pytest

from weft.ids import PeerId
from weft.net.membership.swim import MAX_ALL, MIN_BOUNDED, NUM_FAR, NUM_RING, SETTLE_S, kept, watches_all


def crowd(num):
    return [PeerId(hashlib.sha256(f"peer {number}".encode()).hexdigest()) for number in range(num)]


def secret(peer):
    return hashlib.sha256(f"secret of {peer}".encode()).digest()


def graph(peers, known=None):
    """Return who is linked to whom: a link stands where either side keeps it."""
    links = {peer: set() for peer in peers}
    for peer in peers:
        for other in kept(peer, known or peers, secret(peer)):
            if other in links:
                links[peer].add(other)
                links[other].add(peer)
    return links


def reached(links, start):
    steps, front = {start: 0}, [start]
    for peer in front:
        for other in sorted(links[peer]):
            if other not in steps:
                steps[other] = steps[peer] + 1
                front.append(other)
    return steps


@pytest.mark.full
@pytest.mark.parametrize("num", [33, 100, 1000])
def test_few_links_connect_everybody_in_few_steps(num):
    peers = crowd(num)
    links = graph(peers)
    degrees = [len(others) for others in links.values()]
    assert 10 <= sum(degrees) / num <= 14
    assert min(degrees) >= 2 * NUM_RING + NUM_FAR - 2  # a far one may be near as well
    assert max(degrees) <= 24
    steps = reached(links, peers[0])
    assert len(steps) == num
    assert max(steps.values()) <= 5


@pytest.mark.full
def test_a_third_that_dies_at_once_leaves_the_others_connected():
    peers = crowd(1000)
    living = [peer for place, peer in enumerate(peers) if place % 3]
    assert len(reached(graph(living, known=peers), living[0])) == len(living)


def test_whoever_is_near_on_the_ring_watches_from_both_sides():
    peers = crowd(200)
    mine = {peer: set(kept(peer, peers, secret(peer))) for peer in peers}
    far = {peer: set(kept(peer, peers, bytes(32))) for peer in peers}  # another secret, the same ring
    for peer in peers:
        near = mine[peer] & far[peer]
        assert sum(peer in mine[other] for other in near) >= 2 * NUM_RING


def test_the_dead_are_replaced_by_the_next_on_the_ring():
    peers = crowd(100)
    watched = peers[0]
    watchers = {peer for peer in peers if watched in kept(peer, peers, secret(peer))}
    living = [peer for peer in peers if peer not in watchers]
    assert sum(watched in kept(peer, living, secret(peer)) for peer in living if peer != watched) >= 2 * NUM_RING


@pytest.mark.full
def test_a_newcomer_moves_few_links():
    peers = crowd(1001)
    before = {peer: kept(peer, peers[:-1], secret(peer)) for peer in peers[:-1]}
    moved = sum(before[peer] != kept(peer, peers, secret(peer)) for peer in peers[:-1])
    assert 4 <= moved <= 18


@pytest.mark.parametrize("seed", range(3))
def test_it_is_enough_to_choose_among_those_kept_and_those_that_came(seed):
    me, *peers = crowd(200)
    draw = random.Random(seed)
    present, chosen = set(peers[:5]), kept(me, peers[:5], secret(me))
    for _ in range(100):
        come = set(draw.sample(peers, draw.randrange(6)))
        present |= come
        chosen = kept(me, come.union(chosen), secret(me))
        assert chosen == kept(me, present, secret(me))
        gone = set(draw.sample(sorted(present), min(len(present), 3))).difference(chosen)
        present -= gone
        assert chosen == kept(me, present, secret(me))


def test_far_links_follow_from_the_secret_alone():
    peers = crowd(500)
    assert kept(peers[0], peers, bytes(32)) == kept(peers[0], reversed(peers), bytes(32))
    assert kept(peers[0], peers, bytes(32)) != kept(peers[0], peers, bytes(31) + b"x")
    assert peers[0] not in kept(peers[0], peers, bytes(32))


def test_all_links_are_kept_up_to_thirty_two_and_again_below_twenty_four():
    assert watches_all(True, MAX_ALL, 1e6, False)
    assert not watches_all(True, MAX_ALL + 1, 0.0, False)
    assert not watches_all(False, MIN_BOUNDED, 1e6, False)
    assert not watches_all(False, MIN_BOUNDED - 1, SETTLE_S - 1, False)
    assert watches_all(False, MIN_BOUNDED - 1, SETTLE_S, False)


def test_who_is_told_of_few_links_follows_unless_it_knows_better():
    assert not watches_all(True, MIN_BOUNDED, 1e6, True)
    assert not watches_all(True, 2, 0.0, True)  # a newcomer
    assert watches_all(True, MIN_BOUNDED - 1, SETTLE_S, True)


@pytest.mark.parametrize("num_known", range(1, 40))
@pytest.mark.parametrize("is_told", [True, False])
def test_nobody_goes_to_and_fro(num_known, is_told):
    settled = watches_all(False, num_known, SETTLE_S, is_told)
    assert watches_all(settled, num_known, SETTLE_S, is_told) == settled
