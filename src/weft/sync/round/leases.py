"""How much of the next data each member is leased: as much as it trains while the fastest trains a whole quota.

    pace    = the fastest member's speed, but at most `MAX_LEAD` times the median
    share_i = quota                                  where speed_i is about the pace, or not known
              quota speed_i / pace                   else, in whole units, one at least

So all finish together, and who is ten times slower brings a tenth. A member that is nearly as fast is leased as much as
the others: measured times wobble, and equal machines should train the same whatever the clock said.

Members measure and tell their own speed. Who claims too little is leased little; who claims too much is leased a quota,
as any stranger is. What one claims sets the pace of others only up to `MAX_LEAD` times the median, so nobody can starve
the others of data.

What was leased to somebody who is no member any more, and whom no manifest has counted since, is leased first, to
whoever is next; new samples follow. A member keeps what it was leased: it brings that as carry. Who left and comes back
is a member again, and keeps what is left of its own.

Where members are drawn for a round, the others are leased nothing and rest.

The leader proposes the shares; anybody can check that they are within bounds.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from weft.data.assign import Lease, leases, release
from weft.ids import PeerId, Tokens
from weft.rng import order_key
from weft.sync.method.choices import AmongConfig, SampleConfig
from weft.sync.records.charter import Charter
from weft.sync.records.messages import MAX_UNCOUNTED, Base, Brought, GroupClaim, Manifest
from weft.sync.round.groups import claims_in

EVEN = 0.7  # of the pace: times of equal machines differ by so much when they are busy
MAX_LEAD = 8.0  # beyond, a fast machine waits for the others' inner steps


def drawn(base: Base, charter: Charter, members: Iterable[PeerId]) -> set[PeerId]:
    """Return who of `members` trains in the round after that of `base`, by a lot that nobody can choose.

    Args:
        charter: that holds in it.
    """
    members, among = set(members), charter.settings.method.among
    if not isinstance(among, SampleConfig):
        return members
    lots = sorted(members, key=lambda peer: order_key("drawn", base.run, base.branch, base.round, peer))
    return set(lots[: num_drawn(among, len(lots))])


def without_lease(
    base: Base, charter: Charter, members: Iterable[PeerId], contributions: Iterable[Brought]
) -> set[PeerId]:
    """Return who of `members` is to be leased samples for the next round.

    Args:
        charter: that holds in it.
        contributions: what this round counts. Where a round waits for nobody, who is not counted is still at work.
    """
    members = set(members)
    if charter.settings.method.wait == "all":
        return drawn(base, charter, members)
    return members - {each.peer for each in _open(base, charter, contributions)}


def _open(base: Base, charter: Charter, contributions: Iterable[Brought]) -> list[Lease]:
    """Return the leases that are not counted yet. Where samples or inner steps have another length, all are void."""
    now, before = charter.settings, base.charter.settings
    if (now.seq_len, now.unit) != (before.seq_len, before.unit):
        return []
    done = {each.peer for each in contributions if each.legacy is None}
    return [each for each in base.uncounted if each.peer not in done]


def num_drawn(among: AmongConfig, num: int) -> int:
    """Return how many of `num` members train in a round."""
    return math.ceil(among.share * num) if isinstance(among, SampleConfig) else num


def shares(
    charter: Charter,
    members: Iterable[PeerId],
    speeds: Mapping[PeerId, float],
    groups: Mapping[PeerId, GroupClaim] = MappingProxyType({}),
) -> dict[PeerId, int]:
    """Return the samples that each member is to be leased.

    Args:
        charter: by which they train on them.
        speeds: of members, in samples (or tokens) per second, positive and finite, as far as they are known.
        groups: of members that were counted with one: they are leased what it asks for, within its bounds.
    """
    members = tuple(members)
    known = [speeds[peer] for peer in members if peer in speeds]
    pace = min(max(known), MAX_LEAD * median(known)) if known else 1.0
    return {
        peer: _group_share(charter, groups[peer]) if peer in groups else _share(charter, speeds.get(peer, pace) / pace)
        for peer in members
    }


def _group_share(charter: Charter, claim: GroupClaim) -> int:
    unit, most = charter.settings.unit, charter.settings.quota * claim.num_leased
    return most if charter.has_even_leases else min(max(claim.samples // unit * unit, unit), most)


def _share(charter: Charter, ratio: float) -> int:
    quota, unit = charter.settings.quota, charter.settings.unit
    if charter.has_even_leases or ratio >= EVEN:
        return quota
    return unit * max(1, int(quota // unit * ratio))


@dataclass(frozen=True)
class Leased:
    """What a manifest says of the data."""

    leases: tuple[Lease, ...]  # ascending by peer, and of one peer by start
    cursor: int
    uncounted: tuple[Lease, ...]
    leased_again: Tokens


def lease(base: Base, charter: Charter, counted: Iterable[Brought], wanted: Mapping[PeerId, int]) -> Leased:
    """Lease samples for the next round.

    Args:
        charter: that holds in it. Where samples or inner steps have another length by it, nothing is leased again.
        counted: what this round counts. A legacy is not what its bringer was leased.
        wanted: samples of each member of the next round; 0: it rests.
    """
    open_ones = _open(base, charter, counted)
    kept = [each for each in open_ones if each.peer in wanted]
    again, waiting, left = release([each for each in open_ones if each.peer not in wanted], wanted)
    fresh, cursor = leases(base.cursor, left)
    num_again = sum(each.num_windows for each in again)
    seq_len = charter.settings.seq_len
    return Leased(
        leases=tuple(sorted((*again, *fresh), key=lambda each: (each.peer, each.start))),
        cursor=cursor,
        uncounted=tuple(sorted((*kept, *waiting), key=lambda each: each.start))[-MAX_UNCOUNTED:],
        leased_again=Tokens(base.leased_again + num_again * seq_len),
    )


def are_fair(base: Base, charter: Charter, manifest: Manifest) -> bool:
    """Return whether the leases are what a leader may propose: for each member, in order, from a unit to a quota.

    For an aggregator that the manifest counts with its group, to as many quotas as there are peers to train on it.

    Args:
        charter: that holds after the manifest.
    """
    quota, unit = charter.settings.quota, charter.settings.unit
    wanted = dict.fromkeys(manifest.members, 0)
    for each in manifest.leases:
        wanted[each.peer] = wanted.get(each.peer, 0) + each.num_windows
    to_train = {peer for peer, num in wanted.items() if num}
    if len(wanted) != len(manifest.members) or to_train != without_lease(
        base, charter, manifest.members, manifest.contributions
    ):
        return False
    told = Leased(manifest.leases, manifest.cursor, manifest.uncounted, manifest.leased_again)
    if told != lease(base, charter, manifest.contributions, wanted):
        return False
    groups = claims_in(manifest)
    most = {peer: quota * (groups[peer].num_leased if peer in groups else 1) for peer in to_train}
    least = most if charter.has_even_leases else dict.fromkeys(to_train, unit)
    return all(least[peer] <= wanted[peer] <= most[peer] and wanted[peer] % unit == 0 for peer in to_train)
