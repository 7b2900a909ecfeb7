"""A fluid model of placement: peers come and go, stages have the sum of their peers' rates, a pipeline the weakest's.

No micro-batch is played, so a day of hundreds of peers takes seconds. The decisions are those of `pipeline.placement`,
or others beside them.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.ids import PeerId
from weft.pipeline.placement import Move, Stage, moves, stage_for
from weft.rng import order_key, stream

STAY_H = 32.0  # with which placement without moves comes to what SWARM's authors saw on a trace of their own
REPLACED_S = 120.0  # until another machine is there, in the mean

Joins = Callable[[PeerId, Sequence[Stage]], int]
Rule = Callable[[Sequence[Stage]], Sequence[Move]]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """When peers come and go. Those that are there from the beginning come at 0, evenly over the stages."""

    num_stages: int
    hours: float
    stays: tuple[tuple[float, float, float], ...]  # seconds at which one comes and goes, and its rate


def preemptions(
    seed: int,
    *,
    num_stages: int = 16,
    num_peers: int = 400,
    num_last: int = 150,
    hours: float = 32.0,
    stay_h: float = STAY_H,
    rates: Sequence[float] = (1.0,),
) -> Trace:
    """Return a trace of preemptible machines: none is older than another, and for each that goes another comes soon.

    Args:
        num_peers: in the first half; later fewer are to be had, down to `num_last`.
        stay_h: hours that one stays, in the mean.
        rates: that they have, in equal parts.
    """
    luck, end = stream(seed, "preemptions"), hours * 3600.0
    here = dict.fromkeys(range(num_peers), 0.0)  # when each came
    stays: list[tuple[float, float, int]] = []
    num, at = num_peers, 0.0
    while True:
        at += float(luck.exponential(stay_h * 3600.0 / len(here)))
        if at >= end:
            break
        gone = sorted(here)[int(luck.integers(len(here)))]
        stays.append((here.pop(gone), at, gone))
        scarce = max(2 * at / end - 1, 0.0)
        while len(here) < num_peers + (num_last - num_peers) * scarce:
            here[num] = at + float(luck.exponential(REPLACED_S))
            num += 1
    stays += [(came, end, number) for number, came in here.items()]
    return Trace(
        num_stages=num_stages,
        hours=hours,
        stays=tuple(sorted((came, went, rates[n % len(rates)]) for came, went, n in stays if came < min(went, end))),
    )


def anywhere(peer: PeerId, stages: Sequence[Stage]) -> int:
    """Put a newcomer in a stage that depends on its name alone."""
    return int(order_key("anywhere", peer)[:12], 16) % len(stages)


def nobody(_stages: Sequence[Stage]) -> Sequence[Move]:
    """Move nobody."""
    return ()


def swarms(stages: Sequence[Stage]) -> Sequence[Move]:
    """Move as SWARM does (2301.11913, section 3.3): from the least loaded stage to the most loaded, whatever it gains.

    A stage is as loaded as it has few peers; within one all are loaded alike, where they are equally fast.
    """
    totals = [sum(stage.values()) for stage in stages]
    source, target = totals.index(max(totals)), totals.index(min(totals))
    if totals[source] == totals[target] or len(stages[source]) < 2:
        return ()
    return (Move(min(stages[source]), source, target),)


@dataclass
class Outcome:
    """What a run came to."""

    ratio: float  # of all rates shared out evenly, which no placement exceeds
    by_hour: tuple[float, ...]
    num_moves: int


@dataclass
class _Run:
    stages: list[dict[PeerId, float]]
    moving: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # to which stage, its rate
    num_moves: int = 0

    @property
    def rate(self) -> float:
        return min(sum(stage.values()) for stage in self.stages)

    @property
    def even(self) -> float:
        """Return what stages would do among which the rates of all who are here could be shared out to a hair."""
        rates = sum(sum(stage.values()) for stage in self.stages) + sum(rate for _, rate in self.moving.values())
        return rates / len(self.stages)


def played(trace: Trace, joins: Joins, rule: Rule, *, every_s: float, move_s: float) -> Outcome:
    """Play a trace.

    Args:
        joins: where a newcomer goes.
        rule: who moves, asked every so many seconds.
        move_s: in which who moves does nothing: it fetches a state.
    """
    run = _Run([{} for _ in range(trace.num_stages)])
    queue: list[tuple[float, int, str, PeerId, float]] = []
    for number, (comes, goes, rate) in enumerate(trace.stays):
        peer = PeerId(f"{number:064x}")
        queue += [(comes, number, "comes", peer, rate), (goes, number, "goes", peer, rate)]
    end = trace.hours * 3600.0
    queue += [(float(at), -1, "look", PeerId(""), 0.0) for at in np.arange(every_s, end, every_s)]
    heapq.heapify(queue)
    done, even = np.zeros((2, int(np.ceil(trace.hours))))
    before = 0.0
    while queue:
        at, number, what, peer, rate = heapq.heappop(queue)
        at = min(at, end)
        for hour, span in _hours(before, at):
            done[hour] += span * run.rate
            even[hour] += span * run.even
        before = at
        if at >= end:
            break
        match what:
            case "comes":
                stage = number % trace.num_stages if at == 0.0 else joins(peer, _counted(run))
                run.stages[stage][peer] = rate
            case "goes":
                run.moving.pop(peer, None)
                for held in run.stages:
                    held.pop(peer, None)
            case "arrives":
                if peer in run.moving:
                    stage, rate = run.moving.pop(peer)
                    run.stages[stage][peer] = rate
            case "look":
                for move in rule(_counted(run)):
                    if move.peer in run.stages[move.source]:
                        run.moving[move.peer] = move.target, run.stages[move.source].pop(move.peer)
                        heapq.heappush(queue, (at + move_s, number, "arrives", move.peer, 0.0))
                        run.num_moves += 1
    return Outcome(float(done.sum() / even.sum()), tuple(float(each) for each in done / even), run.num_moves)


def _counted(run: _Run) -> list[dict[PeerId, float]]:
    """Return the stages with those that are on their way to them: nobody else need go there."""
    stages = [dict(stage) for stage in run.stages]
    for peer, (target, rate) in run.moving.items():
        stages[target][peer] = rate
    return stages


def _hours(start: float, stop: float) -> Iterator[tuple[int, float]]:
    """Yield each hour between two times, and the seconds of it that lie between them."""
    while start < stop:
        hour = int(start // 3600.0)
        until = min(stop, (hour + 1) * 3600.0)
        yield hour, until - start
        start = until


def ours(stages: Sequence[Stage]) -> Sequence[Move]:
    """Move as members of a run do."""
    return moves(stages)


at_the_weakest: Joins = stage_for
