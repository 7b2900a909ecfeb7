"""Text files named on a command line, which start from the folder the command is run in."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.data.files import Document


def own_nbytes(paths: Sequence[str]) -> int | None:
    """Return about how much text --data names; None where that cannot be told."""
    from weft.data import TextSource
    from weft.data.corpus import text_nbytes
    from weft.errors import DataError

    try:
        return text_nbytes(TextSource(paths=tuple(paths)), Path.cwd())
    except DataError:
        return None  # whoever reads it says why


def own_documents(paths: Sequence[str]) -> "Iterator[Document]":
    """Yield the documents that --data names.

    Raises:
        DataError: nothing there, unreadable, or not UTF-8.
    """
    from glob import has_magic

    from weft.data import TextSource
    from weft.data.corpus import documents
    from weft.errors import DataError

    for path in paths:
        if not Path(path).exists() and not has_magic(path):
            raise DataError(f"--data {path}: no such file or folder in {Path.cwd()}.")
    return documents(TextSource(paths=tuple(paths)), Path.cwd())
