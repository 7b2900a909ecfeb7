"""A model whose embedding is its head, in stages: that matrix is trained by both ends together."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.rig.flat import two_groups

from scenarios.companies import House, Machine, losses
from scenarios.test_companies import BATCH, SEQ_LEN, crew, done, play, rounds, sealed, whole
from weft.data.batch import Batches
from weft.errors import ConfigError
from weft.events import StageHeld
from weft.model.flat import assemble, flatten
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.peer.state.checkpoint import load_model
from weft.run.genesis import Sealed
from weft.sync.method.presets import DeMoConfig, DiLoCoConfig, MethodConfig, PowerSgdConfig

STEPS = 6
MATRIX = 3  # its number, after those of three stages


def heldout_loss(run: Sealed, module: Transformer) -> float:
    heldout = Batches(run.store, run.index, "heldout", SEQ_LEN, run.config.seed)
    with torch.no_grad():
        return float(torch.stack([module.loss(*each) for each in heldout.heldout_batches(8, 8)]).mean())


def learnt(run: Sealed) -> list[float]:
    """Return the held-out losses of the whole model, which AdamW of torch trains here."""
    config = run.config
    flat = flatten(Transformer(config.model), "cpu")
    flat.vector.copy_(initial_vector(config.model, config.seed))
    decayed, rest = two_groups(flat)
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": [rest], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    batches = Batches(run.store, run.index, "train", SEQ_LEN, config.seed)
    found = []
    for step in range(STEPS):
        flat.zero_gradient()
        flat.module.loss(*batches.at(np.arange(2 * BATCH * step, 2 * BATCH * (step + 1)))).backward()
        optimizer.step()
        found.append(heldout_loss(run, flat.module))
    return found[1::2]


@pytest.mark.parametrize("num", [1, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_stages_learn_what_the_whole_model_does(tmp_path: Path, num: int) -> None:
    run = sealed(tmp_path, num_steps=STEPS, batch=BATCH if num == 6 else 2 * BATCH, is_tied=True, clip=math.inf)

    async def work(house: House) -> None:
        for machine in (machines := crew(house, num)):
            machine.gathers = machine is machines[0]
        await done(machines)

    house = play(run, tmp_path, work)
    maker, expected = house.machines[0], learnt(run)
    assert losses(maker) == pytest.approx(expected, rel=1e-6)
    matrices = [machine.outcomes for machine in house.machines if MATRIX in machine.held]
    assert len(matrices) == {1: 1, 3: 2, 6: 4}[num]
    vector = whole(house.machines, run)
    assert heldout_loss(run, assemble(run.config.model, vector)) == pytest.approx(expected[-1], rel=1e-6)


@pytest.mark.full
def test_who_began_the_run_gathers_the_matrix_too(tmp_path: Path) -> None:
    run = sealed(tmp_path, num_steps=STEPS, is_tied=True)

    async def work(house: House) -> None:
        maker = house.start("a", wait_for=3, gathers=True)
        await done([maker, house.start("b"), house.start("c")])

    house = play(run, tmp_path, work)
    gathered = house.machines[0].gathered
    assert gathered is not None
    assert len(set(gathered.rounds)) == 1
    assert len(gathered.rounds) == 4
    _, _, vector = load_model(gathered.checkpoint)
    assert torch.equal(vector, whole(house.machines, run))
    assert heldout_loss(run, assemble(run.config.model, vector)) == pytest.approx(losses(house.machines[0])[-1])


@pytest.mark.slow
@pytest.mark.parametrize("method", [DeMoConfig(), PowerSgdConfig()])
def test_methods_that_send_gradients_agree_on_it(tmp_path: Path, method: MethodConfig) -> None:
    run = sealed(tmp_path, method, num_steps=20, is_tied=True)

    async def work(house: House) -> None:
        await done(crew(house, 6))

    house = play(run, tmp_path, work)
    held = [machine.held[MATRIX].peer.replica.outer for machine in house.machines if MATRIX in machine.held]
    assert len(held) == 4
    assert all(torch.equal(each, held[0]) for each in held)
    assert losses(house.machines[0])[-1] < losses(house.machines[0])[0] - 0.5


def test_a_method_that_sends_deltas_is_refused_and_the_fix_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Choose a method that sends gradients .* or set is_tied = false"):
        sealed(tmp_path, DiLoCoConfig(every=3), is_tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_an_end_member_that_dies_and_one_that_comes_leave_what_is_learnt_as_it_is(tmp_path: Path, stage: int) -> None:
    run = sealed(tmp_path, num_steps=60, is_tied=True)
    late: list[Machine] = []

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0 if stage else 1], 8)
        next(each for each in machines[1 if stage else 0 :] if stage in each.company.members).kill()
        await asyncio.sleep(1.0)
        late.append(house.start("late"))
        await done(machines + late)

    house = play(run, tmp_path, work)
    assert [event.stage for event in late[0].seen(StageHeld)] == [stage]  # type: ignore[attr-defined]
    held = [m.held[MATRIX].peer.replica.outer for m in house.machines if MATRIX in m.held and not m.is_dead]
    assert len(held) == 4
    assert all(torch.equal(each, held[0]) for each in held)
    alive = next(each for each in house.machines if not each.is_dead and losses(each))
    module = assemble(run.config.model, whole([each for each in house.machines if not each.is_dead], run))
    assert losses(alive)[-1] == pytest.approx(heldout_loss(run, module), rel=1e-5)
    assert losses(alive)[-1] < losses(alive)[0] - 1.0


@pytest.mark.full
def test_both_ends_lost_at_once_go_on_from_the_copies_that_another_kept(tmp_path: Path) -> None:
    run = sealed(tmp_path, num_steps=16, batch=2 * BATCH, is_tied=True)
    kept: list[torch.Tensor] = []

    async def work(house: House) -> None:
        maker, other = crew(house, 2)
        await asyncio.sleep(14.0)
        assert sorted(maker.company.members) == [0, 2]
        maker.kill()
        kept.append(load_model(other.company.kit.folder.stage(MATRIX).checkpoint)[2])
        await done([other])

    house = play(run, tmp_path, work, train_s=0.1, every_s=3.0)
    other = house.machines[1]
    assert {event.stage for event in other.seen(StageHeld)} == {0, 1, 2}  # type: ignore[attr-defined]
    assert {outcome.reason for outcome in other.outcomes.values()} == {"complete"}
    start = initial_vector(run.config.model, run.config.seed)[: kept[0].numel()]
    assert not torch.equal(kept[0], start)  # what it went on from had been trained
    assert losses(other)[-1] == pytest.approx(
        heldout_loss(run, assemble(run.config.model, whole([other], run))), rel=1e-5
    )
    assert losses(other)[-1] < 4.0


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_with_the_matrix_that_it_had(tmp_path: Path) -> None:
    run = sealed(tmp_path, num_steps=20, batch=2 * BATCH, is_tied=True)
    before: list[float] = []

    async def work(house: House) -> None:
        machines = crew(house, 3)
        await rounds(machines[0], 12)
        for machine in machines:
            machine.company.stop("asked to")
        await done(machines)
        before.append(heldout_loss(run, assemble(run.config.model, whole(machines, run))))
        house.machines.clear()
        await done(crew(house, 3))

    house = play(run, tmp_path, work)
    assert {outcome.reason for machine in house.machines for outcome in machine.outcomes.values()} == {"complete"}
    final = heldout_loss(run, assemble(run.config.model, whole(house.machines, run)))
    assert losses(house.machines[0])[-1] == pytest.approx(final, rel=1e-5)
    assert losses(house.machines[0])[0] < before[0] + 0.3, "it goes on, and does not begin anew"


@pytest.mark.full
@pytest.mark.parametrize("is_tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_peer_that_is_paused_leaves_its_device_and_goes_on(tmp_path: Path, is_tied: bool) -> None:
    run = sealed(tmp_path, num_steps=18, is_tied=is_tied)

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 8)
        for machine in (machines[5], machines[3]):
            machine.company.pausing.want("its person plays")
            await asyncio.sleep(3.0)
            assert machine.company.pausing.is_away
            machine.company.pausing.want_no_more("its person plays")
            await asyncio.sleep(3.0)
        assert not machines[0].task.done(), "it was over before they came back"
        await done(machines)

    house = play(run, tmp_path, work, train_s=0.1)
    assert {outcome.reason for machine in house.machines for outcome in machine.outcomes.values()} == {"complete"}
