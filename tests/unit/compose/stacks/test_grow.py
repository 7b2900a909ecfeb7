"""Growth: layers that change nothing, copies, and depth up-scaling."""

import msgspec
import pytest
import torch

from unit.compose.stacks.small import CONFIG, batch, draw, space, vector
from weft.compose.descent import DescentConfig
from weft.compose.stacks import grow
from weft.compose.stacks.align import ContinueConfig, begin
from weft.compose.stacks.body import body, layers_of
from weft.compose.stacks.stack import Stack
from weft.errors import ConfigError

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
