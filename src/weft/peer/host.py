"""What memory of this machine a process may still take. It needs no torch, so `weft doctor` can ask without it."""

from pathlib import Path

import psutil


def host_free_nbytes() -> int:
    """Return the bytes this process may still take: what the system has, or what its container allows it."""
    return min(int(psutil.virtual_memory().available), *_container_free_nbytes(Path("/sys/fs/cgroup")))


def _container_free_nbytes(root: Path) -> list[int]:
    """Return what is left of the memory limits set on this container, for either version of Linux control groups."""
    left = []
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory" / "memory.limit_in_bytes", root / "memory" / "memory.usage_in_bytes"),
    ):
        try:
            # Page cache counts as used but is given back on demand; `inactive_file` is the part that surely is.
            stat = dict(line.split(maxsplit=1) for line in (used.parent / "memory.stat").read_text().splitlines())
            cache = int(stat.get("inactive_file", "0"))
            left.append(int(limit.read_text()) - int(used.read_text()) + cache)
        except (OSError, ValueError):  # no such group, or the limit is the word "max"
            continue
    return left
