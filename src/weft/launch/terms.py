"""What joining a run costs this machine: shown to a person who is asked whether to.

Bytes of data, disk, training memory and of a round follow from the run in closed form (`weft.cost.training`). How often
a round comes around does not: it is reckoned from what its inner steps take the fastest member, as members tell. Where
none has made any, from what they would take if this machine did nothing but multiply matrices of the model's shape,
which is measured in a moment, one thread at a time: threads that wait for one another beside a busy program would
measure that program. An `Allowance` then holds what is really moved against what was shown.

    async with HeartbeatWatch(node, clock) as heartbeats:
        ...                              # heartbeats come with every link, and every two seconds
        pace = await heartbeats.pace()

Whoever takes part sends heartbeats; who only reads the terms sends none, and is not counted. In a run with stages
members speak to those of their own: there all that are linked are taken for members.
"""

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import torch

from weft.clock import Clock
from weft.cost import training as cost
from weft.cost.pipeline import crossing, section_flops
from weft.cost.training import HEARTBEAT_S
from weft.ids import PeerId
from weft.model.config import ModelConfig
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.net.ticket import Ticket
from weft.run.config import RunConfig
from weft.run.host import process_nbytes
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.store.home import Home
from weft.sync.costs import round_traffic
from weft.sync.merge.method import Method
from weft.training import section_memory as holding
from weft.training.device import Device, choose, decoder, needed_nbytes

CALLED_S = 1.0  # for the other members of a run that has begun to call a newcomer that one of them told them of
HEARD_S = HEARTBEAT_S + 0.5  # for a first heartbeat of who is linked


@dataclass(frozen=True, kw_only=True)
class Pace:
    num_members: int  # that were heard
    num_linked: int = 0  # who are here, heard or not: in a run with stages members speak to those of their stage
    tokens_per_s: float  # inner steps of the fastest of them; 0: none has made any

    def steps_s(self, num_tokens: int) -> float | None:
        """Return the seconds that inner steps on so many tokens take the fastest; None where that is not known."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else None


NOBODY = Pace(num_members=0, tokens_per_s=0.0)


class HeartbeatWatch:
    """Listens from the first link on, until it is left; heartbeats are then for `Membership`."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._began = clock.now()
        self._heard: dict[PeerId, Heartbeat] = {}
        self._news = asyncio.Event()

    async def __aenter__(self) -> "HeartbeatWatch":
        self._node.on_note(Heartbeat, self._on_heartbeat)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._node.ignore(Heartbeat)

    async def pace(self) -> Pace:
        """Return what was heard, once everybody who may be heard had the time to speak."""
        while self._clock.now() < self._until():
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until() - self._clock.now()):
                    await self._news.wait()
        training = [beat for beat in self._heard.values() if not beat.is_anchor]
        speeds = [beat.tokens_per_s for beat in training if math.isfinite(beat.tokens_per_s)]
        return Pace(num_members=len(training), num_linked=len(self._node.peers), tokens_per_s=max(speeds, default=0.0))

    def _until(self) -> float:
        """Return how long to listen: not at all where a run waits to begin and all that are linked have spoken."""
        if not set(self._node.peers) <= set(self._heard):
            return self._began + HEARD_S
        has_begun = any(beat.manifest is not None for beat in self._heard.values())
        return self._began + (CALLED_S if has_begun else 0.0)

    async def _on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        self._heard[peer] = heartbeat
        self._news.set()


CHECKPOINT_VECTORS = 10  # outer, momentum, local and two moments, twice while a new one is written
LEAST_ROUND_S = 0.01  # of two peers on one machine with next to nothing to train: messages, and votes on the disk
LEAST_MEASURED_S = 0.002  # of one run of products: far above the clock's grain, below the turn that a system gives
NUM_RUNS = 24  # the best of them counts: beside busy programs, one at least has a core to itself
MAX_ROWS, MAX_WIDTH = 256, 2048  # of what is multiplied: 2 GFLOP and 48 MiB at most
DAY_S = 86_400.0
HOUR_S = 3600.0  # what was moved in less is held against an hour's share: rounds come in bursts
TOLERANCE = 1.5  # times what was shown: an estimate may be so much too low and nothing is said


@dataclass(frozen=True, kw_only=True)
class Terms:
    ticket: Ticket
    run: RunConfig  # as amended: its own digest names nothing
    fetch_nbytes: int  # data, first weights and state, as far as they are not here
    disk_nbytes: int  # data and checkpoint
    process_nbytes: int  # of memory, that this process has taken: Python, torch
    memory_nbytes: int  # that training takes beside it
    num_peers: int  # who takes part, as far as is known, or else as many as the ticket tells, and this one
    round_nbytes: int  # sent and received in one round of so many
    tokens_per_s: float  # inner steps of the fastest member; 0: none has made any
    flops_per_s: float  # of matrix products here, measured where no member has a pace to tell; else 0
    round_s: float  # at that pace, if a round is nothing but its inner steps

    @property
    def day_nbytes(self) -> float:
        """Return about how much this machine moves in a day of such rounds."""
        return 1e9 * cost.gigabytes_per_day(self.round_nbytes, self.round_s)


class Allowance:
    """What a person agreed that this machine may move, held against what it moves.

    Args:
        terms: those that were agreed to. What is fetched once to join counts for no day.
    """

    def __init__(self, terms: Terms, clock: Clock) -> None:
        self._clock = clock
        self._shown_nbytes = terms.day_nbytes
        self._began, self._moved_nbytes = clock.now(), -terms.fetch_nbytes

    def count(self, nbytes: int) -> float | None:
        """Count what was moved; return the bytes a day that it comes to where that is told: far above what was agreed.

        It is told again once it has grown as far above what was told last. Every day is reckoned anew.
        """
        self._moved_nbytes += nbytes
        passed_s = self._clock.now() - self._began
        day_nbytes = self._moved_nbytes * DAY_S / max(passed_s, HOUR_S)
        if passed_s >= DAY_S:
            self._began, self._moved_nbytes = self._clock.now(), 0
        if day_nbytes <= TOLERANCE * self._shown_nbytes:
            return None
        self._shown_nbytes = day_nbytes
        return day_nbytes


def terms(run: RunConfig, ticket: Ticket, home: Home, settings: PeerConfig, clock: Clock, pace: Pace = NOBODY) -> Terms:
    """Return what joining `run` costs; where it has to measure, that takes about a tenth of a second.

    Args:
        pace: of those who train already.

    Raises:
        ConfigError: the settings name a device that is not there.
    """
    num, choices, device = run.num_parameters, run.method, choose(settings)
    num_here = pace.num_linked if isinstance(run, StagedConfig) else pace.num_members
    num_peers = max(1, num_here or len(ticket.contacts)) + 1
    part = _part(run, num_peers, settings, device)
    flops_per_s, round_s = 0.0, pace.steps_s(choices.every * run.tokens_per_step)
    if round_s is None:
        num_threads = (settings.num_threads or torch.get_num_threads()) if device.is_cpu else 1  # as training will have
        flops_per_s = num_threads * product_flops(run.model, run.tokens_per_step, device, clock)
        round_s = cost.work_s(choices.every, run.tokens_per_step, part.flops_per_token, flops_per_s)
    num_vectors = 1 + len(Method(choices, run.train.optimizer).init(0))  # of the state: parameters, outer optimizer
    if not run.is_seeded and home.blobs.open(run.initial) is None:
        num_vectors += 1
    fetch_nbytes = sum(info.nbytes for info in home.shards.missing(run.data)) + num_vectors * cost.vector_nbytes(num)
    return Terms(
        ticket=ticket,
        run=run,
        fetch_nbytes=fetch_nbytes,
        disk_nbytes=fetch_nbytes + 4 * num * CHECKPOINT_VECTORS,
        process_nbytes=process_nbytes(),
        memory_nbytes=part.memory_nbytes,
        num_peers=num_peers,
        round_nbytes=part.round_nbytes,
        tokens_per_s=pace.tokens_per_s,
        flops_per_s=flops_per_s,
        round_s=max(LEAST_ROUND_S, round_s),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a member has of a run among its peers.

    Args:
        flops_per_token: that it computes, of the tokens that it begins or as many.
        round_nbytes: that come and go in a round.
        memory_nbytes: that training takes.
    """

    flops_per_token: float
    round_nbytes: int
    memory_nbytes: int


def _part(run: RunConfig, num_peers: int, settings: PeerConfig, device: Device) -> _Part:
    if not isinstance(run, StagedConfig) or run.stage is None:
        return _Part(
            flops_per_token=cost.flops_per_token(decoder(run.model), run.train.seq_len),
            round_nbytes=_merged_nbytes(run, num_peers),
            memory_nbytes=sum(needed_nbytes(run, settings, device, 1).values()),
        )
    held, section = holding.of_run(run), run.cuts[run.stage]
    micro = held.micro
    num_members, num_sides = -(-num_peers // run.stages), min(2, run.stages - 1)
    num_micro = run.method.every * -(-run.train.batch_size // micro.num_samples)
    round_nbytes = _merged_nbytes(run, num_members) + num_micro * num_sides * crossing(micro).total_nbytes
    if run.has_tied(run.stage):
        matrix = msgspec.structs.replace(run, stage=run.tied)
        round_nbytes += _merged_nbytes(matrix, min(num_peers, 2 * num_members))
    needed = holding.needed_nbytes(
        held, section, device, num_taken=holding.usual_taken(run.stages), has_recompute=settings.has_recompute
    )
    return _Part(
        flops_per_token=section_flops(holding.shape_of(run.model, section), run.train.seq_len).total,
        round_nbytes=round_nbytes,
        memory_nbytes=sum(needed.values()),
    )


def _merged_nbytes(run: RunConfig, num_members: int) -> int:
    traffic = round_traffic(run.method, run.vector.tensors, run.num_parameters, num_members)
    return traffic.sent_nbytes + traffic.received_nbytes


def product_flops(model: ModelConfig, num_rows: int, device: Device, clock: Clock) -> float:
    """Return the floating-point operations per second of multiplying matrices of the model's shape, large ones cut.

    On a CPU that is the speed of one thread.
    """
    rows, width, ffn_width = min(num_rows, MAX_ROWS), min(model.width, MAX_WIDTH), min(model.ffn_width, MAX_WIDTH)
    dtype = device.autocast_dtype or torch.float32
    left = torch.ones((rows, width), dtype=dtype, device=device.torch)
    right = torch.ones((width, ffn_width), dtype=dtype, device=device.torch)

    def run_s(num_products: int) -> float:
        began = clock.now()
        for _ in range(num_products):
            product = left @ right
        float(product[0, 0])  # waits for a GPU
        return clock.now() - began

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        float((left @ right)[0, 0])  # the first one allocates
        num_products = 1
        while min(run_s(num_products) for _ in range(3)) < LEAST_MEASURED_S:
            num_products *= 4
        least_s = min(run_s(num_products) for _ in range(NUM_RUNS))
    finally:
        torch.set_num_threads(before)
    return 2.0 * rows * width * ffn_width * num_products / least_s
