"""Pages of keys and values: who holds which, what can be used again, and whether there is room.

    page     the keys and values of `PAGE` tokens of one sequence, in all layers; here only its number
    name     of a full page: BLAKE3(name of the page before, its tokens), the first behind a salt
    held     by sequences, counted: equal beginnings share pages
    kept     held by nobody, and named: the next sequence that begins alike takes it up, until room is needed
    free     neither

Pages are as in vLLM (arXiv:2309.06180), named by a chain of digests as there. The salt keeps one customer from
finding out by the clock what another has asked (CVE-2025-46570): pages are shared only where salts are equal.

What is taken is taken whole or not at all. After every call, held + kept + free pages are all there are.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from blake3 import blake3

PAGE = 64  # tokens
NAME_NBYTES = 16

Name = bytes


def num_pages(num_tokens: int) -> int:
    """Return how many pages so many tokens take."""
    return -(-num_tokens // PAGE)


def names_of(tokens: Sequence[int], salt: bytes, before: Sequence[Name] = ()) -> list[Name]:
    """Return the names of the full pages of a sequence.

    Args:
        tokens: of the whole sequence.
        salt: who may share its pages.
        before: names of its first pages, where they are known.
    """
    names = list(before)
    for page in range(len(names), len(tokens) // PAGE):
        told = np.asarray(tokens[page * PAGE : (page + 1) * PAGE], "<u4").tobytes()
        names.append(blake3((names[-1] if names else blake3(salt).digest()) + told).digest(NAME_NBYTES))
    return names


class PagePool:
    """Of one model's keys and values.

    Args:
        num_pages: there are numbers 0 ..< `num_pages`.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_name: dict[Name, int] = {}
        self._names: dict[int, Name] = {}

    @property
    def num_room(self) -> int:
        """Return how many pages could be taken now."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def num_known(self, names: Sequence[Name]) -> int:
        """Return how many pages of a sequence with these names, from its beginning, are here."""
        return next((num for num, name in enumerate(names) if name not in self._by_name), len(names))

    def take(self, names: Sequence[Name], num_more: int) -> list[int] | None:
        """Return the pages of a new sequence, now held by it; None: there is no room.

        Args:
            names: of pages that are here (`num_known`).
            num_more: empty pages behind them.
        """
        known = [self._by_name[name] for name in names]
        num_revived = sum(page in self._kept for page in known)
        if num_more > self.num_room - num_revived:
            return None
        for page in known:
            self._kept.pop(page, None)
            self._num_holders[page] = self._num_holders.get(page, 0) + 1
        return [*known, *(self._empty() for _ in range(num_more))]

    def grow(self) -> int | None:
        """Return one more empty page, now held by a sequence; None: there is no room."""
        return self._empty() if self.num_room else None

    def call(self, page: int, name: Name) -> None:
        """Name a page that its only holder has filled; where another has the name already, that one keeps it."""
        if name not in self._by_name and page not in self._names:
            self._by_name[name], self._names[page] = page, name

    def is_named(self, page: int) -> bool:
        """Return whether others may take a page up, or have: it must not be written to any more."""
        return page in self._names

    def release(self, pages: Iterable[int]) -> None:
        """Let go of a sequence's pages. Of those that are kept, its last is used up first: others rest on the first."""
        for page in reversed(list(pages)):
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            del self._num_holders[page]
            if page in self._names:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Drop every name: the model is another from now on. What is held stays held."""
        self._free += self._kept
        self._kept.clear()
        self._by_name.clear()
        self._names.clear()

    def _empty(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._by_name[self._names.pop(page)]
        self._num_holders[page] = 1
        return page

    def check(self) -> None:
        """Hold the promise of the first lines, for tests."""
        held = self._num_holders.keys()
        places = [*self._free, *self._kept, *held]
        assert sorted(places) == list(range(self.num_pages)), "a page is in two places, or in none"
        assert {page: name for name, page in self._by_name.items()} == self._names
        assert self._kept.keys() <= self._names.keys()
        assert all(num > 0 for num in self._num_holders.values())
