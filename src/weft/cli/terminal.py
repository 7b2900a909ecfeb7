"""How far work has come that takes long, as one line on standard error.

On a terminal the line is rewritten in place, and wiped when the work is over; elsewhere it is printed now and then.
"""

import sys
from typing import Any

from weft.clock import Clock, SystemClock
from weft.dashboard import figures
from weft.events import Event, Working

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
