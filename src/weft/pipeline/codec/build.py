"""From the configs of activations and gradients to the codecs of boundaries."""

from weft.codec import build as vectors
from weft.codec.codec import Codec
from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int2Config, Int4Config, Int8Config
from weft.pipeline.codec import activations as config
from weft.pipeline.codec.activations import AqSgdConfig, GradientConfig, LplrConfig, SubspaceConfig
from weft.pipeline.codec.aqsgd import aqsgd
from weft.pipeline.codec.boundary import ActivationCodec, Boundary, Flat, Shape
from weft.pipeline.codec.lplr import Lplr
from weft.pipeline.codec.subspace import InSubspace, drawn


class Boundaries:
    """What makes the codecs of each boundary and side.

    Args:
        gradients: None: as activations; those of aqsgd in int8, as in its paper.

    Raises:
        ConfigError: as `check_gradients`.
    """

    def __init__(
        self, activations: config.ActivationConfig = config.BY_DEFAULT, gradients: GradientConfig | None = None
    ) -> None:
        config.check_gradients(activations, gradients)
        self._activations = activations
        self._gradients = gradients

    def boundary(self, shape: Shape) -> Boundary:
        match self._activations:
            case SubspaceConfig() as activations:
                return _in_subspace(activations, shape)
            case AqSgdConfig(values=values, held_nbytes=held_nbytes):
                back = self._gradients or Int8Config()
                return aqsgd(_numbers(values), held_nbytes, _one_way(back, shape), shape)
            case activations:
                return Boundary(_one_way(activations, shape), _one_way(self._gradients or activations, shape))


def _one_way(config: GradientConfig, shape: Shape) -> ActivationCodec:
    return Lplr(config, shape) if isinstance(config, LplrConfig) else Flat(vectors.build(config), shape)


def _in_subspace(config: SubspaceConfig, shape: Shape) -> Boundary:
    space, values = drawn(config, shape.width, shape.vocab_size), _numbers(config.values)
    return Boundary(
        InSubspace(space.directions, space.fixed, values, shape), InSubspace(space.directions, None, values, shape)
    )


_NUMBERS: dict[str, config.NumberConfig | Int2Config] = {
    "fp32": Fp32Config(),
    "bf16": Bf16Config(),
    "fp8": Fp8Config(),
    "int8": Int8Config(),
    "int4": Int4Config(),
    "int2": Int2Config(),
}


def _numbers(name: str) -> Codec:
    return vectors.build(_NUMBERS[name])
