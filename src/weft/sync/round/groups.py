"""Groups: how peers that find no room in the electorate contribute through a member of it.

    leaf       --Offer----------------> aggregator   a payload, for the mean of this round and nobody else's
    aggregator --Ready, GroupRecord---> electorate   the group's mean, with the sum of its tokens
    manifest                                         names the record's digest; leases to the aggregator for all of them

To a round, a group is one member that brings more tokens; what is voted on knows no leaves. Who is in whose group
nobody decides: a leaf asks electors in an order of its own, and keeps to one at a time.

    V_g = sum_i v_i,   m_g = sum_i v_i x_i / V_g        the mean of a group, weighted as in `shares`
    sum_g V_g m_g / (sum_g V_g + a) = sum_i v_i x_i / (sum_i v_i + a)

so two levels give what one would, up to the rounding of what an aggregator encodes.

Which samples each peer of a group trains on follows from the manifest and the record.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Annotated

from msgspec import Meta

from weft.ids import Digest, PeerId, RunId
from weft.net.messages import HexBranch, HexDigest, HexPeer, HexRun
from weft.rng import order_key
from weft.sync.records import messages
from weft.sync.records.charter import Charter
from weft.wire import Record, digest

NUM_HANDED = 2  # leaves to which each peer of a group hands results on


class Offer(Record, frozen=True, kw_only=True):
    """What a leaf signs: a payload for one round and one aggregator."""

    run: HexRun
    branch: HexBranch
    round: Annotated[int, Meta(ge=0, le=messages.MAX_COUNT)]
    sponsor: HexPeer  # the aggregator
    tokens: Annotated[int, Meta(ge=1, le=messages.MAX_TOTAL)]
    payload: HexDigest  # of its encoded parts, one after the other
    tokens_per_s: Annotated[float, Meta(ge=0)]  # of its training; 0: not measured


def order_of(run: RunId, peer: PeerId, electorate: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Return the electors in the order in which `peer` asks them: another one for each, so that groups are even."""
    return tuple(sorted((each for each in electorate if each != peer), key=lambda each: order_key(run, peer, each)))


def record_of(
    base: messages.Base, aggregator: PeerId, stakes: Iterable[messages.Stake], payloads: Iterable[Digest]
) -> messages.GroupRecord:
    """Return the record of a group whose counted peers come first in `stakes`, in the order of their `payloads`."""
    stakes = tuple(stakes)
    return messages.GroupRecord(
        run=base.run,
        branch=base.branch,
        round=base.round,
        sponsor=aggregator,
        payloads=digest("".join(payloads).encode()),
        peers=bytes.fromhex("".join(stake.peer for stake in stakes)),
        tokens=tuple(stake.tokens for stake in stakes),
        samples=tuple(stake.samples for stake in stakes),
    )


def is_true(base: messages.Base, aggregator: PeerId, record: messages.GroupRecord) -> bool:
    """Return whether a record can be one of `aggregator` in this round; how many tokens count, claims say."""
    settings = base.charter.settings
    stakes = record.stakes
    peers = [stake.peer for stake in stakes]
    is_in_place = (record.run, record.branch, record.round) == (base.run, base.branch, base.round)
    return (
        is_in_place
        and record.sponsor == aggregator
        and len(set(peers)) == len(peers)
        and not (set(peers) - {aggregator}) & set(base.electorate)
        and not set(peers) & set(base.charter.banned)
        and any(stake.peer == aggregator and stake.samples for stake in stakes)
        and all(stake.samples <= settings.quota for stake in stakes)
    )


def tokens_of(record: messages.GroupRecord, peer: PeerId) -> int:
    """Return with how many tokens a record counts `peer`."""
    return next((stake.tokens for stake in record.stakes if stake.peer == peer), 0)


def slices(num: int, record: messages.GroupRecord, charter: Charter) -> dict[PeerId, range]:
    """Return which of the `num` samples of the aggregator's lease each peer of its group trains on.

    The aggregator first, the others in the order of the record, disjoint, in whole units. The lease may be another than
    was asked for: then the last are given what is left.

    Args:
        charter: by which they train on them.
    """
    unit, asked = charter.settings.unit, [stake for stake in record.stakes if stake.samples]
    asked.sort(key=lambda stake: stake.peer != record.sponsor)
    cut, start = dict[PeerId, range](), 0
    for stake in asked:
        wanted = num // len(asked) if charter.has_even_leases else max(stake.samples // unit, 1) * unit
        stop = min(start + wanted, num)
        if stop > start:
            cut[stake.peer] = range(start, stop)
        start = stop
    return cut


def parents(aggregator: PeerId, leaves: Sequence[PeerId]) -> dict[PeerId, PeerId]:
    """Return from whom each leaf fetches what was decided: a tree of `NUM_HANDED` branches, the first next to its root.

    So nobody sends it more than `NUM_HANDED` times, and with 63 leaves nobody is further away than six.
    """
    givers = [aggregator, *leaves]
    return {leaf: givers[place // NUM_HANDED] for place, leaf in enumerate(leaves)}


def may_close(expected: Set[PeerId], brought: Set[PeerId], away: Set[PeerId], is_grace_over: bool) -> bool:
    """Return whether an aggregator should make its group's mean now.

    Args:
        expected: who was to train for this round, the aggregator included.
        brought: whose payload is in the mean, or can never be.
        away: who is suspected, gone, or paused.
    """
    return is_grace_over or expected - away <= brought


def is_grace_due(expected: Set[PeerId], brought: Set[PeerId]) -> bool:
    """Return whether so many have brought theirs that the others have only a grace left: more than half."""
    return 2 * len(expected & brought) > len(expected)
