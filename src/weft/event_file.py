"""A log file of events: one JSON line each, rotated, and whole again after a crash.

It does not know what events mean.
"""

from pathlib import Path

import msgspec

from weft.events import Entry


class JsonlSink:
    """Appends one JSON line per event; at `max_nbytes` the file is renamed to `.1` and begun anew.

    Each line is written at once, so what was said before a crash can be read after it. A last line that a crash
    cut short is removed when the file is opened again. A number that is not finite is written as null.
    """

    def __init__(self, path: Path, *, max_nbytes: int = 64 << 20, num_kept: int = 3) -> None:
        self._path = path
        self._max_nbytes = max_nbytes
        self._num_kept = num_kept
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        _drop_cut_line(path)

    def write(self, entry: Entry) -> None:
        line = msgspec.json.encode(entry) + b"\n"
        if self._file.tell() + len(line) > self._max_nbytes:
            self._rotate()
        if self._file.write(line) != len(line):
            raise OSError(f"no room for another line in {self._path}")

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._num_kept - 1, 0, -1):
            older = self._path.with_suffix(f"{self._path.suffix}.{number}")
            if older.exists():
                older.replace(self._path.with_suffix(f"{self._path.suffix}.{number + 1}"))
        self._path.replace(self._path.with_suffix(f"{self._path.suffix}.1"))
        self._file = self._path.open("ab", buffering=0)


def _drop_cut_line(path: Path) -> None:
    with path.open("r+b") as file:
        num_bytes = file.seek(0, 2)
        end = num_bytes
        while end:  # backwards in blocks to the last line's end: the file may be large
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < num_bytes:
            file.truncate(end)
