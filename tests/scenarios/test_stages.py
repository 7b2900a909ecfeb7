"""Pipelines of peers whose machines take scripted seconds: how busy they are, and what deaths and stillness cost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from benchmarks.rig.stages import Pipeline, Shape, StagePeer
from benchmarks.rig.stages_round import Pace

from weft.clock import VirtualClock
from weft.pipeline.exactly_once import BatchId

SHAPE = Shape(num_stages=3, pace=Pace(every_s=20.0), line_bps=2e6)
WARM_S, FOR_S = 120.0, 240.0
MOST_S = 1200.0  # until all that was begun is counted
SLOW = 0.25

Play = Callable[[Pipeline], Awaitable[None]]


class Played:
    """A pipeline of stages of members of these rates, played until all that was begun is counted."""

    def __init__(self, sizes: Sequence[Sequence[float]], play: Play, shape: Shape = SHAPE) -> None:
        self.clock = VirtualClock()
        self.alive: list[StagePeer] = []  # at the end
        self.pipeline: Pipeline = self.clock.run(self._whole(sizes, play, shape))

    async def _whole(self, sizes: Sequence[Sequence[float]], play: Play, shape: Shape) -> Pipeline:
        pipeline = Pipeline(shape, self.clock)
        for stage, rates in enumerate(sizes):
            for rate in rates:
                pipeline.hold(await pipeline.start(len(pipeline.peers), rate), stage)
        try:
            await play(pipeline)
            async with asyncio.timeout(MOST_S):
                await pipeline.drained()
            self.alive = list(pipeline.peers.values())
        finally:
            await pipeline.aclose()
        return pipeline

    @property
    def begun(self) -> set[BatchId]:
        """Return all micro-batches that were begun by who lives."""
        return {BatchId(peer.id, number) for peer in self.alive for number in range(peer.num_begun)}

    @property
    def num_again(self) -> int:
        return sum(peer.num_again for peer in self.alive)

    def assert_all_are_back(self) -> None:
        assert all(peer.num_returned == peer.num_begun for peer in self.alive)
        assert len(self.begun) > 40  # of a stage of one member, which ends one in three seconds

    def assert_each_counts_once(self) -> None:
        for rounds in self.pipeline.rounds:
            assert self.begun <= set(rounds.merged)
            assert set(rounds.merged.values()) == {1}


async def work(pipeline: Pipeline) -> None:
    await asyncio.sleep(WARM_S + FOR_S)


def capacity(sizes: Sequence[Sequence[float]], shape: Shape = SHAPE) -> float:
    return min(sum(rates) for rates in sizes) / shape.script.total_s


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [((1.0, 1.0),) * 3, ((1.0, SLOW),) * 3, ((1.0, SLOW), (SLOW, 1.0, SLOW), (1.0, 1.0))],
    ids=["even", "one of each stage four times slower", "uneven"],
)
def test_members_do_nine_tenths_of_what_they_could_that_never_wait(sizes: Sequence[Sequence[float]]) -> None:
    found = Played(sizes, work)
    for times in found.pipeline.seen.finished:
        counted = sum(WARM_S <= at < WARM_S + FOR_S for at in times)
        assert 0.9 <= counted / FOR_S / capacity(sizes) <= 1.02  # queues of before may empty meanwhile
    assert found.num_again == 0  # a member that has a queue was asked in vain, and that is no attempt
    found.assert_all_are_back()
    found.assert_each_counts_once()


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_who_dies_without_a_word_takes_no_micro_batch_of_others_with_it(stage: int) -> None:
    lost: list[int] = []

    async def play(pipeline: Pipeline) -> None:
        await asyncio.sleep(71.0)
        dying = pipeline.of(stage)[-1]
        assert dying.holding is not None
        num_taken = dying.holding.worker.num_taken
        assert num_taken
        await pipeline.kill(dying)
        lost.append(num_taken + pipeline.seen.num_lost)  # what no round has counted
        await asyncio.sleep(60.0)

    found = Played(((1.0, 1.0, 1.0),) * 3, play)
    found.assert_all_are_back()
    assert found.num_again > 0
    for number, rounds in enumerate(found.pipeline.rounds):
        assert max(rounds.merged.values()) == 1
        missing = found.begun - set(rounds.merged)
        assert len(missing) <= (lost[0] if number == stage else 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("patience_s", [15.0, 120.0], ids=["others lose patience", "others do not"])
def test_who_stands_still_for_a_while_loses_nothing_and_counts_nothing_twice(stage: int, patience_s: float) -> None:
    async def play(pipeline: Pipeline) -> None:
        await asyncio.sleep(70.0)
        standing = pipeline.of(stage)[-1]
        before = len(pipeline.seen.finished[stage])
        await pipeline.freeze(standing, 30.0)
        assert len(pipeline.seen.finished[stage]) > before  # the other one goes on
        await asyncio.sleep(60.0)

    found = Played(((1.0, 1.0),) * 3, play, replace(SHAPE, patience_s=patience_s))
    assert found.num_again > 0  # others had its work done elsewhere, or what they had to send
    found.assert_all_are_back()
    found.assert_each_counts_once()


def test_a_stage_that_loses_its_last_member_goes_on_when_another_comes() -> None:
    async def play(pipeline: Pipeline) -> None:
        await asyncio.sleep(70.0)
        await pipeline.kill(pipeline.of(1)[0])
        await asyncio.sleep(100.0)  # what was beyond has come back, and who asks in vain what counts has given up
        stopped = [len(times) for times in pipeline.seen.finished]
        await asyncio.sleep(60.0)
        assert [len(times) for times in pipeline.seen.finished] == stopped
        pipeline.hold(await pipeline.start(9), 1)
        await asyncio.sleep(90.0)
        assert all(len(times) > before + 5 for times, before in zip(pipeline.seen.finished, stopped, strict=True))

    found = Played(((1.0, 1.0), (1.0,), (1.0, 1.0)), play)
    found.assert_all_are_back()


def test_who_moves_ends_what_it_has_taken_and_works_in_its_new_stage() -> None:
    async def play(pipeline: Pipeline) -> None:
        await asyncio.sleep(70.0)
        moving = pipeline.of(0)[-1]
        pipeline.move(moving, 2, 30.0)
        assert moving.stage is None
        await asyncio.sleep(120.0)  # its last ones come back within a minute, and the round after counts them
        assert (moving.stage, len(moving.workers)) == (2, 1)
        assert moving.holding is not None
        assert moving.holding.worker.counting.exactly_once.past

    found = Played(((1.0, 1.0, 1.0), (1.0, 1.0), (1.0,)), play)
    assert found.pipeline.seen.num_moves == 1
    assert found.num_again == 0
    found.assert_all_are_back()
    found.assert_each_counts_once()
