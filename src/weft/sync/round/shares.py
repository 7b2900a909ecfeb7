"""What each member's share is: of the mean (by `sync.records.weights`), of the next data, and of the vector that is
merged.

How much of the next data each member is leased: as much as it trains while the fastest trains a whole quota.

    pace    = the fastest member's speed, but at most `MAX_LEAD` times the median
    share_i = quota                                  where speed_i is about the pace, or not known
              quota speed_i / pace                   else, in whole units, one at least

So all finish together, and who is ten times slower brings a tenth. A member that is nearly as fast is leased as much as
the others: measured times wobble, and equal machines should train the same whatever the clock said.

Members measure and tell their own speed. Who claims too little is leased little; who claims too much is leased a quota,
as any stranger is. What one claims sets the pace of others only up to `MAX_LEAD` times the median, so nobody can starve
the others of data. Who is in quarantine sets none.

What was leased to somebody who is no member any more, and whom no manifest has counted since, is leased first, to
whoever is next; new samples follow. A member keeps what it was leased: it brings that as carry. Who left and comes back
is a member again, and keeps what is left of its own. Where members are drawn for a round, the others are leased nothing
and rest. The leader proposes the shares; anybody can check that they are within bounds.

How large a part of the vector each member owns: in proportion to its uplink.

    level_i = 16                                       where the uplink is at least half of the fastest, or not known
              16 rate_i / rate_max, as a power of two  else, down to 4
              0                                        below; for newcomers, who may still be fetching; for who is
                                                       reached through others

An owner sends its merged part to everybody, so who sends slower must own less, or all wait for it. Who sends eight
times slower owns nothing: its uplink is busy with its own payload. Levels are coarse, and one that was given stays as
long as the measured one is within a factor of four: leaders take turns and measure for themselves, and a payload whose
upload takes several rounds must be cut alike in all of them. While something of who is in quarantine waits, and not for
long, all levels stay: it has to be the same bytes when it counts.
"""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from msgspec import UNSET

from weft.data.assign import Lease, leases, release
from weft.ids import PeerId, Tokens
from weft.rng import order_key
from weft.sync.method.choices import AmongConfig, SampleConfig
from weft.sync.records import messages, quarantine
from weft.sync.records.acts import Weighed
from weft.sync.records.charter import Charter
from weft.sync.records.weights import awaited_weight, weight, weight_of
from weft.wire import digest_of


def contribution(charter: Charter, peer: PeerId, ready: messages.Ready) -> messages.Contribution:
    """Return what `peer` announces as a manifest holds it."""
    group = None if ready.group is None else claim_of(ready.group, charter)
    return messages.Contribution(
        peer=peer,
        tokens=ready.tokens,
        parts=ready.parts,
        group=group,
        legacy=ready.legacy,
        work=UNSET if ready.work is UNSET else digest_of(ready.work),
    )


def claim_of(record: messages.GroupRecord, charter: Charter) -> messages.GroupClaim:
    stakes = record.stakes
    others = [stake for stake in stakes if stake.peer != record.sponsor]
    return messages.GroupClaim(
        record=digest_of(record),
        weight=Tokens(sum(weight(charter, stake.tokens) for stake in stakes)),
        num_counted=sum(stake.tokens > 0 for stake in others),
        num_leased=1 + sum(stake.samples > 0 for stake in others),
        samples=sum(record.samples),
    )


def is_plain(manifest: messages.Manifest) -> bool:
    """Return whether results of a round are the mean of what members have trained for it, and of nothing else."""
    return not manifest.counters and all(each.legacy is None for each in manifest.contributions)


def weighed(base: messages.Base, manifest: messages.Manifest, leases: Iterable[Lease], peer: PeerId) -> Weighed | None:
    """Return what the mean of a round was made of that has counted a peer's own work; None: it cannot be taken out.

    A legacy is made shorter where parts are merged, so of what is beside one less is known. Where that round has taken
    out another false work, its results are less than what was brought to it.

    Args:
        base: of the round; manifest: that has decided it.
        leases: of the round.
    """
    mine, charter = messages.own_work(manifest, peer), base.charter
    if mine is None or not weight_of(charter, mine) or not is_plain(manifest):
        return None
    return Weighed(
        branch=manifest.branch,
        manifest=digest_of(manifest),
        weights=tuple(weight_of(charter, each) for each in manifest.contributions),
        late=awaited_weight(charter, manifest.awaited, leases, base.uncounted),
        method=digest_of(charter.settings.method),
    )


EVEN = 0.7  # of the pace: times of equal machines differ by so much when they are busy
MAX_LEAD = 8.0  # beyond, a fast machine waits for the others' inner steps


def drawn(base: messages.Base, charter: Charter, members: Iterable[PeerId]) -> set[PeerId]:
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
    base: messages.Base, charter: Charter, members: Iterable[PeerId], contributions: Iterable[messages.Brought]
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


def _open(base: messages.Base, charter: Charter, contributions: Iterable[messages.Brought]) -> list[Lease]:
    """Return the leases that are not counted yet. Where samples or inner steps have another length, all are void."""
    now, before = charter.settings, base.charter.settings
    if (now.seq_len, now.unit) != (before.seq_len, before.unit):
        return []
    done = {each.peer for each in contributions if each.legacy is None}
    return [each for each in base.uncounted if each.peer not in done]


def num_drawn(among: AmongConfig, num: int) -> int:
    return math.ceil(among.share * num) if isinstance(among, SampleConfig) else num


def shares(
    charter: Charter,
    members: Iterable[PeerId],
    speeds: Mapping[PeerId, float],
    groups: Mapping[PeerId, messages.GroupClaim] = MappingProxyType({}),
) -> dict[PeerId, int]:
    """Return the samples that each member is to be leased.

    Args:
        charter: by which they train on them.
        speeds: of members, in samples (or tokens) per second, positive and finite, as far as they are known.
        groups: of members that were counted with one: they are leased what it asks for, within its bounds.
    """
    members = tuple(members)
    told = {peer for peer in members if peer in speeds}
    known = [speeds[peer] for peer in quarantine.settled(charter, told) or told]
    pace = min(max(known), MAX_LEAD * median(known)) if known else 1.0
    return {
        peer: _group_share(charter, groups[peer]) if peer in groups else _share(charter, speeds.get(peer, pace) / pace)
        for peer in members
    }


def _group_share(charter: Charter, claim: messages.GroupClaim) -> int:
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


def lease(
    base: messages.Base, charter: Charter, counted: Iterable[messages.Brought], wanted: Mapping[PeerId, int]
) -> Leased:
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
        uncounted=tuple(sorted((*kept, *waiting), key=lambda each: each.start))[-messages.MAX_UNCOUNTED :],
        leased_again=Tokens(base.leased_again + num_again * seq_len),
    )


def are_fair(base: messages.Base, charter: Charter, manifest: messages.Manifest) -> bool:
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
    groups = messages.claims_in(manifest)
    most = {peer: quota * (groups[peer].num_leased if peer in groups else 1) for peer in to_train}
    least = most if charter.has_even_leases else dict.fromkeys(to_train, unit)
    return all(least[peer] <= wanted[peer] <= most[peer] and wanted[peer] % unit == 0 for peer in to_train)


LEAST = 4
STAYS = 4  # a level this many times higher or lower is a change of the line, not of who measured it


def uplinks(
    base: messages.Base, members: Iterable[PeerId], idle: Set[PeerId], rates: Mapping[PeerId, float]
) -> tuple[int, ...]:
    """Return the level of each of `members`, in their order.

    Args:
        idle: who is to own nothing: newcomers, who is in quarantine, and who is reached through others.
        rates: of members, in bytes per second, positive, as far as they were measured.
    """
    members = tuple(members)
    fastest = max((rates[peer] for peer in members if peer in rates), default=0.0)
    settled = zip(base.electorate, base.uplinks, strict=False)
    new = {*base.newcomers, *quarantine.members(base.charter)}
    before = {peer: level for peer, level in settled if peer not in new}
    levels = {peer: _level(rates[peer] / fastest) for peer in members if peer in rates}
    return tuple(0 if peer in idle else _next(before.get(peer), levels.get(peer)) for peer in members)


def uplinks_as_before(base: messages.Base, members: Iterable[PeerId]) -> tuple[int, ...]:
    """Return the levels that the members of this round have; who is new has none."""
    before = dict(zip(base.electorate, base.uplinks, strict=False))
    return tuple(before.get(peer, 0) for peer in members)


def _level(ratio: float) -> int:
    level = messages.MAX_UPLINK
    while level > LEAST and ratio * messages.MAX_UPLINK <= level / 2:
        level //= 2
    return level if ratio * messages.MAX_UPLINK > level / 2 else 0


def _next(before: int | None, level: int | None) -> int:
    if level is None:
        return messages.MAX_UPLINK if before is None else before
    if before is None:
        return level
    is_alike = max(level, 1) < STAYS * max(before, 1) and max(before, 1) < STAYS * max(level, 1)
    return before if is_alike else level
