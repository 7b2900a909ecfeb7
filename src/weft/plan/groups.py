"""How long a round takes where more peers train than vote, and what each of them sends: leaves under electors.

    elector ── HandOn, certificate, record, results ──► leaf: inner steps ── Offer, payload ──► elector: mean, Ready

To the electorate's round (`timing`) all of this is how long an elector works before it announces: as long as its own
inner steps take, or until it has the payload of the last of its leaves.

    downwards    HandOn; then request and answer for each of three blobs, whoever is asked waiting for its own source:
                 5 hops and one for each step down the tree, and on each step up to NUM_HANDED copies leave one uplink
    upwards      Offer, request, answer: 3 hops, and whole payloads, PARALLEL at a time, over the aggregator's downlink

Leaves choose aggregators by a hash, so groups differ in size; rounds wait for the largest, as large as the largest of
so many is expected to be. Of a result that is handed on, all but one part are reckoned to be there before the first of
them leaves again: parts share the line.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.cost import training as cost
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.transport.memory import MSS_NBYTES
from weft.peer.group.groups import PARALLEL
from weft.plan.timing import Kind, Load, RoundTime, Way, hop_s, rank, round_time, stream_s, waited_for
from weft.sync.records.messages import MAX_GROUP
from weft.sync.round.groups import NUM_HANDED
from weft.sync.round.machine import FLOOR_S

# Canonical bytes, as cost.round_letters has those of the electorate.
_CLAIM_NBYTES = 170  # of a group in a manifest or plan
_RECORD_NBYTES, _STAKE_NBYTES = 420, 38  # of a group's record, and of each peer in it
_OFFER_NBYTES, _HAND_ON_NBYTES = 520, 230
_GOSSIP_BPS = 8 * 636  # of membership above MAX_MEMBERS peers, however many: benchmarks/reports/thousand.md


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Bytes of a round: of a mean elector, and of a mean leaf."""

    elector: cost.Traffic
    ward: cost.Traffic

    def mean(self, num_electors: int, num_leaves: int) -> cost.Traffic:
        both, num = self.elector.times(num_electors) + self.ward.times(num_leaves), num_electors + num_leaves
        return cost.Traffic(both.sent_nbytes // num, both.received_nbytes // num)


def parted(kinds: Sequence[Kind], num_electors: int) -> tuple[list[Kind], list[Kind]]:
    """Return the electors and the leaves among `kinds`: the maker and who is nearest, as those ask first.

    Of kinds that are as far away as each other, each has its share.
    """
    free = min(num_electors, sum(kind.count for kind in kinds))
    voting: dict[str, int] = {}
    for delay_s in sorted({kind.line.delay_s for kind in kinds}):
        alike = [kind for kind in kinds if kind.line.delay_s == delay_s]
        counts = [kind.count for kind in alike]
        num = min(free - (delay_s < kinds[0].line.delay_s), sum(counts))  # one place is the maker's
        voting |= {kind.name: count for kind, count in zip(alike, _shared(counts, num), strict=True)}
        free -= num
    electors = [replace(kind, count=voting[kind.name]) for kind in kinds if voting[kind.name]]
    leaves = [replace(kind, count=kind.count - voting[kind.name]) for kind in kinds if kind.count > voting[kind.name]]
    return electors, leaves


def largest_group(num_electors: int, num_leaves: int) -> int:
    """Return the leaves of the largest group: what is expected where each leaf chooses its aggregator by chance."""
    mean = num_leaves / num_electors
    spread = math.sqrt(mean * (1 - 1 / num_electors))
    return min(num_leaves, MAX_GROUP - 1, max(math.ceil(mean), round(mean + rank(num_electors) * spread)))


def grouped_time(kinds: Sequence[Kind], num_electors: int, load: Load) -> RoundTime:
    """Return the time of a round among electors, each of which waits for its leaves.

    Args:
        kinds: all peers.
        load: of a round among `num_electors`.
    """
    electors, leaves = parted(kinds, num_electors)
    if not leaves:
        return round_time(electors, load)
    waited, too_late = waited_for(kinds)
    late = tuple(kind.name for kind in too_late)
    awaited = [leaf for leaf in leaves if leaf.name not in late]
    num_leaves = sum(leaf.count for leaf in awaited)
    group = _spread(awaited, largest_group(num_electors, num_leaves)) if awaited else []
    chance_s = _chance_s(kinds, load, len(group), num_leaves) if group else 0.0
    chance_s += FLOOR_S if len(awaited) < len(leaves) else 0.0

    def busy(kind: Kind) -> Kind:
        train_s = max(kind.train_s, _group_s(kind, group, load) + chance_s) if kind.name not in late else kind.train_s
        return replace(kind, train_s=train_s, evaluate_s=max(0.0, kind.evaluate_s - (train_s - kind.train_s)))

    found = round_time([busy(kind) for kind in electors], load)
    slowest_s = max(kind.train_s for kind in waited)
    train_s = sum(kind.count * min(kind.train_s, slowest_s) for kind in kinds) / sum(kind.count for kind in kinds)
    wards_s = max(0.0, found.train_s + found.uneven_s - slowest_s)
    return replace(found, train_s=train_s, uneven_s=max(0.0, slowest_s - train_s), wards_s=wards_s, late=late)


def levels(load: Load, num_electors: int, num_leaves: int, round_s: float) -> Levels:
    """Return what an elector and a leaf send and receive in a round, messages and membership included."""
    e, size = num_electors, num_leaves / num_electors
    letters, num = cost.round_letters(e), num_electors + num_leaves
    claims = e * _CLAIM_NBYTES
    record = _RECORD_NBYTES + round((1 + size) * _STAKE_NBYTES)
    bulk = (e - 1) * (load.payload_nbytes + load.result_nbytes) // e
    # Ready has the record, what a leader sends has the claims.
    votes = cost.control_traffic(e).sent_nbytes + (e - 1) * (record + 3 * claims // e)
    handed = load.result_nbytes + letters.decided + claims + record + (e + 2) * cost.REQUEST_NBYTES
    if num <= MAX_MEMBERS:
        alive = round((num - 1) * round_s / cost.HEARTBEAT_S * cost.HEARTBEAT_NBYTES)
    else:
        alive = round(_GOSSIP_BPS / 8 * round_s)
    brought = load.payload_nbytes + _OFFER_NBYTES
    copies = min(float(NUM_HANDED), size)  # that leave an aggregator; leaves send the others
    told = size * (_HAND_ON_NBYTES + cost.REQUEST_NBYTES)
    return Levels(
        elector=cost.Traffic(
            round(bulk + votes + copies * handed + told) + alive, round(bulk + votes + size * brought) + alive
        ),
        ward=cost.Traffic(round(brought + (1 - copies / size) * handed) + alive, round(handed + told / size) + alive),
    )


def _shared(counts: Sequence[int], num: int) -> list[int]:
    whole = [num * count // sum(counts) for count in counts]
    rest = sorted(range(len(counts)), key=lambda at: (num * counts[at]) % sum(counts), reverse=True)
    for at in rest[: num - sum(whole)]:
        whole[at] += 1
    return whole


def _spread(leaves: Sequence[Kind], num: int) -> list[Kind]:
    """Return `num` leaves, of each kind its share, evenly mixed."""
    counts = _shared([leaf.count for leaf in leaves], num)
    places = [((at + 0.5) / count, leaf) for leaf, count in zip(leaves, counts, strict=True) for at in range(count)]
    return [leaf for _, leaf in sorted(places, key=lambda place: place[0])]


def _group_s(aggregator: Kind, leaves: Sequence[Kind], load: Load) -> float:
    """Return how long after a decision an aggregator has the payloads of all its leaves.

    From when one of them can be asked for on, all that come later share the aggregator's downlink and places.
    """
    ready = []
    for begun_s, leaf in zip(_begun_s(aggregator, leaves, load), leaves, strict=True):
        ready.append((begun_s + leaf.serve_s + leaf.train_s + 3 * hop_s(leaf, aggregator), leaf))
    ready.sort(key=lambda each: each[0])
    payload, done_s = 8 * load.payload_nbytes, 0.0
    for place, (ready_s, leaf) in enumerate(ready):
        later = [each for _, each in ready[place:]]
        one_s = max(payload / leaf.line.up_bps, stream_s(leaf, aggregator, load.payload_nbytes))
        all_s = max(
            len(later) * payload / aggregator.line.down_bps,
            sum(payload / each.line.up_bps for each in later) / PARALLEL,
        )
        done_s = max(done_s, ready_s + max(one_s, all_s))
    return done_s


def _begun_s(aggregator: Kind, leaves: Sequence[Kind], load: Load) -> list[float]:
    """Return how long after a decision each leaf has its results; the first are next to the tree's root."""
    givers, whole = [aggregator, *leaves], 1 - 1 / load.num_parts
    has = [(0.0, 0.0, 0.0)]  # since when each of them has the certificate, the record, the results
    for place, leaf in enumerate(leaves):
        at = place // NUM_HANDED
        giver, away_s = givers[at], hop_s(givers[at], leaf)
        copies = min(NUM_HANDED, len(leaves) - NUM_HANDED * at)
        certificate_s, record_s, result_s = has[at]
        certificate_s = max(hop_s(aggregator, leaf) + away_s, certificate_s) + away_s
        record_s = max(certificate_s + away_s, record_s) + away_s
        result_s = (
            max(record_s + away_s, result_s) + away_s + _handed_s(giver, leaf, copies, load) * (1 if not at else whole)
        )
        has.append((certificate_s, record_s, result_s))
    return [result_s for _, _, result_s in has[1:]]


def _handed_s(giver: Kind, leaf: Kind, copies: int, load: Load) -> float:
    nbytes = load.result_nbytes
    sent_s = 8 * copies * nbytes / giver.line.up_bps
    return max(sent_s, 8 * nbytes / leaf.line.down_bps, stream_s(giver, leaf, load.merged_nbytes[1]))


def _chance_s(kinds: Sequence[Kind], load: Load, size: int, num_leaves: int) -> float:
    """Return what jitter and lost packets add to the way of the latest leaf."""
    depth = math.ceil(math.log2(size / NUM_HANDED + 1))
    way, num_hops = Way(kinds, load, sum(kind.count for kind in kinds)), 8 + depth
    num_packets = math.ceil((load.payload_nbytes + load.result_nbytes) / MSS_NBYTES)
    return way.latest_s(num_hops, num_leaves) + way.again_s(num_leaves, num_hops) + way.again_s(num_leaves, num_packets)
