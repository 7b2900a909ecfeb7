"""Which codec passes activations from one section to the next, and their gradients back, as a run file names it.

    fp32 bf16                 each number as it is, or its upper half; bf16 where nothing is said
    fp8 int8 int4             one scale a block of numbers (`weft.codec`)
    lplr                      two thin matrices of int8 whose product is close (`lplr`)
    subspace                  a few numbers a token, of a model that is held to them (`subspace`): experimental
    aqsgd                     what changed of a sample since it was passed last (`aqsgd`)

What a member computes of activations reaches the others in gradients alone, so members need not agree to the last bit,
and no codec here keeps feedback: a number lost in one micro-batch is a little noise in its gradient.

It needs no torch: an anchor reads charters. `build.Boundaries` makes the codecs.
"""

from typing import Annotated, Literal

from msgspec import Meta

from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int4Config, Int8Config
from weft.config import Config
from weft.errors import ConfigError

MAX_RANK = 4096  # no less than many a model's width

NumberConfig = Fp32Config | Bf16Config | Fp8Config | Int8Config | Int4Config
"""How each number of a vector is encoded."""

_Values = Annotated[
    Literal["fp32", "bf16", "fp8", "int8", "int4"], Meta(description="how each number that is sent is encoded")
]
_Rank = Annotated[int, Meta(ge=1, le=MAX_RANK, description="columns of the thin matrices; at most the model's width")]


class LplrConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="lplr"):
    """Two factors of a micro-batch, in int8: rank bytes a token, and as many rows of the model's width."""

    rank: _Rank = 32


class SubspaceConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="subspace"):
    """Coordinates in a space that all matrices which write to the residual stream are projected to. Experimental."""

    rank: Annotated[int, Meta(ge=1, le=MAX_RANK, description="numbers a token; at most the model's width")] = 32
    values: _Values = "bf16"
    seed: Annotated[int, Meta(ge=0, lt=1 << 62, description="of the space and of the fixed table")] = 0
    fixed_std: Annotated[float, Meta(ge=0.0, le=100.0, description="deviation of the fixed table's numbers")] = 1.0


class AqSgdConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="aqsgd"):
    """Changes of samples that come again, to whom they went before: the fewer members stages have, the more often."""

    values: Annotated[
        Literal["bf16", "fp8", "int8", "int4", "int2"], Meta(description="how each number of a change is encoded")
    ] = "int4"
    held_nbytes: Annotated[
        int, Meta(ge=0, le=1 << 50, description="bytes of memory for samples, of each member at each of its boundaries")
    ] = 1 << 30


ActivationConfig = NumberConfig | LplrConfig | SubspaceConfig | AqSgdConfig
"""What passes activations."""

GradientConfig = NumberConfig | LplrConfig
"""What passes their gradients, where that is said apart."""

BY_DEFAULT = Bf16Config()


def check_gradients(activations: ActivationConfig, gradients: GradientConfig | None) -> None:
    """
    Raises:
        ConfigError: gradients of a subspace have a codec of their own.
    """
    if isinstance(activations, SubspaceConfig) and gradients is not None:
        raise ConfigError("gradients: those of a subspace lie in it, too, and have no other codec. Leave it out.")
