"""Sentences for a terminal: broken between words only, so that a path or a digest can be copied as it is.

A word that is longer than the line stands on a line of its own and runs over.
"""

import shutil
import sys
import textwrap


def terminal_width() -> int:
    """Return how many columns the terminal has; 80 where there is none."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Return one paragraph as lines of at most `width`, all but the first behind `indent`; None: as it is."""
    if width is None:
        return text
    return textwrap.fill(text, max(20, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def tell(text: str) -> None:
    """Print one paragraph on standard error, wrapped where that is a terminal."""
    print(wrapped(text, terminal_width() if sys.stderr.isatty() else None), file=sys.stderr, flush=True)  # noqa: T201
