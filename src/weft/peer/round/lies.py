"""What proves that members lie, on disk until a manifest has struck them out: it outlives the end of all who heard it.

    lies.bin    the canonical record of one lie of each member, replaced whole

What is read is taken up as if somebody had just told it, so nothing in the file is believed: a damaged one costs what
it held. No more is kept than fits the record; the first that were proven go first into it.

It does not know what proves a lie.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.store.record_file import RecordFile
from weft.sync.records.acts import Warrant
from weft.wire import Record

MAX_LIES = MAX_MEMBERS  # one of each of an electorate
MAX_NBYTES = 4 << 20  # ten of the largest; most have some hundred bytes
MARGIN_NBYTES = 1 << 10  # of one in the record, beside the bodies of its letters


class KnownLies(Record, frozen=True, kw_only=True):
    lies: Annotated[tuple[Warrant, ...], Meta(max_length=MAX_LIES)]


class Lies:
    """The file at `path`, which need not exist."""

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path, KnownLies(lies=()), MAX_NBYTES)

    def read(self) -> tuple[Warrant, ...]:
        return self._file.read().lies

    def keep(self, lies: Sequence[Warrant]) -> None:
        """Keep as many of these as fit, in place of those before.

        Raises:
            DiskFull, DataError: it cannot be written; those before stay.
        """
        self._file.keep(KnownLies(lies=_that_fit(lies)))


def _that_fit(lies: Sequence[Warrant]) -> tuple[Warrant, ...]:
    chosen: list[Warrant] = []
    left_nbytes = MAX_NBYTES - MARGIN_NBYTES
    for lie in lies:
        nbytes = MARGIN_NBYTES + sum(len(letter.body) for letter in lie.letters)
        if len(chosen) < MAX_LIES and nbytes <= left_nbytes:
            chosen.append(lie)
            left_nbytes -= nbytes
    return tuple(chosen)
