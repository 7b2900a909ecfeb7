"""What a process takes of its machine and may still take: memory, CPUs. `weft doctor` asks before torch is loaded."""

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

import psutil

from weft.cost import training as cost
from weft.errors import TooLarge

# What psutil raises on a Linux whose /proc is not mounted, as in some containers.
_NO_PROC = (psutil.Error, OSError)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def host_free_nbytes() -> int:
    """Return the bytes this process may still take: what the system has, or what its container allows it."""
    return min([system_nbytes()[0], *_container_free_nbytes(Path("/sys/fs/cgroup"))])


def system_nbytes() -> tuple[int, int]:
    """Return the bytes of main memory that are free, and all."""
    try:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
    except _NO_PROC:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def process_nbytes() -> int:
    """Return the bytes of main memory this process has taken, without the files that it has mapped, where that is told.

    Pages of a mapped file (training data, torch's own code) are the system's to take back.
    """
    try:
        memory = psutil.Process().memory_info()
        return int(memory.rss) - int(getattr(memory, "shared", 0))
    except _NO_PROC:
        import resource  # not on Windows, which has no /proc to lack

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # at most, so far


def take_singly(nbytes: int) -> None:
    """Let blocks of at least so many bytes come from the system, and go back to it as soon as they are freed.

    Smaller ones glibc keeps, for the next that are asked for: twice so many bytes of them at most. By itself it goes by
    the largest block that was freed so far.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, nbytes)
        library.mallopt(_TRIM_THRESHOLD, 2 * nbytes)


def release_heap() -> None:
    """Give back to the system what glibc keeps of freed blocks: of steps that a thread made, no other can use them."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def max_files() -> int | None:
    """Return how many files this process may have open, or None where the system does not say."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def num_cores() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_cores(num: int | None) -> tuple[int, ...]:
    """Keep this process, all its threads, to `num` of the CPUs it may run on; return which; none where no system can.

    None is no limit. They lie side by side and begin where the process number says, so that several peers of one
    machine spread out.
    """
    if num is None:
        return ()
    if not hasattr(os, "sched_setaffinity"):
        with suppress(AttributeError, OSError):  # Windows has it, macOS has not
            chosen = chosen_cores(psutil.Process().cpu_affinity() or [], num, os.getpid())
            psutil.Process().cpu_affinity(list(chosen))
            return chosen
        return ()
    chosen = chosen_cores(sorted(os.sched_getaffinity(0)), num, os.getpid())
    os.sched_setaffinity(0, chosen)
    with suppress(*_NO_PROC):
        for thread in psutil.Process().threads():  # of libraries, which were started when they were loaded
            with suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(thread.id, chosen)
    return chosen


def chosen_cores(allowed: list[int], num: int, turn: int) -> tuple[int, ...]:
    if len(allowed) <= num:
        return tuple(allowed)
    start = turn * num % len(allowed)
    return tuple(sorted((allowed * 2)[start : start + num]))


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


def check_host(num: int) -> None:
    """Refuse parameters of which the host cannot hold even the least a peer keeps there: them and a momentum.

    Asked before anything is allocated; `check_fits` knows the rest once the run is known.

    Raises:
        TooLarge: says the figures.
    """
    needed, free = 2 * cost.vector_nbytes(num), host_free_nbytes()
    if needed > cost.SPARE * free:
        raise TooLarge(
            f"{num:,} parameters do not fit here. This machine would need at least {gigabytes(needed)} of memory for "
            f"them, and has {gigabytes(free)} free. Choose a smaller model, close other programs, or use a larger "
            "machine."
        )


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"
