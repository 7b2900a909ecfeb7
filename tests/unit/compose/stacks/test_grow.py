"""Growth: layers that change nothing, copies, and depth up-scaling."""

import msgspec
import pytest
import torch

from unit.compose.stacks.small import CONFIG, batch, draw, space, vector
from weft.compose.descent import DescentConfig
from weft.compose.making import Work, ways_of
from weft.compose.stacks import grow
from weft.compose.stacks.align import ContinueConfig, begin
from weft.compose.stacks.body import body, layers_of
from weft.compose.stacks.grow import Growth
from weft.compose.stacks.stack import PreConfig, Stack, uniform, whole
from weft.errors import ConfigError
from weft.model.config import ModelConfig

DEEP = msgspec.structs.replace(CONFIG, num_layers=4)


def same_layers(grown: grow.Grown, expected: list[int], of: tuple[object, torch.Tensor]) -> bool:
    config, found = grown
    mine, theirs = layers_of(body(config, found)), layers_of(body(DEEP, of[1]))
    pairs = zip(mine, [theirs[layer] for layer in expected], strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def test_identity_layers_change_nothing_until_they_are_trained() -> None:
    config, found = grow.identity(DEEP, vector(1, DEEP), 3, seed=2)
    assert config.num_layers == 7
    x = space().begin(batch().tokens)
    assert torch.equal(body(config, found)(x), body(DEEP, vector(1, DEEP))(x))
    training = DescentConfig(steps=3, lr=1e-2, warmup_steps=0)
    trained = begin(ContinueConfig(training=training), Stack(space(), (body(config, found),)), draw())
    trained.run()
    new = layers_of(trained.stack.bodies[0])[6]
    assert new["attention.out.weight"].any()
    assert new["ffn.down.weight"].any()


def test_a_copy_is_the_body_on_itself() -> None:
    made = DEEP, vector(1, DEEP)
    assert same_layers(grow.copied(*made), [0, 1, 2, 3, 0, 1, 2, 3], made)
    x = space().begin(batch().tokens)
    one, two = body(*made), body(*grow.copied(*made))
    assert torch.equal(two(x), one(one(x)))


def control(num: int, growth: Growth, lowest: ModelConfig = DEEP) -> Stack:
    """Return what a stack of so many members is told beside."""
    bodies = (body(lowest, vector(1, lowest)), *(body(DEEP, vector(seed, DEEP)) for seed in range(2, num + 1)))
    training = DescentConfig(steps=3, warmup_steps=0)
    work = Work(space(), bodies, uniform(PreConfig(), num), ways_of(["joint"], num, training), 2, 8, (growth,))
    return work.grown(growth)


def test_a_stack_is_told_beside_its_lowest_member_grown_as_papers_do() -> None:
    made = DEEP, vector(1, DEEP)
    for growth, grown in (("copy", grow.copied(*made)), ("depth", grow.depth_up_scaled(*made, 1))):
        wanted = whole(Stack(space(), (body(*grown),)))
        found = whole(control(2, growth))  # type: ignore[arg-type]
        assert found[0] == wanted[0]
        assert found[1].equal(wanted[1])
    assert [len(control(3, "depth").kept(place)) for place in range(3)] == [3, 2, 3]


def test_a_member_of_too_few_layers_is_not_grown_by_depth() -> None:
    two = msgspec.structs.replace(CONFIG, num_layers=2)
    assert [len(control(2, "depth", two).kept(place)) for place in range(2)] == [1, 1]
    with pytest.raises(ConfigError, match="It takes 3; grow by a copy"):
        control(3, "depth", two)


def test_depth_up_scaling_drops_the_last_below_and_the_first_above() -> None:
    made = DEEP, vector(1, DEEP)
    grown = grow.depth_up_scaled(*made, 1)
    assert grown[0].num_layers == 6
    assert same_layers(grown, [0, 1, 2, 1, 2, 3], made)
    assert same_layers(grow.depth_up_scaled(*made, 0), [0, 1, 2, 3] * 2, made)


@pytest.mark.parametrize("num_dropped", [-1, 4])
def test_all_layers_cannot_be_dropped(num_dropped: int) -> None:
    with pytest.raises(ConfigError, match="Allowed: 0 to 3"):
        grow.depth_up_scaled(DEEP, vector(1, DEEP), num_dropped)


def test_layers_that_know_their_place_are_not_moved() -> None:
    config = msgspec.structs.replace(DEEP, window=4, first_windowed=2)
    with pytest.raises(ConfigError, match="no layer can stand in another place"):
        grow.copied(config, vector(1, config))
