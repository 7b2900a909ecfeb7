"""Codecs: flat fp32 vectors to canonical bytes and back.

`weft.codec.codec` and the codecs themselves are not re-exported: they need torch, and a codec's name does not.
"""

from weft.codec.config import MAX_BLOCK, Bf16Config, CodecConfig, Fp32Config, Int8Config

__all__ = ["MAX_BLOCK", "Bf16Config", "CodecConfig", "Fp32Config", "Int8Config"]
