"""Micro-batches through stages of several members: each counts once, whatever gets lost, and nobody waits for ever."""

import asyncio
from itertools import chain

import pytest

from unit.pipeline.stages import FaultyLink, Member, Stages, distance
from weft.events import HeldDropped, MicroBatchFailed
from weft.pipeline.device import Given, PassedTogether
from weft.pipeline.exactly_once import Attempt, BatchId, ExactlyOnce, Told
from weft.pipeline.messages import Backward, Verdict
from weft.pipeline.sender import Sender
from weft.pipeline.worker import Bounds

NUM = 30  # micro-batches of each origin


@pytest.fixture(autouse=True)
def _the_same_faults() -> None:
    FaultyLink.count = 0


async def begun(stages: Stages, origin: Member, num: int, at_once: int = 4) -> list[float]:
    """Have a member of the first stage begin micro-batches, some at a time; return their losses."""
    room, found = asyncio.Semaphore(at_once), []

    async def one(number: int) -> None:
        async with room:
            found.append((await stages.begin(origin, number)).loss)

    await asyncio.gather(*(one(number) for number in range(num)))
    return found


async def all_of(stages: Stages, num: int = NUM) -> list[float]:
    return list(chain(*await asyncio.gather(*(begun(stages, origin, num) for origin in stages.of(0)))))


def batches(stages: Stages, num: int = NUM) -> list[BatchId]:
    return [BatchId(origin.peer, number) for origin in stages.of(0) for number in range(num)]


@pytest.mark.full
def test_what_stages_compute_is_what_the_whole_does() -> None:
    stages, num = Stages(), 12

    async def play() -> None:
        losses = await all_of(stages, num)
        assert len(losses) == 2 * num
        await asyncio.sleep(5)  # the last are counted
        for stage in range(3):
            told = await stages.round(stage)
            assert sorted(chain(*(each.counted for each in told.values()))) == sorted(batches(stages, num))
            assert all(each.counted for each in told.values())  # both members had their share
            assert distance(stages.total(stage), stages.expected(stage, batches(stages, num))) < 1e-6

    stages.run(play)


async def rounds_under_faults(stages: Stages, num: int = NUM) -> list[float]:
    """Return how far each stage's gradients are from those without faults, after rounds midway and at the end."""
    running = asyncio.ensure_future(all_of(stages, num))
    for stage in range(3):
        await asyncio.sleep(3)
        await stages.round(stage)
    assert not running.done(), "rounds were midway"
    losses = await running
    assert len(losses) == 2 * num
    await asyncio.sleep(200)  # what comes late has come
    for stage in range(3):
        for _ in range(2):  # what was held is assigned by the first, and brought to the second
            await stages.round(stage)
    return [distance(stages.total(stage), stages.expected(stage, batches(stages, num))) for stage in range(3)]


@pytest.mark.full
def test_each_micro_batch_counts_once_whatever_is_lost_said_twice_or_late() -> None:
    stages, num = Stages(link=FaultyLink, patience_s=3.0), 18

    async def play() -> None:
        far = await rounds_under_faults(stages, num)
        assert max(far) < 1e-6
        assert not stages.given_up
        again = sum(sender.num_again for each in stages.members for sender in each.senders.values())
        assert again > 2 * num  # the faults were ones

    stages.run(play)


@pytest.mark.slow
def test_without_the_rule_of_acceptance_they_count_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages(link=FaultyLink, patience_s=3.0)
    heard = Sender.on_backward

    async def always(self: Sender, peer: object, note: Backward) -> Verdict:
        await heard(self, peer, note)  # type: ignore[arg-type]
        return Verdict(word="accepted")

    def counted(self: ExactlyOnce, attempt: Attempt) -> ExactlyOnce:
        return self._replace(asked=self.asked - {attempt}, counted=self.counted | {attempt.batch})

    monkeypatch.setattr(Sender, "on_backward", always)
    monkeypatch.setattr(ExactlyOnce, "_kept", counted)

    async def play() -> None:
        assert max(await rounds_under_faults(stages)) > 1e-2

    stages.run(play)


@pytest.mark.full
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_who_dies_takes_with_it_what_no_round_has_counted_and_nothing_else(stage: int) -> None:
    stages = Stages((3, 2, 2) if stage == 0 else (2, 2, 2))

    async def play() -> None:
        everything = batches(stages)
        running = {each.peer: asyncio.ensure_future(begun(stages, each, NUM)) for each in stages.of(0)}
        await asyncio.sleep(2)
        dying = stages.of(stage)[-1]
        before = await stages.round(stage)
        await asyncio.sleep(1)
        kept = dying.total.clone()
        stages.network.kill(dying.peer)
        stages.dead.add(dying.peer)
        if stage == 0:
            running[dying.peer].cancel()
        await stages.end(dying)
        for peer, each in running.items():
            assert peer == dying.peer or len(await each) == NUM
        await asyncio.sleep(200)
        counted = list(chain(*(each.counted for each in before.values())))
        for _ in range(2):
            counted += chain(*(each.counted for each in (await stages.round(stage)).values()))
        assert len(counted) == len(set(counted))
        assert set(counted) <= set(everything)
        assert len(counted) > len(everything) // 3
        assert distance(stages.total(stage) + kept, stages.expected(stage, counted)) < 1e-6

    stages.run(play)


@pytest.mark.full
def test_what_there_is_no_room_for_is_dropped_and_said() -> None:
    stages = Stages(link=FaultyLink, patience_s=0.3, train_s=0.2, bounds=Bounds(held_nbytes=2000))

    async def play() -> None:
        await all_of(stages, 10)
        await asyncio.sleep(200)
        dropped = sum(each.num for member in stages.members for each in member.events if isinstance(each, HeldDropped))
        assert dropped
        for stage in range(3):
            counted = list(chain(*(each.counted for each in (await stages.round(stage)).values())))
            counted += chain(*(each.counted for each in (await stages.round(stage)).values()))
            assert len(counted) == len(set(counted))
            assert distance(stages.total(stage), stages.expected(stage, counted)) < 1e-6

    stages.run(play)


def test_activations_that_are_none_are_given_up_and_another_member_tried() -> None:
    stages = Stages((1, 2, 1))

    async def play() -> None:
        bad = stages.of(1)[0]
        bad.worker._device.input_nbytes = lambda num: 8 * num  # type: ignore[method-assign]  # another version's
        losses = await all_of(stages, 6)
        assert len(losses) == 6
        assert any(isinstance(each, MicroBatchFailed) for each in bad.events)
        await asyncio.sleep(60)
        told: Told = (await stages.round(0))[stages.of(0)[0].peer]
        assert len(told.counted) == 6

    stages.run(play)


@pytest.mark.parametrize(("stage", "has_recompute"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_micro_batch_whose_weights_are_written_meanwhile_is_given_up_and_computed_anew(
    stage: int, has_recompute: bool
) -> None:
    """An outer step is made on another thread, and the member hears of it a moment later."""
    stages = Stages(has_recompute=has_recompute)

    async def play() -> None:
        hasty = stages.of(stage)[0]
        forward, num_written = hasty.worker._forward, 0

        async def and_written(given: Given) -> PassedTogether:
            nonlocal num_written
            passed = await forward(given)
            if num_written < 2:
                num_written += 1
                hasty.model.vector.mul_(1.0)
            return passed

        hasty.worker._forward = and_written  # type: ignore[method-assign]
        assert len(await all_of(stages, 6)) == 12
        assert num_written == 2
        failed = [each for each in hasty.events if isinstance(each, MicroBatchFailed)]
        assert len(failed) >= 2
        assert all("weights" in each.reason for each in failed)
        await asyncio.sleep(60)
        for _ in range(2):  # what was held is assigned by the first, and brought to the second
            await stages.round(stage)
        assert distance(stages.total(stage), stages.expected(stage, batches(stages, 6))) < 1e-6

    stages.run(play)
