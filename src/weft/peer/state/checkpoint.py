"""A peer's state on disk: written whole or not at all, checked chunk by chunk when it is read.

    checkpoint/ checkpoint.json              what the rest is: `Contents`, and the digest of its canonical bytes
                replicated-7.safetensors     outer parameters, outer optimizer: equal on every member
                private-7.safetensors        what only this peer has: carry, inner optimizer
                run-1f0c...bin               the RunConfig's canonical bytes
                tokenizer-93aa...bin         the tokenizer's blob, so that the folder can be used alone
                came-with-5d02...bin     chat template, licence and the like, where some came with the model

`save` writes new files beside the old ones, then replaces checkpoint.json in one step, then removes what it no longer
names. A crash at any point leaves the old checkpoint or the new one. Who reads while another process saves may find a
file gone, and starts over with the newer checkpoint. Nothing read here can run code.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from jaxtyping import Float32
from msgspec import Meta
from torch import Tensor

import weft
from weft import wire
from weft.codec import bounds
from weft.codec.bounds import Empty
from weft.data.store import READ_ONLY, write_atomically
from weft.errors import CheckpointError, DataError, DiskFull
from weft.ids import Digest, short
from weft.model.came_with import MAX_BLOB_NBYTES
from weft.net.messages import HexDigest, HexRun
from weft.run.config import Genesis, RunConfig
from weft.run.genesis import MAX_RUN_NBYTES, MAX_TOKENIZER_NBYTES, on_corpus, read_run
from weft.run.machine import PeerConfig
from weft.store.chunks import chunk_bytes, chunks, index_of
from weft.store.home import CHECKPOINT_FILE
from weft.sync.merge.method import OUTER
from weft.sync.records.charter import Charter
from weft.sync.records.index import CHUNK_NBYTES, StateIndex, VectorIndex, VectorName
from weft.sync.records.messages import Manifest

R = TypeVar("R")

FORMAT = 1  # raised when equal files would mean another state
NAME = CHECKPOINT_FILE
MAX_CONTENTS_NBYTES = 256 << 20  # digests of 3 TB of vectors
_OURS = re.compile(
    r"\.part-.*|(replicated|private)-[0-9]{1,18}\.safetensors|(run|tokenizer|came-with)-[0-9a-f]{16}\.bin"
)
_ADVICE = (
    "Use another peer's checkpoint, or remove this one and join the run again. If no other peer holds the run, `weft "
    "runs delete` removes it, and its run file begins it anew."
)
_READS = 3  # of a checkpoint that another process replaces meanwhile


class Contents(wire.Record, frozen=True, kw_only=True):
    """What a checkpoint holds. All in it but the counters and the private vectors is equal on every member."""

    format: Annotated[int, Meta(ge=1)] = FORMAT
    software: Annotated[str, Meta(max_length=64)]
    serial: Annotated[int, Meta(ge=1, lt=10**18)]  # counts saves into this folder
    run: HexRun  # also the digest of the RunConfig's bytes
    tokenizer: HexDigest
    head: Manifest | None  # the manifest that the state belongs to; None before the first
    charter: Charter | None  # what holds after it; None: what the run began with
    replicated: StateIndex
    private: StateIndex
    counters: dict[VectorName, int]
    came_with: HexDigest | msgspec.UnsetType = msgspec.UNSET  # unset: nothing came with the model


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """checkpoint.json: JSON for people; the digest is of the contents' canonical bytes."""

    contents: Contents
    digest: HexDigest


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A peer's state at one moment. Nobody may change the vectors while it is saved."""

    config: Genesis
    tokenizer: bytes  # its blob; empty where the run has none
    came_with: bytes = b""  # the blob of what came with the model; empty: nothing did
    head: Manifest | None
    charter: Charter | None = None  # None: what the run began with
    replicated: dict[str, Tensor]  # "outer" and the outer optimizer's, flat fp32, on the CPU or spread
    private: dict[str, Tensor] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)  # such as tokens that no manifest has counted

    def let_go(self) -> None:
        """Hold no vector any more: who has taken them over does, and they are large."""
        self.replicated.clear()
        self.private.clear()


def save(folder: Path, snapshot: Snapshot) -> Contents:
    """Make `snapshot` the checkpoint in `folder` and return what was written.

    Raises:
        DiskFull: no room; the previous checkpoint is intact.
        CheckpointError: the folder cannot be written; the previous checkpoint is intact.
    """
    serial = _last_serial(folder) + 1
    run, tokenizer, came_with = wire.encode(snapshot.config), snapshot.tokenizer, snapshot.came_with
    try:
        blobs = {"run": run, "tokenizer": tokenizer} | ({"came-with": came_with} if came_with else {})
        for kind, data in blobs.items():
            path = folder / _blob_name(kind, wire.digest(data))
            if not _holds(path, data):
                write_atomically(path, [data], mode=READ_ONLY)
        contents = Contents(
            software=weft.__version__,
            serial=serial,
            run=snapshot.config.run,
            tokenizer=wire.digest(tokenizer),
            head=snapshot.head,
            charter=snapshot.charter,
            replicated=write_vectors(folder / _vectors_name("replicated", serial), snapshot.replicated),
            private=write_vectors(folder / _vectors_name("private", serial), snapshot.private),
            counters=dict(snapshot.counters),
            came_with=wire.digest(came_with) if came_with else msgspec.UNSET,
        )
        text = msgspec.json.encode(_File(contents=contents, digest=wire.digest_of(contents)), order="sorted")
        write_atomically(folder / NAME, [msgspec.json.format(text, indent=1), b"\n"])
    except (DiskFull, DataError) as error:
        leaf = DiskFull if isinstance(error, DiskFull) else CheckpointError
        raise leaf(f"the checkpoint was not saved, {_what_remains(folder)}: {error}") from error
    finally:
        _clean(folder)
    return contents


def load(folder: Path, *, max_parameters: int | None = None, empty: Empty = bounds.empty) -> Snapshot:
    """Return the state in `folder`, every chunk checked.

    Args:
        max_parameters: larger models are refused before memory is allocated; None: as `PeerConfig` has it.
        empty: gives memory for so many values of a type.

    Raises:
        CheckpointError: missing, half-written, of another format, or altered: names the file, tensor and chunk.
        ConfigError, TooLarge: what is saved is a run this machine does not accept.
    """

    def read(contents: Contents) -> Snapshot:
        def vectors(kind: str, index: StateIndex) -> dict[str, Tensor]:
            return dict(read_vectors(folder / _vectors_name(kind, contents.serial), index, empty=empty))

        config, tokenizer = _read_blobs(folder, contents, max_parameters)
        return Snapshot(
            config=config,
            tokenizer=tokenizer,
            came_with=_read_came_with(folder, contents),
            head=contents.head,
            charter=contents.charter,
            replicated=vectors("replicated", contents.replicated),
            private=vectors("private", contents.private),
            counters=contents.counters,
        )

    return _again_if_replaced(folder, read)


def load_model(folder: Path, *, max_parameters: int | None = None) -> tuple[RunConfig, bytes, Float32[Tensor, " num"]]:
    """Return config, tokenizer blob and parameters: what generating and exporting need. Raises as `load`."""

    def read(contents: Contents) -> tuple[RunConfig, bytes, Tensor]:
        config, tokenizer = _read_blobs(folder, contents, max_parameters)
        path = folder / _vectors_name("replicated", contents.serial)
        return on_corpus(config), tokenizer, dict(read_vectors(path, contents.replicated, only=OUTER))[OUTER]

    return _again_if_replaced(folder, read)


def load_run(folder: Path) -> RunConfig:
    """Return the config of the run alone: its vectors are not read. Raises as `load`."""
    return _again_if_replaced(folder, lambda contents: on_corpus(_read_blobs(folder, contents, None)[0]))


def load_tokenizer(folder: Path) -> bytes:
    """Return the blob of the tokenizer alone; empty where the run has none. Raises as `load`."""
    return _again_if_replaced(folder, lambda contents: _read_blobs(folder, contents, None)[1])


def load_came_with(folder: Path) -> bytes:
    """Return the blob of what came with the model of the checkpoint; empty: nothing did. Raises as `load`."""
    return _again_if_replaced(folder, lambda contents: _read_came_with(folder, contents))


def read_contents(folder: Path) -> Contents:
    """Return what the checkpoint in `folder` says of itself; its vectors are not looked at.

    Raises:
        CheckpointError: missing, half-written, of another format, or altered.
    """
    path = folder / NAME
    try:
        if path.stat().st_size > MAX_CONTENTS_NBYTES:
            raise CheckpointError(f"{path} is larger than {MAX_CONTENTS_NBYTES} bytes: it is not a checkpoint of weft.")
        text = path.read_bytes()
    except FileNotFoundError:
        raise _missing(folder) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        tree = json.loads(text)
        found = tree["contents"]["format"]
        if found != FORMAT:
            raise CheckpointError(f"{path} has format {found!r}, this weft reads {FORMAT}. Use the weft that wrote it.")
        file = msgspec.convert(tree, _File, strict=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is cut short or altered ({error}). {_ADVICE}") from None
    if wire.digest_of(file.contents) != file.digest:
        raise CheckpointError(f"{path} is altered: its contents do not match the digest in it. {_ADVICE}")
    return file.contents


# --- writing ---


def write_vectors(path: Path, vectors: Mapping[str, Tensor], *, is_synced: bool = True) -> StateIndex:
    """Write a safetensors file and return the index of exactly what was written; `is_synced` as `write_atomically`."""
    digests: dict[str, list[Digest]] = {name: [] for name in sorted(vectors)}

    def pieces() -> Iterator[wire.Buffer]:
        yield _header([(name, vector.numel()) for name, vector in sorted(vectors.items())])
        for name, found in digests.items():
            for data in chunk_bytes(vectors[name]):
                found.append(wire.digest(data))
                yield data

    write_atomically(path, pieces(), mode=READ_ONLY, is_synced=is_synced)
    return index_of(vectors, digests)


def _header(vectors: Iterable[tuple[str, int]]) -> bytes:
    """Return what a safetensors file of these flat fp32 vectors begins with: length, then JSON."""
    tree: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, num in vectors:
        tree[name] = {"dtype": "F32", "shape": [num], "data_offsets": [position, position + 4 * num]}
        position += 4 * num
    text = msgspec.json.encode(tree)
    text += b" " * (-len(text) % 8)  # tensors begin aligned, as the format asks
    return len(text).to_bytes(8, "little") + text


def _what_remains(folder: Path) -> str:
    try:
        head = read_contents(folder).head
    except CheckpointError:
        return "and there is no earlier one"
    return f"the earlier one {'of the start' if head is None else f'after round {head.round}'} is intact"


def _last_serial(folder: Path) -> int:
    """Return the highest serial among files that are there, complete or left by a crash."""
    if not folder.is_dir():
        return 0
    found = (re.fullmatch(r"(?:replicated|private)-([0-9]{1,18})\.safetensors", path.name) for path in folder.iterdir())
    return max((int(match[1]) for match in found if match), default=0)


def _clean(folder: Path) -> None:
    """Remove files of ours that the checkpoint does not name: older ones, and what a crash or a full disk left."""
    keep: set[str] = set()
    with suppress(CheckpointError, OSError):
        if (folder / NAME).exists():
            contents = read_contents(folder)
            keep = {
                _vectors_name("replicated", contents.serial),
                _vectors_name("private", contents.serial),
                _blob_name("run", Digest(contents.run)),
                _blob_name("tokenizer", contents.tokenizer),
            }
            if contents.came_with is not msgspec.UNSET:
                keep.add(_blob_name("came-with", contents.came_with))
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in keep:
                path.unlink(missing_ok=True)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _vectors_name(kind: str, serial: int) -> str:
    return f"{kind}-{serial}.safetensors"


def _blob_name(kind: str, digest: Digest) -> str:
    return f"{kind}-{digest[:16]}.bin"


# --- reading ---


def _again_if_replaced(folder: Path, read: Callable[[Contents], R]) -> R:
    """Read, and read anew where another process has replaced the checkpoint meanwhile."""
    for _ in range(_READS - 1):
        contents = read_contents(folder)
        try:
            return read(contents)
        except CheckpointError:
            if read_contents(folder) == contents:
                raise
    return read(read_contents(folder))


def _read_blobs(folder: Path, contents: Contents, max_parameters: int | None) -> tuple[Genesis, bytes]:
    """Return the run's config and its tokenizer's blob, and check that the vectors are those of its model."""
    run = _read_blob(folder / _blob_name("run", Digest(contents.run)), Digest(contents.run), MAX_RUN_NBYTES)
    name = _blob_name("tokenizer", contents.tokenizer)
    tokenizer = _read_blob(folder / name, contents.tokenizer, MAX_TOKENIZER_NBYTES)
    config = read_run(run, PeerConfig().max_parameters if max_parameters is None else max_parameters)
    found = contents.replicated.shape
    if found.get(OUTER) != config.num_parameters:
        raise CheckpointError(
            f"{folder / NAME}: the run's model has {config.num_parameters:,} parameters, the vector {OUTER!r} "
            f"{found.get(OUTER, 0):,}. {_ADVICE}"
        )
    return config, tokenizer


def _read_came_with(folder: Path, contents: Contents) -> bytes:
    if contents.came_with is msgspec.UNSET:
        return b""
    return _read_blob(folder / _blob_name("came-with", contents.came_with), contents.came_with, MAX_BLOB_NBYTES)


def _read_blob(path: Path, digest: Digest, max_nbytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(max_nbytes + 1)
    except OSError as error:
        raise CheckpointError(_unreadable(path, error)) from None
    if wire.digest(data) != digest:
        raise CheckpointError(f"{path} is altered: it should be {short(digest)} and is not. {_ADVICE}")
    return data


def read_vectors(
    path: Path, index: StateIndex, only: str | None = None, empty: Empty = bounds.empty
) -> Iterator[tuple[str, Tensor]]:
    """Yield the vectors of a file, or the one named `only`, once every chunk is what `index` says."""
    header = _header([(vector.name, vector.num) for vector in index.vectors])
    expected = len(header) + index.nbytes
    try:
        with path.open("rb", buffering=0) as file:
            found = path.stat().st_size
            if found != expected:
                raise CheckpointError(
                    f"{path} has {found:,} bytes instead of {expected:,}: half-written or cut. {_ADVICE}"
                )
            if file.read(len(header)) != header:
                raise CheckpointError(f"{path} is altered: its header is not that of the vectors saved. {_ADVICE}")
            start = len(header)
            for vector in index.vectors:
                if only in (None, vector.name):
                    file.seek(start)
                    yield vector.name, _read_vector(file, vector, path, empty)
                start += vector.nbytes
    except OSError as error:
        raise CheckpointError(_unreadable(path, error)) from None


@dataclass(frozen=True)
class Place:
    """Where a chunk lies in a file of vectors."""

    path: Path
    start: int
    nbytes: int

    def read(self) -> bytes | None:
        """Return its bytes, which nobody has checked; None: they are not there any more."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.nbytes)
        except OSError:
            return None
        return data if len(data) == self.nbytes else None


def places(path: Path, index: StateIndex) -> dict[str, dict[Digest, Place]]:
    """Return, by vector, where the chunks lie of a file that `write_vectors` has written."""
    found, start = (
        dict[str, dict[Digest, Place]](),
        len(_header([(vector.name, vector.num) for vector in index.vectors])),
    )
    for vector in index.vectors:
        here = found.setdefault(vector.name, {})
        for number, chunk in enumerate(vector.chunks):
            at = number * CHUNK_NBYTES
            here[Digest(chunk)] = Place(path, start + at, min(CHUNK_NBYTES, vector.nbytes - at))
        start += vector.nbytes
    return found


def _read_vector(file: FileIO, index: VectorIndex, path: Path, empty: Empty) -> Tensor:
    vector = empty(index.num, torch.float32)
    for number, (place, digest) in enumerate(zip(chunks(vector), index.chunks, strict=True)):
        filled = 0
        while filled < len(place) and (count := file.readinto(place[filled:])):
            filled += count
        if filled < len(place) or wire.digest(place) != digest:
            raise CheckpointError(
                f"{path} is altered: chunk {number} of {len(index.chunks)} of tensor {index.name!r} (numbers "
                f"{number * CHUNK_NBYTES // 4:,} to {number * CHUNK_NBYTES // 4 + len(place) // 4:,}) is not what was "
                f"saved. {_ADVICE}"
            )
    return vector


def _missing(folder: Path) -> CheckpointError:
    if folder.is_dir() and any(_OURS.fullmatch(path.name) for path in folder.iterdir()):
        return CheckpointError(f"{folder} holds a half-written checkpoint: its {NAME} is missing. {_ADVICE}")
    return CheckpointError(f"there is no checkpoint in {folder}: it has no {NAME}. Name a folder that weft has saved.")


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} is missing, and the checkpoint is not whole without it. {_ADVICE}"
    return f"cannot read {path}: {error.strerror or error}."
