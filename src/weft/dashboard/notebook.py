"""`weft.Chart`: how a run goes, as a picture in a notebook that changes while it is trained.

    weft.train(config, callbacks=[weft.Chart()])

Outside a notebook it only keeps what it is told; `chart.html()` is the picture at any time.
"""

from contextlib import suppress
from html import escape
from importlib import import_module
from typing import Any

from weft.dashboard import figures
from weft.dashboard.chart import Curve, chart
from weft.dashboard.history import History
from weft.events import Entry, Evaluated, PeerStopped, RoundCommitted

EVERY_S = 1.0  # between two pictures


class Chart:
    """Curves of loss, and figures, of the peer whose events it is given."""

    def __init__(self) -> None:
        self._history = History()
        self._shown_at = float("-inf")
        self._display: Any = None  # of IPython, once there is something to show

    def __call__(self, entry: Entry) -> None:
        self._history.take(entry)
        is_last = isinstance(entry.event, PeerStopped)
        is_news = isinstance(entry.event, RoundCommitted | Evaluated) and entry.at - self._shown_at >= EVERY_S
        if is_last or is_news:
            self._shown_at = entry.at
            self._show()

    def html(self) -> str:
        tree = self._history.whole()
        curves = [
            Curve("training", [(row[1], row[2]) for row in tree["train"]]),
            Curve("held-out", [(row[1], row[2]) for row in tree["heldout"]]),
        ]
        return f"<div><p>{escape(self._words())}</p>{chart('Loss, nats per token', 'tokens', curves)}</div>"

    _repr_html_ = html

    def _words(self) -> str:
        now = self._history.now
        words = [f"{now.num_rounds:,} rounds", f"{figures.amount(now.committed_tokens)} tokens"]
        if now.loss is not None:
            words.append(f"loss {now.loss:.3f}")
        if now.heldout is not None:
            words.append(f"held-out {now.heldout:.3f}")
        words.append(f"{figures.nbytes(now.moved_nbytes)} moved")
        return ", ".join(words)

    def _show(self) -> None:
        if self._display is not None:
            self._display.update(self)
            return
        with suppress(ImportError):
            ipython: Any = import_module("IPython")
            if ipython.get_ipython() is not None:
                self._display = ipython.display.display(self, display_id=True)
