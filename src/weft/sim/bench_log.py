"""What came of each point of a bench, one line of CSV each: written once, as a whole, and never changed.

A process that is killed leaves whole lines: the next one drops what a crash of the machine may have cut, and goes on.

It does not know plans.
"""

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from weft.errors import ConfigError, DiskFull

COMPLETE, DIVERGED = "complete", "diverged"  # any other outcome is a reason, in words


class BenchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One point. What it would have become, had it not diverged, is None."""

    digest: str  # of all that it follows from
    row: str
    grid: str  # what the grid has chosen, as JSON
    seed: int
    peers: int
    outcome: str
    rounds: int
    steps: float  # inner steps of each peer that rounds have counted
    committed_tokens: int
    trained_tokens: int  # of all peers, whether counted or not
    parameters: int
    train_loss: float | None  # nats per token, mean over the last tenth of the inner steps
    heldout_loss: float | None  # nats per token, of the outer parameters at the end
    nats_per_byte: float | None  # the same
    sent_mean: float  # bytes of a peer, until the last commit: payloads, results, letters, heartbeats
    sent_max: int
    received_mean: float
    received_max: int
    bits: float | None  # sent for each parameter and inner step, by the mean peer
    payload_bits: float | None  # of these, payloads and results alone, as reckoned
    ratio_bf16: float | None  # sent, as a share of what ring data-parallel training in bf16 would
    ratio_fp32: float | None
    virtual_s: float  # until the last commit
    cpu_s: float  # of this machine, for all peers
    software: str


COLUMNS = BenchLine.__struct_fields__


class BenchLog:
    """The lines of one file, by digest; the file is made with the first line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = {line.digest: line for line in _read(path)}

    def append(self, line: BenchLine) -> None:
        """Write a line, so that it is on the disk.

        Raises:
            DiskFull: no room for it; the file is as it was, but for a line that is not whole.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            file.truncate(_whole_nbytes(self._path))
            cells = ["" if value is None else value for value in msgspec.structs.astuple(line)]
            data = _encoded(cells) if file.seek(0, os.SEEK_END) else _encoded(COLUMNS) + _encoded(cells)
            if file.write(data) != len(data):
                raise DiskFull(f"no room for another line in {self._path}. Free some, and start the bench again.")
            os.fsync(file.fileno())
        self.lines[line.digest] = line


def _encoded(cells: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)  # type: ignore[arg-type]
    return text.getvalue().encode()


def _whole_nbytes(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def _read(path: Path) -> Iterator[BenchLine]:
    if not path.exists():
        return
    rows = csv.reader(path.read_bytes()[: _whole_nbytes(path)].decode(errors="replace").splitlines())
    if next(rows, list(COLUMNS)) != list(COLUMNS):
        raise ConfigError(f"{path}: its columns are not those of this version of weft. Choose another --out.")
    for number, cells in enumerate(rows, 2):
        try:
            named = {name: cell or None for name, cell in zip(COLUMNS, cells, strict=True)}
            yield msgspec.convert(named, BenchLine, strict=False)
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}. Delete the line, and its point is played again."
            ) from None
