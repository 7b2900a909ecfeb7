"""A few numbers of an encoded vector: where their bytes lie, what they are, and what bytes numbers have.

    spans(codec, num, here)    the bytes of some numbers in an encoding of `num`: scales, where it has them, and codes
    decoded, encoded           those bytes, to numbers and back

These are the codecs of `weft.codec`, block by block and by numpy alone; there is what they are. Only such are here
whose blocks can be told apart: of others a majority judges.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.codec.config import Bf16Config, CodecConfig, Fp32Config, Int4Config, Int8Config
from weft.verify.evidence.shown import Unproven
from weft.wire import Buffer

Known = Fp32Config | Bf16Config | Int8Config | Int4Config

_DENSE_WIDTH = 256  # numbers that are shown of a dense encoding
_LEAST_BITS = 0x00800000  # of a scale: smaller ones are zero
_INT8_GRID, _INT4_GRID = np.uint32(0xFFFFFF80), np.uint32(0xFFFF0000)
_MOST_BF16 = np.float32(float.fromhex("0x1.fep127"))


def known(codec: CodecConfig) -> Known:
    """
    Raises:
        Unproven: blocks of such an encoding cannot be told apart.
    """
    if not isinstance(codec, Known):
        raise Unproven(f"blocks of codec {codec.__struct_config__.tag!r} cannot be shown apart")
    return codec


def width(codec: Known) -> int:
    """Return how many numbers a block has."""
    return codec.block if isinstance(codec, Int8Config | Int4Config) else _DENSE_WIDTH


def place(codec: Known, num: int, block: int) -> range:
    """Return which of `num` numbers a block has.

    Raises:
        Unproven: there is no such block.
    """
    size = width(codec)
    here = range(block * size, min((block + 1) * size, num))
    if not here:
        raise Unproven("there is no such block")
    return here


def block_at(codec: Known, num: int, offset: int) -> int:
    """Return in which block a byte of an encoding lies."""
    scales, _ = _sections(codec, num)
    if offset < scales:
        return offset // (4 if isinstance(codec, Int8Config) else 2)
    of_codes = offset - scales
    number = 2 * of_codes if isinstance(codec, Int4Config) else of_codes // _itemsize(codec)
    return number // width(codec)


def first_other(codec: Known, num: int, data: Buffer, right: Buffer) -> int | None:
    """Return the first block in which two encodings of `num` numbers differ; None: they are equal.

    Raises:
        Unproven: one of them is no such encoding.
    """
    one, other = np.frombuffer(data, np.uint8), np.frombuffer(right, np.uint8)
    if not len(one) == len(other) == nbytes(codec, num):
        raise Unproven("an encoding is of another length than its codec makes")
    differs = one != other
    return block_at(codec, num, int(differs.argmax())) if differs.any() else None


def nbytes(codec: Known, num: int) -> int:
    return sum(_sections(codec, num))


def lengths(codec: Known, num: int) -> list[int]:
    """Return how many numbers an encoding may have that is as long as one of `num`."""
    return [each for each in (num - 1, num, num + 1) if each > 0 and nbytes(codec, each) == nbytes(codec, num)]


def spans(codec: Known, num: int, here: range) -> tuple[range, ...]:
    """Return where the bytes of a block lie."""
    scales, _ = _sections(codec, num)
    block = here.start // width(codec)
    match codec:
        case Int8Config():
            return range(4 * block, 4 * block + 4), range(scales + here.start, scales + here.stop)
        case Int4Config():
            return (range(2 * block, 2 * block + 2), range(scales + here.start // 2, scales + (here.stop + 1) // 2))
        case _:
            size = _itemsize(codec)
            return (range(size * here.start, size * here.stop),)


def decoded(codec: Known, data: Sequence[bytes], num: int) -> NDArray[np.float32]:
    """Return the `num` numbers of a block.

    Args:
        data: the bytes of each of its spans.
    """
    found = np.empty(num, np.float32)
    match codec:
        case Fp32Config():
            found[:] = np.frombuffer(data[0], "<f4")
        case Bf16Config():
            found[:] = _widened(data[0])
        case Int8Config():
            np.multiply(np.frombuffer(data[1], np.int8), np.frombuffer(data[0], "<f4"), out=found, dtype=np.float32)
        case Int4Config():
            packed = np.frombuffer(data[1], np.uint8)
            codes = np.stack((packed & 15, packed >> 4), 1).reshape(-1)[:num].astype(np.int8)
            np.multiply((codes ^ 8) - 8, _widened(data[0]), out=found, dtype=np.float32)
    return found


def _widened(halves: bytes) -> NDArray[np.float32]:
    """Return numbers of which the upper halves are given."""
    return (np.frombuffer(halves, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def encoded(codec: Known, values: NDArray[np.float32]) -> tuple[bytes, ...]:
    """Return the bytes of a block, of each of its spans; the numbers are finite."""
    match codec:
        case Fp32Config():
            return (values.astype("<f4", copy=False).tobytes(),)
        case Bf16Config():
            bits = np.clip(values, -_MOST_BF16, _MOST_BF16).view(np.uint32)
            halves = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
            return (halves.astype("<u2").tobytes(),)
        case Int8Config():
            scale, codes = _quantized(values, 127, _INT8_GRID)
            return scale.astype("<f4").tobytes(), codes.tobytes()
    scale, codes = _quantized(values, 7, _INT4_GRID)
    nibbles = np.append(codes, np.zeros(len(codes) % 2, np.int8)).view(np.uint8) & 15
    half = (scale.view(np.uint32) >> np.uint32(16)).astype("<u2")
    return half.tobytes(), (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8).tobytes()


def _quantized(values: NDArray[np.float32], most: int, grid: np.uint32) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    top = np.abs(values).max(keepdims=True)
    bits = (top / np.float32(most)).view(np.uint32) & grid
    scale = np.where(bits < _LEAST_BITS, np.uint32(0), bits).view(np.float32)
    divisor = np.where(scale > 0, scale, np.float32(1))
    return scale, np.rint(values / divisor).astype(np.int8)


def _sections(codec: Known, num: int) -> tuple[int, int]:
    blocks = -(-num // width(codec))
    match codec:
        case Int8Config():
            return 4 * blocks, num
        case Int4Config():
            return 2 * blocks, (num + 1) // 2
        case _:
            return 0, _itemsize(codec) * num


def _itemsize(codec: Known) -> int:
    """Return the bytes of a number's code, where they are whole."""
    return 4 if isinstance(codec, Fp32Config) else 2 if isinstance(codec, Bf16Config) else 1
