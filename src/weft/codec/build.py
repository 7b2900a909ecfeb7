"""From a codec's config to the codec."""

from typing import assert_never

from weft.codec.blocks import Blocks
from weft.codec.codec import Codec, Sectioned
from weft.codec.config import (
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
from weft.codec.dense import Bf16, Fp32
from weft.codec.extension import Extension
from weft.codec.minifloat import E3m0, Fp8
from weft.codec.quantize import Int4, Int8
from weft.codec.sign import Int2, Sign
from weft.codec.sparse import RandomK, Room, TopK
from weft.extension import make


def build(config: CodecConfig, round: int = 0, num_peers: int = 1) -> Codec:
    """Return the codec that `config` describes.

    Args:
        round: in which it is used: what is drawn at random is drawn anew in each.
        num_peers: whose mean it encodes: what each of them keeps has room in it.
    """
    match config:
        case Fp32Config():
            return Fp32()
        case Bf16Config():
            return Bf16()
        case Fp8Config(block=block):
            return _values("fp8", block)
        case Int8Config(block=block):
            return _values("int8", block)
        case Int4Config(block=block):
            return _values("int4", block)
        case E3m0Config(block=block):
            return _values("e3m0", block)
        case Int2Config(block=block):
            return Blocks(Int2(), block)
        case SignConfig(block=block):
            return _values("sign", block)
        case TopKConfig():
            return _top_k(MAX_BLOCK, config.kept, config.values, num_peers)
        case RandomKConfig(kept=kept, largest=largest):
            values = _top_k(kept, largest, config.values, num_peers) if largest else _values(config.values, kept)
            return RandomK(Room(MAX_BLOCK, kept), round, values)
        case ExtensionCodecConfig():
            return Extension(config.name, make(config))
    assert_never(config)


def _top_k(chunk: int, kept: int, values: Values, num_peers: int) -> TopK:
    room = Room(chunk, kept, num_peers)
    return TopK(room, _values(values, room.num_kept(chunk)))


def _values(name: Values, block: int) -> Sectioned:
    match name:
        case "fp32":
            return Fp32()
        case "bf16":
            return Bf16()
        case "fp8":
            return Blocks(Fp8(), block)
        case "int8":
            return Blocks(Int8(), block)
        case "int4":
            return Blocks(Int4(), block)
        case "e3m0":
            return Blocks(E3m0(), block)
        case "sign":
            return Blocks(Sign(), block)
    assert_never(name)
