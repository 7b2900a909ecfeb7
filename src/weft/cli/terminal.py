"""Lines for a terminal: how far work has come that takes long, and sentences.

The line of work is rewritten in place, and wiped when the work is over; where there is no terminal it is printed now
and then. Sentences break between words only, so that a path or a digest can be copied as it is.
"""

import shutil
import sys
import textwrap
from typing import Any

import typer

from weft.clock import Clock, SystemClock
from weft.dashboard import figures
from weft.events import Event, Working

TO_SCREEN = "json:-"  # of --log: lines for a program where the picture would be
PRINTED_EVERY_S = 10.0  # where lines stay
_WIPE = "\r\x1b[2K"


class WorkLine:
    """Takes events, and shows those that tell of work."""

    def __init__(self, stream: Any = None, clock: Clock | None = None) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock or SystemClock()
        self._is_terminal = self._stream.isatty()
        self._shown_at: float | None = None
        self._what = ""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Working):
            return
        if event.is_over:
            self.close()
        elif self._is_terminal:
            self._shown_at = self._clock.now()
            self._write(_WIPE + figures.work(event))
        elif self._shown_at is None or self._what != event.what or self._is_time():
            self._shown_at, self._what = self._clock.now(), event.what
            self._write(figures.work(event) + "\n")

    def close(self) -> None:
        """Wipe what is to be rewritten."""
        if self._is_terminal and self._shown_at is not None:
            self._write(_WIPE)
        self._shown_at = None

    def _is_time(self) -> bool:
        return self._shown_at is not None and self._clock.now() - self._shown_at >= PRINTED_EVERY_S

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def terminal_width() -> int:
    """Return how many columns the terminal has; 80 where there is none."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Return one paragraph as lines of at most `width`, all but the first behind `indent`; None: as it is."""
    if width is None:
        return text
    return textwrap.fill(text, max(20, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def agrees(question: str, *, default: bool) -> bool:
    """Ask the person at the terminal until the answer is a yes or a no; Enter alone is the default.

    Raises:
        typer.Abort: the input has ended.
    """
    asked, usual = (f"{question} [Y/n]", "yes") if default else (f"{question} [y/N]", "no")
    while True:
        given = str(typer.prompt(asked, default="", show_default=False, err=True)).strip().casefold()
        if given in ("", "y", "yes", "n", "no"):
            return given.startswith("y") if given else default
        tell(f"{given[:40]!r} is no answer here. Type y for yes or n for no; Enter alone is {usual}.")


def say_loading(*, is_quiet: bool = False) -> None:
    """Say, before PyTorch is imported, what a person waits for: on a busy machine that takes a minute."""
    if not is_quiet and "torch" not in sys.modules:
        tell("loading PyTorch ...")


def tell(text: str) -> None:
    """Print one paragraph on standard error, wrapped where that is a terminal."""
    print(wrapped(text, terminal_width() if sys.stderr.isatty() else None), file=sys.stderr, flush=True)  # noqa: T201
