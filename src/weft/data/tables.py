"""Reads a column of text out of Parquet, Arrow and Feather files, whichever of Arrow's layouts holds it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weft import reading
from weft.data.documents import Document, about_conversations
from weft.data.files import find, refuse_what_is_else, unreadable
from weft.errors import DataError

TABLES = (".parquet", ".arrow", ".feather", ".ipc")
_ROWS_AT_ONCE = 256  # rows that are in memory together
_STREAM_MAGIC = b"\xff\xff\xff\xff"  # of Arrow's format without an index, which the library `datasets` writes


def table_documents(paths: Sequence[str], base: Path, column: str) -> Iterator[Document]:
    """Yield `column` of every row; a null is an empty document.

    Args:
        column: its name; "message.content" where there is no such column is `content` of the struct `message`.
    """
    # Imported here: 0.2 s that only this source needs.
    import pyarrow as pa

    for file in find(paths, base, TABLES):
        number = 0
        try:
            for array in _arrays(file.path, column):
                for value in array.cast(pa.large_binary()).to_pylist():
                    number += 1
                    yield Document(f"{file.name}:{number}", _text(value, column, f"{file.path}, row {number}"))
        except (pa.ArrowException, OSError) as error:
            raise unreadable(file.path, error) from error


def table_rows(path: Path, names: Collection[str]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield every row of a file: its number, its place in words, and its columns as Python has them.

    Args:
        names: of the columns that are read, as far as they are there; where none is, all are.

    Raises:
        DataError: it cannot be read, has two columns of a name, or holds what Python has no value for.
    """
    import pyarrow as pa

    def kept(schema: Any) -> list[str]:
        found = [name for name in schema.names if name in names] or list(schema.names)
        for name in found:
            _require_one(schema, name, path)
        return found

    number = 0
    try:
        for batch in _batches(path, kept):
            for row in batch.select(kept(batch.schema)).to_pylist():
                number += 1
                yield number, f"{path}, row {number}", row
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise unreadable(path, error) from error


def column_names(path: Path) -> tuple[str, ...]:
    """Return the names of a file's columns; none: it has no rows.

    Raises:
        DataError: it cannot be read.
    """
    import pyarrow as pa

    found = list[str]()

    def first(schema: Any) -> list[str]:
        found.extend(schema.names)
        return list(schema.names[:1])

    try:
        next(_batches(path, first), None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return tuple(found)


def _arrays(path: Path, column: str) -> Iterator[Any]:
    """Yield the column piece by piece, without dictionaries, runs, structs and extensions around its values."""

    def checked(schema: Any) -> list[str]:
        _place(schema, column, path)
        return [column]

    for batch in _batches(path, checked):
        top, rest = _place(batch.schema, column, path)
        yield _values(batch.column(batch.schema.get_field_index(top)), rest)


def _batches(path: Path, choose: Callable[[Any], list[str]]) -> Iterator[Any]:
    """Yield the rows of a file, some at a time.

    Args:
        choose: returns which columns are wanted of those of a schema; more may be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        head = file.read(reading.HEAD_NBYTES)
    if head.startswith(b"PAR1"):
        with pq.ParquetFile(path) as table:
            yield from table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=choose(table.schema_arrow))
    elif head.startswith(b"ARROW1"):
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as reader:
            choose(reader.schema)
            yield from _pieces(reader.get_batch(number) for number in range(reader.num_record_batches))
    elif head.startswith(_STREAM_MAGIC):
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
            choose(reader.schema)
            yield from _pieces(reader)
    else:
        refuse_what_is_else(path, head)
        raise DataError(f"{path} is not a Parquet, Arrow or Feather file.")


def _pieces(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, len(batch), _ROWS_AT_ONCE):
            yield batch.slice(start, _ROWS_AT_ONCE)


def _place(schema: Any, column: str, path: Path) -> tuple[str, str]:
    """Return the name of the column in the table, and what is named inside it.

    Raises:
        DataError: there is no such column, there are two, or it holds no text.
    """
    top, _, rest = (column, "", "") if column in schema.names else column.partition(".")
    if top not in schema.names:
        raise DataError(
            f"{path}: no column {column!r}; it has {', '.join(schema.names)}.{about_conversations(schema.names)}"
        )
    _require_one(schema, top, path)
    _require_text(schema.field(top).type, rest, column, path)
    return top, rest


def _require_one(schema: Any, name: str, path: Path) -> None:
    if (num := schema.names.count(name)) > 1:
        raise DataError(f"{path}: {num} columns are named {name!r}. Rename or drop all but one.")


def _require_text(kind: Any, rest: str, column: str, path: Path) -> None:
    import pyarrow.types as types

    kind = _inner(kind)
    if types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        name, _, inner = (rest, "", "") if rest in names else rest.partition(".")
        if name not in names:
            named = f"no field {name!r}" if name else "not text"
            raise DataError(
                f"{path}: column {column!r} holds a struct, {named}. Name one of its fields: "
                f"{', '.join(f'{column.removesuffix(rest).rstrip(chr(46))}.{each}' for each in names)}."
            )
        _require_text(kind.field(name).type, inner, column, path)
    elif rest or not _is_text(kind):
        remedy = " Join each list into one text." if types.is_nested(kind) else ""
        raise DataError(f"{path}: column {column!r} holds {kind}, not text.{remedy}")


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    tests = (
        *(types.is_string, types.is_large_string, types.is_string_view, types.is_null),
        *(types.is_binary, types.is_large_binary, types.is_binary_view),
    )
    return any(test(kind) for test in tests)


def _inner(kind: Any) -> Any:
    """Return the type of the values in a dictionary, in runs or in an extension."""
    import pyarrow as pa
    import pyarrow.types as types

    if isinstance(kind, pa.BaseExtensionType):
        return _inner(kind.storage_type)
    is_wrapped = types.is_dictionary(kind) or types.is_run_end_encoded(kind)
    return _inner(kind.value_type) if is_wrapped else kind


def _values(array: Any, rest: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as types

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _values(array.storage, rest)
    if types.is_dictionary(kind):
        return _values(array.dictionary_decode(), rest)
    if types.is_run_end_encoded(kind):
        return _values(pc.run_end_decode(array), rest)
    if types.is_struct(kind):
        name, _, inner = (rest, "", "") if kind.get_field_index(rest) >= 0 else rest.partition(".")
        return _values(array.flatten()[kind.get_field_index(name)], inner)  # null where the struct is null
    return array


def _text(value: bytes | None, column: str, place: str) -> str:
    if value is None:
        return ""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: column {column!r} holds bytes that are not UTF-8 text: byte {error.start + 1} is "
            f"0x{value[error.start]:02x}."
        ) from None
