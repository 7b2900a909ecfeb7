"""What a member has promised and accepted in rounds, on disk before anything that depends on it is sent.

    durable.bin    | slot 0 | slot 1 |      slot: serial, length, BLAKE3 of what follows, the canonical record, zeros

A record goes into the slot that holds the older one, so a write cut short by a crash leaves the newer one readable. The
file keeps its size: one flush of data and none of the folder, a third of the time that a new file takes. A round waits
for two of these writes.

A record holds what binds this peer in its present round, and how far it has voted on the branches that it has left. A
peer that comes back from an older checkpoint finds rounds before it that it has voted in and no longer knows how: it
must not vote in them again, or they could be decided twice.
"""

import errno
import os
from pathlib import Path
from struct import Struct

from weft.data.store import PRIVATE, write_atomically
from weft.errors import CheckpointError, DataError, DiskFull, WireError
from weft.ids import BranchId, Round
from weft.sync.records.messages import Base
from weft.sync.round.rules import Durable
from weft.wire import MAX_RECORD_NBYTES, Record, decode, digest, encode

_HEAD = Struct("<QQ64s")  # serial, length, hex digest of serial, length and record
SLOT_NBYTES = 16 << 10  # at first; doubled until a record fits
MAX_LEFT = 64  # branches left that are remembered: who returns to one before those has left it long ago
_flush = getattr(os, "fdatasync", os.fsync)  # absent on macOS and Windows


class LeftBranch(Record, frozen=True, kw_only=True):
    branch: BranchId
    round: Round  # the last that this peer voted in, or said goodbye in


class Promised(Record, frozen=True, kw_only=True):
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
                "this peer once the run has made another outer step without it."
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
        record = encode(
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
    return digest(_HEAD.pack(serial, len(record), b"") + record).encode()


def _open_slot(slot: bytes) -> tuple[int, Promised] | None:
    if len(slot) < _HEAD.size:
        return None
    serial, length, checksum = _HEAD.unpack_from(slot)
    record = slot[_HEAD.size : _HEAD.size + length]
    if len(record) != length or checksum != _checksum(serial, record):
        return None
    try:
        promised: Promised = decode(record, Promised, max_nbytes=MAX_RECORD_NBYTES)
    except WireError:
        return None
    return serial, promised
