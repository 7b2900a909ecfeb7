"""The standard streams of a process, which whoever started it may have closed, filled or let go of.

A service or a cron job may start with standard input, output or error closed. Then Python has None in their place, and the
next file that is opened gets their number: what a library writes to number 2 would end up in it. A terminal may be closed
and a disk may fill while a peer trains: what it cannot say on standard error must not end it. Standard output is a
command's answer, so what cannot be written there is an error.
"""

import errno
import os
import sys

from contextlib import suppress
from io import BufferedWriter, RawIOBase, TextIOWrapper
from typing import Any

PIPE_CLOSED = 141  # 128 + SIGPIPE, as shells have it
_LAST_STANDARD = 2


def prepare() -> None:
    """Put what swallows everything in the place of closed streams, and let no failure of standard error be one."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = TextIOWrapper(
            BufferedWriter(_Patient(sys.stderr.fileno())), sys.stderr.encoding, "replace", line_buffering=True
        )
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what a terminal cannot show


def finished(code: int) -> int:
    """Return the exit code of a process that is done: `code`, unless its answer cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):  # what is left unwritten must not be tried again at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failed(error)
    return code


def failed(error: OSError) -> int:
    """Return the exit code where standard output does not take what it is given; says why, unless its reader left."""
    if error.errno == errno.EPIPE:
        return PIPE_CLOSED
    from weft.cli.failure import say

    say(f"standard output takes no more: {error.strerror}. The answer is cut short.")
    return 1


class _Patient(RawIOBase):
    """Writes to a file descriptor what that takes, and drops the rest."""

    def __init__(self, number: int) -> None:
        self._number = number

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        try:
            return os.write(self._number, view)
        except OSError:
            return view.nbytes
