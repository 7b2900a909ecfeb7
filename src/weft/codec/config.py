"""Which codec, as a run file and a charter name it. It needs no torch: an anchor reads charters."""

from typing import Annotated, Literal

import msgspec

from weft.config import Config
from weft.errors import ConfigError
from weft.extension import ExtensionConfig

MAX_BLOCK = 4096  # parts are cut at multiples of it (sync/records/parts.py), so a part's blocks are the vector's blocks

_Block = Annotated[int, msgspec.Meta(ge=32, le=MAX_BLOCK, description="values that share a scale; a power of two")]


class Fp32Config(Config, frozen=True, kw_only=True, tag_field="type", tag="fp32"):
    """4 bytes a value, nothing lost."""


class Bf16Config(Config, frozen=True, kw_only=True, tag_field="type", tag="bf16"):
    """2 bytes a value, 8 significant bits."""


class _Blocks(Config, frozen=True, kw_only=True, tag_field="type"):
    block: _Block = 256

    def __post_init__(self) -> None:
        if self.block & (self.block - 1):
            name = type(self).__struct_config__.tag
            raise ConfigError(f"codec {name}: block: {self.block} is not a power of two from 32 to {MAX_BLOCK}.")


class Fp8Config(_Blocks, frozen=True, kw_only=True, tag="fp8"):
    """1 byte a value and 1 byte a block: e4m3, 4 significant bits over 17 powers of two."""


class Int8Config(_Blocks, frozen=True, kw_only=True, tag="int8"):
    """1 byte a value and 4 bytes a block."""


class Int4Config(_Blocks, frozen=True, kw_only=True, tag="int4"):
    """4 bits a value and 2 bytes a block."""


class E3m0Config(_Blocks, frozen=True, kw_only=True, tag="e3m0"):
    """4 bits a value and 1 byte a block: 7 powers of two, either sign, and zero."""


class Int2Config(_Blocks, frozen=True, kw_only=True, tag="int2"):
    """2 bits a value and 2 bytes a block: the sign, and whether it is once or three times the scale."""


class SignConfig(_Blocks, frozen=True, kw_only=True, tag="sign"):
    """1 bit a value and 2 bytes a block: the sign, and the mean magnitude."""


# How the values that a sparse codec keeps are encoded; those of one chunk share a scale.
Values = Literal["fp32", "bf16", "fp8", "int8", "int4", "e3m0", "sign"]
_Values = Annotated[
    Values, msgspec.Meta(description="how those that are kept are encoded; in a chunk they share a scale")
]


class TopKConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="top_k"):
    """The largest magnitudes of each 4096 values: which, as one number of the fewest bits, and their values."""

    kept: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK, description="of each 4096 values")] = 64
    values: _Values = "sign"


class RandomKConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="random_k"):
    """Values of each 4096 at random places, the same on all members in a round; of them all, or the largest."""

    kept: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK, description="of each 4096 values")] = 64
    largest: Annotated[
        int | None, msgspec.Meta(description="how many of those are sent, the largest; left out: all")
    ] = None
    values: _Values = "sign"

    def __post_init__(self) -> None:
        if self.largest is not None and not 1 <= self.largest <= self.kept:
            raise ConfigError(f"codec random_k: largest: {self.largest} is not from 1 to the {self.kept} kept.")


class NonzeroConfig(Config, frozen=True, kw_only=True, tag_field="type", tag="nonzero"):
    """The values that are not zero, and which they are: as many bytes as there are of them."""

    values: Annotated[Literal["fp32", "bf16"], msgspec.Meta(description="how those that are sent are encoded")] = "bf16"


class ExtensionCodecConfig(ExtensionConfig, frozen=True, kw_only=True, tag="extension"):
    """A codec from outside of weft (`weft.extend`), which every member has to have."""


LOSSY = (Int2Config, SignConfig, TopKConfig, RandomKConfig)  # what they leave out has to be kept for later

CodecConfig = (
    Fp32Config
    | Bf16Config
    | Fp8Config
    | Int8Config
    | Int4Config
    | E3m0Config
    | Int2Config
    | SignConfig
    | TopKConfig
    | RandomKConfig
    | NonzeroConfig
    | ExtensionCodecConfig
)
