"""Leaves in order, named by 32 bytes; who has those can be shown one leaf.

    leaf  H(00 "weft.leaf.v1" bytes)            of one leaf
    node  H(01 left right)                      of more; left: of the largest power of two that is not all
    root  H(02 count top)                       count: little-endian, 8 bytes
    tops                                        of whole ranges of leaves, as large as may be: the root follows

    tree = Tree(leaves)                         grows by `append`
    is_leaf(root, leaf, tree.path(7))           whether these bytes are leaf 7 of those that the root names

Nothing is doubled where a level is odd, and leaves, nodes and roots are hashed apart. So no other list has the same
root (CVE-2012-2459), and a node is no leaf (CVE-2017-12842).

The shape, and which hashes are needed, are those of RFC 9162, section 2.1; H is BLAKE3.
"""

from collections.abc import Callable, Iterable
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from weft import wire
from weft.ids import Digest

HASH_NBYTES = 32
MAX_DEPTH = 48
MAX_COUNT = 1 << MAX_DEPTH
_LEAF, _NODE, _ROOT = b"\0weft.leaf.v1", b"\1", b"\2"

Range = tuple[int, int]  # of leaves, the end not included
At = Callable[[int, int], bytes]  # of a level, and of a number in it: the hash there
Hash = Annotated[bytes, Meta(min_length=HASH_NBYTES, max_length=HASH_NBYTES)]
_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_Hashes = Annotated[tuple[Hash, ...], Meta(max_length=2 * MAX_DEPTH)]


class Path(wire.Record, frozen=True, kw_only=True):
    """Shows one leaf of a tree: the hashes that stand beside it, from the leaf up."""

    index: _Count
    count: _Count  # of leaves of the tree
    beside: _Hashes


class Tree:
    """A list of leaves that grows. It keeps 64 bytes a leaf, and no leaf."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self._levels = [bytearray()]  # of whole ranges of 1, 2, 4, ... leaves, their hashes
        for leaf in leaves:
            self.append(leaf)

    def __len__(self) -> int:
        return len(self._levels[0]) // HASH_NBYTES

    def append(self, leaf: bytes) -> None:
        found, level, index = leaf_of(leaf), 0, len(self)
        self._levels[0] += found
        while index & 1:  # it is the right one of two
            found = node_of(self._at(level, index - 1), found)
            level, index = level + 1, index >> 1
            if level == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level] += found

    def root(self, count: int | None = None) -> Digest:
        """Return what names the first `count` leaves; None: all of them."""
        num = self._some(count)
        return root_of(num, self._node((0, num)) if num else b"")

    def path(self, index: int, count: int | None = None) -> Path:
        """Return what shows a leaf to who has the root of the first `count`.

        Raises:
            IndexError: there is no such leaf among them.
        """
        num = self._some(count)
        if not 0 <= index < num:
            raise IndexError(f"there is no leaf {index} among {num}")
        return Path(index=index, count=num, beside=tuple(self._node(each) for each in beside(index, num)))

    def _some(self, count: int | None) -> int:
        num = len(self) if count is None else count
        if not 0 <= num <= len(self):
            raise IndexError(f"there are {len(self)} leaves, and no {num}")
        return num

    def _node(self, some: Range) -> bytes:
        return hash_of(some, self._at, node_of)

    def _at(self, level: int, index: int) -> bytes:
        return bytes(self._levels[level][HASH_NBYTES * index : HASH_NBYTES * (index + 1)])


def is_leaf(root: Digest, leaf: bytes, path: Path) -> bool:
    """Return whether `leaf` is where the path says, in the tree that `root` names."""
    if not 0 <= path.index < path.count:
        return False
    ranges, found = beside(path.index, path.count), leaf_of(leaf)
    if len(ranges) != len(path.beside):
        return False
    for (start, _end), other in zip(ranges, path.beside, strict=True):
        found = node_of(other, found) if start < path.index else node_of(found, other)
    return root_of(path.count, found) == root


# --- the tops, for who keeps no leaf ---


def with_leaf(tops: bytes, count: int, leaf: bytes) -> bytes:
    """Return the tops of a tree of `count` leaves once there is one more.

    Args:
        tops: hashes of its whole ranges of leaves, as large as may be, in order: one for each bit of `count`.
    """
    parts, found = [tops[start : start + HASH_NBYTES] for start in range(0, len(tops), HASH_NBYTES)], leaf_of(leaf)
    while count & 1:
        found, count = node_of(parts.pop(), found), count >> 1
    return b"".join((*parts, found))


def root_of_tops(count: int, tops: bytes) -> Digest:
    """Return what names a tree of so many leaves."""
    top = tops[-HASH_NBYTES:]
    for start in range(len(tops) - 2 * HASH_NBYTES, -1, -HASH_NBYTES):
        top = node_of(tops[start : start + HASH_NBYTES], top)
    return root_of(count, top)


def is_tops(count: int, tops: bytes) -> bool:
    """Return whether a tree of so many leaves has so many tops."""
    return len(tops) == HASH_NBYTES * count.bit_count()


# --- hashes ---


def leaf_of(leaf: bytes) -> bytes:
    return blake3(_LEAF + leaf).digest()


def node_of(left: bytes, right: bytes) -> bytes:
    return blake3(_NODE + left + right).digest()


def root_of(count: int, top: bytes) -> Digest:
    """Return the name of a tree of so many leaves, of which `top` is the hash; of none it is empty."""
    return wire.digest(_ROOT + count.to_bytes(8, "little") + top)


# --- the shape ---


def hash_of(some: Range, at: At, join: Callable[[bytes, bytes], bytes]) -> bytes:
    """Return the hash of a range of leaves that stands somewhere in a tree.

    Args:
        at: returns, of all whole ranges of 2^level leaves, the hash of one.
        join: makes one hash of a left and a right one.
    """
    start, end = some
    level = (end - start).bit_length() - 1
    if end - start == 1 << level:  # such a range begins at a multiple of its length
        return at(level, start >> level)
    middle = _middle(some)
    return join(hash_of((start, middle), at, join), hash_of((middle, end), at, join))


def beside(index: int, count: int) -> list[Range]:
    """Return the ranges of leaves that stand beside leaf `index` on its way up."""
    found, some = list[Range](), (0, count)
    while some[1] - some[0] > 1:
        middle = _middle(some)
        left, right = (some[0], middle), (middle, some[1])
        some, other = (left, right) if index < middle else (right, left)
        found.append(other)
    return found[::-1]


def _middle(some: Range) -> int:
    """Return where the left part ends: as many leaves as a power of two can have that are not all."""
    start, end = some
    return start + (1 << (end - start - 1).bit_length() - 1)
