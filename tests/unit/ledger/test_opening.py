"""Pieces of a blob against the library that made its digest."""

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from weft.ids import Digest
from weft.ledger.opening import (
    CHUNK_NBYTES,
    Claim,
    Opening,
    are_chunks,
    is_chunk,
    is_slice,
    num_chunks,
    open_chunk,
    open_slice,
    open_span,
)

SIZES = [0, 1, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 4096, 5000, 7168, 16_384, 31_745, 70_000]


def blob(nbytes: int, seed: int = 0) -> tuple[bytes, Digest]:
    data = np.random.default_rng([seed, nbytes]).bytes(nbytes)
    return data, Digest(blake3(data).hexdigest())


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_piece_opens_against_the_librarys_digest(nbytes: int) -> None:
    data, digest = blob(nbytes)
    assert num_chunks(nbytes) == max(1, (nbytes + 1023) // 1024)
    for index in range(num_chunks(nbytes)):
        opening = open_chunk(data, index)
        assert opening.piece == data[1024 * index : 1024 * (index + 1)]
        assert is_chunk(digest, nbytes, opening)
    with pytest.raises(IndexError):
        open_chunk(data, num_chunks(nbytes))


@pytest.mark.full
def test_random_sizes_and_places_open() -> None:
    luck = np.random.default_rng(0)
    for seed in range(40):
        nbytes = int(luck.integers(70_001))
        data, digest = blob(nbytes, seed)
        opening = open_chunk(data, int(luck.integers(num_chunks(nbytes))))
        assert is_chunk(digest, nbytes, opening)


def test_views_of_numbers_open_as_their_bytes() -> None:
    numbers = np.arange(5000, dtype=np.float32)
    digest = Digest(blake3(numbers.tobytes()).hexdigest())
    opening = open_chunk(numbers.data, 3)
    assert is_chunk(digest, numbers.nbytes, opening)
    assert np.array_equal(np.frombuffer(opening.piece, np.float32), numbers[768:1024])


@pytest.mark.full
def test_a_thousand_changes_are_refused() -> None:
    luck = np.random.default_rng(1)
    for turn in range(1000 // 8):
        nbytes = int(luck.integers(CHUNK_NBYTES + 1, 8_000))
        data, digest = blob(nbytes, turn % 7)
        index = int(luck.integers(num_chunks(nbytes)))
        opening = open_chunk(data, index)
        bit = int(luck.integers(8 * len(opening.piece)))
        piece = bytearray(opening.piece)
        piece[bit // 8] ^= 1 << bit % 8
        at = int(luck.integers(len(opening.beside)))
        other = bytearray(opening.beside[at])
        other[int(luck.integers(32))] ^= 1 << int(luck.integers(8))
        changed = [
            replace(opening, piece=bytes(piece)),
            replace(opening, piece=opening.piece[:-1]),
            replace(opening, piece=opening.piece + b"\0"),
            replace(opening, beside=opening.beside[:-1]),
            replace(opening, beside=(*opening.beside, bytes(32))),
            replace(opening, beside=(*opening.beside[:at], bytes(other), *opening.beside[at + 1 :])),
            replace(opening, index=(index + 1 + int(luck.integers(num_chunks(nbytes) - 1))) % num_chunks(nbytes)),
            replace(opening, index=index + num_chunks(nbytes)),
        ]
        assert not any(is_chunk(digest, nbytes, each) for each in changed)
        assert not is_chunk(digest, 2 * nbytes, opening)
        assert not is_chunk(Digest(blake3(data + b"\0").hexdigest()), nbytes, opening)


def test_a_piece_behind_the_end_is_none() -> None:
    for nbytes in (0, 1, 1024, 1025, 2048):
        for piece in (b"", b"x"):
            digest = Digest(blake3(piece).hexdigest())
            for index in (num_chunks(nbytes), num_chunks(nbytes) + 1):
                assert not is_chunk(digest, nbytes, Opening(index=index, piece=piece, beside=()))


def test_a_node_is_no_piece() -> None:
    """Nor the two hashes below the top one a blob of 64 bytes."""
    data, digest = blob(2048)
    below = b"".join((open_chunk(data, 1).beside[0], open_chunk(data, 0).beside[0]))
    assert not is_chunk(digest, 64, Opening(index=0, piece=below, beside=()))


def test_the_last_piece_alone_binds_the_length() -> None:
    data, digest = blob(5000)
    assert is_chunk(digest, 5001, open_chunk(data, 0))  # as many pieces: a record or a codec says how long it is
    assert not is_chunk(digest, 5001, open_chunk(data, 4))
    longer = 5000 + CHUNK_NBYTES
    assert is_chunk(digest, longer, open_chunk(data, 0))
    assert not any(is_chunk(digest, longer, replace(open_chunk(data, 4), index=index)) for index in (4, 5))


def claims(nums: list[int]) -> list[Claim]:
    """Return a piece of a blob of each size, at some place."""
    found = []
    for seed, nbytes in enumerate(nums):
        data, digest = blob(nbytes, seed)
        found.append((digest, nbytes, open_chunk(data, (7 * seed) % num_chunks(nbytes))))
    return found


@pytest.mark.parametrize("num", [3, 24])
def test_many_at_once_are_what_each_is(num: int) -> None:
    some = claims((SIZES * 3)[:num])
    assert are_chunks(some)
    for number, (digest, nbytes, opening) in enumerate(some):
        other = replace(opening, piece=bytes(len(opening.piece)), index=opening.index + 1 - bool(opening.piece))
        changed = [*some[:number], (digest, nbytes, other), *some[number + 1 :]]
        assert not are_chunks(changed)
        if opening.beside:
            turned = replace(opening, beside=(*opening.beside[:-1], bytes(32)))
            assert not are_chunks([*some[:number], (digest, nbytes, turned), *some[number + 1 :]])
            shorter = replace(opening, beside=opening.beside[:-1])
            assert not are_chunks([*some[:number], (digest, nbytes, shorter), *some[number + 1 :]])
    assert are_chunks([])


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1000, 1030), (1024, 2048), (4097, 5000), (700, 700)])
def test_a_span_is_shown_by_the_pieces_in_which_it_lies(start: int, stop: int) -> None:
    data, digest = blob(5000)
    shown = open_span(data, range(start, stop))
    assert all(is_chunk(digest, 5000, each) for each in shown)
    first = shown[0].index * CHUNK_NBYTES if shown else 0
    assert b"".join(each.piece for each in shown)[start - first : stop - first] == data[start:stop]
    assert [each.index for each in shown] == list(range(start // 1024, -(-stop // 1024)))[: 9 * (stop > start)]


def test_no_span_lies_beyond_the_end() -> None:
    with pytest.raises(IndexError):
        open_span(blob(5000)[0], range(5119, 5121))


# --- pieces side by side ---


@pytest.mark.parametrize("nbytes", [1, 1024, 1025, 3072, 5000, 7168, 16_384, 31_745])
def test_every_slice_opens_against_the_librarys_digest(nbytes: int) -> None:
    data, digest = blob(nbytes)
    num = num_chunks(nbytes)
    for first in range(num):
        for last in {first, min(first + 4, num - 1), num - 1}:
            span = range(1024 * first, min(1024 * last + 5, nbytes))
            some = open_slice(data, span)
            assert some.data == data[1024 * first : 1024 * (last + 1)]
            assert is_slice(digest, nbytes, some)
            assert len(some.beside) <= 2 * num.bit_length()
    for span in (range(1024 * num, 1024 * num + 1), range(0)):
        with pytest.raises(IndexError):
            open_slice(data, span)


@settings(max_examples=50)
@given(seed=st.integers(0, 1 << 20), nbytes=st.integers(1, 20_000))
def test_any_change_of_a_slice_is_refused(seed: int, nbytes: int) -> None:
    luck = np.random.default_rng(seed)
    data, digest = blob(nbytes, seed % 7)
    start = int(luck.integers(nbytes))
    some = open_slice(data, range(start, int(luck.integers(start, nbytes)) + 1))
    piece = bytearray(some.data)
    piece[int(luck.integers(len(piece)))] ^= 1 << int(luck.integers(8))
    false = [
        replace(some, data=bytes(piece)),
        replace(some, data=some.data[:-1]),
        replace(some, data=some.data + b"\0"),
        replace(some, first=some.first + 1),
        replace(some, beside=(*some.beside, bytes(32))),
    ]
    if some.beside:
        at = int(luck.integers(len(some.beside)))
        other = bytes([some.beside[at][0] ^ 1, *some.beside[at][1:]])
        false.append(replace(some, beside=(*some.beside[:at], other, *some.beside[at + 1 :])))
        false.append(replace(some, beside=some.beside[:-1]))
    assert is_slice(digest, nbytes, some)
    assert not any(is_slice(digest, nbytes, each) for each in false)
    assert not is_slice(blob(nbytes, 8)[1], nbytes, some)
