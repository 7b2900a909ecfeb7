"""The standard streams of a process, which whoever started it may have closed, filled or let go of.

A service or a cron job may start with standard input, output or error closed. Then Python has None in their place, and
the next file that is opened gets their number: what a library writes to number 2 would end up in it. A terminal may be
closed and a disk may fill while a peer trains: what it cannot say on standard error must not end it. Standard output is
a command's answer, so what cannot be written there is an error.
"""

import errno
import os
import sys
from io import BufferedWriter, RawIOBase, TextIOWrapper
from typing import Any

_PIPE_CLOSED = 141  # 128 + SIGPIPE, as shells have it
_LAST_STANDARD = 2


class Unwritten(Exception):
    """Standard output does not take a command's answer; `code` is what the process ends with."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror}. The answer is cut short.")
        self.has_reader = error.errno != errno.EPIPE
        self.code = 1 if self.has_reader else _PIPE_CLOSED


def prepare() -> None:
    """Put what swallows everything in the place of closed streams, and let no failure of standard error be one."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
    sys.stdout = _over(sys.stdout, _Answer) if sys.stdout else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = _over(sys.stderr, _Patient) if sys.stderr else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _over(stream: Any, kind: type["_Stream"]) -> Any:
    if not isinstance(stream, TextIOWrapper):
        return stream
    # A model may write what a terminal cannot show.
    raw = BufferedWriter(kind(stream.fileno()))
    return TextIOWrapper(raw, stream.encoding, "replace", line_buffering=stream.line_buffering)


class _Stream(RawIOBase):
    """Writes to a file descriptor."""

    def __init__(self, number: int) -> None:
        self._number = number

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)


class _Answer(_Stream):
    """Of standard output: what it does not take ends the command, once."""

    def write(self, data: Any) -> int:
        try:
            return os.write(self._number, data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._number)  # what else is written leads nowhere
            raise Unwritten(error) from error


class _Patient(_Stream):
    """Of standard error: what it does not take is dropped."""

    def write(self, data: Any) -> int:
        try:
            return os.write(self._number, data)
        except OSError:
            return len(memoryview(data).cast("B"))
