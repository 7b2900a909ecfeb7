"""An encoding made, or read, in pieces: for vectors of which only a piece is at hand at a time.

The bytes are those of the whole. An encoding is sections one behind the other (scales, then codes), and each section is
that of the pieces, one behind the other, as long as a piece begins where blocks do and places of chunks end with a
byte: every `PIECE` numbers.

A codec that does not tell its sections, as one from outside of weft may not, has the whole vector at once.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.codec import Codec, Elastic, Sectioned
from weft.wire import Buffer

PIECE = 1 << 20  # numbers: 4 MiB


def ranges(num: int, size: int = PIECE) -> Iterator[range]:
    """Yield the ranges of a vector of `num` values, one piece after the other."""
    yield from (range(start, min(start + size, num)) for start in range(0, num, size))


def pieces(codec: Codec, num: int) -> Iterator[range]:
    """Yield the ranges that an encoding of `num` values is made in."""
    yield from ranges(num, PIECE if isinstance(codec, Sectioned) else max(num, 1))


def encode(codec: Codec, num: int, read: Callable[[range], Float32[Tensor, " piece"]], data: Buffer) -> Buffer:
    """Encode a vector of `num` values; return the bytes of `data` that this takes.

    Args:
        read: returns a piece of it, on the CPU.
        data: where to: `nbytes(num)` bytes.

    Raises:
        NotFinite: the vector holds NaN or infinity.
    """
    found = np.frombuffer(data, np.uint8)
    if isinstance(codec, Elastic):
        whole = np.frombuffer(codec.encode(read(range(num))), np.uint8)
        found[: len(whole)] = whole
        return bounds.as_buffer(found[: len(whole)])
    for here, places in _places(codec, num):
        encoded = np.frombuffer(codec.encode(read(here)), np.uint8)
        start = 0
        for place in places:
            stop = start + place.stop - place.start
            found[place] = encoded[start:stop]
            start = stop
    return data


def decode(codec: Codec, data: Buffer, num: int, write: Callable[[range, Float32[Tensor, " piece"]], None]) -> None:
    """Hand the vector of `num` values that `data` encodes to `write`, piece by piece.

    Raises:
        PayloadError: as `Codec.decode`; some pieces may have been written.
    """
    if isinstance(codec, Elastic):
        write(range(num), codec.decode(data, num))
        return
    found = np.frombuffer(bounds.require_nbytes(data, codec.nbytes(num)), np.uint8)
    for here, places in _places(codec, num):
        joined = np.concatenate([found[place] for place in places])
        write(here, codec.decode(bounds.as_buffer(joined), len(here)))


def _places(codec: Codec, num: int) -> Iterator[tuple[range, list[slice]]]:
    """Yield each piece, and where its sections lie in the encoding of the whole."""
    sizes = _sections(codec, num)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    for here in pieces(codec, num):
        sizes = _sections(codec, len(here))
        yield here, [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]


def _sections(codec: Codec, num: int) -> tuple[int, ...]:
    return codec.sections(num) if isinstance(codec, Sectioned) else (codec.nbytes(num),)
