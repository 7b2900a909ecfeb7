"""The values that are not zero, and where they are: as many bytes as a vector needs.

    counts   of each chunk of 4096 values how many are sent: two bytes
    places   which, `elias_fano`
    values   each in fp32 or bf16

for each run of 256 chunks, one behind the other. What bf16 makes zero is not sent. Where all values are sent, it is a
bit a value more than they are.
"""

from collections.abc import Iterator
from typing import final

import numpy as np
from jaxtyping import Float32
from numpy.typing import NDArray
from torch import Tensor

from weft.codec import bounds
from weft.codec.dense import Bf16, Fp32
from weft.codec.sparse import elias_fano
from weft.codec.sparse.elias_fano import CHUNK, Chunks, chunks_of
from weft.errors import PayloadError
from weft.wire import Buffer

_RUN = 256 * CHUNK  # values encoded together
_COUNT_NBYTES = 2


@final
class Nonzero:
    """
    Args:
        values: encodes those that are sent, each by itself.
    """

    def __init__(self, values: Fp32 | Bf16) -> None:
        self._values = values
        self._word: str = "<u4" if isinstance(values, Fp32) else "<u2"

    def encode(self, vector: Float32[Tensor, " num"]) -> Buffer:
        bounds.require_flat(vector)
        return b"".join(self._encoded(vector[here.start : here.stop]) for here in _runs(vector.numel()))

    def decode(self, data: Buffer, num: int, out: Float32[Tensor, " num"] | None = None) -> Float32[Tensor, " num"]:
        view = bounds.plain(data)
        if (length := self.length(view, num)) != view.nbytes:
            raise PayloadError(f"payload of {view.nbytes} bytes where {length} are due; dropped undecoded")
        out, begin = bounds.target(num, out), 0
        for here in _runs(num):
            chunks = self._chunks(view[begin:], len(here))
            end = begin + self._nbytes(chunks)
            self._decode(view[begin:end], chunks, out[here.start : here.stop])
            begin = end
        return out

    def nbytes(self, num: int) -> int:
        """Return the most bytes that an encoding of `num` values has."""
        return num // _RUN * self._most(_RUN) + self._most(num % _RUN)

    def length(self, data: Buffer, num: int) -> int:
        view, begin = bounds.plain(data), 0
        for here in _runs(num):
            begin += self._nbytes(self._chunks(view[begin:], len(here)))
            if begin > view.nbytes:
                raise PayloadError(f"payload of {view.nbytes} bytes where {begin} or more are due; dropped undecoded")
        return begin

    def _most(self, num: int) -> int:
        places = -(-num // 8) + 1 if num else 0
        return _COUNT_NBYTES * _num_chunks(num) + places + self._values.nbytes(num)

    def _encoded(self, vector: Tensor) -> bytes:
        num = vector.numel()
        words = np.frombuffer(self._values.encode(vector), self._word)
        places = np.flatnonzero(_magnitudes(words))
        counts = np.bincount(places // CHUNK, minlength=_num_chunks(num))
        chunks = chunks_of(num, counts)
        return counts.astype("<u2").tobytes() + elias_fano.encode(chunks, places) + words[places].tobytes()

    def _decode(self, data: memoryview, chunks: Chunks, out: Tensor) -> None:
        head = _COUNT_NBYTES * len(chunks.counts)
        end = data.nbytes - self._values.nbytes(chunks.num_sent)
        places = elias_fano.decode(chunks, data[head:end])
        if not _magnitudes(np.frombuffer(data[end:], self._word)).all():
            raise PayloadError("payload that sends zeros; dropped")
        out.zero_()
        out.numpy()[places] = self._values.decode(data[end:], chunks.num_sent).numpy()

    def _chunks(self, data: memoryview, num: int) -> Chunks:
        """Return what the counts at the beginning of `data` say."""
        head = _COUNT_NBYTES * _num_chunks(num)
        if data.nbytes < head:
            raise PayloadError(f"payload of {data.nbytes} bytes where {head} or more are due; dropped undecoded")
        return chunks_of(num, np.frombuffer(data[:head], "<u2").astype(np.int64))

    def _nbytes(self, chunks: Chunks) -> int:
        upper, lower = chunks.nbytes
        return _COUNT_NBYTES * len(chunks.counts) + upper + lower + self._values.nbytes(chunks.num_sent)


def _runs(num: int) -> Iterator[range]:
    yield from (range(start, min(start + _RUN, num)) for start in range(0, num, _RUN))


def _num_chunks(num: int) -> int:
    return -(-num // CHUNK)


def _magnitudes(words: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    return words << np.array(1, words.dtype)  # without the sign
