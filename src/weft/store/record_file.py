"""One canonical record in a file that is replaced whole.

Nothing that is read is believed: a file that is absent, damaged or too large holds nothing.
"""

from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from weft.data import write_atomically
from weft.errors import WireError
from weft.wire import Record, decode, encode

R = TypeVar("R", bound=Record)


class RecordFile(Generic[R]):
    """The file at `path`, which need not exist.

    Args:
        empty: the record that it holds where nothing can be read.
    """

    def __init__(self, path: Path, empty: R, max_nbytes: int) -> None:
        self._path = path
        self._held = empty
        self._max_nbytes = max_nbytes

    def read(self) -> R:
        with suppress(OSError, WireError):
            self._held = decode(self._path.read_bytes(), type(self._held), max_nbytes=self._max_nbytes)
        return self._held

    def keep(self, record: R) -> None:
        """Keep a record in place of the one before.

        Raises:
            DiskFull, DataError: it cannot be written; the one before stays.
        """
        if record != self._held:
            write_atomically(self._path, [encode(record)])
            self._held = record
