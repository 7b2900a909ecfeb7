"""One KiB of a blob, shown to who has the blob's digest: BLAKE3 is a tree of such pieces itself.

    opening = open_chunk(blob, 7)              the piece, and the hashes beside it: 32 bytes for each doubling
    is_chunk(digest, nbytes, opening)          whether these are bytes 7168 to 8191 of a blob of so many
    are_chunks(claims)                         of many at once, in less time than one by one
    openings = open_span(blob, span)           the pieces in which some bytes lie
    some = open_slice(blob, span)              the same as one: hashes that follow from its pieces are left out

So nothing needs to be hashed a second time to be shown in parts: payloads, results and states have digests already. How
long a blob is follows from a record or a codec, for other pieces than the last may open to other lengths, too.

BLAKE3: github.com/BLAKE3-team/BLAKE3-specs, sections 2.1 to 2.6, without a key; numbers are of 32 bits, little-endian.
What opens is worked out for all pieces at once by numpy, and so are many that are opened; one alone by Python's own
integers.
"""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from weft import wire
from weft.ids import Digest
from weft.ledger.tree import MAX_DEPTH, At, Hash, Range, beside, hash_of

CHUNK_NBYTES = 1024
MAX_SLICE_NBYTES = 1 << 20
_BLOCK_NBYTES = 64
_WORDS = 16  # of a block
_START, _END, _PARENT, _ROOT = 1, 2, 4, 8
_ROUNDS = 7
_MASK = 0xFFFFFFFF
_MANY = 4  # pieces: of fewer, Python's integers are as fast
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

_BY_ONE, _BY_TWO, _BY_THREE = (np.array([(row + by) % 4 for row in range(4)]) for by in (1, 2, 3))
_PERMUTED_ROWS = np.array(_PERMUTED)

Word = Any  # an int below 2^32, or an array of uint32, of as many pieces as are hashed at once
Rows = NDArray[np.uint32]  # four of them
Counter = tuple[Word, Word]  # of a piece, its number: the low word, the high one
_Piece = Annotated[bytes, Meta(max_length=CHUNK_NBYTES)]


class Opening(wire.Record, frozen=True, kw_only=True):
    """A piece of a blob, and what shows that it is one."""

    index: Annotated[int, Meta(ge=0, lt=1 << MAX_DEPTH)]  # of the piece
    piece: _Piece
    beside: Annotated[tuple[Hash, ...], Meta(max_length=MAX_DEPTH)]  # from the piece up


class Slice(wire.Record, frozen=True, kw_only=True):
    """Pieces of a blob that lie side by side, and what shows that they are."""

    first: Annotated[int, Meta(ge=0, lt=1 << MAX_DEPTH)]  # the number of the first piece
    data: Annotated[bytes, Meta(max_length=MAX_SLICE_NBYTES)]
    beside: Annotated[tuple[Hash, ...], Meta(max_length=2 * MAX_DEPTH)]  # from the pieces up: left, then right


def num_chunks(nbytes: int) -> int:
    """Return of how many pieces a blob is; one of no bytes is of one."""
    return max(1, -(-nbytes // CHUNK_NBYTES))


def open_chunk(blob: wire.Buffer, index: int) -> Opening:
    """Return what shows piece `index` of a blob.

    Raises:
        IndexError: there is no such piece.
    """
    (opening,) = _opened(blob, range(index, index + 1))
    return opening


def open_span(blob: wire.Buffer, span: range) -> tuple[Opening, ...]:
    """Return what shows the pieces in which some bytes of a blob lie, in order.

    Args:
        span: of its bytes.

    Raises:
        IndexError: they lie beyond its end.
    """
    return _opened(blob, pieces_of(span))


def pieces_of(span: range) -> range:
    """Return the numbers of the pieces in which some bytes lie; of none, none."""
    return range(span.start // CHUNK_NBYTES, -(-span.stop // CHUNK_NBYTES)) if span else range(0)


def _opened(blob: wire.Buffer, pieces: range) -> tuple[Opening, ...]:
    data = memoryview(blob).cast("B")
    num = num_chunks(len(data))
    if pieces and not 0 <= pieces.start < pieces.stop <= num:
        raise IndexError(f"there are no pieces {pieces.start} to {pieces.stop - 1} of a blob of {num}")
    levels = _levels(data) if pieces else []
    at: At = lambda level, number: levels[level][number].tobytes()  # noqa: E731
    return tuple(
        Opening(
            index=index,
            piece=bytes(data[CHUNK_NBYTES * index :][:CHUNK_NBYTES]),
            beside=tuple(hash_of(each, at, _parent) for each in beside(index, num)),
        )
        for index in pieces
    )


def is_chunk(digest: Digest, nbytes: int, opening: Opening) -> bool:
    """Return whether the piece is where the opening says, in the blob of `nbytes` that `digest` names."""
    ranges = _ranges(nbytes, opening)
    if ranges is None:
        return False
    if not ranges:
        return wire.digest(opening.piece) == digest
    found = _piece(opening.piece, opening.index)
    for depth, (some, other) in enumerate(zip(ranges, opening.beside, strict=True)):
        pair = (other, found) if some[0] < opening.index else (found, other)
        found = _parent(*pair, _ROOT if depth == len(ranges) - 1 else 0)
    return found.hex() == digest


Claim = tuple[Digest, int, Opening]  # the blob, its bytes, and a piece that is said to be of it


def are_chunks(claims: Iterable[Claim]) -> bool:
    """Return whether all of many pieces are what their openings say: as `is_chunk` of each."""
    claims = list(claims)
    if len(claims) < _MANY:
        return all(is_chunk(*each) for each in claims)
    paths = [_ranges(nbytes, opening) for _, nbytes, opening in claims]
    if any(path is None for path in paths):
        return False
    found = _leaves([opening for _, _, opening in claims])
    for depth in range(max(len(path or ()) for path in paths)):
        _climb(found, claims, [path or [] for path in paths], depth)
    return all(
        (found[number].tobytes().hex() if path else wire.digest(opening.piece)) == digest
        for number, (path, (digest, _, opening)) in enumerate(zip(paths, claims, strict=True))
    )


# --- many pieces side by side ---


def open_slice(blob: wire.Buffer, span: range) -> Slice:
    """Return what shows the pieces in which some bytes of a blob lie, as one.

    Args:
        span: of its bytes; at least one.

    Raises:
        IndexError: they lie beyond its end.
    """
    data, pieces = memoryview(blob).cast("B"), pieces_of(span)
    num = num_chunks(len(data))
    if not 0 <= pieces.start < pieces.stop <= num:
        raise IndexError(f"there are no pieces {pieces.start} to {pieces.stop - 1} of a blob of {num}")
    levels = _levels(data)
    at: At = lambda level, number: levels[level][number].tobytes()  # noqa: E731
    beside = tuple(
        hash_of((number << level, min(number + 1 << level, num)), at, _parent)
        for level, number in _beside_of(pieces, num)
    )
    shown = bytes(data[CHUNK_NBYTES * pieces.start : CHUNK_NBYTES * pieces.stop])
    return Slice(first=pieces.start, data=shown, beside=beside)


def is_slice(digest: Digest, nbytes: int, some: Slice) -> bool:
    """Return whether the pieces are where the slice says, in the blob of `nbytes` that `digest` names."""
    num, first, stop = num_chunks(nbytes), some.first, some.first + num_chunks(len(some.data))
    is_whole = stop <= num and len(some.data) == min(CHUNK_NBYTES * stop, nbytes) - CHUNK_NBYTES * first
    if not is_whole or len(some.beside) != len(list(_beside_of(range(first, stop), num))):
        return False
    if num == 1:
        return wire.digest(some.data) == digest
    found, beside = _hashes(some.data, first), list(some.beside)
    while num > 1:
        if first & 1:
            first, found = first - 1, [beside.pop(0), *found]
        if stop & 1 and stop < num:
            stop, found = stop + 1, [*found, beside.pop(0)]
        flags = _PARENT | (_ROOT if num == 2 else 0)
        found = _joined(found, flags)  # the last one of a level goes up as it is, where nothing stands beside it
        first, stop, num = first // 2, (stop + 1) // 2, (num + 1) // 2
    return found[0].hex() == digest


def _beside_of(pieces: range, num: int) -> Iterator[tuple[int, int]]:
    """Yield level and number of what stands beside some pieces of `num`, and does not follow from them."""
    first, stop, level = pieces.start, pieces.stop, 0
    while num > 1:
        if first & 1:
            yield level, first - 1
        if stop & 1 and stop < num:
            yield level, stop
        first, stop, num, level = first // 2, (stop + 1) // 2, (num + 1) // 2, level + 1


def _hashes(data: bytes, first: int) -> list[bytes]:
    """Return the hashes of pieces that lie side by side."""
    whole = len(data) // CHUNK_NBYTES
    if whole < _MANY:
        return [
            _piece(data[at : at + CHUNK_NBYTES], first + at // CHUNK_NBYTES) for at in range(0, len(data), CHUNK_NBYTES)
        ]
    found = _hashed(data[: CHUNK_NBYTES * whole], np.arange(first, first + whole, dtype=np.uint64))
    rest = data[CHUNK_NBYTES * whole :]
    return [each.tobytes() for each in found] + ([_piece(rest, first + whole)] if rest else [])


def _joined(nodes: list[bytes], flags: int) -> list[bytes]:
    """Return the hashes above pairs of hashes, and the last one where it has none beside it."""
    pairs, rest = len(nodes) // 2, nodes[len(nodes) // 2 * 2 :]
    if pairs < _MANY:
        return [_parent(nodes[2 * at], nodes[2 * at + 1], flags & _ROOT) for at in range(pairs)] + rest
    words = np.frombuffer(b"".join(nodes[: 2 * pairs]), "<u4").reshape(pairs, 2, 8)
    return [each.tobytes() for each in _parents(words[:, 0], words[:, 1], flags)] + rest


def _ranges(nbytes: int, opening: Opening) -> list[Range] | None:
    """Return what stands beside a piece on its way up; None: it cannot be one of a blob of so many bytes."""
    index, num = opening.index, num_chunks(nbytes)
    if not 0 <= index < num:
        return None
    ranges = beside(index, num)
    is_whole = len(opening.piece) == min(CHUNK_NBYTES, nbytes - CHUNK_NBYTES * index)
    return ranges if is_whole and len(opening.beside) == len(ranges) else None


def _leaves(openings: Sequence[Opening]) -> NDArray[np.uint32]:
    """Return the hashes of pieces, eight words each."""
    found = np.zeros((len(openings), 8), np.uint32)
    whole = [number for number, each in enumerate(openings) if len(each.piece) == CHUNK_NBYTES]
    if whole:
        data = b"".join(openings[number].piece for number in whole)
        places = np.array([openings[number].index for number in whole], np.uint64)
        found[whole] = _hashed(data, places)
    for number in set(range(len(openings))) - set(whole):
        found[number] = np.frombuffer(_piece(openings[number].piece, openings[number].index), "<u4")
    return found


def _climb(found: NDArray[np.uint32], claims: Sequence[Claim], paths: Sequence[list[Range]], depth: int) -> None:
    """Make of the hashes of what is `depth` nodes above a piece those one above, in place."""
    here = [number for number, path in enumerate(paths) if depth < len(path)]
    openings = [claims[number][2] for number in here]
    others = np.array([np.frombuffer(each.beside[depth], "<u4") for each in openings])
    starts = [paths[number][depth][0] for number in here]
    is_right = np.array([start < each.index for start, each in zip(starts, openings, strict=True)])[:, None]
    left, right = np.where(is_right, others, found[here]), np.where(is_right, found[here], others)
    is_top = np.array([depth == len(paths[number]) - 1 for number in here])
    flags = np.where(is_top, _PARENT | _ROOT, _PARENT).astype(np.uint32)
    found[here] = _parents(left, right, flags)


# --- pieces ---


def _levels(data: memoryview) -> list[NDArray[np.uint32]]:
    """Return the hashes of whole ranges of 1, 2, 4, ... pieces, eight words each."""
    whole = len(data) // CHUNK_NBYTES
    found = _hashed(data[: CHUNK_NBYTES * whole], np.arange(whole, dtype=np.uint64))
    if len(data) > CHUNK_NBYTES * whole:
        rest = np.frombuffer(_piece(bytes(data[CHUNK_NBYTES * whole :]), whole), "<u4")
        found = np.concatenate([found, rest[None]])
    levels = [found]
    while (num := len(found) // 2) > 0:
        found = _parents(found[: 2 * num : 2], found[1 : 2 * num : 2], _PARENT)
        levels.append(found)
    return levels


def _hashed(data: wire.Buffer, places: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the hashes of whole pieces, eight words each.

    Args:
        data: of all of them.
        places: their numbers in the blob.
    """
    words = np.frombuffer(data, "<u4").reshape(len(places), CHUNK_NBYTES // _BLOCK_NBYTES, _WORDS)
    blocks = np.ascontiguousarray(words.transpose(1, 2, 0))
    counter = (places & _MASK).astype(np.uint32), (places >> 32).astype(np.uint32)
    found = np.repeat(np.array(_IV, np.uint32)[:, None], len(places), 1)
    for number, block in enumerate(blocks):
        flags = _START * (number == 0) | _END * (number == len(blocks) - 1)
        found = _compressed_rows(found, block, counter, flags)
    return found.T.copy()


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
    chained: Sequence[Word], words: Sequence[Word], counter: Counter, nbytes: int, flags: Word
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


def _parents(left: NDArray[np.uint32], right: NDArray[np.uint32], flags: Word) -> NDArray[np.uint32]:
    """Return the hashes above pairs of hashes, eight words each."""
    chained = np.repeat(np.array(_IV, np.uint32)[:, None], len(left), 1)
    return _compressed_rows(chained, np.concatenate([left.T, right.T]), (0, 0), flags).T.copy()


def _compressed_rows(
    chained: NDArray[np.uint32], words: NDArray[np.uint32], counter: Counter, flags: Word
) -> NDArray[np.uint32]:
    """As `_compressed` of whole blocks, many at once: a row for each word. Four columns, or four diagonals, are mixed
    at a time."""
    state = np.empty((_WORDS, chained.shape[1]), np.uint32)
    state[:8], state[8:12] = chained, np.array(_IV[:4], np.uint32)[:, None]
    state[12], state[13], state[14], state[15] = (*counter, _BLOCK_NBYTES, flags)
    a, b, c, d = state.reshape(4, 4, -1)
    for _ in range(_ROUNDS):
        _mix_rows(a, b, c, d, words[0:8:2], words[1:8:2])
        b, c, d = b[_BY_ONE], c[_BY_TWO], d[_BY_THREE]
        _mix_rows(a, b, c, d, words[8::2], words[9::2])
        b, c, d = b[_BY_THREE], c[_BY_TWO], d[_BY_ONE]
        words = words[_PERMUTED_ROWS]
    return np.concatenate([a ^ c, b ^ d])


def _mix_rows(a: Rows, b: Rows, c: Rows, d: Rows, first: Rows, second: Rows) -> None:
    for words, far, near in ((first, 16, 12), (second, 8, 7)):
        a += words
        a += b
        d ^= a
        d[:] = d >> np.uint32(far) | d << np.uint32(32 - far)
        c += d
        b ^= c
        b[:] = b >> np.uint32(near) | b << np.uint32(32 - near)


def _turned(word: Word, num: int) -> Word:
    """Return the word's bits, so many places to the right, round the end."""
    return (word >> num | word << 32 - num) & _MASK
