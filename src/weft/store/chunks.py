"""Flat vectors as bytes: cut into chunks, each named by its digest, and one index that names them all.

    vector    |------ 1 MiB ------|------ 1 MiB ------|-- rest --|
    digests           d0                  d1               d2          index.VectorIndex(name, num, chunks)
                                                                       index.StateIndex(vectors), ascending by name

A chunk is a blob: newcomers fetch it by digest, a checkpoint is checked by it, and where two replicas differ, it says
where. The digest of the replicated vectors' index is what a replica prints at the end: equal digests, equal bits.

Chunks are views into the vector's own memory, in the order of the machine; every machine that torch trains on is
little-endian.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec.pieces import ranges
from weft.ids import Digest
from weft.store.index import CHUNK_NBYTES, StateIndex, VectorIndex
from weft.sync.merge.method import OUTER
from weft.sync.merge.sharded import Readable, SpreadVector
from weft.wire import digest, digest_of


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
