"""Members of a stage that compute each micro-batch together: whole peers of such runs."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from scenarios.companies import House, Machine, losses
from scenarios.test_companies import BATCH, crew, done, play, rounds, sealed
from weft.errors import ConfigError
from weft.events import MicroBatchFailed, RoundCommitted, TeamFormed
from weft.pipeline.config import PipelineConfig
from weft.pipeline.split.cut import SplitConfig
from weft.pipeline.split.leader import LedPassed
from weft.run.config import RunFile, TrainConfig
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.method.schedule import ConstantConfig

HEADS, SEGMENTS = SplitConfig(by="heads"), SplitConfig(by="segments")


def calm(root: Path, num_steps: int) -> list[float]:
    """Return the losses where three peers compute alone, as many samples a step."""
    root.mkdir()

    async def work(house: House) -> None:
        await done(crew(house, 3))

    return losses(play(sealed(root, num_steps=num_steps, batch=2 * BATCH), root, work).machines[0])


@pytest.mark.full
@pytest.mark.parametrize("split", [HEADS, pytest.param(SEGMENTS, marks=pytest.mark.slow)], ids=["heads", "segments"])
def test_teams_learn_what_members_alone_do(tmp_path: Path, split: SplitConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run, led, real = sealed(tmp_path, split=split), list[int](), LedPassed.count

    def count(passed: LedPassed) -> None:
        led.append(passed._leader.means.stage)
        real(passed)

    monkeypatch.setattr(LedPassed, "count", count)

    async def work(house: House) -> None:
        await done(crew(house, 6))

    house = play(run, tmp_path, work)
    assert not [event for machine in house.machines for event in machine.seen(MicroBatchFailed)]
    teams = [event.members for machine in house.machines for event in machine.seen(TeamFormed)]  # type: ignore[attr-defined]
    assert sorted(Counter(teams).values()) == [2, 2, 2], "each tells once of the team that it is in"
    told = [machine.outcomes for machine in house.machines]
    replicas = {stage: {each[stage].replica for each in told if stage in each} for stage in range(3)}
    assert {stage: len(found) for stage, found in replicas.items()} == {0: 1, 1: 1, 2: 1}, "members of a stage agree"
    brought = [[len(event.contributors) for event in machine.seen(RoundCommitted)] for machine in house.machines]  # type: ignore[attr-defined]
    assert {num for each in brought for num in each} == {1}, "who leads brings what its team has found"
    num_micro = 6 * 2 * BATCH // 2  # of two samples each
    assert min(led.count(stage) for stage in range(3)) > 0.8 * num_micro, "all but the first, while some still came"
    assert losses(house.machines[0]) == pytest.approx(calm(tmp_path / "calm", 6), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "helper"])
def test_a_member_of_a_team_that_dies_leaves_what_is_learnt_as_it_is(tmp_path: Path, is_leader: bool) -> None:
    run = sealed(tmp_path, num_steps=60, lr=3e-3, split=HEADS)
    late: list[Machine] = []

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 8)
        team = sorted((each for each in machines if 1 in each.company.members), key=lambda each: each.id)
        team[0 if is_leader else 1].kill()
        await asyncio.sleep(20.0)
        late.append(house.start("late"))
        await done(machines + late)

    house = play(run, tmp_path, work)
    alive = next(each for each in house.machines if not each.is_dead and losses(each))
    assert losses(alive)[-1] == pytest.approx(calm_at(tmp_path / "calm", 60), rel=0.02)


def calm_at(root: Path, num_steps: int) -> float:
    root.mkdir()

    async def work(house: House) -> None:
        await done(crew(house, 3))

    return losses(play(sealed(root, num_steps=num_steps, batch=2 * BATCH, lr=3e-3), root, work).machines[0])[-1]


def test_a_method_whose_members_step_apart_has_no_teams(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.split"):
        sealed(tmp_path, DiLoCoConfig(every=3), split=HEADS)


@pytest.mark.slow
@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "helper"])
def test_a_member_of_a_team_that_is_paused_leaves_its_device_and_goes_on(tmp_path: Path, is_leader: bool) -> None:
    run = sealed(tmp_path, num_steps=60, lr=3e-3, split=HEADS)

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 8)
        team = sorted((each for each in machines if 1 in each.company.members), key=lambda each: each.id)
        paused = team[0 if is_leader else 1].company.pausing
        for _ in range(3):
            paused.want("asked to")
            await asyncio.sleep(3.0)
            paused.want_no_more("asked to")
            await asyncio.sleep(1.0)
        await done(machines)

    house = play(run, tmp_path, work)
    assert [each.outcomes[min(each.outcomes)].reason for each in house.machines] == ["complete"] * 6
    alive = next(each for each in house.machines if losses(each))
    assert losses(alive)[-1] == pytest.approx(calm_at(tmp_path / "calm", 60), rel=0.02)


def test_a_run_without_stages_has_no_teams() -> None:
    train = TrainConfig(seq_len=16, batch_size=2, tokens=1000, schedule=ConstantConfig(lr=1e-2))
    with pytest.raises(ConfigError, match="pipeline: it has no effect in a run without stages"):
        RunFile(name="whole", peers=1, train=train, pipeline=PipelineConfig(split=HEADS))
