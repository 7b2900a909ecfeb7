"""Flat vectors as bytes: cut into chunks, each named by its digest, and one index that names them all.

    vector    |------ 1 MiB ------|------ 1 MiB ------|-- rest --|
    digests           d0                  d1               d2          index.VectorIndex(name, num, chunks)
                                                                       index.StateIndex(vectors), ascending by name

A chunk is a blob: newcomers fetch it by digest, a checkpoint is checked by it, and where two replicas differ, it says
where. The digest of the replicated vectors' index is what a replica prints at the end: equal digests, equal bits.

Chunks are views into the vector's own memory, in the order of the machine; every machine that torch trains on is
little-endian.

A state that is still coming (`Partial`) is kept in memory and on disk, so that what has come need not be fetched again:

    arriving/ offer.bin     which state: the manifest it belongs to, and its index
              chunks.bin    its vectors one behind the other, with holes where chunks are missing

Nothing is synced and nothing says which chunks are whole: whoever opens the folder again checks each against its
digest, and takes those that have it. So a crash at any moment costs no more than the chunks that were being written.

Failure:
- no room on the disk: the state comes into memory alone, and a restart fetches it anew.
- the folder holds something else than a state on its way: it is as if it were empty.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.bounds import Empty
from weft.codec.pieces import ranges
from weft.errors import DataError
from weft.ids import Digest
from weft.net.multi_source import Blob
from weft.store.home import RecordFile
from weft.sync.merge.method import OUTER
from weft.sync.merge.sharded import Readable, SpreadVector
from weft.sync.records.charter import Charter
from weft.sync.records.index import CHUNK_NBYTES, MAX_INDEX_NBYTES, StateIndex, VectorIndex
from weft.sync.records.messages import Manifest
from weft.wire import Buffer, Record, digest, digest_of


def raw(vector: Float32[Tensor, " num"]) -> memoryview:
    """Return the bytes of a vector: a writable view, not a copy.

    Raises:
        ValueError: not a flat, contiguous fp32 vector on the CPU.
    """
    if vector.dtype != torch.float32 or vector.dim() != 1 or not vector.is_contiguous() or vector.device.type != "cpu":
        raise ValueError(f"a flat fp32 vector on the CPU is needed, not {vector.dtype} {tuple(vector.shape)}")
    return vector.detach().numpy().view(np.uint8).data


def chunks(vector: Float32[Tensor, " num"]) -> list[memoryview]:
    """Return the chunks of a vector as writable views: to send, to check, or to receive into."""
    whole = raw(vector)
    return [whole[start : start + CHUNK_NBYTES] for start in range(0, len(whole), CHUNK_NBYTES)]


def chunk_bytes(vector: Float32[Tensor, " num"]) -> Iterator[memoryview]:
    """Yield the chunks of a vector, to be read: views, or read one after the other where it is spread."""
    if not isinstance(vector, Readable):
        yield from chunks(vector)
        return
    for here in ranges(vector.numel()):  # whole chunks
        yield from chunks(vector.read(here))


def chunk_digests(vector: Float32[Tensor, " num"]) -> tuple[Digest, ...]:
    if isinstance(vector, SpreadVector):
        return vector.chunk_digests()
    return tuple(digest(chunk) for chunk in chunks(vector))


def state_index(vectors: Mapping[str, Float32[Tensor, " num"]]) -> StateIndex:
    return index_of(vectors, {name: chunk_digests(vector) for name, vector in vectors.items()})


def index_of(vectors: Mapping[str, Float32[Tensor, " num"]], digests: Mapping[str, Sequence[Digest]]) -> StateIndex:
    """Return the index of `vectors` whose chunks have these digests."""
    return StateIndex(
        vectors=tuple(
            VectorIndex(name=name, num=vectors[name].numel(), chunks=tuple(digests[name])) for name in sorted(vectors)
        )
    )


def replica_digest(outer: Float32[Tensor, " num"], state: Mapping[str, Float32[Tensor, " num"]]) -> Digest:
    """Return one digest of all that is equal on every member after a commit.

    Args:
        outer: the parameters.
        state: the outer optimizer's vectors by name.
    """
    return digest_of(state_index({OUTER: outer, **state}))


class _Offer(Record, frozen=True, kw_only=True):
    head: Manifest
    charter: Charter
    index: StateIndex


class Partial:
    """One state on its way.

    Args:
        folder: what has come is also kept there; None: in memory alone.
        empty: gives memory for so many values of a type.
    """

    def __init__(
        self, folder: Path | None, head: Manifest, charter: Charter, index: StateIndex, empty: Empty = bounds.empty
    ) -> None:
        self.head = head
        self.charter = charter
        self.name = digest_of(head)
        self.index = index
        self.vectors = {each.name: empty(each.num, torch.float32) for each in index.vectors}
        self.why_not_kept: str | None = None  # why it is not on disk
        self._folder = folder
        self._places: dict[Digest, list[tuple[int, memoryview]]] = {}  # of each chunk: offset in the file, memory
        for offset, wanted, place in _pieces(index, self.vectors):
            self._places.setdefault(wanted, []).append((offset, place))
        self._missing = dict.fromkeys(self._places)

    @classmethod
    def open(cls, folder: Path, empty: Empty = bounds.empty) -> "Partial | None":
        """Return what an earlier process left in `folder`, every chunk checked, or None."""
        try:
            offer = _offer_file(folder).read()
            if offer is None:
                return None
            partial = cls(folder, offer.head, offer.charter, offer.index, empty)
            with (folder / "chunks.bin").open("rb") as file:
                for offset, wanted, place in _pieces(partial.index, partial.vectors):
                    file.seek(offset)
                    data = file.read(len(place))
                    if wanted in partial._missing and digest(data) == wanted:
                        partial._take(wanted, data)
        except (OSError, ValueError, MemoryError):
            return None
        return partial

    def begin(self, others: "Partial | None" = None) -> None:
        """Make the folder hold this state and no other; take over the chunks that `others` has already.

        Raises:
            nothing: what stands in the way of keeping it is in `why_not_kept`.
        """
        known = {} if others is None else {each: others.chunk(each) for each in self._places if others.has(each)}
        if self._folder is not None:
            try:
                drop(self._folder)
                _offer_file(self._folder).keep(_Offer(head=self.head, charter=self.charter, index=self.index))
                (self._folder / "chunks.bin").touch()
            except (DataError, OSError) as error:
                self._give_up_folder(str(error))
        for wanted, data in known.items():
            self.put(wanted, data)

    def has(self, wanted: Digest) -> bool:
        return wanted in self._places and wanted not in self._missing

    def chunk(self, wanted: Digest) -> Buffer:
        return self._places[wanted][0][1]

    def missing(self) -> list[Blob]:
        """Return the chunks that have not come, each once, in order."""
        return [Blob(digest=each, nbytes=len(self._places[each][0][1])) for each in self._missing]

    @property
    def missing_nbytes(self) -> int:
        return sum(len(self._places[each][0][1]) for each in self._missing)

    def put(self, wanted: Digest, data: Buffer) -> None:
        """Take a chunk whose digest was checked, to all its places."""
        self._take(wanted, data)
        if self._folder is None:
            return
        try:
            with (self._folder / "chunks.bin").open("r+b") as file:
                for offset, _ in self._places[wanted]:
                    file.seek(offset)
                    file.write(data)
        except OSError as error:
            self._give_up_folder(error.strerror or str(error))

    def drop(self) -> None:
        """Remove what is on disk: the state is complete, or wanted no more."""
        if self._folder is not None:
            drop(self._folder)

    def _take(self, wanted: Digest, data: Buffer) -> None:
        for _, place in self._places[wanted]:
            place[:] = memoryview(data)
        self._missing.pop(wanted, None)

    def _give_up_folder(self, reason: str) -> None:
        self.drop()
        self._folder, self.why_not_kept = None, reason


def _offer_file(folder: Path) -> RecordFile[_Offer | None]:
    return RecordFile(folder / "offer.bin", _Offer, MAX_INDEX_NBYTES, None)


def drop(folder: Path) -> None:
    """Remove what an earlier process may have left of a state."""
    shutil.rmtree(folder, ignore_errors=True)


def _pieces(index: StateIndex, vectors: Mapping[str, Tensor]) -> Iterator[tuple[int, Digest, memoryview]]:
    """Yield each chunk's offset in the file, digest, and place in memory."""
    offset = 0
    for each in index.vectors:
        for wanted, place in zip(each.chunks, chunks(vectors[each.name]), strict=True):
            yield offset, Digest(wanted), place
            offset += len(place)
