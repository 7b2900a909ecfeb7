"""What two views of a large swarm differ in, found with few bytes: pure functions.

    one side                      the other
      sums of its buckets ─────────►
      ◄─────────── what it lacks altogether; lists of the buckets that differ
      what is newer here, and its own lists of those ─────────►
      ◄─────────── what is newer there

A bucket holds the peers whose keys begin alike. Its sum covers the present ones with their incarnations; equal sums are
taken for equal buckets. Whoever makes keys whose sums cancel hides those keys, and nobody else's.

It does not know who said what, nor when to compare.
"""

from collections.abc import Iterable
from functools import lru_cache

from weft.ids import PeerId
from weft.net.messages import MAX_LISTED, NUM_BUCKETS, Listed
from weft.net.roll import MAX_KNOWN, Accused, Lives, Proof, Roll, present, proofs

MAX_GIVEN = 256  # claims in answer to one comparison: a newcomer asks again a second later, and somebody else

_MASK = (1 << 64) - 1


def bucket(peer: PeerId) -> int:
    """Return which bucket `peer` is in."""
    return int(peer[:2], 16) % NUM_BUCKETS


def sums(roll: Roll) -> bytes:
    """Return the sums of this view's buckets."""
    totals = [0] * NUM_BUCKETS
    for life, _ in present(roll):
        index, mixed = _summand(life.peer, life.incarnation)
        totals[index] += mixed
    return b"".join((total & _MASK).to_bytes(8, "big") for total in totals)


def differing(roll: Roll, theirs: bytes) -> tuple[list[int], list[int]]:
    """Return the buckets that the other side has nothing in, and the others that differ."""
    mine = sums(roll)
    empty: list[int] = []
    others: list[int] = []
    for index in range(NUM_BUCKETS):
        here, there = mine[8 * index : 8 * index + 8], theirs[8 * index : 8 * index + 8]
        if here != there:
            (others if any(there) else empty).append(index)
    return empty, others


def listing(roll: Roll, buckets: Iterable[int]) -> tuple[tuple[int, ...], tuple[Listed, ...]]:
    """Return as many of `buckets` as fit into one message, and who is present in them."""
    chosen: list[int] = []
    listed: list[Listed] = []
    members = _by_bucket(roll)
    for index in buckets:
        here = [Listed(peer=life.peer, incarnation=life.incarnation) for life, _ in members[index]]
        if len(listed) + len(here) > MAX_LISTED:
            break
        chosen.append(index)
        listed += here
    return tuple(chosen), tuple(listed)


def everything(roll: Roll, buckets: Iterable[int]) -> list[Proof]:
    """Return what to tell somebody who knows nobody in `buckets`."""
    members = _by_bucket(roll)
    return [proof for index in buckets for each in members[index] for proof in _proofs(*each)][:MAX_GIVEN]


def newer(roll: Roll, buckets: Iterable[int], listed: Iterable[Listed]) -> list[Proof]:
    """Return what is newer here than what somebody lists: later presences, and why those it lists are not present."""
    theirs = {each.peer: each.incarnation for each in listed}
    found: list[Proof] = []
    members = _by_bucket(roll)
    for index in buckets:
        for life, against in members[index]:
            if theirs.get(life.peer, -1) < life.incarnation:
                found += _proofs(life, against)
    for peer, incarnation in theirs.items():
        if peer in roll.buried and roll.entries[peer].life.incarnation >= incarnation:
            found += proofs(roll.entries[peer])
    return found[:MAX_GIVEN]


def is_behind(roll: Roll, listed: Iterable[Listed]) -> bool:
    """Return whether somebody lists what is newer than what is known here."""
    for each in listed:
        entry = roll.entries.get(each.peer)
        if each.peer != roll.me and (entry is None or entry.life.incarnation < each.incarnation):
            return True
    return False


def _by_bucket(roll: Roll) -> list[list[tuple[Lives, tuple[Accused, ...]]]]:
    members: list[list[tuple[Lives, tuple[Accused, ...]]]] = [[] for _ in range(NUM_BUCKETS)]
    for life, against in present(roll):
        members[bucket(life.peer)].append((life, against))
    return members


def _proofs(life: Lives, against: tuple[Accused, ...]) -> list[Proof]:
    return [life.proof, *(accused.proof for accused in against)]


@lru_cache(maxsize=MAX_KNOWN)  # asked for each peer with each comparison
def _summand(peer: PeerId, incarnation: int) -> tuple[int, int]:
    return bucket(peer), _mixed(int(peer[2:18], 16), incarnation)


def _mixed(peer: int, incarnation: int) -> int:
    word = (peer + incarnation * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    return (word ^ word >> 29) * 0x94D049BB133111EB & _MASK
