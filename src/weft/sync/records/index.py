"""What a state consists of, by the digests of its chunks: the records, and no tensors.

An anchor keeps states without knowing what a vector is; `chunks` turns vectors into these and back.
"""

from collections.abc import Collection
from typing import Annotated, NamedTuple

from msgspec import Meta

from weft.ids import Digest, short
from weft.net.messages import HexDigest
from weft.wire import Record

CHUNK_NBYTES = 1 << 20  # one piece of a blob transfer; its digest weighs 1/16000 of it
MAX_INDEX_NBYTES = 64 << 20  # of an index: 64 hex digits per MiB of state
MAX_NUM = 1 << 48  # of one vector: a petabyte, and small enough for every product with it

VectorName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_.]{0,63}\Z")]


class VectorIndex(Record, frozen=True, kw_only=True):
    """One flat fp32 vector by the digests of its chunks, in order."""

    name: VectorName
    num: Annotated[int, Meta(ge=0, le=MAX_NUM)]
    chunks: tuple[HexDigest, ...]

    def __post_init__(self) -> None:
        """Refuse an index that contradicts itself, whoever sent it."""
        if len(self.chunks) != (expected := -(-self.nbytes // CHUNK_NBYTES)):
            raise ValueError(f"{self.num} numbers make {expected} chunks, not {len(self.chunks)}")

    @property
    def nbytes(self) -> int:
        return 4 * self.num


class Span(NamedTuple):
    """Where a chunk belongs."""

    name: VectorName
    start: int  # the number of the vector that it begins with
    nbytes: int


class StateIndex(Record, frozen=True, kw_only=True):
    """Vectors by name, ascending."""

    vectors: tuple[VectorIndex, ...]
    chunk_nbytes: Annotated[int, Meta(ge=CHUNK_NBYTES, le=CHUNK_NBYTES)] = CHUNK_NBYTES

    def __post_init__(self) -> None:
        names = [vector.name for vector in self.vectors]
        if names != sorted(set(names)):
            raise ValueError("the vectors of a state are named once each, in ascending order")
        self._require_one_length()

    @property
    def nbytes(self) -> int:
        return sum(vector.nbytes for vector in self.vectors)

    @property
    def shape(self) -> dict[str, int]:
        return {vector.name: vector.num for vector in self.vectors}

    def vector(self, name: str) -> VectorIndex:
        """
        Raises:
            KeyError: there is none of this name.
        """
        for vector in self.vectors:
            if vector.name == name:
                return vector
        raise KeyError(name)

    def without(self, name: str) -> tuple[VectorIndex, ...]:
        """Return all vectors but one: such as the optimizer's, which are all but the parameters."""
        return tuple(vector for vector in self.vectors if vector.name != name)

    def _require_one_length(self) -> None:
        """Refuse one digest for chunks of two lengths: what it names would fit into one of their places only."""
        lengths: dict[str, int] = {}  # of last chunks that are shorter than others
        for vector in self.vectors:
            if rest := vector.nbytes % CHUNK_NBYTES:
                lengths.setdefault(vector.chunks[-1], rest)
        for vector in self.vectors:
            rest = vector.nbytes % CHUNK_NBYTES or CHUNK_NBYTES
            for number, chunk in enumerate(vector.chunks, start=1):
                nbytes = rest if number == len(vector.chunks) else CHUNK_NBYTES
                if lengths.get(chunk, nbytes) != nbytes:
                    raise ValueError(f"chunk {short(Digest(chunk))} has {lengths[chunk]} bytes here and {nbytes} there")

    def places(self, names: Collection[str] | None = None) -> dict[Digest, list[Span]]:
        """Return where each chunk belongs, in order; equal chunks are one with several places.

        Args:
            names: of the vectors; None: all.
        """
        found: dict[Digest, list[Span]] = {}
        for vector in self.vectors:
            for number, chunk in enumerate(vector.chunks if names is None or vector.name in names else ()):
                start = number * CHUNK_NBYTES
                span = Span(vector.name, start // 4, min(CHUNK_NBYTES, vector.nbytes - start))
                found.setdefault(Digest(chunk), []).append(span)
        return found
