"""What a member writes down of its rounds: what it has promised, and what was merged and decided since a checkpoint.

    durable.bin    | slot 0 | slot 1 |      slot: serial, length, BLAKE3 of what follows, the canonical record, zeros

What was promised and accepted is on disk before anything that depends on it is sent (`Votes`). A record goes into the
slot that holds the older one, so a write cut short by a crash leaves the newer one readable. The file keeps its size:
one flush of data and none of the folder, a third of the time that a new file takes. A round waits for two of these
writes.

A record holds what binds this peer in its present round, and how far it has voted on the branches that it has left. A
peer that comes back from an older checkpoint finds rounds before it that it has voted in and no longer knows how: it
must not vote in them again, or they could be decided twice.

    journal/ 12-RESULT'S DIGEST    the bytes of a result of round 12, before this peer tells that it holds them
             12.bin                the certificate of round 12, as soon as it is decided

So not even all who die at once lose a commit: who was killed makes these outer steps again after its checkpoint
(`Journal`). What was accepted and not decided it serves, so that whoever leads next can have it decided. A checkpoint
makes what is before it superfluous. Nothing of it is flushed, for a round would wait for it: what is written outlives
the process, and not the power of a machine that fails together with all others.

Failure:
- there is no room for a promise: `DiskFull`, and nothing was promised.
- there is none for the journal, or its folder cannot be written: nothing is kept until the next checkpoint, and it can
  be asked why.
- what is read of it is not what its name says: it is ignored, with all rounds after it.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct

from weft import wire
from weft.data.store import PRIVATE, write_atomically
from weft.errors import CheckpointError, DataError, DiskFull, WireError
from weft.ids import BranchId, Digest, Round
from weft.store.pool import Pool
from weft.sync.records.messages import Base, Certificate
from weft.sync.round.rules import Durable

_HEAD = Struct("<QQ64s")  # serial, length, hex digest of serial, length and record
SLOT_NBYTES = 16 << 10  # at first; doubled until a record fits
MAX_LEFT = 64  # branches left that are remembered: who returns to one before those has left it long ago
_flush = getattr(os, "fdatasync", os.fsync)  # absent on macOS and Windows


class LeftBranch(wire.Record, frozen=True, kw_only=True):
    branch: BranchId
    round: Round  # the last that this peer voted in, or said goodbye in


class Promised(wire.Record, frozen=True, kw_only=True):
    """What is on the disk."""

    present: Durable
    left: tuple[LeftBranch, ...] = ()  # oldest first


class Votes:
    """The file at `path`, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.last: Durable | None = None  # what was promised last, also by a process before this one
        self._left: dict[BranchId, Round] = {}  # oldest first
        self._path = path
        self._handle: int | None = None
        self._slot_nbytes = SLOT_NBYTES
        self._serial = 0

    def read(self) -> Durable | None:
        """Return what was written last, or None where nothing was.

        Raises:
            CheckpointError: the file is damaged, so what this peer has promised is not known.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error.strerror or error}.") from error
        half = len(data) // 2
        found = [slot for slot in (_open_slot(data[:half]), _open_slot(data[half:])) if slot is not None]
        if not found:
            raise CheckpointError(
                f"{self._path} is damaged: what this peer has promised to its run is lost. Remove the file, and start "
                "this peer once the run has finished another round without it."
            )
        self._serial, promised = max(found, key=lambda slot: slot[0])
        self._slot_nbytes = half
        self.last = promised.present
        self._left = {each.branch: each.round for each in promised.left}
        return self.last

    def may_begin(self, base: Base) -> bool:
        """Return whether this peer has not voted in the round of `base` yet, nor in a later one of its branch."""
        if self.last is not None and self.last.base.branch == base.branch:
            return base.round > self.last.base.round
        return base.round > self._left.get(base.branch, -1)

    def write(self, durable: Durable) -> None:
        """Return once `durable` is on the disk.

        Raises:
            DiskFull: no room.
            DataError: the folder cannot be written.
        """
        left = self._left_for(durable.base)
        record = wire.encode(
            Promised(present=durable, left=tuple(LeftBranch(branch=name, round=left[name]) for name in left))
        )
        serial = self._serial + 1
        slot = _HEAD.pack(serial, len(record), _checksum(serial, record)) + record
        try:
            if self._handle is None or len(slot) > self._slot_nbytes:
                self._make(slot)
            else:
                os.lseek(self._handle, serial % 2 * self._slot_nbytes, os.SEEK_SET)
                if os.write(self._handle, slot) != len(slot):
                    raise OSError(errno.ENOSPC, "a short write")
                _flush(self._handle)
        except OSError as error:
            if isinstance(error, DiskFull) or error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(
                    f"cannot write {self._path}: no room on its disk. Nothing was promised. Free some and start again."
                ) from error
            raise DataError(f"cannot write {self._path}: {error.strerror or error}. Nothing was promised.") from error
        self._serial, self.last, self._left = serial, durable, left

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _left_for(self, base: Base) -> dict[BranchId, Round]:
        """Return the branches left once `base` is the present one: the last before it is the newest."""
        left = dict(self._left)
        if self.last is not None and self.last.base.branch != base.branch:
            left.pop(base.branch, None)
            left[self.last.base.branch] = self.last.base.round
        return dict(list(left.items())[-MAX_LEFT:])

    def _make(self, slot: bytes) -> None:
        """Begin the file anew with `slot` in the place of its serial, which outdates all before."""
        while self._slot_nbytes < len(slot):
            self._slot_nbytes *= 2
        self.close()
        padded = slot.ljust(self._slot_nbytes, b"\0")
        empty = bytes(self._slot_nbytes)
        slots = [empty, padded] if (self._serial + 1) % 2 else [padded, empty]
        write_atomically(self._path, slots, mode=PRIVATE)
        self._handle = os.open(self._path, os.O_RDWR | getattr(os, "O_BINARY", 0))


def _checksum(serial: int, record: bytes) -> bytes:
    return wire.digest(_HEAD.pack(serial, len(record), b"") + record).encode()


def _open_slot(slot: bytes) -> tuple[int, Promised] | None:
    if len(slot) < _HEAD.size:
        return None
    serial, length, checksum = _HEAD.unpack_from(slot)
    record = slot[_HEAD.size : _HEAD.size + length]
    if len(record) != length or checksum != _checksum(serial, record):
        return None
    try:
        promised: Promised = wire.decode(record, Promised, max_nbytes=wire.MAX_RECORD_NBYTES)
    except WireError:
        return None
    return serial, promised


FULL_NBYTES = 512 << 20  # then a checkpoint is due, and where a state is larger, at twice that
_RESULT = re.compile(r"([0-9]{1,18})-([0-9a-f]{64})")
_ROUND = re.compile(r"([0-9]{1,18})\.bin")


class Journal:
    """
    Args:
        is_on: False: nothing is written, for its owner wants no checkpoint but at the end.
        memory: for what is read.
    """

    def __init__(self, folder: Path, *, is_on: bool = True, memory: Pool | None = None) -> None:
        self._folder = folder
        self._memory = memory or Pool(0)
        self._is_wanted = self._is_on = is_on
        self._failure: str | None = None
        self._nbytes: int | None = None  # None: nobody has looked since files were removed

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""
        return self._is_on

    def take_failure(self) -> str | None:
        """Return, once, why nothing is kept. What is written is written by any thread; events are not."""
        failure, self._failure = self._failure, None
        return failure

    def keep(self, round: Round, result: Digest, data: wire.Buffer) -> None:
        self._write(f"{round}-{result}", data)

    def decide(self, certificate: Certificate) -> None:
        self._write(f"{certificate.manifest.round}.bin", wire.encode(certificate))

    def rounds(self) -> Iterator[Certificate]:
        """Yield what was decided, in order, as far as it can be read."""
        for number, path in sorted(self._found(_ROUND)):
            try:
                certificate: Certificate = wire.decode(path.read_bytes(), Certificate)
            except (OSError, WireError):
                return
            if certificate.manifest.round == number:
                yield certificate

    def result(self, round: Round, result: Digest) -> memoryview | None:
        """Return a result, if it is here and whole."""
        path, filled = self._folder / f"{round}-{result}", 0
        with suppress(OSError), path.open("rb", buffering=0) as file:
            data = self._room(path.stat().st_size)
            while filled < len(data) and (count := file.readinto(data[filled:])):
                filled += count
            return data if filled == len(data) and wire.digest(data) == result else None
        return None

    def _room(self, nbytes: int) -> memoryview:
        try:
            return self._memory.block(nbytes)
        except DiskFull:  # where memory lies in files: what was decided matters more
            return Pool(0).block(nbytes)

    @property
    def nbytes(self) -> int:
        """How large it is."""
        if self._nbytes is None:
            self._nbytes = 0
            for _, path in (*self._found(_ROUND), *self._found(_RESULT)):
                with suppress(OSError):
                    self._nbytes += path.stat().st_size
        return self._nbytes

    def forget(self, until: Round) -> None:
        """Remove what a checkpoint after round `until` makes superfluous, and write again: that found room."""
        self._is_on = self._is_wanted
        for number, path in (*self._found(_ROUND), *self._found(_RESULT)):
            if number <= until:
                with suppress(OSError):
                    path.unlink()
        self._nbytes = None

    def _found(self, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        if not self._folder.is_dir():
            return []
        matched = ((pattern.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [(int(match[1]), path) for match, path in matched if match is not None]

    def _write(self, name: str, data: wire.Buffer) -> None:
        if not self._is_on:
            return
        part = self._folder / f".part-{name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            os.replace(part, self._folder / name)
            if self._nbytes is not None:
                self._nbytes += len(memoryview(data).cast("B"))
        except OSError as error:
            self._is_on = False
            with suppress(OSError):
                part.unlink(missing_ok=True)
            why = error.strerror or error
            self._failure = f"cannot write {self._folder}: rounds until the next checkpoint are not kept: {why}"
