r"""What came of each point of a bench, one line of CSV each: written once, as a whole, and never changed.

A process that is killed leaves whole lines: the next one drops what a crash of the machine may have cut, and goes on.
A point that neither completed nor diverged is played again, and has another line then: the later one counts. A line
after one that is final is refused, for nobody can tell which of them is true.

Lines end with "\n" and hold no other. Whoever writes holds a lock file beside them, so that of two benches none loses
what the other wrote.
"""

import csv
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from weft.errors import ConfigError, DiskFull
from weft.wire import printable

COMPLETE, DIVERGED = "complete", "diverged"  # any other outcome is a reason, in words
MAX_OUTCOME = 300  # characters: the reason may quote an error of any length


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

    @property
    def is_final(self) -> bool:
        """Whether the same point would come to the same; else a machine or weft was at fault, or the plan's limits."""
        return self.outcome in (COMPLETE, DIVERGED)


COLUMNS = BenchLine.__struct_fields__


class BenchLog:
    """The lines of one file that count, by digest; the file is made with the first line.

    Raises:
        ConfigError: its lines are not such, or two of them are of one point.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: dict[str, BenchLine] = {}
        numbers: dict[str, int] = {}
        for number, line in _read(path):
            before = self.lines.get(line.digest)
            if before is not None and before.is_final:
                raise ConfigError(
                    f"{path}: lines {numbers[line.digest]} and {number} are both of point {line.digest} of row "
                    f"{line.row}, which is played once. Delete one of them."
                )
            self.lines[line.digest], numbers[line.digest] = line, number

    def append(self, line: BenchLine) -> None:
        """Write a line, so that it is on the disk. Its outcome is cut, and loses what would end or steer a line.

        The file's lock must be held (`held`).

        Raises:
            DiskFull: no room for it; the file is as it was, but for a line that is not whole.
        """
        line = msgspec.structs.replace(line, outcome=printable(" ".join(line.outcome.split()))[:MAX_OUTCOME])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            file.truncate(self._path.read_bytes().rfind(b"\n") + 1)  # to the last line that is whole
            cells = ["" if value is None else value for value in msgspec.structs.astuple(line)]
            data = _encoded(cells) if file.seek(0, os.SEEK_END) else _encoded(COLUMNS) + _encoded(cells)
            if file.write(data) != len(data):
                raise DiskFull(f"no room for another line in {self._path}. Free some, and start the bench again.")
            os.fsync(file.fileno())
        self.lines[line.digest] = line


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep others from writing lines to `path`.

    Raises:
        ConfigError: another process writes there, or the lock file cannot be used.
    """
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"{path}: another bench plays and writes there. Wait until it has ended, or choose another --out."
        ) from None
    except OSError as error:
        raise ConfigError(f"{lock.lock_file}: cannot be locked: {error}. Choose another --out.") from error
    try:
        yield
    finally:
        lock.release()


def _encoded(cells: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)  # type: ignore[arg-type]
    return text.getvalue().encode()


def _read(path: Path) -> Iterator[tuple[int, BenchLine]]:
    """Yield the lines after the head, with their numbers in the file."""
    if not path.exists():
        return
    head, *lines = path.read_bytes().decode(errors="replace").split("\n")[:-1] or [",".join(COLUMNS)]
    if _cells(head) != list(COLUMNS):
        raise ConfigError(f"{path}: its columns are not those of this version of weft. Choose another --out.")
    for number, text in enumerate(lines, 2):
        try:
            named = {name: cell or None for name, cell in zip(COLUMNS, _cells(text), strict=True)}
            yield number, msgspec.convert(named, BenchLine, strict=False)
        except (ValueError, csv.Error, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error}. Delete the line, and its point is played again."
            ) from None


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])
