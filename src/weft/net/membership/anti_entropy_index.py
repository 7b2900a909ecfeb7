"""Who is present in a large swarm, in the buckets in which views are compared: an index of a roll.

A roll of a thousand changes with each claim that comes and is compared each second while it grows: to go through all of
it each time would cost the swarm the square of its size. So `roll.put` keeps this beside it, and
net/membership/anti_entropy.py reads it: a change touches one bucket.

A bucket holds the peers whose keys begin alike. Its sum covers the present ones with their incarnations; equal sums are
taken for equal buckets. Whoever makes keys whose sums cancel hides those keys, and nobody else's.
"""

import msgspec

from weft.ids import PeerId
from weft.net.messages import NUM_BUCKETS

_MASK = (1 << 64) - 1


class Bucket(msgspec.Struct, frozen=True):
    """Never changed in place."""

    peers: dict[PeerId, None] = {}
    sum: int = 0  # of their summands, modulo 2^64


View = tuple[Bucket, ...]
EMPTY: View = (Bucket(),) * NUM_BUCKETS


def bucket(peer: PeerId) -> int:
    """Return which bucket `peer` is in."""
    return int(peer[:2], 16) % NUM_BUCKETS


def moved(view: View, peer: PeerId, before: int | None, after: int | None) -> View:
    """Return the view as `peer` goes over from one incarnation to another; None: it is not present."""
    if before == after:
        return view
    place = bucket(peer)
    known = view[place]
    peers = known.peers
    if before is None:
        peers = {**peers, peer: None}
    elif after is None:
        peers = {other: None for other in peers if other != peer}
    total = added(added(known.sum, peer, after), peer, before, sign=-1)
    return (*view[:place], Bucket(peers, total), *view[place + 1 :])


def added(total: int, peer: PeerId, incarnation: int | None, sign: int = 1) -> int:
    """Return `total` and what `peer` adds to its bucket's sum."""
    return total if incarnation is None else (total + sign * _mixed(int(peer[2:18], 16), incarnation)) & _MASK


def _mixed(peer: int, incarnation: int) -> int:
    word = (peer + incarnation * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    return (word ^ word >> 29) * 0x94D049BB133111EB & _MASK
