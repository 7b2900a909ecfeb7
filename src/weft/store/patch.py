"""A folder of a model as what changed since another one: the same bytes, in fewer.

    write(old, new, file)       model.safetensors, config.json, ... of two folders
    apply(old, file, target)    the folder `new` again, to the bit

    "weft patch 1\\n" | pieces, one behind the other | index | bytes of the index, u64 | digest of all before

The index says which files of the old folder are read, by their digests; and of each new file its digest, and of which
pieces it is: given in the patch, copied from an old file, or changed from an old file's tensor (`codec.sparse.words`).
So whoever applies one needs to know nothing of tensors. Whichever is shortest is taken.

Who applies a patch believes nothing in it: its last digest tells damage, the old files must be those it names, pieces
lie within them and within what the patch has, a new folder takes at most `MOST_TIMES` what both take, and every file is
compared with its digest before the folder is there.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from blake3 import blake3

from weft import reading
from weft.codec.sparse import words
from weft.data.store import write_atomically
from weft.errors import ConfigError, PayloadError, WireError
from weft.ids import Digest, short
from weft.model.weights import whole_folder
from weft.wire import Buffer, Record, decode, encode

MAGIC = b"weft patch 1\n"
ENDING = ".safetensors"
MAX_INDEX_NBYTES = MAX_HEADER_NBYTES = 64 << 20
MOST_TIMES = 2
_LENGTH = struct.Struct("<Q")
_DIGEST_NBYTES = 32
_TRAILER_NBYTES = _LENGTH.size + _DIGEST_NBYTES
_SLICE = 16 << 20  # bytes that are read together
_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}

_Nbytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*\Z", max_length=200)]
OnDone = Callable[[int], object]


class Given(Record, frozen=True, tag_field="of", tag="patch"):
    """Bytes that the patch holds."""

    nbytes: _Nbytes


class Copied(Record, frozen=True, tag_field="of", tag="old"):
    """Bytes of an old file."""

    file: _Name
    begin: _Nbytes
    nbytes: _Nbytes


class Changed(Record, frozen=True, tag_field="of", tag="both"):
    """Words of an old file, changed as the next `patch_nbytes` of the patch say."""

    file: _Name
    begin: _Nbytes
    nbytes: _Nbytes
    width: Annotated[int, msgspec.Meta(ge=2, le=4)]  # bytes of a word
    patch_nbytes: _Nbytes


Piece = Given | Copied | Changed


class Made(Record, frozen=True):
    """A file of the new folder."""

    name: _Name
    digest: _Digest
    pieces: tuple[Piece, ...]


class Index(Record, frozen=True):
    """What a patch holds."""

    old: dict[_Name, _Digest]  # of the files that are read
    files: tuple[Made, ...]


@dataclass
class Told:
    """What a patch comes to, for people."""

    new_nbytes: int = 0
    num_words: int = 0  # of tensors that both folders have
    num_changed: int = 0
    left_out: list[str] = field(default_factory=list)  # of the new folder: hidden files, which are no model's


# --- making one ---


def write(old: Path, new: Path, file: Path, on_done: OnDone = lambda _nbytes: None) -> Told:
    """Write what makes the folder `new` of the folder `old`.

    Args:
        on_done: told how many bytes of the new folder were looked at since it was told last.

    Raises:
        ConfigError: a folder is none, holds folders, or cannot be read; or `file` is taken, or in one of them.
        DataError: `file` cannot be written.
        DiskFull: no room.
    """
    if file.exists():
        raise ConfigError(f"{file}: exists; weft overwrites no patch. Remove it or choose another name.")
    if file.resolve().parent in (old.resolve(), new.resolve()):
        raise ConfigError(f"{file}: it would be a file of the model's folder. Choose another place for the patch.")
    told = Told()
    write_atomically(file, _with_digest(_written(old, new, told, on_done)))
    return told


def _with_digest(pieces: Iterator[Buffer]) -> Iterator[Buffer]:
    hashed = blake3()
    for piece in pieces:
        hashed.update(piece)
        yield piece
    yield hashed.digest()


def _written(old: Path, new: Path, told: Told, on_done: OnDone) -> Iterator[Buffer]:
    """Yield a patch, piece by piece."""
    before, made = _Before(old), list[Made]()
    yield MAGIC
    files, told.left_out = _files_of(new)
    for path in files:
        pieces = list[Piece]()
        for piece, data in before.pieces(path, told):
            pieces.append(piece)
            yield data
            on_done(piece.nbytes)
            told.new_nbytes += piece.nbytes
        made.append(Made(name=path.name, digest=_digest_of(path), pieces=tuple(pieces)))
    used = {piece.file for each in made for piece in each.pieces if not isinstance(piece, Given)}
    index = encode(Index(old={name: _digest_of(old / name) for name in sorted(used)}, files=tuple(made)))
    if len(index) > MAX_INDEX_NBYTES:
        raise ConfigError(f"{new}: it has too many tensors for a patch.")
    yield index
    yield _LENGTH.pack(len(index))


class _Before:
    """An old folder, as new files may be made of it."""

    def __init__(self, folder: Path) -> None:
        self._files = dict[str, Any]()  # their bytes
        self._tensors = dict[str, tuple[str, "_Tensor"]]()
        for path in _files_of(folder)[0]:
            data = self._files[path.name] = _mapped(path)
            self._tensors |= {name: (path.name, each) for name, each in _tensors_of(path, data).items()}

    def pieces(self, path: Path, told: Told) -> Iterator[tuple[Piece, Buffer]]:
        """Yield what a new file is made of, and what the patch holds of each."""
        data, at = _mapped(path), 0
        for name, tensor in sorted(_tensors_of(path, data).items(), key=lambda each: each[1].begin):
            found = self._tensors.get(name)
            if found is None or not found[1].is_like(tensor) or not tensor.nbytes or tensor.begin < at:
                continue
            yield from self._plain(path.name, data, at, tensor.begin)
            yield self._of_tensor(found, data[tensor.begin : tensor.begin + tensor.nbytes], told)
            at = tensor.begin + tensor.nbytes
        yield from self._plain(path.name, data, at, len(data))

    def _plain(self, name: str, data: Any, begin: int, end: int) -> Iterator[tuple[Piece, Buffer]]:
        """Yield bytes that are no tensor of both: copied where the old file of that name has the same there."""
        old = self._files.get(name)
        for start in range(begin, end, _SLICE):
            stop = min(start + _SLICE, end)
            here = data[start:stop]
            if old is not None and len(old) >= stop and np.array_equal(old[start:stop], here):
                yield Copied(file=name, begin=start, nbytes=stop - start), b""
            else:
                yield Given(nbytes=stop - start), here.tobytes()

    def _of_tensor(self, found: "tuple[str, _Tensor]", new: Any, told: Told) -> tuple[Piece, Buffer]:
        file, tensor = found
        old = self._files[file][tensor.begin : tensor.begin + tensor.nbytes]
        if np.array_equal(old, new):
            told.num_words += tensor.nbytes // tensor.width
            return Copied(file=file, begin=tensor.begin, nbytes=tensor.nbytes), b""
        kind = f"<u{tensor.width}"
        first, then = old.view(kind), new.view(kind)
        told.num_words += len(first)
        told.num_changed += int(np.count_nonzero(first != then))
        patch = words.encode(first, then)
        if len(patch) >= tensor.nbytes:
            return Given(nbytes=tensor.nbytes), new.tobytes()
        changed = Changed(
            file=file, begin=tensor.begin, nbytes=tensor.nbytes, width=tensor.width, patch_nbytes=len(patch)
        )
        return changed, patch


# --- applying one ---


def apply(old: Path, file: Path, target: Path, on_done: OnDone = lambda _nbytes: None) -> None:
    """Make the folder `target` that a patch is of.

    Args:
        old: the folder that the patch was made from.
        on_done: told how many bytes of the new folder were written since it was told last.

    Raises:
        ConfigError: it is no patch, or one from another folder, or damaged; or `target` is taken.
        DiskFull: no room; nothing is left behind.
    """
    data = _mapped(file)
    index, pieces = _parts_of(file, data)
    before = {name: _old(old, name, digest, file) for name, digest in index.old.items()}
    most = MOST_TIMES * (len(data) + sum(map(len, before.values())))
    if sum(piece.nbytes for made in index.files for piece in made.pieces) > most:
        raise ConfigError(f"{file}: it would make more than {most:,} bytes, which no patch of these does.")
    names = [made.name for made in index.files]
    if _twins(names) or not names:
        raise ConfigError(f"{file}: it makes no file, or one twice. Get the patch again.")
    given = _Given(pieces)
    with whole_folder(target, last="config.json") as partial:
        for made in index.files:
            hashed = blake3()
            with (partial / made.name).open("wb") as out:
                for piece in made.pieces:
                    try:
                        here = _made(piece, before, given)
                    except PayloadError as error:
                        raise ConfigError(f"{file}: {made.name}: {error}. Get the patch again.") from None
                    out.write(here)
                    hashed.update(here)
                    on_done(piece.nbytes)
            if hashed.hexdigest() != made.digest:
                raise ConfigError(f"{file}: {made.name} comes out otherwise than it says. Get the patch again.")
        given.end(file)


def _made(piece: Piece, before: Mapping[str, Any], given: "_Given") -> Any:
    """Return the bytes that a piece is of.

    Raises:
        PayloadError: it is of none.
    """
    if isinstance(piece, Given):
        return given.take(piece.nbytes)
    old = before.get(piece.file)
    if old is None or piece.begin + piece.nbytes > len(old):
        raise PayloadError("a piece that lies in no old file")
    here = old[piece.begin : piece.begin + piece.nbytes]
    if isinstance(piece, Copied):
        return here
    if piece.width == 3 or piece.nbytes % piece.width:
        raise PayloadError("words of a width that there is not")
    found = words.decode(here.view(f"<u{piece.width}"), memoryview(given.take(piece.patch_nbytes)))
    return found.view(np.uint8)


class _Given:
    """What a patch holds of pieces, taken one behind the other."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = data, 0

    def take(self, num: int) -> Any:
        if self._at + num > len(self._data):
            raise PayloadError("a piece that the patch does not hold")
        self._at += num
        return self._data[self._at - num : self._at]

    def end(self, file: Path) -> None:
        if self._at < len(self._data):
            raise ConfigError(f"{file}: it holds pieces that it names nowhere. Get the patch again.")


def _parts_of(file: Path, data: Any) -> tuple[Index, Any]:
    """Return a patch's index, and the bytes of its pieces.

    Raises:
        ConfigError: it is no patch, or a damaged one.
    """
    ends = len(data) - _TRAILER_NBYTES
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise ConfigError(f"{file}: it is no patch of weft's. weft patch make writes one.")
    if ends < len(MAGIC) or blake3(data[:-_DIGEST_NBYTES]).digest() != data[-_DIGEST_NBYTES:].tobytes():
        raise ConfigError(f"{file}: it is cut off, or damaged. Get the patch again.")
    (length,) = _LENGTH.unpack(data[ends:-_DIGEST_NBYTES].tobytes())
    if not length <= min(MAX_INDEX_NBYTES, ends - len(MAGIC)):
        raise ConfigError(f"{file}: it is cut off, or damaged. Get the patch again.")
    try:
        index: Index = decode(data[ends - length : ends].tobytes(), Index, max_nbytes=MAX_INDEX_NBYTES)
    except WireError as error:
        raise ConfigError(f"{file}: it is damaged: {error}. Get the patch again.") from None
    return index, data[len(MAGIC) : ends - length]


def _old(folder: Path, name: str, digest: str, file: Path) -> Any:
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{folder}: it has no {name}, which {file.name} needs. Name the folder it was made from.")
    if (found := _digest_of(path)) != digest:
        raise ConfigError(
            f"{path}: it is not what {file.name} was made from ({short(Digest(found))}, and {short(Digest(digest))} is "
            "due). Name the folder that the patch was made from, as it was."
        )
    return _mapped(path)


# --- files ---


class _Tensor(msgspec.Struct, frozen=True):
    """Where a tensor lies in its file."""

    begin: int
    nbytes: int
    width: int  # bytes of a number
    kind: str

    def is_like(self, other: "_Tensor") -> bool:
        return (self.nbytes, self.kind) == (other.nbytes, other.kind)


def _tensors_of(path: Path, data: Any) -> dict[str, _Tensor]:
    """Return the tensors of a safetensors file whose numbers have 16 or 32 bits; of other files none.

    Args:
        data: its bytes.

    Raises:
        ConfigError: it is named as one, and is none.
    """
    if path.suffix != ENDING:
        return {}
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
        if length > min(MAX_HEADER_NBYTES, len(data)):
            raise ValueError("its header is cut off")
        header = reading.json_of(data[_LENGTH.size : _LENGTH.size + length].tobytes())
        found, base = dict[str, _Tensor](), _LENGTH.size + length
        for name, each in header.items():
            if name == "__metadata__" or each["dtype"] not in _WIDTHS:
                continue
            (begin, end), width = each["data_offsets"], _WIDTHS[each["dtype"]]
            if not 0 <= begin <= end <= len(data) - base:
                raise ValueError(f"{name} lies behind its end")
            if (end - begin) % width:
                raise ValueError(f"{name} ends in the middle of a number")
            found[name] = _Tensor(base + begin, end - begin, width, each["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{path}: no safetensors file ({error}). Download or export it again.") from None
    return found


def _files_of(folder: Path) -> tuple[list[Path], list[str]]:
    """Return a model's files by name, and what of its folder is hidden: traces of whatever downloaded it.

    Raises:
        ConfigError: there is no folder, or it holds others, or files whose names no patch takes.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder. Name one that weft export wrote, or a Hugging Face folder.")
    with _reading(folder):
        found = sorted(folder.iterdir())
    paths = [path for path in found if not path.name.startswith(".")]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: a patch is of files, and this is none. Take it out of the folder.")
        try:
            msgspec.convert(path.name, _Name)
        except msgspec.ValidationError:
            raise ConfigError(f"{path}: a patch takes names of letters, digits, dots and dashes. Rename it.") from None
    if twins := _twins([path.name for path in paths]):
        raise ConfigError(f"{folder}: {' and '.join(twins)} are one name on some disks. Rename one.")
    if not paths:
        raise ConfigError(f"{folder}: it is empty. Name one that weft export wrote, or a Hugging Face folder.")
    return paths, [path.name for path in found if path.name.startswith(".")]


def _twins(names: Sequence[str]) -> list[str]:
    """Return names that are one on disks, such as those of Macs and Windows, that tell no capital letters apart."""
    times = Counter(name.lower() for name in names)
    return [name for name in names if times[name.lower()] > 1]


def _mapped(path: Path) -> Any:
    """Return a file's bytes, as they are read."""
    with _reading(path):
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)


def _digest_of(path: Path) -> str:
    hashed = blake3()
    with _reading(path), path.open("rb") as file:
        while data := file.read(_SLICE):
            hashed.update(data)
    return hashed.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """
    Raises:
        ConfigError: it cannot be read.
    """
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from error
