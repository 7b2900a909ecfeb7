"""Log files of events: one JSON line each, rotated, and whole again after a crash.

They are written by `JsonlSink`, and read whole or while they grow.
"""

import math
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError
from weft.events import VERSION, Entry, Event
from weft.ids import PeerId


def _all_events(base: type[Event] = Event) -> list[type[Event]]:
    return [kind for child in base.__subclasses__() for kind in (child, *_all_events(child))]


def read_jsonl(path: Path) -> list[Entry]:
    """Return the entries of a log file. Left out: a last line cut short by a crash, and kinds of a later version.

    Raises:
        ConfigError: a line is no event, named by its number.
    """
    return list(read_lines(path.read_bytes().splitlines(keepends=True), str(path)))


class LogTail:
    """A log file that is read while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0  # bytes

    def read(self) -> list[Entry]:
        """Return the entries written since the last call.

        Raises:
            ConfigError: as `read_jsonl`.
        """
        rest = b""
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._num_read:  # the log was begun anew, and what was there renamed
                rest, self._num_read = self._rest(), 0
            file.seek(self._num_read)
            data = file.read()
        new = data[: data.rfind(b"\n") + 1]
        self._num_read += len(new)
        whole = rest + new
        return list(read_lines(whole.splitlines(keepends=True), str(self._path)))

    def _rest(self) -> bytes:
        """Return what was written to the log between the last look and its renaming."""
        try:
            with self._path.with_name(f"{self._path.name}.1").open("rb") as file:
                file.seek(self._num_read)
                return file.read()
        except FileNotFoundError:
            return b""


def read_lines(lines: Iterable[bytes], where: str) -> Iterator[Entry]:
    """Yield the entries of a log's lines, as `read_jsonl` does; `where` names them in errors."""
    kinds = {kind.__struct_config__.tag: kind for kind in _all_events()}
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            stored = msgspec.json.decode(line.removeprefix(BOM_UTF8), type=_StoredEntry)  # an editor may put it there
            kind = kinds.get(msgspec.convert(stored.event["type"], str))
            if stored.v != VERSION or kind is None:
                continue
            event = msgspec.convert(_nan_for_null(stored.event, kind), kind)
        except (msgspec.DecodeError, KeyError, UnicodeDecodeError) as error:
            do = "Remove the line to read the rest."
            if number == 1:
                do = f'If this is a log: {do} A run of this home is given by its name, its digits, or "last".'
            raise ConfigError(f"{where}: line {number} is not an event of weft ({error}). {do}") from error
        yield Entry(v=stored.v, at=stored.at, peer=stored.peer, event=event)


class _StoredEntry(msgspec.Struct):
    v: int
    at: float
    peer: PeerId
    event: dict[str, Any]


def _nan_for_null(tree: dict[str, Any], kind: type[Event]) -> dict[str, Any]:
    """Undo what JSON does to a loss that is not finite, in fields that are always a number."""
    numbers = _numbers(kind)
    return {name: math.nan if value is None and name in numbers else value for name, value in tree.items()}


@cache
def _numbers(kind: type[Event]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.type is float)


class JsonlSink:
    """Appends one JSON line per event; at `max_nbytes` the file is renamed to `.1` and begun anew.

    Each line is written at once, so what was said before a crash can be read after it. A last line that a crash
    cut short is removed when the file is opened again, and one that a full disk cut short at once. A number that is not
    finite is written as null.
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
        if self._file.closed:  # it could not be begun anew before
            self._file = self._path.open("ab", buffering=0)
        if self._file.seek(0, os.SEEK_END) + len(line) > self._max_nbytes:
            self._rotate()
        before = self._file.seek(0, os.SEEK_END)
        if self._file.write(line) != len(line):
            self._file.truncate(before)
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
