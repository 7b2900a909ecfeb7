"""What stages pass where the model is held to it, or what passed before counts: whole peers of such runs."""

import asyncio
from pathlib import Path

import pytest
import torch

from scenarios.companies import House, losses
from scenarios.swarm import write_corpus
from scenarios.test_companies import DDP, crew, done, play, rounds, sealed, whole
from scenarios.test_tied import heldout_loss
from weft.codec.config import Fp32Config
from weft.errors import ConfigError
from weft.events import MicroBatchFailed
from weft.model.flat import assemble, layout
from weft.pipeline.codec.activations import ActivationConfig, AqSgdConfig, SubspaceConfig
from weft.pipeline.codec.subspace import WRITERS, drawn
from weft.run.staged import StagedConfig
from weft.sync.method.presets import DiLoCoConfig, MethodConfig

SUBSPACE = SubspaceConfig(rank=6, values="fp32", fixed_std=0.1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "is_tied"),
    [(DiLoCoConfig(every=3), False), pytest.param(DDP, True, marks=pytest.mark.slow)],
    ids=["diloco", "tied ddp"],
)
def test_a_model_that_is_held_to_a_subspace_stays_in_it_and_learns(
    tmp_path: Path, method: MethodConfig, is_tied: bool
) -> None:
    run = sealed(tmp_path, method, num_steps=12, is_tied=is_tied, activations=SUBSPACE)

    async def work(house: House) -> None:
        machines = crew(house, 3)
        await rounds(machines[0], 2)
        machines.append(house.start("late"))
        await done(machines)

    house = play(run, tmp_path, work)
    assert not [event for machine in house.machines for event in machine.seen(MicroBatchFailed)]
    model, vector = run.config.model, whole(house.machines, run)
    space = drawn(SUBSPACE, model.width, model.vocab_size)
    beyond = torch.eye(model.width) - space.directions @ space.directions.T
    for span in layout(model):
        matrix = vector[span.offset : span.stop].view(span.shape)
        if span.name == "embed.weight":
            assert float(((matrix - space.fixed) @ beyond).norm() / matrix.norm()) < 1e-5
        elif span.name.endswith(WRITERS) and "layers.2" not in span.name:
            assert float((beyond @ matrix).norm() / matrix.norm()) < 1e-5
    found = losses(house.machines[0])
    assert found[-1] < found[0] - 0.1
    assert found[-1] == pytest.approx(heldout_loss(run, assemble(model, vector)), rel=1e-4), "what is sent is whole"


def test_a_space_of_more_dimensions_than_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="above the model's width"):
        sealed(tmp_path, activations=SubspaceConfig(rank=17))


@pytest.mark.slow
@pytest.mark.parametrize("num", [3, 6])
def test_samples_that_come_again_are_passed_by_what_changed(tmp_path: Path, num: int) -> None:
    """In as many bytes the loss is nearer to that of exact activations than where each is passed alone."""
    text = tmp_path / "short.txt"
    text.write_text(write_corpus(tmp_path).read_text()[:1600])

    def learnt(name: str, activations: ActivationConfig) -> float:
        root = tmp_path / name
        root.mkdir()
        run = sealed(root, num_steps=60, lr=2e-3, text=text, activations=activations, gradients=Fp32Config())
        assert isinstance(run.config, StagedConfig)

        async def work(house: House) -> None:
            await done(crew(house, num))

        house = play(run, root, work)
        assert not [event for machine in house.machines for event in machine.seen(MicroBatchFailed)]
        return losses(house.machines[0])[-1]

    exact = learnt("exact", Fp32Config())
    changes = learnt("changes", AqSgdConfig(values="int2"))
    alone = learnt("alone", AqSgdConfig(values="int2", held_nbytes=0))
    assert abs(changes - exact) < abs(alone - exact)


@pytest.mark.slow
def test_a_member_that_dies_leaves_nothing_that_others_would_build_on(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text(write_corpus(tmp_path).read_text()[:1600])
    run = sealed(tmp_path, num_steps=40, lr=2e-3, text=text, activations=AqSgdConfig())

    async def work(house: House) -> None:
        machines = crew(house, 6)
        await rounds(machines[0], 16)
        killed = next(each for each in machines[1:] if 1 in each.company.members)
        killed.kill()
        await asyncio.sleep(1.0)
        machines.append(house.start("late"))
        await done(machines)

    house = play(run, tmp_path, work)
    assert losses(house.machines[0])[-1] < losses(house.machines[0])[0] - 0.1
    alive = [machine for machine in house.machines if not machine.is_dead]
    refused = [event for machine in alive for event in machine.seen(MicroBatchFailed)]
    assert not [event for event in refused if "not held here" in event.reason]
