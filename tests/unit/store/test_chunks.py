"""Vectors as chunks: every bit is in exactly one digest, and chunks are the vector's own memory."""

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from weft import wire
from weft.errors import WireError
from weft.ledger.tree import Tree
from weft.store.chunks import chunk_digests, chunks, raw, replica_digest, state_index
from weft.sync.records.index import CHUNK_NBYTES, StateIndex, VectorIndex
from weft.wire import digest_of

NUM = CHUNK_NBYTES // 4  # numbers in a chunk


def vector(num: int) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.Philox(num)).standard_normal(num, dtype=np.float32))


@pytest.mark.parametrize("num", [0, 1, NUM - 1, NUM, NUM + 1, 2 * NUM + 5])
def test_chunks_are_the_vectors_bytes_in_order(num: int) -> None:
    v = vector(num)
    data = v.numpy().astype("<f4").tobytes()
    assert b"".join(chunks(v)) == data == bytes(raw(v))
    assert all(len(chunk) == CHUNK_NBYTES for chunk in chunks(v)[:-1])
    pieces = [data[start : start + CHUNK_NBYTES] for start in range(0, len(data), CHUNK_NBYTES)]
    assert list(chunk_digests(v)) == [blake3(piece).hexdigest() for piece in pieces]


def test_writing_into_chunks_fills_the_vector() -> None:
    source, target = vector(NUM + 3), torch.zeros(NUM + 3)
    for place, chunk in zip(chunks(target), chunks(source), strict=True):
        place[:] = chunk
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, device="meta")],
)
def test_what_is_no_flat_vector_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="flat fp32 vector"):
        raw(wrong)


def test_an_index_names_vectors_in_order_and_travels_as_a_record() -> None:
    index = state_index({"outer": vector(NUM + 1), "momentum": vector(3)})
    assert [each.name for each in index.vectors] == ["momentum", "outer"]
    assert [each.num for each in index.vectors] == [3, NUM + 1]
    assert [len(each.chunks) for each in index.vectors] == [1, 2]
    assert index.nbytes == 4 * (NUM + 4)
    assert wire.decode(wire.encode(index), StateIndex) == index


@pytest.mark.parametrize(
    ("some", "others"),
    [(0x0000_0000, 0x8000_0000), (0x0000_0000, 0x0000_0001), (0x0000_0001, 0x8000_0001), (0x007F_FFFF, 0x0080_0000)],
    ids=["zero and its negative", "zero and the least number", "least numbers", "denormal and normal"],
)
def test_numbers_that_are_equal_or_next_to_nothing_have_names_of_their_own(some: int, others: int) -> None:
    """A state is its bits: what equals another, or is flushed to it, is another under the root over a work's states."""
    states = [vector(5), vector(5)]
    for each, bits in zip(states, (some, others), strict=True):
        each.view(torch.int32)[2] = torch.tensor([bits], dtype=torch.uint32).view(torch.int32)
    one, other = (digest_of(state_index({"local": each})) for each in states)
    assert one != other
    first = bytes(32)
    assert Tree([first, bytes.fromhex(one)]).root() != Tree([first, bytes.fromhex(other)]).root()
    for each in states:  # and comes as it is where it is fetched
        target = torch.ones(5)
        for place, chunk in zip(chunks(target), chunks(each), strict=True):
            place[:] = bytes(chunk)
        assert torch.equal(target.view(torch.int32), each.view(torch.int32))


@given(place=st.integers(0, 2 * NUM + 4), bit=st.integers(0, 31))
def test_any_bit_changes_the_replicas_digest(place: int, bit: int) -> None:
    v, momentum = torch.ones(2 * NUM + 5), torch.zeros(4)
    before = replica_digest(v, {"momentum": momentum})
    v.numpy().view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert replica_digest(v, {"momentum": momentum}) != before
    v.numpy().view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert replica_digest(v, {"momentum": momentum}) == before
    momentum[place % 4] = -0.0
    assert replica_digest(v, {"momentum": momentum}) != before


def test_the_digest_tells_names_and_lengths_apart() -> None:
    v = torch.zeros(4)
    found = {replica_digest(v, {}), replica_digest(v, {"a": v}), replica_digest(v, {"b": v}), replica_digest(v[:3], {})}
    assert len(found) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"num": NUM + 1},
        {"num": -1},
        {"num": 1 << 60},
        {"chunks": []},
        {"chunks": ["00" * 32, "00" * 32]},
        {"chunks": ["../etc/passwd"]},
        {"name": "../outer"},
        {"name": ""},
        {"name": "a" * 65},
    ],
)
def test_an_index_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    good = msgspec.to_builtins(VectorIndex(name="outer", num=NUM, chunks=(wire.digest(b""),)))
    encoder = msgspec.msgpack.Encoder(order="sorted")
    assert wire.decode(encoder.encode(good), VectorIndex).num == NUM
    with pytest.raises(WireError):
        wire.decode(encoder.encode(good | change), VectorIndex)


def test_a_state_with_vectors_twice_or_out_of_order_is_refused() -> None:
    a, b = (VectorIndex(name=name, num=0, chunks=()) for name in "ab")
    for vectors in ((a, a), (b, a)):
        with pytest.raises(ValueError, match="ascending order"):
            StateIndex(vectors=vectors)
    with pytest.raises(WireError):
        wire.decode(msgspec.msgpack.Encoder(order="sorted").encode({"vectors": [], "chunk_nbytes": 4}), StateIndex)


def test_a_digest_of_chunks_of_two_lengths_is_refused() -> None:
    one, other = "1" * 64, "2" * 64
    long = VectorIndex(name="a", num=NUM, chunks=(one,))
    for vectors in (
        (long, VectorIndex(name="b", num=NUM - 1, chunks=(one,))),
        (VectorIndex(name="a", num=NUM + 5, chunks=(one, one)),),
        (VectorIndex(name="a", num=5, chunks=(one,)), VectorIndex(name="b", num=6, chunks=(one,))),
    ):
        with pytest.raises(ValueError, match="bytes here and"):
            StateIndex(vectors=vectors)
        data = wire.encode(StateIndex(vectors=())).replace(b"\x90", msgspec.msgpack.encode(vectors, order="sorted"))
        with pytest.raises(WireError, match="bytes here and"):
            wire.decode(data, StateIndex)
    StateIndex(vectors=(long, VectorIndex(name="b", num=NUM + 5, chunks=(one, other))))  # zeros are often equal
    StateIndex(vectors=(VectorIndex(name="a", num=5, chunks=(one,)), VectorIndex(name="b", num=5, chunks=(one,))))
