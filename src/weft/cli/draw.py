"""The view as a terminal shows it: one line per peer, the loss curve, bytes, time left, what happened last.

Pure: a `View` in, something rich can print out. It does not know where it is printed.
"""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.cli import figures
from weft.cli.view import Line, View

_LEVELS = " ▁▂▃▄▅▆▇█"
_CURVE_HEIGHT = 6
_CURVE_WIDTH = 64
_AWAY = {"gone", "left", "stopped"}
_GOOD = {"training", "joined", "starting", "data ready", "back", "complete"}


def draw(view: View) -> RenderableType:
    """Return the whole view."""
    parts: list[RenderableType] = [_peers(view), Text(progress(view), style="bold")]
    if len(view.losses) > 1:
        parts.append(_curve_panel(view))
    if view.ring_nbytes:
        parts.append(Text(traffic(view)))
    parts += [Text(f"· {news.text}", style="dim", overflow="ellipsis", no_wrap=True) for news in view.notables]
    return Group(*parts)


def progress(view: View) -> str:
    """Return where the run stands in one line: also what is printed where there is no terminal."""
    words = [] if view.round is None else [f"round {view.round}"]
    num_peers = sum(line.state not in _AWAY for line in view.lines.values())
    words.append(f"{num_peers} peer{'s' if num_peers != 1 else ''}")
    if view.facts is not None:
        share = min(100, 100 * view.committed_tokens / view.facts.total_tokens)
        total = figures.amount(view.facts.total_tokens)
        words.append(f"{figures.amount(view.committed_tokens)} of {total} tokens ({share:.0f} %)")
    if view.losses:
        words.append(f"loss {view.losses[-1][1]:.3f}")
    if view.evaluations:
        words.append(f"held-out {view.evaluations[-1][1]:.3f} nats per byte")
    if view.time_left_s is not None:
        words.append(f"{figures.duration(view.time_left_s)} left")
    return "  ".join(words)


def traffic(view: View) -> str:
    """Return bytes sent and received beside what bf16 ring DDP would have moved."""
    used = view.sent_nbytes + view.received_nbytes
    return (
        f"{figures.nbytes(view.sent_nbytes)} sent, {figures.nbytes(view.received_nbytes)} received; bf16 ring DDP: "
        f"{figures.nbytes(view.ring_nbytes)}, {figures.ratio(view.ring_nbytes, used)} as much"
    )


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return `values` as a filled curve of block characters, the highest line first.

    Args:
        values: at least one; more than `width` are averaged into columns.
    """
    columns = _resample(values, min(width, len(values)))
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    # The lowest value still shows one eighth, so that a column is never missing.
    eighths = [1 + round((value - low) / span * (8 * height - 1)) for value in columns]
    return [
        "".join(_LEVELS[min(8, max(0, count - 8 * (height - 1 - row)))] for count in eighths) for row in range(height)
    ]


def _resample(values: Sequence[float], width: int) -> list[float]:
    borders = [len(values) * column // width for column in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]


def _curve_panel(view: View) -> RenderableType:
    losses = [loss for _, loss in view.losses]
    rows = curve(losses, _CURVE_WIDTH, _CURVE_HEIGHT)
    axis = [f"{max(losses):7.3f} ", *["        "] * (_CURVE_HEIGHT - 2), f"{min(losses):7.3f} "]
    body = Text("\n").join(Text.assemble((label, "dim"), (row, "cyan")) for label, row in zip(axis, rows, strict=True))
    return Panel(body, title="training loss, nats per token", title_align="left", expand=False, border_style="dim")


def _peers(view: View) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("peer", max_width=20, no_wrap=True)
    for title in ("tokens/s", "round", "loss"):
        table.add_column(title, justify="right")
    table.add_column("link")
    table.add_column("state")
    for peer, line in sorted(view.lines.items(), key=lambda item: (view.name(item[0]), item[0])):
        table.add_row(view.name(peer), *_cells(line))
    return table


def _cells(line: Line) -> tuple[RenderableType, ...]:
    return (
        figures.amount(line.tokens_per_s) if line.tokens_per_s else "-",
        "-" if line.round is None else str(line.round),
        "-" if line.loss is None else f"{line.loss:.3f}",
        line.link or ("here" if line.is_heard else "-"),
        Text(line.state, style="green" if line.state in _GOOD else "yellow"),
    )
