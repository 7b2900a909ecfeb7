"""Which codec, as a run file and a charter name it. It needs no torch: an anchor reads charters."""

from typing import Annotated

import msgspec

from weft.config import Config
from weft.errors import ConfigError

MAX_BLOCK = 4096  # parts are cut at multiples of it (sync/reduce.py), so a part's blocks are the vector's blocks


class Fp32Config(Config, frozen=True, kw_only=True, tag_field="type", tag="fp32"):
    """4 bytes a value, nothing lost."""


class Bf16Config(Config, frozen=True, kw_only=True, tag_field="type", tag="bf16"):
    """2 bytes a value, 8 significant bits."""


class Int8Config(Config, frozen=True, kw_only=True, tag_field="type", tag="int8"):
    """1 byte a value and 4 bytes a block."""

    block: Annotated[
        int, msgspec.Meta(ge=32, le=MAX_BLOCK, description="values that share a scale; a power of two")
    ] = 256

    def __post_init__(self) -> None:
        if self.block & (self.block - 1):
            raise ConfigError(f"codec int8: block: {self.block} is no power of two from 32 to {MAX_BLOCK}.")


CodecConfig = Fp32Config | Bf16Config | Int8Config
