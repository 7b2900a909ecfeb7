"""From the configs of activations and gradients to what makes the codecs of boundaries."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, assert_never

from weft.codec import build as vectors
from weft.codec.codec import Codec
from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int2Config, Int4Config, Int8Config
from weft.pipeline.codec.activations import (
    BY_DEFAULT,
    ActivationConfig,
    AqSgdConfig,
    GradientConfig,
    LplrConfig,
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


def _numbers(name: Literal["fp32", "bf16", "fp8", "int8", "int4", "int2"]) -> Codec:
    match name:
        case "fp32":
            return vectors.build(Fp32Config())
        case "bf16":
            return vectors.build(Bf16Config())
        case "fp8":
            return vectors.build(Fp8Config())
        case "int8":
            return vectors.build(Int8Config())
        case "int4":
            return vectors.build(Int4Config())
        case "int2":
            return vectors.build(Int2Config())
    assert_never(name)
