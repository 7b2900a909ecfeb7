"""From a codec's config to the codec."""

from typing import assert_never

from weft.codec import config as named
from weft.codec.blocks import Blocks
from weft.codec.codec import Codec, Sectioned
from weft.codec.dense import Bf16, Fp32
from weft.codec.extension import Extension
from weft.codec.minifloat import E3m0, Fp8
from weft.codec.quantize import Int4, Int8
from weft.codec.sign import Int2, Sign
from weft.codec.sparse.kept import RandomK, Room, TopK
from weft.codec.sparse.nonzero import Nonzero
from weft.extension import make


def build(config: named.CodecConfig, round: int = 0, num_peers: int = 1) -> Codec:
    """Return the codec that `config` describes.

    Args:
        round: in which it is used: what is drawn at random is drawn anew in each.
        num_peers: whose mean it encodes: what each of them keeps has room in it.
    """
    match config:
        case named.Fp32Config():
            return Fp32()
        case named.Bf16Config():
            return Bf16()
        case named.Fp8Config(block=block):
            return _values("fp8", block)
        case named.Int8Config(block=block):
            return _values("int8", block)
        case named.Int4Config(block=block):
            return _values("int4", block)
        case named.E3m0Config(block=block):
            return _values("e3m0", block)
        case named.Int2Config(block=block):
            return Blocks(Int2(), block)
        case named.SignConfig(block=block):
            return _values("sign", block)
        case named.TopKConfig():
            return _top_k(named.MAX_BLOCK, config.kept, config.values, num_peers)
        case named.RandomKConfig(kept=kept, largest=largest):
            values = _top_k(kept, largest, config.values, num_peers) if largest else _values(config.values, kept)
            return RandomK(Room(named.MAX_BLOCK, kept), round, values)
        case named.NonzeroConfig(values=values):
            return Nonzero(Fp32() if values == "fp32" else Bf16())
        case named.ExtensionCodecConfig():
            return Extension(config.name, make(config))
    assert_never(config)


def _top_k(chunk: int, kept: int, values: named.Values, num_peers: int) -> TopK:
    room = Room(chunk, kept, num_peers)
    return TopK(room, _values(values, room.num_kept(chunk)))


def _values(name: named.Values, block: int) -> Sectioned:
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
