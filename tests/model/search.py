"""Every world that can be reached from a first one."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

W = TypeVar("W", bound=Hashable)


def num_reached(first: W, check: Callable[[W], None], following: Callable[[W], Iterable[W]]) -> int:
    """Check each world once, those nearest to the first one first; return how many there are.

    Args:
        following: the worlds that may come next.
    """
    seen, waiting = {first}, deque([first])
    while waiting:
        world = waiting.popleft()
        check(world)
        for after in following(world):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen)


def break_rules(patch: pytest.MonkeyPatch, broken: Mapping[tuple[Any, str], Any]) -> None:
    """Put other functions in the place of some, each by its module, or class, and its name."""
    for (module, name), function in broken.items():
        patch.setattr(module, name, function)
