"""The folders of one machine: identities, shards, blobs, and one folder for each run and peer.

    root/ keys/           identities (weft.keys)
          shards/         shards of all runs, named by digest
          blobs/          RunConfigs, tokenizers and initial vectors of all runs, named by digest
          private/        shards of this machine's own files in private runs: no peer can request them
          code/           texts of extensions that the owner of this home has given, named by digest
          runs/<run id>/<peer id>/
              checkpoint/       the state, as last saved
              journal/          what was merged and decided since
              log.jsonl         the events
              durable.bin       what was promised and accepted in rounds
              measured.json     how long rounds took
              awaiting.bin      acts, ballots and verdicts that no manifest holds yet
              lies.bin          what proves that members lie, until they are struck out
              lock              held by the process in which the peer takes part
              secret, ticket    what the run's tickets hold, and a fresh one; for their owner's eyes only
              addresses         where other peers were last reached
              name              what --name called this peer last
              run.toml          the run file, as its maker wrote it
              own_data.bin      of a private run: which shards in private/ hold this peer's own files
              anchored/         what an anchor keeps in the place of a checkpoint
              archive/          and of an audited run, where it keeps all
              moved             bytes moved today, where that is capped
              wish, answer      what a person on this machine asks a running peer, and what it says
              arriving/         what has come of a state that is being fetched
              stage-2/          the same again of that stage, where the model is cut into stages
              rounds.db         all rounds, where the run records them
              forks/            of branches: parameters where they began, and what one that was given up had counted

Shards and blobs may be shared by many peers and runs: a name is the digest of what it names, and a file appears
whole or not at all. What is read is checked first.

One small record in a file that is replaced whole is a `RecordFile`:

    file = RecordFile(path, Kind, max_nbytes, empty)
    file.read()      what it holds; `empty` where that cannot be read
    file.keep(each)  in place of the one before

A `Record` lies there as its canonical bytes, any other type as JSON. Nothing that is read is believed: a file that is
absent, damaged or too large holds nothing.
"""

import re
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from weft import wire
from weft.data.store import READ_ONLY, ShardStore, write_atomically
from weft.errors import ConfigError, DataError, WireError
from weft.ids import Digest, PeerId, RunId
from weft.wire import Record, decode, encode

CHECKPOINT_FILE = "checkpoint.json"  # in a checkpoint's folder, once it is whole

ROUNDS = "rounds.db"  # in a peer's folder, and in those of its stages

_STAGE = "stage-"
_HEX = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """Blobs of any size in `folder`, each a read-only file named by the digest of its bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[Digest, memoryview] = {}

    def put(self, data: wire.Buffer) -> Digest:
        """Keep `data` under its digest.

        Raises:
            DiskFull: no room; nothing is left behind.
            DataError: the folder cannot be written.
        """
        digest = wire.digest(data)
        with suppress(DataError):  # a corrupt blob is removed, and written again
            if self.open(digest) is not None:
                return digest
        write_atomically(self._path(digest), [data], mode=READ_ONLY)
        self._mapped[digest] = _map(self._path(digest))  # what was written need not be hashed again
        return digest

    def read(self, digest: Digest, max_nbytes: int) -> bytes | None:
        """Return a small blob, or None when it is not here.

        Raises:
            DataError: larger than `max_nbytes`, unreadable, or corrupt (removed, so that it can be fetched again).
        """
        path = self._path(digest)
        with suppress(OSError):  # `open` says what is wrong
            if (found := path.stat().st_size) > max_nbytes:
                raise DataError(f"blob {path} has {found} bytes; at most {max_nbytes} are read as what it should be.")
        mapped = self.open(digest)
        return None if mapped is None else bytes(mapped)

    def open(self, digest: Digest) -> memoryview | None:
        """Return a blob mapped into memory, read-only, or None when it is not here; checked once in this process.

        Raises:
            DataError: unreadable, or corrupt (removed, so that it can be fetched again).
        """
        if digest not in self._mapped:
            path = self._path(digest)
            try:
                view = _map(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise DataError(f"cannot read blob {path}: {error.strerror or error}.") from error
            if wire.digest(view) != digest:
                with suppress(OSError):
                    path.unlink()
                raise DataError(
                    f"blob {path} does not hold the bytes that its name says: the disk or somebody changed it. weft "
                    "has removed it; start again, and weft fetches it from members (or the run's maker makes it "
                    "again)."
                )
            self._mapped[digest] = view
        return self._mapped[digest]

    def keep_only(self, named: Container[Digest]) -> None:
        """Remove every blob that is not `named`; what cannot be removed stays."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if Digest(path.name) not in named:
                self._mapped.pop(Digest(path.name), None)
                with suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Let go of all mapped files."""
        self._mapped.clear()

    def _path(self, digest: Digest) -> Path:
        if not _HEX.fullmatch(digest):
            raise DataError(f"{digest[:80]!r} is no digest")  # it could be a path
        return self.folder / digest


def _map(path: Path) -> memoryview:
    if path.stat().st_size == 0:  # numpy maps no empty file
        return memoryview(b"")
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray).data


class _Inside:
    """What lies in a peer's folder under this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "PeerFolder", _kind: object = None) -> Path:
        return folder.root / self._name


@dataclass(frozen=True)
class PeerFolder:
    """What one peer keeps of one run. Whoever writes a file makes the folders above it."""

    root: Path

    checkpoint = _Inside("checkpoint")
    journal = _Inside("journal")
    log = _Inside("log.jsonl")
    durable = _Inside("durable.bin")
    measured = _Inside("measured.json")
    awaiting = _Inside("awaiting.bin")
    lies = _Inside("lies.bin")
    lock = _Inside("lock")
    secret = _Inside("secret")
    ticket = _Inside("ticket")
    addresses = _Inside("addresses")
    ports = _Inside("ports")
    name = _Inside("name")
    run_file = _Inside("run.toml")
    own_data = _Inside("own_data.bin")
    said = _Inside("said.json")
    anchored = _Inside("anchored")
    archive = _Inside("archive")
    moved = _Inside("moved")
    wish = _Inside("wish")
    answer = _Inside("answer")
    arriving = _Inside("arriving")
    forks = _Inside("forks")
    rounds = _Inside(ROUNDS)
    traces = _Inside("traces")
    scratch = _Inside("scratch")  # files that have no name, and end with the process

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state of the run, or of one of its stages."""
        return (self.checkpoint / CHECKPOINT_FILE).exists() or bool(self.stages)

    def stage(self, number: int) -> "PeerFolder":
        """Return where it keeps what it knows of one stage."""
        return PeerFolder(self.root / f"{_STAGE}{number}")

    @property
    def stages(self) -> list[int]:
        """Return the stages of which there is a state."""
        found = self.root.glob(f"{_STAGE}*/{self.checkpoint.name}/{CHECKPOINT_FILE}")
        return sorted(int(path.parts[-3].removeprefix(_STAGE)) for path in found)

    @property
    def voted_stages(self) -> list[int]:
        """Return the stages in whose rounds this peer has voted."""
        found = self.root.glob(f"{_STAGE}*/{self.durable.name}")
        return sorted(int(path.parts[-2].removeprefix(_STAGE)) for path in found)


class Home:
    """One machine's folders below `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keys = root / "keys"
        self.shards = ShardStore(root / "shards")
        self.blobs = BlobStore(root / "blobs")
        self.private = ShardStore(root / "private")
        self.code = root / "code"

    def folder(self, run: RunId, peer: PeerId) -> PeerFolder:
        """Return where `peer` keeps what it knows of `run`.

        Raises:
            ConfigError: a name that is no digest or key, which could lead elsewhere.
        """
        for name in (run, peer):
            if not _HEX.fullmatch(name):
                raise ConfigError(f"{name[:80]!r} names no run or peer: a name is 64 hexadecimal digits.")
        return PeerFolder(self.root / "runs" / run / peer)

    def moved_asking(self, run: RunId) -> Path:
        """Return where it is counted what moved today for questions to the members of `run`, by whatever key."""
        return self.root / "asked" / run

    def close(self) -> None:
        """Let go of all mapped files."""
        self.shards.close()
        self.blobs.close()
        self.private.close()


# --- one small record in a file that is replaced whole ---


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
