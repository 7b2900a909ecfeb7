"""From the configs of activations and gradients to what makes the codecs of boundaries."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from weft.codec import build as vectors
from weft.codec.codec import Codec
from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int2Config, Int4Config, Int8Config
from weft.pipeline.codec.activations import (
    BY_DEFAULT,
    ActivationConfig,
    AqSgdConfig,
    GradientConfig,
    LplrConfig,
    NumberConfig,
    SubspaceConfig,
    check_gradients,
)
from weft.pipeline.codec.aqsgd import aqsgd
from weft.pipeline.codec.boundary import ActivationCodec, Boundaries, Boundary, Flat, Shape
from weft.pipeline.codec.lplr import Lplr
from weft.pipeline.codec.subspace import InSubspace, drawn


@dataclass(frozen=True)
class Built:
    make: Callable[[Shape], Boundary]

    def boundary(self, shape: Shape) -> Boundary:
        return self.make(shape)


def build(activations: ActivationConfig = BY_DEFAULT, gradients: GradientConfig | None = None) -> Boundaries:
    """Return what makes the codecs of boundaries.

    Args:
        gradients: left out: as activations; those of aqsgd in int8, as in its paper.

    Raises:
        ConfigError: as `check_gradients`.
    """
    check_gradients(activations, gradients)
    match activations:
        case SubspaceConfig():
            return Built(cache(lambda shape: _in_subspace(activations, shape)))  # it remembers nothing, and is large
        case AqSgdConfig(values=values, held_nbytes=held_nbytes):
            back = gradients or Int8Config()
            return Built(lambda shape: aqsgd(_numbers(values), held_nbytes, _one_way(back, shape), shape))
        case _:
            back = gradients or activations
            return Built(lambda shape: Boundary(_one_way(activations, shape), _one_way(back, shape)))


def _one_way(config: GradientConfig, shape: Shape) -> ActivationCodec:
    return Lplr(config, shape) if isinstance(config, LplrConfig) else Flat(vectors.build(config), shape)


def _in_subspace(config: SubspaceConfig, shape: Shape) -> Boundary:
    space, values = drawn(config, shape.width, shape.vocab_size), _numbers(config.values)
    return Boundary(
        InSubspace(space.directions, space.fixed, values, shape), InSubspace(space.directions, None, values, shape)
    )


_NUMBERS: dict[str, NumberConfig | Int2Config] = {
    "fp32": Fp32Config(),
    "bf16": Bf16Config(),
    "fp8": Fp8Config(),
    "int8": Int8Config(),
    "int4": Int4Config(),
    "int2": Int2Config(),
}


def _numbers(name: str) -> Codec:
    return vectors.build(_NUMBERS[name])
