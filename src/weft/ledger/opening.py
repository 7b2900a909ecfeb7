"""One KiB of a blob, shown to who has the blob's digest: BLAKE3 is a tree of such pieces itself.

    opening = open_chunk(blob, 7)              the piece, and the hashes beside it: 32 bytes for each doubling
    is_chunk(digest, nbytes, opening)          whether these are bytes 7168 to 8191 of a blob of so many

So nothing needs to be hashed a second time to be shown in parts: payloads, results and states have digests already. How
long a blob is follows from a record or a codec, for other pieces than the last may open to other lengths, too.

BLAKE3: github.com/BLAKE3-team/BLAKE3-specs, sections 2.1 to 2.6, without a key; numbers are of 32 bits, little-endian.
What opens is worked out for all pieces at once by numpy; what is opened, for one alone, by Python's own integers.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weft import wire
from weft.ids import Digest
from weft.ledger.tree import MAX_DEPTH, At, Hash, beside, hash_of

CHUNK_NBYTES = 1024
_BLOCK_NBYTES = 64
_WORDS = 16  # of a block
_START, _END, _PARENT, _ROOT = 1, 2, 4, 8
_ROUNDS = 7
_MASK = 0xFFFFFFFF
_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_PERMUTED = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_MIXED = (  # a, b, c, d of the state: columns, then diagonals
    (0, 4, 8, 12),
    (1, 5, 9, 13),
    (2, 6, 10, 14),
    (3, 7, 11, 15),
    (0, 5, 10, 15),
    (1, 6, 11, 12),
    (2, 7, 8, 13),
    (3, 4, 9, 14),
)

_BLOCK, _HASH = Struct("<16I"), Struct("<8I")

Word = Any  # an int below 2^32, or an array of uint32, of as many pieces as are hashed at once
Counter = tuple[Word, Word]  # of a piece, its number: the low word, the high one
_Piece = Annotated[bytes, Meta(max_length=CHUNK_NBYTES)]


class Opening(wire.Record, frozen=True, kw_only=True):
    """A piece of a blob, and what shows that it is one."""

    index: Annotated[int, Meta(ge=0, lt=1 << MAX_DEPTH)]  # of the piece
    piece: _Piece
    beside: Annotated[tuple[Hash, ...], Meta(max_length=MAX_DEPTH)]  # from the piece up


def num_chunks(nbytes: int) -> int:
    """Return of how many pieces a blob is; one of no bytes is of one."""
    return max(1, -(-nbytes // CHUNK_NBYTES))


def open_chunk(blob: wire.Buffer, index: int) -> Opening:
    """Return what shows piece `index` of a blob.

    Raises:
        IndexError: there is no such piece.
    """
    data = memoryview(blob).cast("B")
    num = num_chunks(len(data))
    if not 0 <= index < num:
        raise IndexError(f"there is no piece {index} of a blob of {num}")
    levels = _levels(data)
    at: At = lambda level, number: levels[level][number].tobytes()  # noqa: E731
    hashes = tuple(hash_of(each, at, _parent) for each in beside(index, num))
    return Opening(index=index, piece=bytes(data[CHUNK_NBYTES * index :][:CHUNK_NBYTES]), beside=hashes)


def is_chunk(digest: Digest, nbytes: int, opening: Opening) -> bool:
    """Return whether the piece is where the opening says, in the blob of `nbytes` that `digest` names."""
    index, num = opening.index, num_chunks(nbytes)
    if not 0 <= index < num:
        return False
    ranges = beside(index, num)
    if len(opening.piece) != min(CHUNK_NBYTES, nbytes - CHUNK_NBYTES * index) or len(opening.beside) != len(ranges):
        return False
    if not ranges:
        return wire.digest(opening.piece) == digest
    found, top = _piece(opening.piece, index), len(ranges) - 1
    for depth, ((start, _end), other) in enumerate(zip(ranges, opening.beside, strict=True)):
        pair = (other, found) if start < index else (found, other)
        found = _parent(*pair, _ROOT if depth == top else 0)
    return found.hex() == digest


# --- pieces ---


def _levels(data: memoryview) -> list[NDArray[np.uint32]]:
    """Return the hashes of whole ranges of 1, 2, 4, ... pieces, eight words each."""
    whole = len(data) // CHUNK_NBYTES
    words = np.frombuffer(data[: CHUNK_NBYTES * whole], "<u4").reshape(whole, CHUNK_NBYTES // _BLOCK_NBYTES, _WORDS)
    columns = np.ascontiguousarray(words.transpose(1, 2, 0))
    places = np.arange(whole, dtype=np.uint64)
    counter = (places & _MASK).astype(np.uint32), (places >> 32).astype(np.uint32)
    found = np.stack(_chained([(list(block), _BLOCK_NBYTES) for block in columns], counter), 1)
    if len(data) > CHUNK_NBYTES * whole:
        rest = np.frombuffer(_piece(bytes(data[CHUNK_NBYTES * whole :]), whole), "<u4")
        found = np.concatenate([found, rest[None]])
    levels = [found]
    while (num := len(found) // 2) > 0:
        pairs = [*found[: 2 * num : 2].T, *found[1 : 2 * num : 2].T]
        found = np.stack(_compressed(_IV, pairs, (0, 0), _BLOCK_NBYTES, _PARENT), 1)
        levels.append(found)
    return levels


def _piece(data: bytes, index: int) -> bytes:
    """Return the hash of one piece, of any length up to a whole one's."""
    starts = range(0, max(1, len(data)), _BLOCK_NBYTES)
    blocks = [data[start : start + _BLOCK_NBYTES] for start in starts]
    words = [(_BLOCK.unpack(block.ljust(_BLOCK_NBYTES, b"\0")), len(block)) for block in blocks]
    return _HASH.pack(*_chained(words, (index & _MASK, index >> 32)))


def _parent(left: bytes, right: bytes, flags: int = 0) -> bytes:
    words = _BLOCK.unpack(left + right)
    return _HASH.pack(*_compressed(_IV, words, (0, 0), _BLOCK_NBYTES, _PARENT | flags))


def _chained(blocks: Sequence[tuple[Sequence[Word], int]], counter: Counter) -> list[Word]:
    """Return the hash of a piece from its blocks' words and bytes."""
    found: Sequence[Word] = _IV
    for number, (words, nbytes) in enumerate(blocks):
        flags = _START * (number == 0) | _END * (number == len(blocks) - 1)
        found = _compressed(found, words, counter, nbytes, flags)
    return list(found)


def _compressed(
    chained: Sequence[Word], words: Sequence[Word], counter: Counter, nbytes: int, flags: int
) -> list[Word]:
    """Return the eight words that BLAKE3's compression makes of eight and a block."""
    state: list[Word] = [*chained, *_IV[:4], *counter, nbytes, flags]
    for _ in range(_ROUNDS):
        for number, (a, b, c, d) in enumerate(_MIXED):
            for word, far, near in ((words[2 * number], 16, 12), (words[2 * number + 1], 8, 7)):
                state[a] = (state[a] + word + state[b]) & _MASK  # numpy's words wrap, two of Python's do not
                state[d] = _turned(state[d] ^ state[a], far)
                state[c] = (state[c] + state[d]) & _MASK
                state[b] = _turned(state[b] ^ state[c], near)
        words = [words[at] for at in _PERMUTED]
    return [low ^ high for low, high in zip(state[:8], state[8:], strict=True)]


def _turned(word: Word, num: int) -> Word:
    """Return the word's bits, so many places to the right, round the end."""
    return (word >> num | word << 32 - num) & _MASK
