"""Codecs: flat fp32 vectors to canonical bytes and back.

`weft.codec.build` and the codecs themselves are not re-exported: they need torch, and a codec's name does not.
"""

from weft.codec.config import (
    LOSSY,
    MAX_BLOCK,
    Bf16Config,
    CodecConfig,
    E3m0Config,
    ExtensionCodecConfig,
    Fp8Config,
    Fp32Config,
    Int2Config,
    Int4Config,
    Int8Config,
    RandomKConfig,
    SignConfig,
    TopKConfig,
    Values,
)

__all__ = [
    "LOSSY",
    "MAX_BLOCK",
    "Bf16Config",
    "CodecConfig",
    "E3m0Config",
    "ExtensionCodecConfig",
    "Fp8Config",
    "Fp32Config",
    "Int2Config",
    "Int4Config",
    "Int8Config",
    "RandomKConfig",
    "SignConfig",
    "TopKConfig",
    "Values",
]
