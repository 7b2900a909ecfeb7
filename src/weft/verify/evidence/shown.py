"""Pieces of blobs that are shown to who has the blobs' digests: read as they come, and believed once all are checked.

    book = Book()
    data = book.read(digest, nbytes, range(4096, 4100), window)
    book.close()                                                   none is another's, or the whole proves nothing

All are checked at once, for that takes less time than one by one.
"""

from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weft.codec.config import MAX_BLOCK
from weft.ids import Digest
from weft.ledger.opening import CHUNK_NBYTES as PIECE_NBYTES
from weft.ledger.opening import (
    Claim,
    Opening,
    Slice,
    are_chunks,
    is_slice,
    num_chunks,
    open_slice,
    open_span,
    pieces_of,
)
from weft.sync.records.index import CHUNK_NBYTES, VectorIndex
from weft.wire import Buffer, Record

MAX_PIECES = 4 * MAX_BLOCK // PIECE_NBYTES + 1  # of a window: the longest block in fp32, wherever it begins


class Unproven(ValueError):
    """What is shown proves nothing; says why."""


class Window(Record, frozen=True, kw_only=True):
    """Some bytes of a blob, by the pieces in which they lie."""

    openings: Annotated[tuple[Opening, ...], Meta(max_length=MAX_PIECES)]


def window(blob: Buffer, span: range) -> Window:
    """Return what shows some bytes of a blob."""
    return Window(openings=open_span(blob, span))


class Book:
    def __init__(self) -> None:
        self._claims: list[Claim] = []
        self._slices: list[tuple[Digest, int, Slice]] = []

    def read(self, digest: Digest, nbytes: int, span: range, shown: Window) -> bytes:
        """Return what a window says that some bytes of a blob are.

        Args:
            nbytes: of the blob.

        Raises:
            Unproven: it shows others.
        """
        pieces = pieces_of(span)
        if [each.index for each in shown.openings] != list(pieces):
            raise Unproven("other pieces of a blob are shown than are asked for")
        self._claims += [(digest, nbytes, each) for each in shown.openings]
        start = span.start - PIECE_NBYTES * pieces.start if pieces else 0
        data = b"".join(each.piece for each in shown.openings)[start : start + len(span)]
        if len(data) != len(span):
            raise Unproven("a blob is shown to be shorter than it is")
        return data

    def slice(self, digest: Digest, nbytes: int, span: range, shown: Slice) -> bytes:
        """As `read`, of pieces that are shown as one."""
        pieces = pieces_of(span)
        if shown.first != pieces.start or num_chunks(len(shown.data)) != len(pieces):
            raise Unproven("other pieces of a blob are shown than are asked for")
        self._slices.append((digest, nbytes, shown))
        data = shown.data[span.start - PIECE_NBYTES * pieces.start :][: len(span)]
        if len(data) != len(span):
            raise Unproven("a blob is shown to be shorter than it is")
        return data

    def numbers(self, vector: VectorIndex, here: range, shown: Window) -> NDArray[np.float32]:
        """Return what a window says that some numbers of a vector are, all of one chunk.

        Raises:
            Unproven: it shows others, or there are none such.
        """
        number, span, nbytes = place_of(vector, here)
        data = self.read(Digest(vector.chunks[number]), nbytes, span, shown)
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)

    def close(self) -> None:
        """
        Raises:
            Unproven: one of the pieces is not of its blob.
        """
        if not are_chunks(self._claims) or not all(is_slice(*each) for each in self._slices):
            raise Unproven("a piece that is shown is not of its blob")


def place_of(vector: VectorIndex, here: range) -> tuple[int, range, int]:
    """Return in which chunk of a vector some numbers lie, at which of its bytes, and how many it has.

    Raises:
        Unproven: there are none such, or they lie in several.
    """
    if not 0 <= here.start < here.stop <= vector.num:
        raise Unproven("a vector has no such numbers")
    number = 4 * here.start // CHUNK_NBYTES
    start, nbytes = number * CHUNK_NBYTES, min(CHUNK_NBYTES, vector.nbytes - number * CHUNK_NBYTES)
    if 4 * here.stop > start + nbytes:
        raise Unproven("numbers of several chunks are asked for")
    return number, range(4 * here.start - start, 4 * here.stop - start), nbytes


def numbers_window(vector: NDArray[np.float32], here: range) -> Window:
    """Return what shows some numbers of a vector, all of one chunk."""
    return window(*_chunk_of(vector, here))


def numbers_slice(vector: NDArray[np.float32], here: range) -> Slice:
    """As `numbers_window`, as one."""
    return open_slice(*_chunk_of(vector, here))


def _chunk_of(vector: NDArray[np.float32], here: range) -> tuple[memoryview, range]:
    """Return the chunk in which some numbers of a vector lie, and at which of its bytes."""
    start = 4 * here.start // CHUNK_NBYTES * (CHUNK_NBYTES // 4)
    chunk = np.ascontiguousarray(vector[start : start + CHUNK_NBYTES // 4].astype("<f4", copy=False))
    return chunk.data, range(4 * (here.start - start), 4 * (here.stop - start))
