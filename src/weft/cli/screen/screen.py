"""Where the view is shown: redrawn in place on a terminal, plain lines elsewhere, or not at all.

All of it goes to standard error: standard output is for what was asked for (a ticket, a text, a summary).
A screen is a sink. Events come from the event loop and from the thread that trains, so a lock guards the fold.
"""

import sys
import threading
from collections.abc import Iterable
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.live import Live

from weft.cli.screen.draw import draw, progress
from weft.cli.terminal import WorkLine, tell
from weft.dashboard import figures
from weft.dashboard.view import About, View, news_of, update
from weft.events import Entry, Evaluated, Event, RoundCommitted

_REDRAWS_PER_S = 4


class Screen:
    """A sink that may also be told of the run. This one folds events and shows nothing."""

    def __init__(self) -> None:
        self.view = View()
        self._lock = threading.Lock()

    def write(self, entry: Entry) -> None:
        with self._lock:
            self.view = update(self.view, entry)

    def take(self, before: Iterable[Entry]) -> None:
        """Take what was told in an earlier life of the run, and say nothing of it: it is no news."""
        with self._lock:
            for entry in before:
                self.view = update(self.view, entry)
            self.view = replace(self.view, notables=())

    def start(self, run: About, wait_for: int = 1) -> None:
        """Take what is known of the run, and how many peers it begins with."""
        with self._lock:
            self.view = replace(self.view, run=run, wait_for=wait_for)

    def aside(self, event: Event) -> None:
        """Take how far work has come before there is a view of the run."""

    def say(self) -> None:
        """Say what has happened so far, where there will be no view."""

    def note(self, text: str) -> None:
        """Say what no event tells."""

    def close(self) -> None:
        pass


class PlainScreen(Screen):
    """A line for every commit, evaluation and notable event, each written at once."""

    def __init__(self) -> None:
        super().__init__()
        self._work = WorkLine()

    def aside(self, event: Event) -> None:
        self._work(event)

    def note(self, text: str) -> None:
        tell(text)

    def start(self, run: About, wait_for: int = 1) -> None:
        super().start(run, wait_for)
        if self.view.num_awaited:
            print(progress(self.view), file=sys.stderr, flush=True)  # noqa: T201

    def write(self, entry: Entry) -> None:
        with self._lock:
            before, self.view = self.view, update(self.view, entry)
            line = plain_line(before, self.view, entry)
            self.aside(entry.event)
        if line is not None:
            print(line, file=sys.stderr, flush=True)  # noqa: T201  # this is the terminal


class LiveScreen(Screen):
    """Redraws the view in place, a few times a second, in a thread of rich's own."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._work = WorkLine()

    def write(self, entry: Entry) -> None:
        super().write(entry)
        self.aside(entry.event)

    def aside(self, event: Event) -> None:
        with self._lock:
            if self._live is None:
                self._work(event)

    def say(self) -> None:
        with self._lock:
            self._work.close()
            said = [news.text for news in self.view.notables]
        for text in said:
            tell(text)

    def note(self, text: str) -> None:
        tell(text)  # above the view

    def start(self, run: About, wait_for: int = 1) -> None:
        super().start(run, wait_for)
        if self._live is None:
            self._work.close()
            self._live = Live(
                get_renderable=self._draw,
                console=Console(stderr=True),
                refresh_per_second=_REDRAWS_PER_S,
                redirect_stdout=False,
                redirect_stderr=True,
            )
            self._live.start()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _draw(self) -> RenderableType:
        size = self._live.console.size if self._live is not None else Console(stderr=True).size
        return draw(self.view, size.width, size.height)


def make_screen(*, is_quiet: bool) -> Screen:
    """Return the screen for standard error as it is."""
    if is_quiet:
        return Screen()
    return LiveScreen() if Console(stderr=True).is_terminal else PlainScreen()


def plain_line(before: View, after: View, entry: Entry) -> str | None:
    """Return what to print of an entry that turned `before` into `after`, or None.

    A commit that several peers report is printed once, and so is what they say in the same words.
    """
    match entry.event:
        case RoundCommitted() if after.committed_tokens > before.committed_tokens:
            return progress(after)
        case Evaluated() as told if after.evaluated is not before.evaluated:
            return f"held-out loss after round {told.round}: {figures.heldout_of(told)}"
    news = news_of(before, entry)
    return None if news is None else news.text
