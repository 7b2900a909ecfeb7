"""Reads documents out of files: the standard library, text, JSONL, Parquet, Hugging Face datasets.

Every reader yields `Document`s one at a time, in an order that depends on names only, and says which file and
which line is at fault when it cannot go on. A document is held in memory whole.
"""

import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import DataError

# Folders of the standard library that are not its source: other people's packages, tests, and generated tables
# (codec maps, help topics, build settings). test/ alone is larger than all the rest.
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "__phello__")
)
_NOT_STDLIB_STARTS = ("config-", "_sysconfigdata")
_ROWS_AT_ONCE = 256  # rows of a Parquet file that are in memory together


class Document(msgspec.Struct, frozen=True):
    """A text and the name that decides its side: relative to where it was found, with forward slashes."""

    name: str
    text: str


class Found(msgspec.Struct, frozen=True, order=True):
    """A file and its name, relative to the folder it was found in."""

    name: str
    path: Path


def stdlib_documents() -> Iterator[Document]:
    """Yield the modules of the running Python's standard library; a file that is not UTF-8 is left out.

    Raises:
        DataError: this Python has no source files (some embedded ones have not).
    """
    for file in stdlib_files():
        try:
            text = file.path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a stray file of the machine's owner; the corpus is what can be read
        yield Document(file.name, text)


def stdlib_files() -> list[Found]:
    """Return the modules of the running Python's standard library.

    Raises:
        DataError: this Python has no source files (some embedded ones have not).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = list(_below(root, ".py", _is_no_stdlib)) if root.is_dir() else []
    if not found:
        raise DataError(f"this Python has no standard library source in {root}. Name text files of your own.")
    return found


def text_documents(paths: Sequence[str], base: Path) -> Iterator[Document]:
    for file in find(paths, base, suffix=""):
        yield Document(file.name, _read(file.path))


def jsonl_documents(paths: Sequence[str], base: Path, field: str) -> Iterator[Document]:
    """Yield `field` of every line; blank lines are skipped."""
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    for file in find(paths, base, suffix=".jsonl"):
        try:
            with file.path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        text = _field(decoder, line, field, f"{file.path}, line {number}")
                        yield Document(f"{file.name}:{number}", text)
        except OSError as error:
            raise _unreadable(file.path, error) from error


def parquet_documents(paths: Sequence[str], base: Path, column: str) -> Iterator[Document]:
    """Yield `column` of every row; rows where it is null are skipped."""
    # Imported here: 0.2 s that only this source needs.
    import pyarrow as pa
    import pyarrow.parquet as pq

    for file in find(paths, base, suffix=".parquet"):
        try:
            with pq.ParquetFile(file.path) as table:
                _require_text_column(table.schema_arrow, column, file.path)
                number = 0
                for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[column]):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        if text is not None:
                            yield Document(f"{file.name}:{number}", text)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(file.path, error) from error


def dataset_documents(
    name: str, subset: str | None, split: str, column: str, revision: str | None
) -> Iterator[Document]:
    """Yield `column` of every row of a Hugging Face dataset, streamed by its own library."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f'the dataset {name} needs the library `datasets`, which is not installed: pip install "weft[datasets]".'
        ) from None
    try:
        rows = iter(datasets.load_dataset(name, subset, split=split, revision=revision, streaming=True))
        for number, row in enumerate(rows, start=1):
            if column not in row:
                raise DataError(f"dataset {name} has no column {column!r}; it has {', '.join(sorted(row))}.")
            if not isinstance(row[column], str):
                kind = type(row[column]).__name__
                raise DataError(f"dataset {name}, row {number}: column {column!r} holds {kind}, not text.")
            yield Document(f"{name}:{number}", row[column])
    except DataError:
        raise
    except Exception as error:  # the library raises what its many loaders raise
        raise DataError(f"cannot read dataset {name} (split {split}): {type(error).__name__}: {error}") from error


def find(paths: Sequence[str], base: Path, suffix: str) -> list[Found]:
    """Return the files that `paths` name, each once, sorted by name.

    Args:
        paths: files, folders or globs (`**` crosses folders), relative to `base` or absolute.
        suffix: what a file in a named folder must end with; files and globs are taken as they are.

    Raises:
        DataError: a path is missing, a folder or glob matches nothing, or something is no file.
    """
    found: dict[Path, Found] = {}
    for given in paths:
        path = base / Path(given)
        if path.is_dir():
            matches = list(_below(path, suffix))
        elif path.exists():
            matches = [Found(path.name, path)]
        elif has_magic(given):
            matches = list(_matching(given, base))
        else:
            raise DataError(f"{path}: no such file or folder. Relative paths start from {base}.")
        if not matches:
            kind = f"*{suffix} files" if suffix else "files"
            raise DataError(f"{path}: no {kind} there.")
        for match in matches:
            found.setdefault(match.path.resolve(), match)
    return list(_told_apart(sorted(found.values())))


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


def _below(root: Path, suffix: str, is_left_out: Callable[[str], bool] = _is_hidden) -> Iterator[Found]:
    """Yield the regular files below `root`, sorted by name; folders and files that are left out are not entered."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if not is_left_out(name)]
        for name in names:
            path = Path(folder, name)
            if name.endswith(suffix) and not is_left_out(name) and path.is_file():
                found.append(Found(path.relative_to(root).as_posix(), path))
    yield from sorted(found)


def _matching(pattern: str, base: Path) -> Iterator[Found]:
    """Yield the files a glob matches, named relative to the folder before its first wildcard."""
    parts = Path(pattern).parts
    num_plain = next(number for number, part in enumerate(parts) if has_magic(part))
    root = base.joinpath(*parts[:num_plain])
    for hit in glob(str(Path(*parts[num_plain:])), root_dir=root, recursive=True):
        if (root / hit).is_file():
            yield Found(Path(hit).as_posix(), root / hit)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text: byte {error.start + 1} is 0x{data[error.start]:02x}. Convert the file, "
            f"or name the text files alone with a glob such as '{path.parent.name}/**/*.txt'."
        ) from None


def _field(decoder: "msgspec.json.Decoder[dict[str, msgspec.Raw]]", line: bytes, field: str, where: str) -> str:
    try:
        tree = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: not a JSON object: {error}.") from None
    if field not in tree:
        raise DataError(f"{where}: no field {field!r}; it has {', '.join(sorted(tree)) or 'none'}.")
    try:
        return msgspec.json.decode(tree[field], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: field {field!r} holds no text: {error}.") from None


def _require_text_column(schema: Any, column: str, path: Path) -> None:
    if column not in schema.names:
        raise DataError(f"{path}: no column {column!r}; it has {', '.join(schema.names)}.")
    kind = schema.field(column).type
    if str(kind) not in ("string", "large_string"):
        raise DataError(f"{path}: column {column!r} holds {kind}, not text.")


def _raise_unreadable(error: OSError) -> None:
    raise _unreadable(Path(error.filename), error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read: {error}.")
