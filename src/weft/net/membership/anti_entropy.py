"""What two members of a large swarm know differently, found with few bytes: pure functions.

    one side                      the other
      sums of its buckets ─────────►
      ◄─────────── what it lacks altogether; lists of the buckets that differ
      what is newer here, and its own lists of those ─────────►
      ◄─────────── what is newer there

What a bucket and its sum are, net/membership/members.py says.
"""

from collections.abc import Iterable, Iterator

from weft.net.membership.members import Accused, Lives, Members, Proof, added, bucket, proofs
from weft.net.messages import MAX_LISTED, NUM_BUCKETS, Listed

MAX_GIVEN = 256  # claims in answer to one comparison: a newcomer asks again a second later, and somebody else


def sums(members: Members) -> bytes:
    """Return the sums of the buckets here."""
    totals = [each.sum for each in members.buckets]
    if members.own is not None:
        place = bucket(members.me)
        totals[place] = added(totals[place], members.me, members.own.incarnation)
    return b"".join(total.to_bytes(8, "big") for total in totals)


def differing(members: Members, theirs: bytes) -> tuple[list[int], list[int]]:
    """Return the buckets that the other side has nothing in, and the others that differ."""
    mine = sums(members)
    empty: list[int] = []
    others: list[int] = []
    for index in range(NUM_BUCKETS):
        here, there = mine[8 * index : 8 * index + 8], theirs[8 * index : 8 * index + 8]
        if here != there:
            (others if any(there) else empty).append(index)
    return empty, others


def listing(members: Members, buckets: Iterable[int]) -> tuple[tuple[int, ...], tuple[Listed, ...]]:
    """Return as many of `buckets` as fit into one message, and who is present in them."""
    chosen: list[int] = []
    listed: list[Listed] = []
    for index in buckets:
        here = [Listed(peer=life.peer, incarnation=life.incarnation) for life, _ in _present(members, index)]
        if len(listed) + len(here) > MAX_LISTED:
            break
        chosen.append(index)
        listed += here
    return tuple(chosen), tuple(listed)


def everything(members: Members, buckets: Iterable[int]) -> list[Proof]:
    """Return what to tell somebody who knows nobody in `buckets`."""
    return [proof for index in buckets for each in _present(members, index) for proof in _proofs(*each)][:MAX_GIVEN]


def newer(members: Members, buckets: Iterable[int], listed: Iterable[Listed]) -> list[Proof]:
    """Return what is newer here than what somebody lists: later presences, and why those it lists are not present."""
    theirs = {each.peer: each.incarnation for each in listed}
    found: list[Proof] = []
    for index in buckets:
        for life, against in _present(members, index):
            if theirs.get(life.peer, -1) < life.incarnation:
                found += _proofs(life, against)
    for peer, incarnation in theirs.items():
        if peer in members.buried and members.entries[peer].life.incarnation >= incarnation:
            found += proofs(members.entries[peer])
    return found[:MAX_GIVEN]


def is_behind(members: Members, listed: Iterable[Listed]) -> bool:
    """Return whether somebody lists what is newer than what is known here."""
    for each in listed:
        entry = members.entries.get(each.peer)
        if each.peer != members.me and (entry is None or entry.life.incarnation < each.incarnation):
            return True
    return False


def _present(members: Members, index: int) -> Iterator[tuple[Lives, tuple[Accused, ...]]]:
    """Yield who of a bucket is alive or suspected, this peer included, and what is said against each."""
    if members.own is not None and bucket(members.me) == index:
        yield members.own, ()
    for peer in members.buckets[index].peers:
        yield members.entries[peer].life, members.entries[peer].against


def _proofs(life: Lives, against: tuple[Accused, ...]) -> list[Proof]:
    return [life.proof, *(accused.proof for accused in against)]
