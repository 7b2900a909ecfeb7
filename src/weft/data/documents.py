"""Reads documents out of files: the standard library, text, JSON lines, Hugging Face datasets.

Every reader yields `Document`s one at a time, in an order that depends on names only, and says which file and which
line is at fault when it cannot go on. A document is held in memory whole; one without text is yielded empty, so that it
can be counted. Columns of Parquet and Arrow files are read in `weft.data.tables`.
"""

import io
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft import reading
from weft.data.files import Found, find, opened, refuse_what_is_else, stdlib_files
from weft.errors import DataError

LINES = (".jsonl", ".ndjson", ".json")
_MAX_SHARE_OF_ZEROS = 0.25  # of bytes: UTF-16 of Latin letters has a half


class Document(msgspec.Struct, frozen=True):
    """A text and the name that decides its side: relative to where it was found, with forward slashes."""

    name: str
    text: str


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


def text_documents(paths: Sequence[str], base: Path) -> Iterator[Document]:
    """Yield each file whole, in the encoding that its byte order mark names, else in UTF-8."""
    found = find(paths, base)
    for file in found:
        with opened(file.path) as stream:
            data = stream.read()
        refuse_what_is_else(file.path, data[: reading.HEAD_NBYTES], is_page_text=True)
        try:
            text = reading.text_of(data)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path}: not {error.encoding.upper()} text: byte {error.start + 1} is "
                f"0x{error.object[error.start]:02x}. Convert the file to UTF-8{_or_a_glob(file, found, base)}."
            ) from None
        if text.count("\0") > _MAX_SHARE_OF_ZEROS * len(text):
            raise DataError(
                f"{file.path}: not UTF-8 text: {text.count(chr(0))} of its {len(text)} bytes are zero, as in UTF-16 "
                f"without a byte order mark. Convert the file to UTF-8{_or_a_glob(file, found, base)}."
            )
        yield Document(file.name, text)


def jsonl_documents(paths: Sequence[str], base: Path, field: str) -> Iterator[Document]:
    """Yield `field` of every JSON object: one per line, or all in one array; blank lines are skipped.

    Args:
        field: its name; "message.content" where there is no such field is `content` of the object `message`.
    """
    for file in find(paths, base, LINES):
        with opened(file.path) as stream:
            for number, place, value in _values(stream, file.path):
                yield Document(f"{file.name}:{number}", _text_in(value, field, place))


def json_objects(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield every JSON object of a file whole: its number, its place in words, and its fields.

    Raises:
        DataError: something is no JSON object.
    """
    with opened(path) as stream:
        for number, place, value in _values(stream, path):
            if not isinstance(value, Mapping):
                raise DataError(f"{place}: not a JSON object: it is {_kind(value)}.")
            yield number, place, {name: _plain(each, name, place) for name, each in value.items()}


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
            if not isinstance(row[column], str | None):
                kind = type(row[column]).__name__
                raise DataError(f"dataset {name}, row {number}: column {column!r} holds {kind}, not text.")
            yield Document(f"{name}:{number}", row[column] or "")
    except DataError:
        raise
    except Exception as error:  # the library raises what its many loaders raise
        raise DataError(f"cannot read dataset {name} (split {split}): {type(error).__name__}: {error}") from error


def _or_a_glob(bad: Found, found: Sequence[Found], base: Path) -> str:
    """Return the advice to name the files of another ending, where the folder of `bad` holds such."""
    root = bad.path.parents[bad.name.count("/")]
    others = Counter(
        file.path.suffix for file in found if file.path.is_relative_to(root) and file.path.suffix != bad.path.suffix
    )
    if not others:
        return ""
    folder = root.relative_to(base) if root.is_relative_to(base) else root
    glob = (folder / "**" / f"*{others.most_common(1)[0][0]}").as_posix()
    return f", or name the text files alone with a glob such as '{glob}'"


# --- JSON ---

_Value = tuple[int, str, Any]  # number, place in words, what stands there


def _values(stream: io.BufferedReader, path: Path) -> Iterator[_Value]:
    head = stream.peek(reading.HEAD_NBYTES)
    refuse_what_is_else(path, head)
    is_array = reading.text_of_head(head).lstrip().startswith("[")
    return _array(stream, path) if is_array else _lines(stream, path)


def _lines(stream: io.BufferedReader, path: Path) -> Iterator[_Value]:
    encoding, num_skipped = reading.encoding_of(stream.peek(reading.HEAD_NBYTES))
    stream.read(num_skipped)
    # Bytes that are no text come back as they were: they are the fault of their line.
    errors = "surrogateescape" if encoding == "utf-8" else "strict"
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    number = 0
    try:
        with io.TextIOWrapper(stream, encoding, errors) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    place = f"{path}, line {number}"
                    yield number, place, _object(decoder, line.encode("utf-8", errors), place)
    except UnicodeDecodeError:
        raise DataError(f"{path}: what follows line {number} is not {encoding.upper()} text.") from None


def _array(stream: io.BufferedReader, path: Path) -> Iterator[_Value]:
    try:
        values = reading.json_of(stream.read())
    except ValueError as error:
        raise DataError(f"{path}: starts like a JSON array, but is not one: {error}.") from None
    yield from ((number, f"{path}, item {number}", value) for number, value in enumerate(values, start=1))


def _object(decoder: "msgspec.json.Decoder[dict[str, msgspec.Raw]]", line: bytes, place: str) -> Any:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            return reading.json_of(line)  # slower, and takes what Python writes
        except ValueError as fault:
            why = fault if isinstance(error, RecursionError) else error
    is_spread = line.strip() in (b"{", b"[")
    remedy = " Write one object per line (`jq -c` does), or all in one array." if is_spread else ""
    raise DataError(f"{place}: not a JSON object: {why}.{remedy}")


def _text_in(value: Any, field: str, place: str) -> str:
    """Return the text of `field`, which may be null."""
    rest = field
    while rest:
        if value is None and rest != field:
            return ""
        if not isinstance(value, Mapping):
            what = "not a JSON object" if rest == field else f"field {field!r} leads through what is not an object"
            raise DataError(f"{place}: {what}: it is {_kind(value)}.")
        name, _, inner = (rest, "", "") if rest in value else rest.partition(".")
        if name not in value:
            hint = _other_field(value) if rest == field else ""
            raise DataError(f"{place}: no field {field!r}; it has {', '.join(sorted(value)) or 'none'}.{hint}")
        value, rest = _plain(value[name], field, place), inner
    if value is None:
        return ""
    if not isinstance(value, str):
        hint = (
            f" Name one of its fields, such as {field}.{next(iter(value))}."
            if isinstance(value, dict) and value
            else ""
        )
        raise DataError(f"{place}: field {field!r} holds no text: it is {_kind(value)}.{hint}")
    return letters(value, f"{place}: field {field!r}")


def letters(text: str, what: str) -> str:
    """Return `text`, which UTF-8 can write.

    Raises:
        DataError: it holds half a surrogate pair, as Python writes them into JSON; says of `what`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{what} holds half a surrogate pair, which is not a letter.") from None
    return text


def about_conversations(names: Iterable[str]) -> str:
    """Return what to do with rows that have such fields, if they are conversations."""
    if {"messages", "conversations", "conversation"}.isdisjoint(names):
        return ""
    return ' These are conversations: [data.source] type = "conversations" trains on their answers.'


def _other_field(value: Mapping[str, Any]) -> str:
    """Return the advice to name the field of the longest text, as it stands in the file."""
    if advice := about_conversations(value):
        return advice
    raw = {name: bytes(each) if isinstance(each, msgspec.Raw) else each for name, each in value.items()}
    texts = {
        name: len(each)
        for name, each in raw.items()
        if isinstance(each, str) or (isinstance(each, bytes) and each.startswith(b'"'))
    }
    if not texts:
        return ""
    return f" Name the one to read: --set {shlex.quote(f'data.source.field={max(texts, key=texts.__getitem__)}')}."


def _plain(value: Any, field: str, place: str) -> Any:
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            return reading.json_of(bytes(value))
        except ValueError:
            raise DataError(f"{place}: field {field!r} holds no text: {error}.") from None


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return kinds.get(type(value), "text")
