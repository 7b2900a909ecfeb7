"""How those that ask share one machine's pages and steps: pure.

Pages are shared as by max-min fairness. While there is room, anybody takes some. Where there is none, who holds most
gives its youngest text up, for whoever holds less even with what it asks for: so one that asks for everything keeps
what nobody else wants, and many small texts stand beside a large one.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Reversible
from operator import itemgetter
from typing import Protocol, TypeVar


class HoldsPages(Protocol):
    pages: list[int]


T = TypeVar("T")
Held = TypeVar("Held", bound=HoldsPages)
Key = TypeVar("Key", bound=Hashable)


def pages_held(texts: Iterable[Held], key_of: Callable[[Held], Key]) -> Counter[Key]:
    """Return how many pages each key's texts hold."""
    held = Counter[Key]()
    for text in texts:
        held[key_of(text)] += len(text.pages)
    return held


def youngest(texts: Reversible[T], key_of: Callable[[T], Key], key: Key) -> T:
    """Return the last of a key's texts, which stand oldest first; there is one at least."""
    return next(text for text in reversed(texts) if key_of(text) == key)


def most_held(held: Mapping[Key, int]) -> Key:
    """Return who holds most; of equals the first.

    Args:
        held: pages, or texts; of one at least.
    """
    return max(held, key=lambda key: held[key])


def who_yields(held: Mapping[Key, int], key: Key, num: int) -> Key | None:
    """Return who gives a text up so that `key` has room for `num` pages more; None: nobody holds more than it would."""
    most = most_held(held) if held else key
    return most if held.get(most, 0) > held.get(key, 0) + num else None


def who_makes_way(waiting: Mapping[Key, tuple[int, float]], key: Key, room: float) -> Key | None:
    """Return who gives up its youngest text in a full queue for one more of `key`; None: nobody has more than it would.

    Args:
        waiting: how many texts each has there, and its priority (`Wanted.room`); a higher one makes way for none.
    """
    return who_yields({each: num for each, (num, its_room) in waiting.items() if its_room <= room}, key, 1)


def all_who_make_way(
    waiting: Mapping[Key, tuple[int, float]], key: Key, room: float, num_free: int, num: int
) -> list[Key] | None:
    """Return who makes way, in order, so that `num` texts of `key` find places at once; None: not all of them do.

    Args:
        waiting, room: as of `who_makes_way`.
        num_free: places that are taken first.
    """
    left, found = dict(waiting), list[Key]()
    for place in range(num):
        if place >= num_free:
            other = who_makes_way(left, key, room)
            if other is None:
                return None
            found.append(other)
            left[other] = left[other][0] - 1, left[other][1]
        num_own, its_room = left.get(key, (0, room))
        left[key] = num_own + 1, its_room
    return found


def first_of_most(texts: Collection[T], key_of: Callable[[T], Key]) -> T:
    """Return the first text of the key that has most of them; there is one text at least."""
    most = most_held(Counter(map(key_of, texts)))
    return next(text for text in texts if key_of(text) == most)


def by_turns(each: Iterable[T], key_of: Callable[[T], Hashable]) -> list[T]:
    """Return the first of every key, then the second of every key, and so on."""
    nums = Counter[Hashable]()
    turns = list[tuple[int, T]]()
    for one in each:
        turns.append((nums[key_of(one)], one))
        nums[key_of(one)] += 1
    return [one for _, one in sorted(turns, key=itemgetter(0))]


def longest_ago(
    each: Iterable[T], key_of: Callable[[T], Hashable], at_of: Callable[[T], int], among: Iterable[T]
) -> list[T]:
    """Return texts by turns of their keys: first the key that has had no turn for longest, in each key such a text.

    Args:
        at_of: when a text had its last turn.
        among: the texts whose turns count for their keys.
    """
    last = dict[Hashable, int]()
    for text in among:
        last[key_of(text)] = max(last.get(key_of(text), at_of(text)), at_of(text))
    return by_turns(sorted(each, key=lambda text: (last[key_of(text)], at_of(text))), key_of)
