"""Codecs: flat fp32 vectors to canonical bytes and back."""

from weft.codec.codec import Codec, CodecConfig, build
from weft.codec.dense import Bf16, Bf16Config, Fp32, Fp32Config
from weft.codec.quantize import Int8, Int8Config

__all__ = ["Bf16", "Bf16Config", "Codec", "CodecConfig", "Fp32", "Fp32Config", "Int8", "Int8Config", "build"]
