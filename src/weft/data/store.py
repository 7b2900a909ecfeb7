"""A folder of read-only shards, each named by the digest of its bytes, and the index that lists them.

A shard is a run of token ids as little-endian uint16 or uint32, nothing else. The maker of a run packs its
corpus into shards (`weft.data.packing`); their digests, in a `DataIndex`, are part of the run's genesis, so every
peer trains on the same tokens whatever its own files say. A peer that lacks shards fetches them by digest and
hands them to `add`. A store whose index nobody else is told (`data = "private"`) is one that is never served.

Writing is atomic: a file is complete and synced before it has its name. Reading trusts nothing: a shard is
checked against its digest, its length and the vocabulary before its first use, then mapped into memory.
"""

import errno
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal
from weakref import WeakValueDictionary

import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from weft import wire
from weft.data.corpus import Date, Split, TooLong
from weft.errors import DataError, DiskFull, PayloadError
from weft.ids import Digest, short

Dtype = Literal["uint16", "uint32"]
Tokens = NDArray[np.uint16] | NDArray[np.uint32]

# Small enough to spread over donors and to check in a millisecond, large enough that their names weigh nothing.
SHARD_NBYTES = 4 << 20
MAX_SHARD_NBYTES = 64 << 20  # what a fetching peer holds in memory at once
MAX_SHARDS = 1 << 15  # of one split; their infos take about 3 MiB of the 4 MiB a record may have

# Of a word in a row of whole texts (`weft.data.rows`): below the sign of four bytes, in which stages pass words on.
BEGINS, TRAINED = 1 << 29, 1 << 30
MAX_VOCAB = BEGINS

_HEX = r"\A[0-9a-f]{64}\Z"
_ITEM_NBYTES: dict[Dtype, int] = {"uint16": 2, "uint32": 4}
REPLACEABLE = 0o644
PRIVATE = 0o600  # for the eyes of its owner only
# Where permissions are not POSIX's, a read-only file can be neither replaced nor removed.
READ_ONLY = 0o444 if os.name == "posix" else REPLACEABLE
_WHAT = {  # in a home's folders of files that are named by their digests
    "shards": "the text as tokens",
    "private": "your own text as tokens",
    "blobs": "what the run is made of",
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: a limit on the size of files


class ShardInfo(wire.Record, frozen=True, kw_only=True):
    """A shard's name and size."""

    digest: Annotated[Digest, Meta(pattern=_HEX)]
    num_tokens: Annotated[int, Meta(ge=1)]
    nbytes: Annotated[int, Meta(ge=1, le=MAX_SHARD_NBYTES)]


NOTHING_HELD_OUT = (
    "no token of the held-out conversations is trained on, so there is no loss of them. Whoever made the run packed "
    "them wrongly; tell them."
)


class Rows(wire.Record, frozen=True, kw_only=True):
    """Of shards that hold rows of whole texts (`weft.data.rows`), of which not every token is trained on."""

    length: Annotated[int, Meta(ge=2, le=MAX_SHARD_NBYTES // 4)]
    train_trained: Annotated[int, Meta(ge=0)]  # tokens; of tasks, how many there are
    heldout_trained: Annotated[int, Meta(ge=0)]
    too_long: TooLong  # how they were packed: so every peer of a private run packs its own
    date: Date
    is_paired: Literal[True] | UnsetType = UNSET  # texts are pairs of answers, the chosen one before the rejected one
    are_tasks: Literal[True] | UnsetType = UNSET  # a row is a task and how an answer to it is checked

    @property
    def what(self) -> str:
        """Return what they hold, in words."""
        if self.are_tasks is True:
            return "tasks"
        return "pairs of answers" if self.is_paired is True else "conversations"


class DataIndex(wire.Record, frozen=True, kw_only=True):
    """What a run trains on: shards in order, of running text whatever the sequence length. Holds no path."""

    dtype: Dtype
    train: Annotated[tuple[ShardInfo, ...], Meta(max_length=MAX_SHARDS)]
    heldout: Annotated[tuple[ShardInfo, ...], Meta(max_length=MAX_SHARDS)]
    train_text_nbytes: Annotated[int, Meta(ge=0)]  # of UTF-8 text, to turn nats per token into nats per byte
    heldout_text_nbytes: Annotated[int, Meta(ge=0)]  # of rows: of what is trained on in them
    tokenizer: Annotated[Digest, Meta(pattern=_HEX)]
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 32)]
    rows: Rows | UnsetType = UNSET  # unset: running text, all of which is trained on

    def __post_init__(self) -> None:
        """Refuse an index that contradicts itself, whoever sent it."""
        if self.rows is not UNSET and (self.dtype != "uint32" or self.vocab_size > MAX_VOCAB):
            raise ValueError(f"rows of whole texts are of uint32, of at most {MAX_VOCAB} ids")
        if self.dtype == "uint16" and self.vocab_size > 1 << 16:
            raise ValueError(f"{self.vocab_size} ids do not fit into uint16")
        for info in (*self.train, *self.heldout):
            if info.nbytes != info.num_tokens * _ITEM_NBYTES[self.dtype]:
                raise ValueError(f"shard {short(info.digest)}: {info.num_tokens} tokens are not {info.nbytes} bytes")

    def shards(self, split: Split) -> tuple[ShardInfo, ...]:
        return self.train if split == "train" else self.heldout

    def num_tokens(self, split: Split) -> int:
        return sum(info.num_tokens for info in self.shards(split))

    @property
    def has_rows(self) -> bool:
        """Return whether it holds rows of whole texts, and no running text."""
        return self.rows is not UNSET

    @property
    def is_paired(self) -> bool:
        """Return whether its texts are pairs of answers."""
        return self.rows is not UNSET and self.rows.is_paired is True

    @property
    def has_tasks(self) -> bool:
        """Return whether its rows are tasks, of which answers are drawn."""
        return self.rows is not UNSET and self.rows.are_tasks is True

    def num_predicted(self, split: Split) -> int:
        """Return how many tokens are predicted."""
        if self.rows is UNSET:
            return self.num_tokens(split)
        return self.rows.train_trained if split == "train" else self.rows.heldout_trained

    def nats_per_byte(self, nats_per_token: float) -> float:
        """Return the held-out loss per byte of UTF-8 text: comparable between tokenizers. NaN where there is none."""
        nbytes = 0 if self.is_paired or self.has_tasks else self.heldout_text_nbytes
        return nats_per_token * self.num_predicted("heldout") / nbytes if nbytes else float("nan")


def dtype_for(vocab_size: int) -> Dtype:
    """Return the narrowest width that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardStore:
    """Shards in `folder`. Several stores, in one process or many, may share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[Digest, Tokens] = {}
        self._served: WeakValueDictionary[Digest, np.ndarray] = WeakValueDictionary()  # as long as somebody reads them
        self._checked: set[Digest] = set()

    def missing(self, index: DataIndex) -> tuple[ShardInfo, ...]:
        """Return the shards of `index` that are not here, each once, training shards first."""
        wanted = {info.digest: info for info in (*index.train, *index.heldout)}
        return tuple(info for info in wanted.values() if not self._path(info.digest).exists())

    def put(self, data: wire.Buffer) -> Digest:
        """Keep `data` under its digest.

        Raises:
            DiskFull: no room; nothing is left behind.
            DataError: the folder cannot be written.
        """
        name = wire.digest(data)
        path = self._path(name)
        if not _holds(path, name):
            write_atomically(path, [data], mode=READ_ONLY)
        return name

    def add(self, index: DataIndex, digest: Digest, data: wire.Buffer) -> None:
        """Keep a shard of `index` that another peer sent.

        Raises:
            PayloadError: not in the index, or the bytes are not those of `digest`: the sender's fault.
            DataError: the bytes are right but hold ids beyond the vocabulary: the run's own data is broken.
            DiskFull: no room; nothing is left behind.
        """
        info = next((info for info in (*index.train, *index.heldout) if info.digest == digest), None)
        if info is None:
            raise PayloadError(f"shard {short(digest)} is not one of this run's; dropped")
        if len(data) != info.nbytes or wire.digest(data) != digest:
            raise PayloadError(
                f"{len(data)} bytes received as shard {short(digest)} of {info.nbytes} are not its bytes"
            )
        _check_ids(np.frombuffer(data, dtype=np.dtype(index.dtype).newbyteorder("<")), index, f"shard {short(digest)}")
        self.put(data)

    def read(self, digest: Digest) -> memoryview | None:
        """Return a shard's bytes to serve them, or None when it is not here.

        They are mapped, once for all who fetch them, and checked the first time in this process: to ask for a shard
        again and again costs neither memory nor time.

        Raises:
            DataError: the file is corrupt, and is removed so that it can be fetched again.
        """
        raw = self._served.get(digest)
        if raw is None:
            try:
                raw = self._map(digest)
            except FileNotFoundError:
                self._checked.discard(digest)
                return None
            if digest not in self._checked and wire.digest(raw.data) != digest:
                raise self._corrupt(self._path(digest))
            self._checked.add(digest)
            self._served[digest] = raw
        return raw.data

    def open(self, index: DataIndex, info: ShardInfo) -> Tokens:
        """Return the ids of a shard, mapped read-only; the first time in this process they are checked.

        Raises:
            DataError: missing, corrupt (removed, so that it can be fetched again), or beyond the vocabulary.
        """
        if info.digest not in self._mapped:
            path = self._path(info.digest)
            try:
                raw = self._map(info.digest)
            except FileNotFoundError:
                raise DataError(f"shard {path} is missing. A member of the run has it: fetch it again.") from None
            if wire.digest(raw.data) != info.digest:
                raise self._corrupt(path)
            if raw.nbytes != info.nbytes:
                raise DataError(f"shard {path} has {raw.nbytes} bytes, but the run's index says {info.nbytes}.")
            tokens = raw.view(np.dtype(index.dtype).newbyteorder("<"))
            _check_ids(tokens, index, str(path))
            self._mapped[info.digest] = tokens
        return self._mapped[info.digest]

    def close(self) -> None:
        """Let go of all mapped files."""
        self._mapped.clear()

    def _map(self, digest: Digest) -> np.ndarray:
        """Return a shard's bytes, mapped.

        Raises:
            FileNotFoundError: it is not here.
            DataError: it cannot be read, or is empty, as no shard is.
        """
        path = self._path(digest)
        try:
            return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        except FileNotFoundError:
            raise
        except ValueError:  # numpy maps no empty file
            raise self._corrupt(path) from None
        except OSError as error:
            raise DataError(f"cannot read shard {path}: {error.strerror or error}.") from error

    def _path(self, digest: Digest) -> Path:
        if not re.search(_HEX, digest):
            raise DataError(f"{digest[:80]!r} is no digest")  # it could be a path
        return self.folder / digest

    def _corrupt(self, path: Path) -> DataError:
        with suppress(OSError):
            path.unlink()
        return DataError(
            f"shard {path} does not hold the bytes that its name says: the disk or somebody changed it. weft has "
            "removed it; start again, and weft fetches it from members (or the run's maker packs it again)."
        )


def write_atomically(
    path: Path, chunks: Iterable[wire.Buffer], *, mode: int = REPLACEABLE, is_synced: bool = True
) -> None:
    """Write a file that appears under its name complete and synced, in the place of any before it, or not at all.

    Args:
        mode: its permissions, which it has before its name; `READ_ONLY` for bytes that their name fixes for
            ever, `PRIVATE` for secrets.
        is_synced: False: who can do without it after a loss of power need not wait for the disk.

    Raises:
        DiskFull: no room; nothing is left behind.
        DataError: the folder cannot be written.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        with suppress(OSError):  # a disk that knows no modes, as of a USB stick; it is its owner's alone until here
            os.chmod(temporary, mode)
        os.replace(temporary, path)
        if is_synced:
            _sync_folder(path.parent)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(
                f"no room on the disk of {path.parent} for {_WHAT.get(path.parent.name, path.name)}. Free some, then "
                "start again."
            ) from error
        raise DataError(
            f"cannot write {path}: {error.strerror or error}. Choose another place; if it is in weft's home, another "
            "home: --home FOLDER."
        ) from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # gone where it was renamed
                os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _holds(path: Path, name: Digest) -> bool:
    try:
        return wire.digest(path.read_bytes()) == name
    except OSError:
        return False


def _check_ids(tokens: Tokens, index: DataIndex, where: str) -> None:
    largest = int((tokens if index.rows is UNSET else tokens & (BEGINS - 1)).max())
    if largest >= index.vocab_size:
        raise DataError(
            f"{where} holds token id {largest}, but the run's vocabulary has {index.vocab_size}: the run's maker "
            "packed it with another tokenizer. The run cannot be trained; tell its maker."
        )
