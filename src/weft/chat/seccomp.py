"""Which calls of Linux code in a sandbox may make, as a filter that the kernel runs before each of them.

    refused     memory that no limit of a process counts: System V's segments, queues and semaphores
                rings and queues of requests (io_uring, aio), which are counted for the whole machine
                namespaces, and with them file systems in memory and rights there
                the kernel's own keys, programs (BPF) and counters
                sockets but Unix's: the Internet's hold memory of the kernel's, a virtual machine's reach its host

All others are as they were. The filter is a program of classic BPF, as bwrap takes it.

Linux: Documentation/userspace-api/seccomp_filter.rst; the numbers are of asm/unistd.h.
"""

import errno
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_INSTRUCTION = struct.Struct("<HBBI")  # what, where to go on if it holds, and if not, a number
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # where they lie in what the kernel shows
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1,)  # AF_UNIX


@dataclass(frozen=True)
class Calls:
    """Of one processor.

    Args:
        arch: as the kernel names it.
        limit: numbers from here on are of another way to call the same.
    """

    arch: int
    limit: int
    clone: int
    clone3: int
    socket: int
    refused: tuple[int, ...]


# In this order: shmget, msgget, semget, unshare, setns, mount, fsopen, io_uring_setup, add_key, request_key, keyctl,
# bpf, perf_event_open, userfaultfd, io_setup.
CALLS: Mapping[str, Calls] = {
    "x86_64": Calls(
        0xC000003E, 0x40000000, 56, 435, 41, (29, 68, 64, 272, 308, 165, 430, 425, 248, 249, 250, 321, 298, 323, 206)
    ),
    "aarch64": Calls(
        0xC00000B7, 0x40000000, 220, 435, 198, (194, 186, 190, 97, 268, 40, 430, 425, 217, 218, 219, 280, 241, 282, 0)
    ),
}


def program(machine: str) -> bytes | None:
    """Return the filter for a processor, as `platform.machine()` names it; None: its calls are not known here."""
    calls = CALLS.get(machine)
    return None if calls is None else b"".join(_INSTRUCTION.pack(*each) for each in _instructions(calls))


def _instructions(calls: Calls) -> Iterator[tuple[int, int, int, int]]:
    refuse, is_unknown = _answer(errno.EPERM), _answer(errno.ENOSYS)
    yield _LOAD, 0, 0, _ARCH
    yield _EQUAL, 1, 0, calls.arch
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, calls.limit
    yield is_unknown
    for number in calls.refused:
        yield _EQUAL, 0, 1, number
        yield refuse
    yield _EQUAL, 0, 1, calls.clone3  # whose flags lie where no filter looks; libraries take clone where it is missing
    yield is_unknown
    yield _EQUAL, 0, 4, calls.clone
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    yield _ANY_BIT, 0, 1, _NEW_NAMESPACES
    yield refuse
    yield _RETURN, 0, 0, _ALLOW
    yield _EQUAL, 0, len(_FAMILIES) + 2, calls.socket
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    for left, family in zip(range(len(_FAMILIES), 0, -1), _FAMILIES, strict=True):
        yield _EQUAL, left, 0, family
    yield refuse
    yield _RETURN, 0, 0, _ALLOW


def _answer(number: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, _ERRNO | number
