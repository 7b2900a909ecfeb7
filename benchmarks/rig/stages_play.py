"""A trace of peers that come and go, played micro-batch by micro-batch: what the fluid model of placement leaves out.

Who goes where is decided as in the fluid model, from the same trace, at the same times: all that differs is what
happens between. Who goes dies without a word. What is measured are micro-batches whose weights' gradients a stage has
counted.
"""

import asyncio
from bisect import bisect_left
from dataclasses import dataclass

from benchmarks.rig.placement import Joins, Rule, Trace
from benchmarks.rig.stages import Pipeline, Shape
from weft.clock import VirtualClock


@dataclass(frozen=True)
class Outcome:
    """What a play came to."""

    shape: Shape
    finished: tuple[tuple[float, ...], ...]  # of each stage, when it had counted a micro-batch, in order
    rates: tuple[tuple[float, float], ...]  # the sum of all peers' rates, and since when
    num_moves: int
    num_again: int  # attempts after the first of a micro-batch
    num_lost: int  # counted by a member that died before a round did so, over all stages
    busy_s: float  # of machines
    useful_s: float  # of that, for what was counted

    def by_stage(self, begin_s: float, end_s: float) -> tuple[float, ...]:
        """Return the micro-batches that each stage finished in a second of that time."""
        return tuple(
            (bisect_left(each, end_s) - bisect_left(each, begin_s)) / (end_s - begin_s) for each in self.finished
        )

    def even(self, begin_s: float, end_s: float) -> float:
        """Return what stages could finish among which all rates were shared out to a hair."""
        total = 0.0
        ends = (*(at for at, _ in self.rates[1:]), end_s)
        for (since, rate), until in zip(self.rates, ends, strict=True):
            total += rate * max(min(until, end_s) - max(since, begin_s), 0.0)
        return total / (end_s - begin_s) / len(self.finished) / self.shape.script.total_s

    def ratio(self, begin_s: float, end_s: float) -> float:
        """Return what the stage that finished least has of that."""
        return min(self.by_stage(begin_s, end_s)) / self.even(begin_s, end_s)


def play(trace: Trace, joins: Joins, rule: Rule, shape: Shape, *, every_s: float, move_s: float) -> Outcome:
    """Play a trace; see `benchmarks.rig.placement.played`, whose arguments these are."""
    assert trace.num_stages == shape.num_stages
    clock = VirtualClock()

    async def whole() -> Outcome:
        pipeline = Pipeline(shape, clock)
        try:
            return await _played(pipeline, trace, joins, rule, every_s, move_s)
        finally:
            await pipeline.aclose()

    return clock.run(whole())


async def _played(pipeline: Pipeline, trace: Trace, joins: Joins, rule: Rule, every_s: float, move_s: float) -> Outcome:
    clock, end = pipeline.clock, trace.hours * 3600.0
    happens: list[tuple[float, int, str, float]] = []
    for number, (comes, goes, rate) in enumerate(trace.stays):
        happens += [(comes, number, "comes", rate), (goes, number, "goes", rate)]
    happens += [(every_s * turn, -1, "looks", 0.0) for turn in range(1, int(end / every_s) + 1)]
    for at, number, what, rate in sorted(happens):
        if at >= end:
            break
        await asyncio.sleep(at - clock.now())
        match what:
            case "comes":
                peer = await pipeline.start(number, rate)
                pipeline.hold(peer, number % trace.num_stages if at == 0.0 else joins(peer.name, pipeline.told()))
            case "goes":
                await pipeline.kill(pipeline.peers[number])
            case "looks":
                for move in rule(pipeline.told()):
                    moving = pipeline.peers[int(move.peer, 16)]
                    if moving.stage == move.source:
                        pipeline.move(moving, move.target, move_s)
    await asyncio.sleep(end - clock.now())
    return _outcome(pipeline)


def _outcome(pipeline: Pipeline) -> Outcome:
    seen, alive = pipeline.seen, list(pipeline.peers.values())
    return Outcome(
        pipeline.shape,
        tuple(tuple(times) for times in seen.finished),
        tuple(seen.rates),
        seen.num_moves,
        seen.num_again + sum(peer.num_again for peer in alive),
        seen.num_lost,
        seen.busy_s + sum(peer.machine.busy_s for peer in alive),
        seen.useful_s + sum(peer.useful_s for peer in alive),
    )
