"""How fast something is beside a copy in memory of the same vector."""

import statistics
import time
from collections.abc import Callable, Mapping

from torch import Tensor


def cpu_s(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def speeds(vector: Tensor, acts: Mapping[str, Callable[[], object]], turns: int) -> tuple[dict[str, float], float]:
    """Return each act's share of a copy's speed, and the bytes a second that a copy takes over."""
    target = vector.clone()
    for act in acts.values():
        act()
    found: dict[str, list[float]] = {name: [] for name in acts}
    copies = []
    for _ in range(turns):
        for name, act in acts.items():
            copy_s = statistics.median(cpu_s(lambda: target.copy_(vector)) for _ in range(3))
            copies.append(copy_s)
            found[name].append(copy_s / cpu_s(act))
    fractions = {name: statistics.median(each) for name, each in found.items()}
    return fractions, 4 * vector.numel() / statistics.median(copies)


def error(found: Tensor, vector: Tensor) -> float:
    return float((found - vector).double().norm() / vector.double().norm())
