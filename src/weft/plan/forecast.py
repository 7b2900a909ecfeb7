"""What a run takes: seconds, tokens per second, bytes, memory, energy, money, and the same in one data centre.

round       timing.round_time, with what processors do beside it
speed       tokens of a round / its seconds
energy      watts while a machine trains, a share of them while it waits
multiplier  what the run takes by what the data centre takes, as a product of named parts
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import torch

from weft.codec.build import build as build_codec
from weft.codec.config import LOSSY
from weft.cost import training as cost
from weft.cost.audits import WRITE_S, AuditCost, Audited, Customs, Kept, Speed, cost_of
from weft.errors import ConfigError
from weft.model.config import num_base_parameters
from weft.model.flat import layout
from weft.peer.audit import between, kept, trace
from weft.peer.group.groups import PARALLEL
from weft.plan.groups import Levels, grouped_time, largest_group, levels
from weft.plan.loss import NONE, Penalty, penalty
from weft.plan.processor import merge_s, processor_time, sent_nbytes
from weft.plan.question import Machines, Question
from weft.plan.timing import Kind, Load, RoundTime
from weft.run.config import DpoConfig
from weft.sync import costs
from weft.sync.costs import audit_memory_nbytes, num_moments, peer_memory
from weft.sync.merge.method import most_sent
from weft.sync.method.choices import NesterovConfig
from weft.sync.round.shares import num_drawn
from weft.training.device import decoder, thinned
from weft.training.text_memory import TextMemory, answer_memory
from weft.verify.suspicion import NEW, TIMES

HOUR_S, DAY_S, KWH_J = 3600.0, 86_400.0, 3.6e6
# Of the fastest's speed: who has so much is leased as much. And how much faster than the median the fastest may count.
EVEN, MAX_LEAD = 0.7, 8.0
AUDITS = Customs(
    times=TIMES,
    num_new=NEW,
    leases=Kept(trace.KEPT_ROUNDS, trace.KEPT_S),
    parts=Kept(kept.KEPT_ROUNDS, kept.KEPT_S),
    between=Kept(between.KEPT_ROUNDS, between.KEPT_S),
)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How one method would run.

    Args:
        tokens: of all members in a round.
        traffic: of a mean member in a round, messages and heartbeats included.
        total_s: until the run's tokens are committed.
        penalty: in loss; None: nothing was published that would tell.
        levels: traffic of an elector and of a leaf; None: all vote.
        audits: what they take, in `round` and `traffic`; None: there are none.
    """

    round: RoundTime
    tokens: int
    num_rounds: int
    tokens_per_s: float
    traffic: cost.Traffic
    total_s: float
    penalty: Penalty | None
    levels: Levels | None = None
    audits: AuditCost | None = None

    @property
    def kept_nbytes(self) -> int:
        """Return the bytes on the disk that audits may ask for."""
        return 0 if self.audits is None else self.audits.disk_nbytes(self.round.total_s)

    @property
    def audited_speed(self) -> float:
        """Return the speed as a share of that without audits."""
        return 1 - self.round.audit_s / self.round.total_s

    @property
    def gigabytes_per_day(self) -> float:
        return cost.gigabytes_per_day(self.traffic.sent_nbytes + self.traffic.received_nbytes, self.round.total_s)

    @property
    def same_loss_s(self) -> float | None:
        """Return how long it takes to the loss of data-parallel training on as many tokens; None: not known."""
        if self.penalty is None or self.penalty.more_tokens is None:
            return None
        return self.total_s * self.penalty.more_tokens


@dataclass(frozen=True, kw_only=True)
class Hold:
    """What one peer holds in memory at its peak.

    Args:
        on_device: bytes on a GPU; 0 where it trains on its CPU. `on_host`: the rest.
        micro_batch: samples at a time, as many as fit.
        has_room: whether one sample at a time fits; None: the device's memory is not known.
    """

    machines: str
    on_device: int
    on_host: int
    micro_batch: int
    has_room: bool | None


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What a run takes of energy and money."""

    kwh: float
    money: float
    rent: float  # of it: machines paid by the hour


@dataclass(frozen=True, kw_only=True)
class Part:
    """One factor of the multiplier."""

    name: str
    factor: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """How many times as long a run takes to the same loss as in the data centre, as much energy, as much money.

    Time and energy are the products of their parts.
    """

    time: tuple[Part, ...]
    energy: tuple[Part, ...]
    money: float

    @property
    def of_time(self) -> float:
        return math.prod(part.factor for part in self.time)

    @property
    def of_energy(self) -> float:
        return math.prod(part.factor for part in self.energy)

    @property
    def of_distance(self) -> float:
        """Return what being apart costs in time, were the machines the same."""
        return math.prod(part.factor for part in self.time if part.name != "machines")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    question: Question
    pace: Pace
    memory: tuple[Hold, ...]
    bill: Bill
    cluster_s: float
    cluster_bill: Bill
    multiplier: Multiplier


def forecast(question: Question) -> Forecast:
    """Return what the run of `question` takes."""
    pace, cluster = pace_of(question), question.cluster
    cluster_wait = _ddp_wait(question)
    cluster_s = question.train.tokens * cluster_wait / (cluster.count * cluster.tokens_per_s)
    bill, cluster_bill = _bill(question, pace), _cluster_bill(question, cluster_s)
    return Forecast(
        question=question,
        pace=pace,
        memory=tuple(hold(question, each) for each in question.machines),
        bill=bill,
        cluster_s=cluster_s,
        cluster_bill=cluster_bill,
        multiplier=Multiplier(
            time=_time_parts(question, pace, cluster_wait),
            energy=_energy_parts(question, pace, bill, cluster_bill),
            money=_method_part(pace).factor * bill.money / cluster_bill.money if cluster_bill.money else 0.0,
        ),
    )


# --- pace ---


def pace_of(question: Question) -> Pace:
    """Return how the method of `question` would run."""
    train, num_peers = question.train, question.num_peers
    leased = leased_tokens(question)
    load, num_electors = load_of(question), question.num_electors
    kinds = [_kind(question, each, leased[each.name], load) for each in question.machines]
    audits = _audits(question, load, leased)
    round = grouped_time(kinds, num_electors, load)
    if audits is not None:
        round = replace(round, audit_s=audits.round_s)
    share = num_drawn(question.choices.among, num_peers) / num_peers  # of all machines, whichever are drawn
    tokens = sum(each.count * leased[each.name] for each in question.machines)
    late = [each for each in question.machines if each.name in round.late]
    per_s = (tokens - sum(each.count * leased[each.name] for each in late)) / round.total_s
    per_s += sum(each.count * each.tokens_per_s for each in late)  # hand in what they have, rounds later
    tokens, per_s = int(share * tokens), share * per_s
    num_leaves = num_peers - num_electors
    parted = levels(load, num_electors, num_leaves, round.total_s) if num_leaves else None
    return Pace(
        round=round,
        tokens=tokens,
        num_rounds=math.ceil(train.tokens / (per_s * round.total_s)),
        tokens_per_s=per_s,
        traffic=(
            _traffic(load, num_peers, share, round.total_s) if parted is None else parted.mean(num_electors, num_leaves)
        )
        + (audits.traffic if audits is not None else cost.Traffic(0, 0)),
        total_s=max(train.tokens / per_s, round.total_s),  # the first round is done whole
        penalty=_penalty(question),
        levels=parted,
        audits=audits,
    )


def _audits(question: Question, load: Load, leased: dict[str, int]) -> AuditCost | None:
    """Return what audits take of a member that trains as long as the slowest."""
    if (trust := question.audits) is None:
        return None
    slowest = max(question.machines, key=lambda each: leased[each.name] / each.tokens_per_s)
    num, choices = question.num_parameters, question.choices
    audited = Audited(
        customs=AUDITS,
        rate=trust.audit_rate,
        trace_every=trust.trace_every,
        num_members=question.num_peers,
        num_rounds=math.ceil(question.train.tokens / sum(each.count * leased[each.name] for each in question.machines)),
        num_parameters=num,
        num_moments=num_moments(question.train.optimizer),
        has_error=choices.feedback is not None,
        num_steps=max(1, leased[slowest.name] // question.tokens_per_step),
        payload_nbytes=load.payload_nbytes,
        merged_nbytes=max(load.merged_nbytes),
        has_gradient=trust.signs_gradients,
    )
    is_free = slowest.is_processor_free
    speed = Speed(
        step_s=question.tokens_per_step / slowest.tokens_per_s,
        hash_s=0.0 if is_free else slowest.hash_s,
        write_s=0.0 if is_free else WRITE_S,
        merge_s=0.0 if is_free else merge_s(choices.codec, num),
        crowding=slowest.crowding,
    )
    return cost_of(audited, speed)


def load_of(question: Question) -> Load:
    """Return what a round of the electorate moves.

    Raises:
        ConfigError: the method has no replicas, or no results travel.
    """
    if question.choices.graph is not None or question.choices.is_merged_by_all:
        raise ConfigError(
            "method: this planner cannot tell how long whole payloads travel, to neighbours or to all. Name a method "
            'with replicas and merged_by = "owners", or simulate the run: weft simulate.'
        )
    choices, shapes = question.choices, tuple(span.shape for span in layout(question.model))
    num_sent = most_sent(choices, shapes, question.num_parameters)
    payload, reply = build_codec(choices.codec), build_codec(choices.reply)
    return Load.of(num_sent, question.num_electors, payload, reply, question.train.evaluate_every)


def leased_tokens(question: Question) -> dict[str, int]:
    """Return the tokens that a member of each kind is leased in a round.

    Where leases follow speeds, the fastest is leased all of a round's samples, and so is who is nearly as fast; others
    less, in whole inner steps where they make any of their own.
    """
    choices, train = question.choices, question.train
    quota, unit = choices.every * train.batch_size, 1 if choices.sends_gradient else train.batch_size
    speeds = [each.tokens_per_s for each in question.machines for _ in range(each.count)]
    fastest = min(max(speeds), MAX_LEAD * median(speeds))
    leased = {}
    for each in question.machines:
        ratio = each.tokens_per_s / fastest
        is_whole = question.has_even_leases or ratio >= EVEN
        leased[each.name] = train.seq_len * (quota if is_whole else unit * max(1, int(quota // unit * ratio)))
    return leased


def _kind(question: Question, machines: Machines, num_tokens: int, load: Load) -> Kind:
    train, train_s = question.train, num_tokens / machines.tokens_per_s
    return Kind(
        name=machines.name,
        count=machines.count,
        line=machines.line,
        train_s=train_s,
        evaluate_s=train.evaluate_windows * train.seq_len // 3 / machines.tokens_per_s,  # forward only
        serve_s=0.0 if machines.is_processor_free else _serve_s(machines, question, load, train_s),
    )


def _serve_s(machines: Machines, question: Question, load: Load, train_s: float) -> float:
    """Return what a round keeps a processor busy with while nothing else goes on: bytes beyond what lines are busy.

    Where inner steps run on the same processor, what goes on all the time makes these longer, too.
    """
    found, crowding = processor_time(question, load), machines.crowding
    nbytes = sent_nbytes(load, question.num_electors - 1, _group_size(question))
    line_s = 8 * nbytes / min(machines.line.up_bps, machines.line.down_bps)
    own_s = crowding * (found.round_s + found.values_s) + max(0.0, crowding * found.bytes_s - line_s)
    upkeep = 0.0 if machines.is_gpu and crowding <= 1 else min(0.9, crowding * found.upkeep)
    return (own_s + upkeep * train_s) / (1 - upkeep)


def _group_size(question: Question) -> int:
    return largest_group(question.num_electors, question.num_peers - question.num_electors)


def _traffic(load: Load, num_peers: int, share: float, round_s: float) -> cost.Traffic:
    if num_peers == 1:
        return cost.Traffic(0, 0)
    bulk = int((num_peers - 1) * (share * load.payload_nbytes + load.result_nbytes) / num_peers)
    return cost.Traffic(bulk, bulk) + cost.control_traffic(num_peers, round_s)


def _penalty(question: Question) -> Penalty | None:
    choices = question.choices
    if question.num_peers > 1 and (isinstance(choices.codec, LOSSY) or choices.is_projected):
        return None
    if question.num_peers == 1 or choices.sends_gradient:
        return NONE
    if not isinstance(choices.apply, NesterovConfig):
        return None
    return penalty(
        question.num_parameters, question.num_peers, choices.every * choices.fragments, question.train.tokens
    )


# --- memory ---


def hold(question: Question, machines: Machines) -> Hold:
    """Return what a peer with one of `machines` holds, with as many samples at a time as fit."""
    micro_batch, trust = question.train.batch_size, question.audits
    if trust is not None:
        micro_batch = min(trust.micro_batch or micro_batch, micro_batch)
    while True:
        on_device, on_host = _held(question, machines, micro_batch)
        held, there = on_device or on_host, machines.memory_nbytes
        has_room = None if there is None else held <= cost.SPARE * there
        if has_room is not False or micro_batch == 1 or trust is not None:  # there it is the run's
            break
        micro_batch //= 2
    return Hold(
        machines=machines.name, on_device=on_device, on_host=on_host, micro_batch=micro_batch, has_room=has_room
    )


def audits_nbytes(question: Question) -> int:
    """Return the bytes on the host that audits take of a member at most."""
    if (trust := question.audits) is None:
        return 0
    return audit_memory_nbytes(
        question.choices,
        question.train.optimizer,
        tuple(span.shape for span in layout(question.model)),
        question.num_parameters,
        question.num_peers,
        rate=trust.audit_rate,
        has_gradient=trust.signs_gradients,
    )


def evidence_nbytes(question: Question) -> int:
    """Return the bytes beside that, which a member takes if it has them, where a fault was found; of running text."""
    trust, train = question.audits, question.train
    if trust is None or not trust.signs_gradients:
        return 0
    micro_batch = trust.micro_batch or train.batch_size
    return costs.evidence_nbytes(question.model, question.choices, train.batch_size, train.seq_len, micro_batch)


def _held(question: Question, machines: Machines, micro_batch: int) -> tuple[int, int]:
    """Return the bytes on the device and on the host, as `training.device.needed_nbytes` splits them.

    Of an elector; a leaf neither merges parts nor the payloads of a group.
    """
    num, num_peers, choices = question.num_parameters, question.num_peers, question.choices
    num_electors, shapes = question.num_electors, tuple(span.shape for span in layout(question.model))
    memory = peer_memory(
        choices,
        question.train.optimizer,
        shapes,
        num,
        num_electors,
        num_rounds=math.ceil(question.train.tokens / (num_peers * choices.every * question.tokens_per_step)),
        activations=_activation_nbytes(question, machines, micro_batch),
    )
    more = _group_nbytes(question) + audits_nbytes(question)
    frozen = cost.vector_nbytes(num_base_parameters(question.model))
    if isinstance(question.train.loss, DpoConfig):
        frozen += cost.vector_nbytes(num)
    place = torch.device("cuda" if machines.is_gpu else "cpu")
    drawn = answer_memory(question.model, place, question.train.seq_len) if question.has_reward else TextMemory(0, 0)
    if not machines.is_gpu:
        return 0, memory.on_cpu + more + frozen + sum(drawn)
    on_device, on_host = memory.on_gpu
    return on_device + frozen + drawn.device, on_host + more + frozen + drawn.host


def _activation_nbytes(question: Question, machines: Machines, micro_batch: int) -> int:
    shape, seq_len, trust = decoder(question.model), question.train.seq_len, question.audits
    if trust is not None and trust.is_exact:
        return cost.exact_activation_nbytes(shape, micro_batch, seq_len)
    return cost.activation_nbytes(
        shape, micro_batch, seq_len, is_half=machines.is_half, num_thinned=thinned(question.model)
    )


def _group_nbytes(question: Question) -> int:
    """Return what a group's mean takes: its float64 sum, one decoded vector, itself encoded, payloads on the way."""
    if not (size := _group_size(question)):
        return 0
    num = question.num_parameters
    held = 4 * num * (size + 1) if question.choices.is_robust else 0
    return (8 + 4) * num + held + (1 + min(size, PARALLEL)) * build_codec(question.choices.codec).nbytes(num)


# --- energy and money ---


def _bill(question: Question, pace: Pace) -> Bill:
    def kwh(machines: Iterable[Machines]) -> float:
        return sum(each.count * _joules(question, pace, each) for each in machines) * pace.num_rounds / KWH_J

    rent = sum(each.count * each.price_per_hour for each in question.machines) * pace.total_s / HOUR_S
    paid = kwh(each for each in question.machines if not each.price_per_hour)
    return Bill(kwh=kwh(question.machines), money=paid * question.price_per_kwh + rent, rent=rent)


def _joules(question: Question, pace: Pace, machines: Machines) -> float:
    train_s = leased_tokens(question)[machines.name] / machines.tokens_per_s
    if (audits := pace.audits) is not None:
        train_s += audits.hash_s + audits.keep_s + audits.again_s
    train_s = min(train_s, pace.round.total_s)
    return machines.watts * (train_s + question.idle_share * (pace.round.total_s - train_s))


def _cluster_bill(question: Question, total_s: float) -> Bill:
    cluster = question.cluster
    kwh = cluster.count * cluster.watts * cluster.pue * total_s / KWH_J
    rent = cluster.count * cluster.price_per_hour * total_s / HOUR_S
    return Bill(kwh=kwh, money=rent, rent=rent)


# --- the multiplier ---


def _ddp_wait(question: Question) -> float:
    """Return how many times as long as its computing a step of the data centre takes."""
    cluster = question.cluster
    step_s = question.tokens_per_step / cluster.tokens_per_s
    traffic = cost.ring_ddp_traffic(question.num_parameters, cluster.count)
    return 1 + cost.Link(cluster.fabric_bps, cluster.fabric_bps).seconds(traffic) / step_s


def _time_parts(question: Question, pace: Pace, cluster_wait: float) -> tuple[Part, ...]:
    cluster = question.cluster
    ours = sum(each.count * each.tokens_per_s for each in question.machines)
    machines = cluster.count * cluster.tokens_per_s / ours
    return (
        Part(name="machines", factor=machines, why=f"{cluster.count} {cluster.name} compute so much faster"),
        *_waits(pace.round, ours / pace.tokens_per_s),  # what all would train, had they nothing to wait for
        Part(name="its own waiting", factor=1 / cluster_wait, why="the data centre's all-reduces, not hidden"),
        _method_part(pace),
    )


def _waits(round: RoundTime, total: float) -> list[Part]:
    """Return the factors by which waiting makes a run longer; their product is `total`."""
    stages = (
        ("exchange", round.contribute_s + round.result_s, "payloads and results are under way"),
        ("messages", round.messages_s, "messages are under way"),
        ("processor", round.serve_s, "encoding, encrypting, checking, merging, updates, heartbeats"),
        ("groups", round.wards_s, "results are on their way to peers without a vote, and payloads from them"),
        ("evaluation", round.evaluate_s, "the others wait for the peer that evaluates"),
        ("audits", round.audit_s, "hashing states, and waiting for who does training steps again"),
    )
    passed, parts = round.train_s + round.uneven_s, []
    for name, took_s, why in stages:
        parts.append(Part(name=name, factor=(passed + took_s) / passed, why=why))
        passed += took_s
    uneven = total / math.prod(part.factor for part in parts)
    return [Part(name="uneven machines", factor=uneven, why="waiting for the slowest training steps"), *parts]


def _method_part(pace: Pace) -> Part:
    if pace.penalty is None or pace.penalty.more_tokens is None:
        return Part(name="method", factor=1.0, why="the loss that rare rounds cost is not known here")
    return Part(name="method", factor=pace.penalty.more_tokens, why="more tokens to the loss of training in one place")


def _energy_parts(question: Question, pace: Pace, bill: Bill, cluster_bill: Bill) -> tuple[Part, ...]:
    cluster, machines = question.cluster, question.machines
    if not bill.kwh or not cluster_bill.kwh:
        return ()
    trained_j = sum(each.count * each.watts for each in machines) / sum(
        each.count * each.tokens_per_s for each in machines
    )
    cluster_j = cluster.watts / cluster.tokens_per_s
    total = bill.kwh / cluster_bill.kwh
    names = (
        Part(name="machines", factor=trained_j / cluster_j, why="energy of a token while it is trained on"),
        Part(name="building", factor=1 / cluster.pue, why="the data centre cools and converts"),
    )
    waiting = total / math.prod(part.factor for part in names)
    return (*names, Part(name="waiting", factor=waiting, why="machines draw power while they wait"), _method_part(pace))
