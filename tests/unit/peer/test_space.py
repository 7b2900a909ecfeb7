"""Peers train layers between the ends of a space, and hand back a decoder that has these ends."""

from pathlib import Path

import msgspec
import pytest
import torch

from unit.peer.crew import Crew
from weft.cli.model.trained import open_trained
from weft.compose.space import Space, read_space, write_space
from weft.data.tokenizer import ByteTokenizer
from weft.events import Evaluated
from weft.model.config import ModelConfig, named, plain
from weft.model.flat import assemble, layout, plain_vector
from weft.model.initial import initial_vector
from weft.model.weights import read_folder
from weft.peer.state.checkpoint import load_model
from weft.run.config import SpaceModel
from weft.run.frozen import base_of
from weft.run.genesis import initial

WIDTH = 32


def written(folder: Path) -> Space:
    config: ModelConfig = msgspec.structs.replace(
        named("nano", 257, 32), num_layers=1, num_heads=2, num_kv_heads=2, width=WIDTH, ffn_width=48
    )
    made = Space.of(assemble(config, initial_vector(config, 5)), ByteTokenizer().digest)
    write_space(folder, made, ByteTokenizer())
    return made


@pytest.mark.full
async def test_two_peers_train_in_a_space_whose_ends_stay_as_they_were(tmp_path: Path) -> None:
    space = written(tmp_path / "space")
    model = SpaceModel(path="space", num_layers=2, num_heads=2, ffn_width=48)
    crew = Crew(tmp_path, num_peers=2, num_rounds=6, model=model, train={"evaluate_every": 1})
    async with crew.deadline():
        members = [crew.found("a", wait_for=2), crew.join("b")]
        outcomes = await crew.done(*members)
    losses = [event.loss for event in members[0].seen(Evaluated)]
    assert losses[-1] < losses[0]
    for member, outcome in zip(members, outcomes, strict=True):
        run, _, vector = load_model(outcome.checkpoint)
        assert len(vector) == layout(run.model).num_parameters
        frozen = base_of(run, member.home)
        assert frozen is not None
        assert Space.between(run.model, frozen, run.data.tokenizer).digest == space.digest
        trained = open_trained(str(outcome.checkpoint), member.home.root)
        assert trained.adapter is None
        assert trained.config == plain(run.model)
        trained.export(tmp_path / f"export of {member.name}")
        alone = assemble(trained.config, trained.vector)
        tokens = torch.arange(16)[None]
        assert torch.equal(alone(tokens), assemble(run.model, vector, frozen)(tokens))
        ends = read_space(tmp_path / "space")
        assert torch.equal(alone.embed.weight, ends.embed)
        assert torch.equal(alone.head_weight, ends.head)


@pytest.mark.full
async def test_peers_begin_with_the_layers_of_a_member_whoever_has_it(tmp_path: Path) -> None:
    space = written(tmp_path / "space")
    alone = Crew(
        tmp_path,
        num_peers=1,
        num_rounds=8,
        model=SpaceModel(path="space", num_layers=2, num_heads=2, ffn_width=48),
        train={"evaluate_every": 1},
    )
    async with alone.deadline():
        backbone = alone.found("backbone")
        (begun,) = await alone.done(backbone)
    before = [event.loss for event in backbone.seen(Evaluated)]
    open_trained(str(begun.checkpoint), backbone.home.root).export(tmp_path / "english")

    model = SpaceModel(path="space", member="english")
    crew = Crew(tmp_path, num_peers=2, num_rounds=4, model=model, train={"evaluate_every": 1})
    async with crew.deadline():
        members = [crew.found("a", wait_for=2), crew.join("b")]
        outcomes = await crew.done(*members)
    losses = [event.loss for event in members[0].seen(Evaluated)]
    assert losses[0] == pytest.approx(before[-1], abs=1e-6)
    assert losses[-1] < losses[0]
    for member, outcome in zip(members, outcomes, strict=True):
        run, _, _ = load_model(outcome.checkpoint)
        frozen, first = base_of(run, member.home), initial(run, member.home)
        assert frozen is not None
        assert first is not None, "who joins was sent what the run begins with"
        assert Space.between(run.model, frozen, run.data.tokenizer).digest == space.digest
        _, whole = read_folder(tmp_path / "english")
        assert plain_vector(run.model, frozen, first).equal(whole)
