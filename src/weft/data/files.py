"""Finds the files that a source names, and opens them: unpacked, whole, and nothing but files.

What is compressed is known by its first bytes, whatever its name: gzip, bzip2, xz, zstd. Errors say which file is at
fault, what it is instead, and what to do.
"""

import bz2
import gzip
import io
import lzma
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import msgspec

from weft import reading
from weft.errors import DataError

# Folders of the standard library that are not its source: other people's packages, tests, and generated tables
# (codec maps, help topics, build settings). test/ alone is larger than all the rest.
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "__phello__")
)
_NOT_STDLIB_STARTS = ("config-", "_sysconfigdata")
_DAMAGED = " The packed file is cut short or damaged: copy or download it again."
_PACKED_ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zstd")


class Found(msgspec.Struct, frozen=True, order=True):
    """A file and its name, relative to the folder it was found in."""

    name: str
    path: Path


def stdlib_files() -> list[Found]:
    """Return the modules of the running Python's standard library.

    Raises:
        DataError: this Python has no source files (some embedded ones have not).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = list(_below(root, (".py",), _is_no_stdlib)) if root.is_dir() else []
    if not found:
        raise DataError(f"this Python has no standard library source in {root}. Name text files of your own.")
    return found


def find(paths: Sequence[str], base: Path, endings: tuple[str, ...] = ()) -> list[Found]:
    """Return the files that `paths` name, each once, sorted by name.

    Args:
        paths: files, folders or globs (`**` crosses folders), relative to `base` or absolute.
        endings: what a file in a named folder must end with, in letters of any case, before .gz and the like; empty
            takes all. Files and globs are taken as they are.

    Raises:
        DataError: a path is missing, a folder or glob matches nothing, or something is no file.
    """
    found: dict[Path, Found] = {}
    for given in paths:
        path = base / Path(given)
        if path.is_dir():
            matches = list(_below(path, endings))
        elif path.is_file():
            matches = [Found(path.name, path)]
        elif path.exists():
            raise DataError(
                f"{path} is a pipe or a device, not a file. Write what it gives into a file, and name that."
            )
        elif has_magic(given):
            matches = list(_matching(given, base))
        else:
            raise DataError(f"{path}: no such file or folder. Relative paths start from {base}.")
        if not matches:
            kind = " or ".join(f"*{ending}" for ending in endings)
            raise DataError(f"{path}: no {kind + ' ' if kind else ''}files there.")
        for match in matches:
            found.setdefault(match.path.resolve(), match)
    return list(_told_apart(sorted(found.values())))


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file, and unpack it while it is read.

    Raises:
        DataError: it cannot be read, or its packed bytes are cut short or damaged; inside the block, too.
    """
    try:
        with path.open("rb") as file, _unpacked(file) as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        is_of_system = isinstance(error, OSError) and error.errno is not None
        raise unreadable(path, error, "" if is_of_system else _DAMAGED) from error


def refuse_what_is_else(path: Path, head: bytes, *, is_page_text: bool = False) -> None:
    """Accept a file that begins with `head`, unless its first bytes say that it is something other than text.

    Raises:
        DataError: with what it is, and what to do.
    """
    if (kind := reading.what_else(head, is_page_text=is_page_text)) is not None:
        raise DataError(f"{path} is {kind}.{'' if ':' in kind else ' Name files that hold text.'}")


def has_ending(name: str, endings: tuple[str, ...]) -> bool:
    """Return whether a file's name ends so, in letters of any case, before .gz and the like; empty takes all."""
    path = Path(name)
    return (path.stem if is_packed(path) else name).lower().endswith(endings or ("",))


def is_packed(path: Path) -> bool:
    """Return whether the name says that the file is compressed."""
    return path.suffix.lower() in _PACKED_ENDINGS


def unreadable(path: Path, error: Exception, remedy: str = "") -> DataError:
    return DataError(f"{path}: cannot be read: {str(error).rstrip('.')}.{remedy}")


def _unpacked(file: io.BufferedReader) -> AbstractContextManager[io.BufferedReader]:
    head = file.peek(10)
    stream: Any
    if head.startswith(reading.GZIP):
        stream = gzip.GzipFile(fileobj=file)
    elif head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        stream = bz2.BZ2File(file)
    elif head.startswith(reading.XZ):
        stream = lzma.LZMAFile(file)  # noqa: SIM115 (closed with its reader)
    elif head.startswith(reading.ZSTD):
        import pyarrow as pa  # 0.2 s that only this needs

        stream = pa.CompressedInputStream(pa.PythonFile(file), "zstd")
    else:
        return nullcontext(file)
    return closing(io.BufferedReader(stream))


def _told_apart(files: Sequence[Found]) -> Iterator[Found]:
    """Yield `files`, those that share a name (text.txt of several folders) as text.txt, text.txt#2, ..."""
    seen = Counter[str]()
    for file in files:
        seen[file.name] += 1
        yield file if seen[file.name] == 1 else Found(f"{file.name}#{seen[file.name]}", file.path)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_no_stdlib(name: str) -> bool:
    return _is_hidden(name) or name in _NOT_STDLIB or name.startswith(_NOT_STDLIB_STARTS)


def _below(root: Path, endings: tuple[str, ...], is_left_out: Callable[[str], bool] = _is_hidden) -> Iterator[Found]:
    """Yield the regular files below `root`, sorted by name; folders and files that are left out are not entered.

    Raises:
        DataError: a folder cannot be read, or a link leads to nothing.
    """
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not is_left_out(name)]
        for name in names:
            path = Path(folder, name)
            if is_left_out(name) or not has_ending(name, endings):
                continue
            if path.is_file():
                found.append(Found(path.relative_to(root).as_posix(), path))
            elif path.is_symlink():
                raise DataError(f"{path} is a link to {os.readlink(path)}, which is not there. Fix it or remove it.")
    yield from sorted(found)


def _matching(pattern: str, base: Path) -> Iterator[Found]:
    """Yield the files a glob matches, named relative to the folder before its first wildcard."""
    parts = Path(pattern).parts
    num_plain = next(number for number, part in enumerate(parts) if has_magic(part))
    root = base.joinpath(*parts[:num_plain])
    for hit in glob(str(Path(*parts[num_plain:])), root_dir=root, recursive=True):
        if (root / hit).is_file():
            yield Found(Path(hit).as_posix(), root / hit)


def _raise_unreadable(error: OSError) -> None:
    raise unreadable(Path(error.filename), error) from error
