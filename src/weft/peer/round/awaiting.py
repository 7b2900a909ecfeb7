"""Letters of stewards and voters that wait for a round, on disk: whoever handed one in was told that it waits.

    awaiting.bin    the canonical record of all of them, replaced whole

What is read is taken up as if it were handed in again, so nothing in the file is believed: a damaged one costs what it
held, and those that others keep come back from them.

It does not know what a letter means.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from weft.store.record_file import RecordFile
from weft.wire import Record, Signed

MAX_NBYTES = 4 << 20
MAX_LETTERS = 4096  # more than all stewards and members may have waiting


class Letters(Record, frozen=True, kw_only=True):
    letters: Annotated[tuple[Signed, ...], Meta(max_length=MAX_LETTERS)]


class Awaiting:
    """The file at `path`, which need not exist."""

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path, Letters(letters=()), MAX_NBYTES)

    def read(self) -> tuple[Signed, ...]:
        return self._file.read().letters

    def keep(self, letters: Sequence[Signed]) -> None:
        """Keep these in place of those before.

        Raises:
            DiskFull, DataError: it cannot be written; those before stay.
        """
        self._file.keep(Letters(letters=tuple(letters)))
