"""A model that is held in a subspace: what it sends is all there is, and stays so as it trains."""

import msgspec
import pytest
import torch
from benchmarks.rig.flat import two_groups

from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, cut, flatten
from weft.model.initial import initial_vector
from weft.model.sections import sections
from weft.model.transformer import SectionModule
from weft.pipeline.codec.activations import SubspaceConfig
from weft.pipeline.codec.boundary import Samples, Shape
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.codec.subspace import WRITERS, Confined, Space, confined, drawn

CONFIG = msgspec.convert(
    {
        "vocab_size": 13,
        "num_layers": 3,
        "num_heads": 2,
        "num_kv_heads": 1,
        "width": 16,
        "ffn_width": 24,
        "max_seq_len": 8,
    },
    ModelConfig,
)
SUBSPACE = SubspaceConfig(rank=5, values="fp32")
SHAPE = Shape(8, 16, 13)


def space_of(config: SubspaceConfig = SUBSPACE) -> Space:
    return drawn(config, 16, 13)


def held_to(model: FlatModel) -> Confined:
    assert model.section is not None
    return confined(SUBSPACE, model.config, model.section)


def models(*, is_begun: bool = True, config: ModelConfig = CONFIG) -> list[FlatModel]:
    found = []
    for section in sections(config, 3):
        model = flatten(SectionModule(config, section), "cpu")
        model.vector.copy_(cut(config, initial_vector(config, 1), section))
        if is_begun:
            held_to(model).begin(model.vector)
        found.append(model)
    return found


def trained(held: list[FlatModel], steps: int, *, is_constrained: bool) -> torch.Tensor:
    """Make steps of AdamW on the three sections, without codecs; return tokens."""
    luck = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 13, (4, 9), generator=luck)
    optimizer = torch.optim.AdamW([group for model in held for group in two_groups(model)], lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        for model in held:
            model.zero_gradient()
        x = tokens[:, :-1]
        for model in held[:-1]:
            x = model.module(x)
        held[-1].module.loss(x, tokens[:, 1:]).backward()
        optimizer.step()
        for model in held if is_constrained else []:
            held_to(model).constrain(model.vector)
    return tokens


@torch.no_grad()
def outputs(held: list[FlatModel], tokens: torch.Tensor) -> list[torch.Tensor]:
    found, x = [], tokens[:, :-1]
    for model in held[:-1]:
        x = model.module(x)
        found.append(x)
    return found


def test_directions_are_orthonormal_and_follow_from_the_seed() -> None:
    space = drawn(SubspaceConfig(rank=16), 16, 13)
    assert torch.allclose(space.directions.T @ space.directions, torch.eye(16), atol=1e-6)
    assert torch.equal(drawn(SubspaceConfig(rank=16), 16, 13).directions, space.directions)
    assert not torch.equal(drawn(SubspaceConfig(rank=16, seed=1), 16, 13).directions, space.directions)
    fixed = drawn(SubspaceConfig(rank=1, fixed_std=3.0), 64, 500).fixed
    assert float(fixed.std()) == pytest.approx(3.0, rel=0.05)
    assert abs(float(fixed.mean())) < 0.1


def test_what_a_constrained_model_sends_arrives_whole_and_of_another_it_is_refused() -> None:
    codec = Boundaries(SUBSPACE).boundary(SHAPE).activations
    held = models()
    tokens = trained(held, 10, is_constrained=True)
    samples = Samples(tokens[:, :-1], (0, 1, 2, 3))
    for x in outputs(held, tokens):
        found = codec.decode(codec.encode(x, samples), samples)
        assert float((found - x).norm() / x.norm()) < 1e-5
    free = models()
    trained(free, 10, is_constrained=False)
    with pytest.raises(ConfigError, match="outside of the space"):
        codec.encode(outputs(free, tokens)[0], samples)
    never = models(is_begun=False)
    with pytest.raises(ConfigError, match=r"Confined\.begin"):
        codec.encode(outputs(never, tokens)[0], samples)


def test_the_embedding_is_the_fixed_table_and_what_lies_in_the_space() -> None:
    space, held = space_of(), models()
    before = initial_vector(CONFIG, 1)[: 13 * 16].view(13, 16)  # the embedding comes first
    table = held[0].layout.view(held[0].vector, held[0].layout.spans[0])
    assert torch.allclose(table, space.fixed + before @ space.directions @ space.directions.T, atol=1e-6)


def test_the_last_section_may_write_what_it_wants_and_reads_are_left_alone() -> None:
    free, held = models(is_begun=False), models()
    for number in range(3):
        for span in held[number].layout:
            is_held = span.name == "embed.weight" or (span.name.endswith(WRITERS) and number < 2)
            before, after = (each[number].vector[span.offset : span.stop] for each in (free, held))
            assert torch.equal(before, after) != is_held, span.name


def test_a_tied_table_is_alike_at_both_ends() -> None:
    held = models(config=msgspec.structs.replace(CONFIG, is_tied=True))
    tables = [held[number].layout.view(held[number].vector, held[number].layout.spans[0]) for number in (0, 2)]
    assert held[2].layout.spans[0].name == "embed.weight"
    assert torch.equal(*tables)


def test_to_constrain_what_is_constrained_changes_rounding_alone() -> None:
    held = models()
    for model in held:
        before = model.vector.clone()
        held_to(model).constrain(model.vector)
        assert torch.allclose(model.vector, before, atol=1e-6)


def test_the_gradient_that_comes_back_is_that_of_what_was_sent() -> None:
    """The chain rule through encoding and decoding, as torch has it."""
    space, boundary = space_of(), Boundaries(SUBSPACE).boundary(SHAPE)
    tokens = torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(1))
    samples = Samples(tokens, (0, 1))
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    there = ((x - space.fixed[tokens]) @ space.directions) @ space.directions.T + space.fixed[tokens]
    there.pow(3).sum().backward()
    passed = boundary.gradients.decode(boundary.gradients.encode((3 * there**2).detach(), samples), samples)
    assert x.grad is not None
    assert torch.allclose(passed, x.grad, rtol=1e-4, atol=1e-4)
