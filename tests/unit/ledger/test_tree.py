"""Trees against RFC 9162's own words, and every way to show what is not so."""

from collections.abc import Callable

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace

from weft.ids import Digest
from weft.ledger.tree import Path, Tree, is_leaf, is_tops, leaf_of, node_of, root_of, root_of_tops, with_leaf

SIZES = [*range(70), 127, 128, 129, 200]


def leaves(count: int, seed: int = 0) -> list[bytes]:
    return [f"{seed} {number}".encode() for number in range(count)]


# --- RFC 9162, section 2.1, with weft's tags ---


def split(count: int) -> int:
    """Return the largest power of two that is smaller."""
    power = 1
    while 2 * power < count:
        power *= 2
    return power


def mth(some: list[bytes]) -> bytes:
    if len(some) == 1:
        return blake3(b"\0weft.leaf.v1" + some[0]).digest()
    k = split(len(some))
    return blake3(b"\1" + mth(some[:k]) + mth(some[k:])).digest()


def path(m: int, some: list[bytes]) -> list[bytes]:
    if len(some) == 1:
        return []
    k = split(len(some))
    return [*path(m, some[:k]), mth(some[k:])] if m < k else [*path(m - k, some[k:]), mth(some[:k])]


def root(some: list[bytes]) -> Digest:
    top = mth(some) if some else b""
    return Digest(blake3(b"\2" + len(some).to_bytes(8, "little") + top).hexdigest())


# --- what holds ---


@pytest.mark.parametrize("count", SIZES)
def test_roots_and_paths_are_those_of_the_rfc(count: int) -> None:
    some, tree = leaves(count), Tree(leaves(count))
    assert tree.root() == root(some)
    for index in range(count):
        found = tree.path(index)
        assert list(found.beside) == path(index, some)
        assert is_leaf(tree.root(), some[index], found)


def test_it_grows_and_every_earlier_root_stays_to_be_had() -> None:
    some, tree = leaves(200), Tree(leaves(200))
    for before in SIZES:
        assert tree.root(before) == root(some[:before])
        if before:
            assert is_leaf(tree.root(before), some[before - 1], tree.path(before - 1, before))


def test_what_there_is_not_is_not_shown() -> None:
    tree = Tree(leaves(5))
    for asked in (lambda: tree.path(5), lambda: tree.path(-1), lambda: tree.path(3, 3), lambda: tree.root(6)):
        with pytest.raises(IndexError):
            asked()


# --- what does not ---

Forgery = Callable[[Path, list[bytes], np.random.Generator], tuple[bytes, Path]]


def _other(luck: np.random.Generator, count: int, index: int) -> int:
    return int((index + luck.integers(1, count)) % count)


def _flipped(data: bytes, luck: np.random.Generator) -> bytes:
    at = int(luck.integers(8 * len(data)))
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def _wrong_sibling(path: Path, some: list[bytes], luck: np.random.Generator) -> tuple[bytes, Path]:
    at = int(luck.integers(len(path.beside)))
    flipped = _flipped(path.beside[at], luck)
    return some[path.index], replace(path, beside=(*path.beside[:at], flipped, *path.beside[at + 1 :]))


def _node_for_a_leaf(path: Path, some: list[bytes], luck: np.random.Generator) -> tuple[bytes, Path]:
    """Show the 64 bytes below a node as if they were a leaf (CVE-2017-12842)."""
    below = leaf_of(some[path.index]), path.beside[0]
    pair = b"".join(below if path.index % 2 == 0 else reversed(below))
    count = -(-path.count // 2)
    return (
        (pair, Path(index=path.index // 2, count=count, beside=path.beside[1:]))
        if luck.integers(2)
        else (b"\1" + pair, replace(path, beside=path.beside[1:]))
    )


FORGERIES: dict[str, Forgery] = {
    "another leaf": lambda path, some, luck: (some[_other(luck, len(some), path.index)], path),
    "a bit of the leaf": lambda path, some, luck: (_flipped(some[path.index], luck), path),
    "another place": lambda path, some, luck: (
        some[path.index],
        replace(path, index=_other(luck, len(some), path.index)),
    ),
    "a place behind the end": lambda path, some, _: (some[path.index], replace(path, index=path.index + path.count)),
    "a place before the begin": lambda path, some, _: (some[path.index], replace(path, index=path.index - path.count)),
    "another count": lambda path, some, luck: (
        some[path.index],
        replace(path, count=path.count + int(luck.choice([-1, 1, 2]))),
    ),
    "a wrong sibling": _wrong_sibling,
    "a sibling too few": lambda path, some, _: (some[path.index], replace(path, beside=path.beside[:-1])),
    "a sibling too many": lambda path, some, luck: (
        some[path.index],
        replace(path, beside=(*path.beside, luck.bytes(32))),
    ),
    "siblings in another order": lambda path, some, _: (some[path.index], replace(path, beside=path.beside[::-1])),
    "a node for a leaf": _node_for_a_leaf,
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_thousand_forgeries_of_each_kind_show_nothing(forge: Forgery) -> None:
    luck = np.random.default_rng(0)
    for _ in range(1000):
        count = int(luck.integers(2, 90))
        some = leaves(count, int(luck.integers(1 << 30)))
        tree = Tree(some)
        index = int(luck.integers(count))
        honest = tree.path(index)
        leaf, shown = forge(honest, some, luck)
        if (leaf, shown) != (some[index], honest):  # two siblings in another order are others, one is not
            assert not is_leaf(tree.root(), leaf, shown)


def test_a_last_leaf_that_is_doubled_makes_another_tree() -> None:
    """CVE-2012-2459: where the last of an odd level stands for two, a list with it twice has the same root."""
    for count in range(1, 70):
        some = leaves(count)
        assert root([*some, some[-1]]) != root(some)
        assert Tree([*some, some[-1]]).root() != Tree(some).root()
        doubled = Tree([*some, some[-1]])
        assert not is_leaf(Tree(some).root(), some[-1], doubled.path(count))


def test_thousands_of_trees_show_all_that_is_asked() -> None:
    luck = np.random.default_rng(2)
    for _ in range(4_000):
        count = int(luck.integers(1, 40))
        some = leaves(count, int(luck.integers(1 << 30)))
        tree, index = Tree(some), int(luck.integers(count))
        assert is_leaf(tree.root(), some[index], tree.path(index))


def test_paths_are_as_long_as_the_tree_is_deep() -> None:
    tree = Tree(leaves(100_000))
    assert max(len(tree.path(index).beside) for index in (0, 1, 65_535, 65_536, 99_999)) == 17
    assert root_of(2, node_of(leaf_of(b"a"), leaf_of(b"b"))) == Tree([b"a", b"b"]).root()


def test_who_keeps_the_tops_alone_finds_the_same_roots() -> None:
    tops, tree = b"", Tree()
    for count, leaf in enumerate(leaves(300)):
        assert is_tops(count, tops)
        assert root_of_tops(count, tops) == tree.root()
        tops = with_leaf(tops, count, leaf)
        tree.append(leaf)
    assert not is_tops(299, tops)
    assert root_of_tops(300, tops) == root(leaves(300))
