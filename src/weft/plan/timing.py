"""How long a round takes among machines on lines: the way of its messages and bytes, added up.

    inner steps | Ready | ask, payloads | Gathered | Collect, Merged | ask, results | Holding | Propose, Accept | ...

Each arrow waits for the slowest that it needs: plans for all members, parts for all their contributions, proposals and
commits for a majority. Leaders rotate, so the figure is the mean over who leads. Machines that are alike are one
`Kind`.

    a payload's part    (n - 1) / n of a payload leaves each uplink, as much arrives: whichever takes longer
    jitter, loss        of many ways the slowest counts: `Way.late_s`
    a lossy stream      no faster than MSS / RTT sqrt(3 / (2 p))                    Mathis et al. (1997), equation 3

Payloads and results do not overlap: a result is complete only once every contribution to it has come.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from weft.cost import training as cost
from weft.net.transport.memory import CHUNK_NBYTES, MSS_NBYTES, NUM_REPEATS, RTO_S
from weft.peer.messages import HANDED_NBYTES
from weft.sync.round.machine import FIRST_S, FLOOR_S, TELL_S


@dataclass(frozen=True, kw_only=True)
class Line:
    """A machine's line to the middle of the network: two machines are as far apart as both are from there."""

    up_bps: float = math.inf
    down_bps: float = math.inf
    delay_s: float = 0.0
    jitter_s: float = 0.0  # at most so much later, by chance
    loss: float = 0.0  # share of the packets


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Members that are alike.

    Args:
        train_s: the inner steps of a round.
        evaluate_s: one evaluation, by the leader of a round.
        serve_s: what its processor does for a round beside training: encode, encrypt, check, merge.
    """

    name: str
    count: int
    line: Line
    train_s: float
    evaluate_s: float = 0.0
    serve_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a round moves, in parts of nearly equal size.

    Args:
        part_nbytes: the smallest and the largest part of a payload; `merged_nbytes`: of what is merged.
        evaluate_every: rounds from one evaluation to the next; 0: none. `num_parts`: of a vector.
    """

    payload_nbytes: int
    result_nbytes: int
    part_nbytes: tuple[int, int]
    merged_nbytes: tuple[int, int]
    evaluate_every: int = 0
    num_parts: int = 1

    @classmethod
    def of(cls, num: int, num_peers: int, payload: cost.Encoding, reply: cost.Encoding, every: int = 0) -> "Load":
        """Return the load of averaging `num` elements among `num_peers`."""
        sizes = [cost.part_size(num, num_peers, index) for index in range(num_peers)]
        least, most = min(sizes), max(sizes)
        return cls(
            payload_nbytes=payload.nbytes(num),
            result_nbytes=reply.nbytes(num),
            part_nbytes=(payload.nbytes(least), payload.nbytes(most)),
            merged_nbytes=(reply.nbytes(least), reply.nbytes(most)),
            evaluate_every=every,
            num_parts=num_peers,
        )


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """The seconds of a mean round, by what a mean member does in them."""

    train_s: float
    uneven_s: float = 0.0  # waits for the slowest member's inner steps
    contribute_s: float = 0.0  # payloads are under way
    result_s: float = 0.0  # merged parts are under way
    messages_s: float = 0.0  # so are messages, and both kinds of bytes until the first and after the last of them
    evaluate_s: float = 0.0  # the others wait for who evaluates
    serve_s: float = 0.0  # processors encode, encrypt, check and merge
    wards_s: float = 0.0  # results are on their way to leaves, and their payloads to their aggregators (`groups`)
    audit_s: float = 0.0  # states are hashed, and the round waits for who does training steps again (`cost.audits`)
    late: tuple[str, ...] = ()  # kinds that rounds do not wait for

    @property
    def total_s(self) -> float:
        exchange_s = self.contribute_s + self.result_s + self.messages_s + self.serve_s + self.wards_s
        return self.train_s + self.uneven_s + exchange_s + self.evaluate_s + self.audit_s

    @property
    def utilisation(self) -> float:
        """Return the share of a round in which the mean member trains."""
        return self.train_s / self.total_s


def round_time(kinds: Sequence[Kind], load: Load) -> RoundTime:
    """Return the time of a round in the long run: links are up, deadlines have been measured, and nobody fails."""
    waited, late = waited_for(kinds)
    num = sum(kind.count for kind in kinds)
    slowest_s, serve_s = max(kind.train_s for kind in waited), max(kind.serve_s for kind in waited)
    train_s = sum(kind.count * min(kind.train_s, slowest_s) for kind in kinds) / num
    every = load.evaluate_every
    if num == 1:
        evaluate_s = kinds[0].evaluate_s / every if every else 0.0
        return RoundTime(train_s=train_s, evaluate_s=evaluate_s, serve_s=serve_s)
    way = Way(kinds, load, num)
    total_s = _mean_s(way, waited, has_evaluation=False) + way.late_s() + (FLOOR_S if late else 0.0)
    evaluate_s = (
        (_mean_s(way, waited, has_evaluation=True) + way.late_s() - total_s) / every if every and not late else 0.0
    )
    contribute_s, result_s = way.bulk_s()
    # Where the slowest computer is not on the slowest line, its inner steps run while the others still fetch.
    result_s = min(result_s, max(0.0, total_s - slowest_s - serve_s - contribute_s))
    messages_s = max(0.0, total_s - slowest_s - serve_s - contribute_s - result_s)
    return RoundTime(
        train_s=train_s,
        uneven_s=slowest_s - train_s,
        contribute_s=contribute_s,
        result_s=result_s,
        messages_s=messages_s,
        evaluate_s=max(0.0, evaluate_s),
        serve_s=serve_s,
        late=tuple(kind.name for kind in late),
    )


def waited_for(kinds: Sequence[Kind]) -> tuple[list[Kind], list[Kind]]:
    """Return the kinds whose members a round waits for, and those that are too late from its first round on."""
    majority = sum(kind.count for kind in kinds) // 2 + 1
    quorum_s = _nth(((kind.train_s, kind.count) for kind in kinds), majority)
    waited = [kind for kind in kinds if kind.train_s - quorum_s <= FIRST_S]
    return waited, [kind for kind in kinds if kind not in waited]


def _mean_s(way: "Way", waited: Sequence[Kind], *, has_evaluation: bool) -> float:
    """Return the mean over leaders from one plan to the next."""
    total = 0.0
    for leader in way.kinds:
        starts = way.starts(leader, has_evaluation=has_evaluation)
        for number, following in enumerate(starts):
            weight = leader.count * following.count / way.num**2
            total += weight * way.planned_s(starts, number, waited)
    return total


@dataclass(frozen=True)
class _Start:
    """When members of a kind begin their next inner steps, in seconds from the plan."""

    kind: Kind
    count: int
    at_s: float


def _nth(times: Iterable[tuple[float, int]], number: int) -> float:
    """Return when the `number`-th of all is there, given times and how many come at each."""
    for time_s, count in sorted(times):
        number -= count
        if number <= 0:
            return time_s
    return math.inf


class Way:
    """One round after its plan, for a leader of each kind. Members are (kind, count) entries; the leader is its own."""

    def __init__(self, kinds: Sequence[Kind], load: Load, num: int) -> None:
        self.kinds, self.num = kinds, num
        self._load = load
        self._letters = cost.round_letters(num)
        self._others = num - 1

    def bulk_s(self) -> tuple[float, float]:
        """Return how long payloads are under way, and results: the slowest of all lines."""
        pairs = self._pairs()
        return max(self._payload_s(a, b) for a, b in pairs), max(self._result_s(a, b) for a, b in pairs)

    def _pairs(self) -> list[tuple[Kind, Kind]]:
        return [(a, b) for a in self.kinds for b in self.kinds if a is not b or b.count > 1]

    def starts(self, leader: Kind, *, has_evaluation: bool) -> list[_Start]:
        """Return when members begin their next inner steps; the leader comes first, as an entry of its own."""
        entries = [(leader, 1)] + [(kind, kind.count - (kind is leader)) for kind in self.kinds]
        entries = [(kind, count) for kind, count in entries if count]
        letters = self._letters
        # Uplinks are busy from the first request on, so the last member's plan counts half.
        planned = [0.0] + [hop_s(leader, kind) + self._send_s(leader, letters.collect) / 2 for kind, _ in entries[1:]]
        asking = _num_asking(self._load.merged_nbytes[1])
        # What is planned is here: it is merged at once.
        sent = [
            planned[j]
            + self._send_s(owner, letters.merged)
            + max(asking * hop_s(owner, other) for k, (other, count) in enumerate(entries) if k != j or count > 1)
            for j, (owner, _) in enumerate(entries)
        ]
        held = [
            max(
                sent[j] + hop_s(owner, member) + self._result_s(owner, member)
                for j, (owner, count) in enumerate(entries)
                if j != k or count > 1
            )
            + self._tail_s(member, self._load.merged_nbytes[1])
            for k, (member, _) in enumerate(entries)
        ]
        # Half of an even number is a majority with the tie-breaker in it, which every other half has.
        needs = {self.num // 2 + 1, (self.num + 1) // 2}
        decided = sum(self._decided_s(entries, held, need) for need in needs) / len(needs)
        told = [decided] + [
            decided + hop_s(leader, kind) + self._send_s(leader, letters.decided) for kind, _ in entries[1:]
        ]
        starts = [max(a, b) for a, b in zip(told, held, strict=True)]
        if has_evaluation:
            starts[0] += min(leader.evaluate_s, self._grace_s())
        return [_Start(kind, count, at_s) for (kind, count), at_s in zip(entries, starts, strict=True)]

    def planned_s(self, starts: Sequence[_Start], leader: int, waited: Sequence[Kind]) -> float:
        """Return when the next leader, one of the members of `starts[leader]`, has heard all."""
        ready = []
        for number, start in enumerate(starts):
            kind = start.kind
            if kind in waited:
                ready_s = start.at_s + kind.serve_s + kind.train_s + self._send_s(kind, self._letters.ready)
                ready.append(ready_s + self._gathered_s(starts, number, leader))
        return max(ready)

    def _gathered_s(self, starts: Sequence[_Start], source: int, leader: int) -> float:
        """Return how long after its announcement the leader knows that a member's payload has arrived everywhere."""
        first, sender = starts[leader].kind, starts[source].kind
        is_led = source == leader and starts[leader].count == 1  # the leader's own payload
        gathered = [] if is_led else [self._fetched_s(sender, first)]
        for k, other in enumerate(starts):
            taken = (k == source) + (k == leader and not is_led)  # who sends, and who leads, are no owners besides
            if other.count > taken:
                gathered.append(self._fetched_s(sender, other.kind) + hop_s(other.kind, first))
        return max(gathered)

    def _fetched_s(self, source: Kind, owner: Kind) -> float:
        """Return how long it takes from an announcement until an owner holds its part of the payload."""
        nbytes = self._load.part_nbytes[1]
        asked_s = (1 + _num_asking(nbytes)) * hop_s(source, owner)  # Ready, a request, the answer
        return asked_s + self._payload_s(source, owner) + self._tail_s(owner, self._load.part_nbytes[1]) + TELL_S

    def _decided_s(self, entries: Sequence[tuple[Kind, int]], held: Sequence[float], need: int) -> float:
        """Return when the leader, `entries[0]`, has a majority's votes."""
        leader = entries[0][0]
        back = [0.0] + [hop_s(kind, leader) for kind, _ in entries[1:]]
        counts = [count for _, count in entries]
        holding = [(held_s + back_s, count) for held_s, back_s, count in zip(held, back, counts, strict=True)]
        proposed = max(held[0], _nth(holding, need))
        sent_s = self._send_s(leader, self._letters.proposed) * need / self.num  # to the majority's last
        votes = [(proposed, 1)]
        for k in range(1, len(entries)):
            heard_s = proposed + sent_s + hop_s(leader, entries[k][0])
            votes.append((max(heard_s, held[k]) + back[k], counts[k]))  # who votes holds what it votes for
        return _nth(votes, need)

    # --- lines ---

    def _payload_s(self, source: Kind, owner: Kind) -> float:
        load = self._load
        sent_s = 8 * (load.payload_nbytes - load.part_nbytes[0]) / source.line.up_bps  # all but its own part
        received_s = 8 * self._others * load.part_nbytes[1] / owner.line.down_bps
        return max(sent_s, received_s, stream_s(source, owner, load.part_nbytes[1]))

    def _result_s(self, owner: Kind, member: Kind) -> float:
        load = self._load
        sent_s = 8 * self._others * load.merged_nbytes[1] / owner.line.up_bps
        received_s = 8 * (load.result_nbytes - load.merged_nbytes[0]) / member.line.down_bps
        return max(sent_s, received_s, stream_s(owner, member, load.merged_nbytes[1]))

    def _send_s(self, source: Kind, letter_nbytes: int) -> float:
        """Return how long a letter to all others occupies an uplink."""
        return 8 * self._others * letter_nbytes / source.line.up_bps

    @staticmethod
    def _tail_s(receiver: Kind, nbytes: int) -> float:
        """Return how long the last chunk occupies the downlink after it has left the uplink."""
        return 8 * min(nbytes, CHUNK_NBYTES) / receiver.line.down_bps

    # --- chance ---

    def late_s(self) -> float:
        """Return what jitter and lost packets add to a round.

        Each of n (n - 1) ways from a plan over a payload to a result has six hops, two where nobody asks, and the
        slowest of all is waited for; then the votes of a majority, one hop there and two back; then each member's way
        over the decision to its next announcement, two hops.
        """
        pairs = self.num * self._others
        nbytes = (self._load.part_nbytes[1], self._load.merged_nbytes[1])
        bulk = [max(1, math.ceil(each / MSS_NBYTES)) for each in nbytes]
        short = [num_packets for num_packets in bulk if num_packets <= NUM_REPEATS]
        asking = sum(map(_num_asking, nbytes))
        exchanged = self.latest_s(2 + asking, pairs) + self.again_s(pairs * (asking + sum(short)))
        exchanged += sum(self.again_s(pairs, num_packets) for num_packets in bulk if num_packets > NUM_REPEATS)
        voted = 3 * self._jitter_s() / 2 + self.again_s(3)
        return exchanged + voted + self.latest_s(2, self._others) + self.again_s(2 * self._others)

    def _jitter_s(self) -> float:
        jitters = sorted((kind.line.jitter_s for kind in self.kinds for _ in range(min(2, kind.count))), reverse=True)
        return sum(jitters[:2])

    def latest_s(self, num_hops: int, num_ways: int) -> float:
        """Return how late the latest of several ways is: their hops' mean, and as many deviations as its rank."""
        jitter_s = self._jitter_s()
        return min(num_hops * jitter_s, jitter_s * (num_hops / 2 + rank(num_ways) * math.sqrt(num_hops / 12)))

    def again_s(self, num_messages: int, num_packets: int = 1) -> float:
        """Return how late the latest of so many messages is, since packets are lost and sent again.

        That takes a timeout, or where many packets follow, a round trip.
        """
        loss = max(_loss(a, b) for a, b in self._pairs())
        trip_s = 2 * max(hop_s(a, b) for a, b in self._pairs())
        again_s = trip_s if num_packets > NUM_REPEATS else max(RTO_S, trip_s)
        return again_s * (1 - (1 - loss) ** (num_messages * num_packets))

    def _grace_s(self) -> float:
        """Return how long others wait for who evaluates: about as long as they differ anyhow."""
        spread_s = max(kind.train_s for kind in self.kinds) - min(kind.train_s for kind in self.kinds)
        return min(FIRST_S, max(FLOOR_S, spread_s))


def _num_asking(nbytes: int) -> int:
    """Return how many hops it takes to be told of a blob and to ask for it, before it comes: small ones are handed."""
    return 0 if 0 < nbytes <= HANDED_NBYTES else 2


def rank(num: int) -> float:
    """Return by how many deviations the largest of `num` normal values is expected to exceed their mean."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0  # Blom, 1958


def hop_s(a: Kind, b: Kind) -> float:
    return a.line.delay_s + b.line.delay_s


def _loss(a: Kind, b: Kind) -> float:
    return 1 - (1 - a.line.loss) * (1 - b.line.loss)


def stream_s(source: Kind, target: Kind, nbytes: int) -> float:
    """Return how long one stream takes for `nbytes`, however fast the lines are."""
    loss = _loss(source, target)
    if not loss:
        return 0.0
    return nbytes / MSS_NBYTES * 2 * hop_s(source, target) / math.sqrt(1.5 / loss)
