"""How much of the next data each member is leased: as much as it trains while the fastest trains a whole quota.

    pace    = the fastest member's speed, but at most `MAX_LEAD` times the median
    share_i = quota                                  where speed_i is about the pace, or not known
              quota speed_i / pace                   else, in whole units, one at least

So all finish together, and who is ten times slower brings a tenth. A member that is nearly as fast is leased as much as
the others: measured times wobble, and equal machines should train the same whatever the clock said.

Members measure and tell their own speed. Who claims too little is leased little; who claims too much is leased a quota,
as any stranger is. What one claims sets the pace of others only up to `MAX_LEAD` times the median, so nobody can starve
the others of data.

The leader proposes the shares; anybody can check that they are within bounds. It does not know how speeds are measured.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from types import MappingProxyType

from weft.data.assign import leases
from weft.ids import PeerId
from weft.sync.charter import Charter
from weft.sync.messages import GroupClaim, Manifest

EVEN = 0.7  # of the pace: times of equal machines differ by so much when they are busy
MAX_LEAD = 8.0  # beyond, a fast machine waits for the others' inner steps


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


def are_fair(cursor: int, charter: Charter, manifest: Manifest) -> bool:
    """Return whether the leases are what a leader may propose: for each member one, in order, from a unit to a quota.

    For a sponsor that the manifest counts with its group, to as many quotas as there are peers to train on it.

    Args:
        cursor: of the manifest before.
        charter: that holds after this one.
    """
    quota, unit = charter.settings.quota, charter.settings.unit
    wanted = {lease.peer: lease.num_windows for lease in manifest.leases}
    if set(wanted) != set(manifest.members) or (manifest.leases, manifest.cursor) != leases(cursor, wanted):
        return False
    groups = {each.peer: each.group.num_leased for each in manifest.contributions if each.group is not None}
    most = {peer: quota * groups.get(peer, 1) for peer in wanted}
    least = most if charter.has_even_leases else dict.fromkeys(wanted, unit)
    return all(least[peer] <= num <= most[peer] and num % unit == 0 for peer, num in wanted.items())
