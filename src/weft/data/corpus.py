"""Where text comes from, as named documents, and which of it is held out.

A source is one of a closed union in the run file: the running Python's own standard library (nothing to
download), text files, JSONL, Parquet, a Hugging Face dataset, token files made elsewhere, or conversations, which
`weft.chat` reads. `documents` reads one document after another; `split` says for each piece of text whether it is
trained on or held out.

Held out is decided by a hash of the document's name, which is relative to the folder it was found in: a
document stays on its side when others are added, and on any machine. A source of few documents (fewer than
1 / heldout_fraction) is cut instead: the end of each document is held out, as nanoGPT does with one.

These settings stay on the machine that makes the run. What its peers receive are shards and their digests
(`weft.data.store`), so no received record names a path.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from weft import rng
from weft.config import Config
from weft.data import documents as readers
from weft.data import files, tables
from weft.data.documents import Document
from weft.errors import DataError

Split = Literal["train", "heldout"]


class StdlibSource(Config, frozen=True, kw_only=True, tag="stdlib"):
    """The running Python's standard library, without its tests and generated tables: about 10 MB of source."""


class TextSource(Config, frozen=True, kw_only=True, tag="text"):
    """Files of text, one document each: UTF-8, or what a byte order mark says; .gz, .bz2, .xz and .zst are unpacked."""

    paths: Annotated[
        tuple[str, ...], Meta(min_length=1, description="files, folders (all files below that are not hidden) or globs")
    ]


class JsonlSource(Config, frozen=True, kw_only=True, tag="jsonl"):
    """Files with one JSON object per line, or one array of them, one document each; .gz and the like are unpacked."""

    paths: Annotated[
        tuple[str, ...], Meta(min_length=1, description="files, folders (*.jsonl, *.ndjson and *.json below) or globs")
    ]
    field: Annotated[str, Meta(description="the object's field that holds the text; a dot leads into an object")] = (
        "text"
    )


class ParquetSource(Config, frozen=True, kw_only=True, tag="parquet"):
    """Parquet, Arrow or Feather files, one document per row."""

    paths: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="files, folders (*.parquet, *.arrow, *.feather and *.ipc below) or globs"),
    ]
    column: Annotated[str, Meta(description="the column that holds the text; a dot leads into a struct")] = "text"


class DatasetSource(Config, frozen=True, kw_only=True, tag="datasets"):
    """A dataset of the Hugging Face hub, streamed; needs `pip install "weft[datasets]"`."""

    name: Annotated[str, Meta(min_length=1, description="its name on the hub")]
    subset: Annotated[str | None, Meta(description="its configuration, where it has several")] = None
    split: Annotated[str, Meta(description="which of its splits; weft cuts held-out text from it itself")] = "train"
    column: Annotated[str, Meta(description="the column that holds the text")] = "text"
    revision: Annotated[str | None, Meta(description="commit or tag; None takes the newest")] = None
    # Stop after this many; None takes all.
    max_documents: Annotated[int, Meta(ge=1)] | None = None


class BinSource(Config, frozen=True, kw_only=True, tag="bin"):
    """Token ids made elsewhere, as bare little-endian integers (nanoGPT's train.bin and val.bin)."""

    path: Annotated[str, Meta(description="the tokens to train on")]
    heldout_path: Annotated[str | None, Meta(description="the held-out tokens; None cuts the end of `path`")] = None
    dtype: Annotated[Literal["uint16", "uint32"], Meta(description="the width of one token")] = "uint16"


TooLong = Annotated[
    Literal["cut", "leave_out"],
    Meta(description="what becomes of a conversation longer than train.seq_len: its first tokens, or nothing"),
]
Date = Annotated[
    str,
    Meta(
        pattern=r"\A\d{4}-\d{2}-\d{2}\Z",
        description="the day that templates are told which ask for it: fixed, so that the same files give one run",
    ),
]


USUAL_DATE = "2026-01-01"


class ConversationsSource(Config, frozen=True, kw_only=True, tag="conversations"):
    """Conversations, written by the model's chat template; the assistant's answers alone are trained on."""

    paths: Annotated[
        tuple[str, ...], Meta(min_length=1, description="files of JSON lines or tables, folders of such, or globs")
    ]
    template: Annotated[str, Meta(description="a file of Jinja")] | None = None  # None: the model's own
    too_long: TooLong = "cut"
    date: Date = USUAL_DATE


class PreferencesSource(ConversationsSource, frozen=True, kw_only=True, tag="preferences"):
    """Conversations that go on in two ways, of which one was chosen and one rejected, to learn what is preferred."""


class TasksSource(ConversationsSource, frozen=True, kw_only=True, tag="tasks"):
    """Tasks whose answers can be checked, as `weft eval --tasks` reads them: what rewards are learnt from."""

    too_long: Annotated[  # half a task is none
        Literal["leave_out"], Meta(description="what becomes of a task for which train.seq_len has no room: nothing")
    ] = "leave_out"


TextualSource = StdlibSource | TextSource | JsonlSource | ParquetSource | DatasetSource
SourceConfig = TextualSource | BinSource | ConversationsSource | PreferencesSource | TasksSource


class CorpusConfig(Config, frozen=True, kw_only=True):
    """What a run reads. It belongs to the run file and to one machine: paths are relative to that file's folder."""

    source: SourceConfig = StdlibSource()
    heldout_fraction: Annotated[float, Meta(gt=0, le=0.5, description="share of the text that is held out")] = 0.05


def documents(source: TextualSource, base: Path) -> Iterator[Document]:
    """Yield the documents of `source` in an order that depends on names only.

    Args:
        base: the folder that relative paths start from: the run file's.

    Raises:
        DataError: nothing there, unreadable, malformed, or not UTF-8; names the file and the place.
    """
    match source:
        case StdlibSource():
            return readers.stdlib_documents()
        case TextSource(paths=paths):
            return readers.text_documents(paths, base)
        case JsonlSource(paths=paths, field=field):
            return readers.jsonl_documents(paths, base, field)
        case ParquetSource(paths=paths, column=column):
            return tables.table_documents(paths, base, column)
        case DatasetSource():
            stream = readers.dataset_documents(source.name, source.subset, source.split, source.column, source.revision)
            return islice(stream, source.max_documents)


def source_of(paths: Sequence[str], base: Path) -> TextSource | JsonlSource | ParquetSource:
    """Return how files are read of which nobody says it: JSON lines and tables where all are such by their names.

    Args:
        paths: as of the sources.
        base: the folder that relative paths start from.

    Raises:
        DataError: as `documents`, or text, JSON lines and tables are mixed.
    """
    found = files.find(paths, base)
    of_lines = [file for file in found if files.has_ending(file.path.name, readers.LINES)]
    of_tables = [file for file in found if files.has_ending(file.path.name, tables.TABLES)]
    if len(of_lines) == len(found):
        return JsonlSource(paths=tuple(paths))
    if len(of_tables) == len(found):
        return ParquetSource(paths=tuple(paths))
    # Among text .json is text: settings of a program, beside its source.
    for file in (*of_tables, *(each for each in of_lines if not files.has_ending(each.path.name, (".json",)))):
        raise DataError(f"{file.path} is among text files. Name one kind at a time: text, JSON lines or tables.")
    return TextSource(paths=tuple(paths))


def text_nbytes(source: SourceConfig, base: Path) -> int | None:
    """Return about how many bytes of text `source` holds, without reading it; None where that cannot be told.

    Raises:
        DataError: as `documents`.
    """
    match source:
        case StdlibSource():
            found = files.stdlib_files()
        case TextSource(paths=paths):
            found = files.find(paths, base)
        case JsonlSource() | ParquetSource() | DatasetSource() | BinSource() | ConversationsSource():
            return None  # they hold more than their text, or are elsewhere
    if any(files.is_packed(file.path) for file in found):
        return None
    return sum(file.path.stat().st_size for file in found if file.path.is_file())


def split(
    source: TextualSource, base: Path, heldout_fraction: float, on_empty: Callable[[], None] = lambda: None
) -> Iterator[tuple[Split, str]]:
    """Yield every non-empty piece of text with the side it is on.

    Documents without text count for nothing; `on_empty` is told of each. The first 1 / heldout_fraction others are read
    twice. Of those, the one with the lowest hash is always held out, so that neither side is empty. Of a fraction of 0
    nothing is held out.

    Raises:
        DataError: as `documents`, or there is no text at all.
    """
    is_few_below = ceil(1 / heldout_fraction) if heldout_fraction else 1
    first = [document.name for document in islice(_written(source, base), is_few_below)]
    lowest = min(range(len(first)), key=lambda number: rank(first[number]), default=None)
    surely_heldout = lowest if heldout_fraction else None
    for number, document in enumerate(_written(source, base, on_empty)):
        if len(first) < is_few_below:
            border = int(len(document.text) * (1 - heldout_fraction))
            pieces: tuple[tuple[Split, str], ...] = (
                ("train", document.text[:border]),
                ("heldout", document.text[border:]),
            )
        else:
            is_heldout = number == surely_heldout or rank(document.name) < heldout_fraction
            pieces = (("heldout" if is_heldout else "train", document.text),)
        for side, text in pieces:
            if text:
                yield side, text
    if not first:
        raise DataError("the corpus is empty: the files that were named hold no text. Name others.")


def _written(source: TextualSource, base: Path, on_empty: Callable[[], None] = lambda: None) -> Iterator[Document]:
    for document in documents(source, base):
        if document.text:
            yield document
        else:
            on_empty()


def rank(name: str) -> float:
    """Return the document's place in [0, 1), the same on every machine: below heldout_fraction it is held out."""
    # 52 bits: exact in a double.
    return int(rng.order_key("heldout", name)[:13], 16) / (1 << 52)
