"""One small record in a file that is replaced whole.

    file = RecordFile(path, Kind, max_nbytes, empty)
    file.read()      what it holds; `empty` where that cannot be read
    file.keep(each)  in place of the one before

A `Record` lies there as its canonical bytes, any other type as JSON. Nothing that is read is believed: a file that is
absent, damaged or too large holds nothing.
"""

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from weft.data.store import write_atomically
from weft.errors import WireError
from weft.wire import Record, decode, encode

T = TypeVar("T")


class RecordFile(Generic[T]):
    """The file at `path`, which need not exist.

    Args:
        empty: what it holds where nothing can be read.
        is_synced: False: what was kept last may be lost when the machine's power is.
    """

    def __init__(self, path: Path, kind: Any, max_nbytes: int, empty: T, *, is_synced: bool = True) -> None:
        self.path = path
        self.damage = ""  # why nothing of a file that is there could be read
        self._kind = kind
        self._is_json = not (isinstance(kind, type) and issubclass(kind, Record))
        self._max_nbytes = max_nbytes
        self._held = empty
        self._is_synced = is_synced

    def read(self) -> T:
        try:
            self._held = self._decoded(self.path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, WireError, msgspec.DecodeError) as error:
            self.damage = str(error)
        return self._held

    def keep(self, record: T) -> None:
        """Keep a record in place of the one before.

        Raises:
            DiskFull, DataError: it cannot be written; the one before stays.
        """
        if record != self._held:
            data = msgspec.json.encode(record) if self._is_json else encode(record)  # type: ignore[arg-type]
            write_atomically(self.path, [data], is_synced=self._is_synced)
            self._held = record

    def _decoded(self, data: bytes) -> T:
        if not self._is_json:
            return decode(data, self._kind, max_nbytes=self._max_nbytes)  # type: ignore[no-any-return]
        if len(data) > self._max_nbytes:
            raise WireError(f"{len(data)} bytes, above {self._max_nbytes}")
        return msgspec.json.decode(data, type=self._kind)  # type: ignore[no-any-return]
