"""Curves as SVG: axes with round numbers, a line for each, and its name where it ends.

`weft.Chart` shows them in a notebook, in a picture that changes while a run is trained:

    weft.train(config, callbacks=[weft.Chart()])
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

from weft.dashboard import figures
from weft.dashboard.history import History
from weft.events import Entry, Evaluated, PeerStopped, RoundCommitted
from weft.ids import several

WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 120, 16, 40
EVERY_S = 1.0  # between two pictures in a notebook
MAX_POINTS = 600  # of a curve: more than there are columns
# Told apart by those who see red and green alike (Okabe and Ito, 2008), and on light and dark ground.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, across: str, curves: Iterable[Curve]) -> str:
    """Return a picture of curves over the same axes.

    Args:
        across: what the horizontal axis counts.
    """
    drawn = [Curve(curve.name, thinned(curve.points)) for curve in curves if len(curve.points) > 1]
    points = [point for curve in drawn for point in curve.points]
    xs, ys = ticks(*_span(x for x, _ in points)), ticks(*_span(y for _, y in points))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (WIDTH - _LEFT - _RIGHT) * (x - xs[0]) / (xs[-1] - xs[0]),
            HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (y - ys[0]) / (ys[-1] - ys[0]),
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_words(title, drawn))}">']
    for y in ys:
        left, height = at(xs[0], y)
        right, _ = at(xs[-1], y)
        parts.append(f'<path d="M{left:.1f} {height:.1f}H{right:.1f}" stroke="currentColor" opacity=".15"/>')
        parts.append(_text(left - 8, height + 4, _short(y, ys), "end"))
    for x in xs:
        where, bottom = at(x, ys[0])
        parts.append(_text(where, bottom + 18, _short(x, xs), "middle"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 4, across, "middle"))
    names: list[float] = []
    for number, curve in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in curve.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>')
        end, height = at(*curve.points[-1])
        while any(abs(height - other) < 14 for other in names):
            height += 14
        names.append(height)
        parts.append(f'<circle cx="{end + 8:.1f}" cy="{height:.1f}" r="4" fill="{colour}"/>')
        parts.append(_text(end + 16, height + 4, curve.name[:16], "start"))
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers from at most `low` to at least `high`, about `wanted` of them and two at least."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # no span, or too fine for floats to count in its steps
        low, high = low - max(abs(low), 1.0) / 2, high + max(abs(high), 1.0) / 2
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points that are finite, as many as can be seen, the last among them."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    every = max(1, math.ceil(len(finite) / MAX_POINTS))
    return finite[::-1][::every][::-1]


def _span(values: Iterable[float]) -> tuple[float, float]:
    found = list(values) or [0.0, 1.0]
    return min(found), max(found)


def _short(value: float, all_: Sequence[float]) -> str:
    if max(map(abs, all_)) >= 1000:
        return figures.amount(value) if value >= 0 else f"-{figures.amount(-value)}"
    digits = max(0, -math.floor(math.log10(all_[1] - all_[0]) + 1e-9))
    return f"{value:.{digits}f}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="currentColor">{escape(text)}</text>'
    )


def _words(title: str, curves: Sequence[Curve]) -> str:
    """Return the picture in a sentence, for who does not see it."""
    ends = "; ".join(f"{curve.name} from {curve.points[0][1]:.4g} to {curve.points[-1][1]:.4g}" for curve in curves)
    return f"{title}: {ends}." if ends else title


# --- in a notebook ---


class Chart:
    """Curves of loss, and figures, of the peer whose events it is given.

    Outside a notebook it only keeps what it is told; `chart.html()` is the picture at any time.
    """

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
        drawn = chart(f"Loss, {figures.per(self._history.view.loss_of)}", "tokens", curves)
        return f"<div><p>{escape(self._words())}</p>{drawn}</div>"

    _repr_html_ = html

    def _words(self) -> str:
        now, of = self._history.now, self._history.view.loss_of
        words = [several(now.num_rounds, "round"), f"{figures.amount(now.committed_tokens)} tokens"]
        if now.loss is not None:
            words.append(f"loss {figures.nats(now.loss, of)}")
        if now.heldout is not None:
            words.append(f"held-out {figures.nats(now.heldout, of)}")
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
