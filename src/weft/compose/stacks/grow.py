"""A body grows deeper: by layers that change nothing yet, by a copy of itself, by itself without its middle's ends.

    identity           | f | + layers whose output projections are 0     says what it said, until it is trained on
    copied             | f | f |
    depth_up_scaled    | f without its last m | f without its first m |     n layers become 2 (n - m)

All return a config and a vector. What was copied has to be trained on. They are the controls of every stack: a second
member has to be worth more than layers that cost nothing.

Copies: Du et al., 2405.15319. Depth up-scaling, 32 layers to 48 with m = 8: Kim et al., 2312.15166, section 2.1.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from jaxtyping import Float32
from msgspec import UNSET
from torch import Tensor

from weft.compose.stacks.body import LayerTensors, body, joined, layers_of
from weft.compose.stacks.body import identity as identity_body
from weft.errors import ConfigError
from weft.model.config import ModelConfig

Growth = Literal["copy", "depth"]  # of the lowest member of a stack, by itself
Grown = tuple[ModelConfig, Float32[Tensor, " num"]]


def identity(config: ModelConfig, vector: Float32[Tensor, " num"], num: int, seed: int) -> Grown:
    """Return the body with so many layers on top that change nothing yet.

    Args:
        seed: of their other matrices.

    Raises:
        ConfigError: its layers are not all alike.
    """
    new = msgspec.structs.replace(config, num_layers=num)
    return _of(config, [*_layers(config, vector), *layers_of(body(new, identity_body(new, seed)))])


def copied(config: ModelConfig, vector: Float32[Tensor, " num"], times: int = 2) -> Grown:
    """Return so many copies of the body, one on the other.

    Raises:
        ConfigError: as `identity`.
    """
    return _of(config, _layers(config, vector) * times)


def depth_up_scaled(config: ModelConfig, vector: Float32[Tensor, " num"], num_dropped: int) -> Grown:
    """Return the body without its last layers, and on it the body without its first.

    Args:
        num_dropped: of each: m.

    Raises:
        ConfigError: all would be dropped; or as `identity`.
    """
    if not 0 <= num_dropped < config.num_layers:
        raise ConfigError(
            f"depth up-scaling: m = {num_dropped} of {config.num_layers} layers. Allowed: 0 to {config.num_layers - 1}."
        )
    layers = _layers(config, vector)
    return _of(config, layers[: config.num_layers - num_dropped] + layers[num_dropped:])


def usual_dropped(num_layers: int) -> int:
    """Return m as the paper has it of so many layers: a quarter, 8 of 32."""
    return max(1, num_layers // 4)


def _layers(config: ModelConfig, vector: Float32[Tensor, " num"]) -> list[LayerTensors]:
    if config.first_windowed is not UNSET:
        raise ConfigError(
            "growth: the last layers of this model have a window, and no layer can stand in another place."
        )
    return layers_of(body(config, vector))


def _of(config: ModelConfig, layers: Sequence[LayerTensors]) -> Grown:
    grown = msgspec.structs.replace(config, num_layers=len(layers))
    return grown, joined(grown, layers)
