"""The view as a terminal shows it: a line per peer and stage, the loss curve, bytes, time left, what happened last.

Pure: a `View` in, something rich can print out.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.cli.terminal import wrapped
from weft.dashboard import figures
from weft.dashboard.figures import is_away
from weft.dashboard.stages import Stages, ordinal, rate, slowest
from weft.dashboard.view import Line, View
from weft.ids import several

_LEVELS = " ▁▂▃▄▅▆▇█"
_CURVE_HEIGHT = 6
_CURVE_WIDTH = 64
_MIN_SPAN = 0.25  # of the highest value: less than that from top to bottom would show noise as a fall
_SMOOTH_FROM = 16  # columns; of fewer every one counts
_NUM_NEIGHBOURS = 2  # on either side, that a column is averaged with
_MAX_NEWS_LINES = 8
_DAY_S = 12 * 3600.0  # after which a time of day says too little
_CURVE_FROM_ROWS = 18  # on a lower terminal the curve has no place
_MAX_STAGES = 8  # that have a line each
_GOOD = {
    *("training", "helping", "joined", "joining", "starting", "waiting"),
    *("data ready", "back", "finishing", "finished"),
}


def draw(view: View, width: int = 80, height: int = 40) -> RenderableType:
    """Return the whole view for a terminal of so many columns and rows."""
    status = Text(progress(view, width), style="bold", no_wrap=True, overflow="crop")
    watching = [Text(f"watching: {view.num_watching}", style="dim")] if view.num_watching else []
    parts: list[RenderableType] = [_peers(view, width), *watching, status]
    losses = [loss for _, loss in view.losses.points if math.isfinite(loss)]
    num_rows = 2 + len(view.lines) + len(watching)
    if view.cut.num:
        held = [Text(f"this peer holds {view.held}")] if view.held else []
        stages = _stages(view.cut)
        parts[1:1] = [*held, stages]
        num_rows += len(held) + (1 + stages.row_count if isinstance(stages, Table) else 1)
    if len(losses) > 1 and height >= _CURVE_FROM_ROWS:
        of = f" of {whose}" if (whose := _whose_loss(view)) else ""
        parts.append(_curve_panel(losses, min(_CURVE_WIDTH, max(8, width - 12)), f"{of}, {figures.per(view.loss_of)}"))
        num_rows += _CURVE_HEIGHT + 2
    if view.ring_nbytes or (view.cut.num and view.sent_nbytes):
        text = "\n".join(wrapped(line, width, "  ") for line in traffic(view).split("\n"))
        parts.append(Text(text))
        num_rows += text.count("\n") + 1
    parts += [Text(line, style="dim") for line in _news(view, width, height - num_rows - 1)]
    return Group(*parts)


def progress(view: View, width: int | None = None) -> str:
    """Return where the run stands in one line: also what is printed where there is no terminal.

    Args:
        width: columns that it must not exceed: it is shortened, and how many peers there are is left to their table.
    """
    if view.num_awaited:
        text = f"waiting for {several(view.num_awaited, 'more peer')}"
        return text if width is None else text[:width]
    said = _said(view)
    if width is None:
        return "  ".join(long for long, _ in said.values())
    said.pop("peers", None)
    said.pop("stage", None)
    words = {name: long for name, (long, _) in said.items()}
    # First shortened, both losses at once, since they are of one unit, then left out.
    for names in (("loss", "heldout"), ("tokens",), ("loss",), ("heldout",), ("left",)):
        if len("  ".join(words.values())) <= width:
            break
        for name in words.keys() & set(names):
            short = said[name][1]
            words[name] = short if words[name] != short else ""
        words = {name: word for name, word in words.items() if word}
    return "  ".join(words.values())[:width]


def _said(view: View) -> dict[str, tuple[str, str]]:
    """Return the parts of the line of progress, each at length and in short."""
    said = {} if view.round is None else {"round": (f"round {view.round}",) * 2}
    if view.held:
        said["stage"] = (view.held.split(",")[0], "")
    num_peers = sum(not is_away(line.state) for line in view.lines.values())
    if num_peers or not view.is_complete:
        said["peers"] = (several(num_peers, "peer"), "")
    if (empty := view.cut.empty()) and not view.is_complete:
        said["empty"] = (f"nobody computes {ordinal(empty, 0)}", f"{len(empty)} without peers")
    if view.run.total_tokens is not None:
        total, done = view.run.total_tokens, view.committed_tokens
        is_known = view.round is not None  # who comes to a run hears what is done with the first round
        said["tokens"] = (
            (figures.tokens(done, total), figures.percent(done, total))
            if is_known
            else (f"{figures.amount(total)} tokens in all",) * 2
        )
    if view.losses.points:
        loss = f"loss {view.losses.points[-1][1]:.3f}"
        of = f" of {whose}" if (whose := _whose_loss(view)) else ""
        unit = figures.per(view.loss_of)
        said["loss"] = (f"{loss} {unit}{of}", f"{loss} {unit.replace(' per ', '/')}")
    if (told := view.evaluated) is not None:
        heldout, at = f"held-out {told.loss:.3f}", "" if told.round == view.round else f" (round {told.round})"
        unit = figures.per(view.loss_of)
        said["heldout"] = (f"{heldout} {unit}{at}", f"{heldout} {unit.replace(' per ', '/')}{at}")
    if view.time_left_s is not None and not view.is_complete:
        said["left"] = (f"{figures.duration(view.time_left_s)} left", "")
    return said


def _whose_loss(view: View) -> str:
    """Return whose steps alone the training loss is of; empty: of all that take part."""
    heard = [peer for peer, line in view.peers.items() if line.is_heard]
    return view.name(heard[0]) if len(heard) == 1 and len(view.lines) > 1 else ""


def traffic(view: View) -> str:
    """Return bytes sent and received, and by whom, and below them what bf16 ring DDP would have moved."""
    moved = f"sent {figures.nbytes(view.sent_nbytes)}, received {figures.nbytes(view.received_nbytes)}"
    heard = [view.name(peer) for peer, line in view.peers.items() if line.is_heard and line.name]
    who = f"{view.num_heard} peers together" if view.num_heard > 1 else "".join(heard)
    said = f"{who} {moved}".strip()
    return f"{said}\n{ring(view)}" if view.ring_nbytes else said


def ring(view: View) -> str:
    """Return what the same rounds would have cost the same peers with gradients exchanged at each step."""
    times = figures.times(view.ring_nbytes, view.sent_nbytes + view.received_nbytes)
    return f"ring DDP, which exchanges gradients at every step: {figures.nbytes(view.ring_nbytes)}{times}"


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return `values` as a filled curve of block characters, the highest line first.

    Args:
        values: at least one; more than `width` are averaged into columns.
    """
    columns = _columns(values, width)
    eighths = _eighths(columns, height)
    return [
        "".join(_LEVELS[min(8, max(0, count - 8 * (height - 1 - row)))] for count in eighths) for row in range(height)
    ]


def _eighths(columns: Sequence[float], height: int) -> list[int]:
    """Return how high each column is. The lowest value still shows one eighth, so that a column is never missing."""
    low, high = scale(columns)
    return [1 + round((value - low) / (high - low) * (8 * height - 1)) for value in columns]


def axis(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return a label for each line of the same curve: the highest value, and the lowest where it lies."""
    columns = _columns(values, width)
    lowest = min(columns)
    at = height - -(-min(_eighths(columns, height)) // 8)
    labels = [""] * height
    labels[at], labels[0] = f"{lowest:.3f}", f"{max(columns):.3f}"
    return labels


def _resample(values: Sequence[float], width: int) -> list[float]:
    borders = [len(values) * column // width for column in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]


def scale(columns: Sequence[float]) -> tuple[float, float]:
    """Return what the lowest and the highest line of a curve stand for."""
    high = max(columns)
    return min(*columns, high - (_MIN_SPAN * abs(high) or 1.0)), high


def _columns(values: Sequence[float], width: int) -> list[float]:
    columns = _resample(values, min(width, len(values)))
    if len(columns) < _SMOOTH_FROM:
        return columns
    near = [columns[max(0, at - _NUM_NEIGHBOURS) : at + _NUM_NEIGHBOURS + 1] for at in range(len(columns))]
    return [sum(each) / len(each) for each in near]


def _curve_panel(losses: Sequence[float], width: int, of: str) -> RenderableType:
    rows = curve(losses, width, _CURVE_HEIGHT)
    labels = [f"{label:>7} " for label in axis(losses, width, _CURVE_HEIGHT)]
    lines = zip(labels, rows, strict=True)
    body = Text("\n").join(Text.assemble((label, "dim"), (row, "cyan")) for label, row in lines)
    return Panel(body, title=f"training loss{of}", title_align="left", expand=False, border_style="dim")


def _news(view: View, width: int, num_rows: int) -> list[str]:
    """Return what happened last, wrapped; where there is no room the oldest is left out."""
    lines: list[str] = []
    for news in reversed(view.notables):
        more = wrapped(f"· {_time(news.at, view.now)} {news.text}", width, "  ").split("\n")
        if lines and len(lines) + len(more) > min(_MAX_NEWS_LINES, num_rows):
            break
        lines = [*more, *lines]
    return lines


def _time(at: float, now: float) -> str:
    """Return when something happened by this machine's clock, with its date where that is not today's."""
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M" if now - at < _DAY_S else "%Y-%m-%d %H:%M")


def _peers(view: View, width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("peer", max_width=20, no_wrap=True)
    titles = [title for title, least in _COLUMNS if width >= least and (view.cut.num or title != "stage")]
    for title in titles:
        table.add_column(title, justify="left" if title in ("link", "state") else "right", no_wrap=True)
    for peer, line in sorted(view.lines.items(), key=lambda item: (view.name(item[0]), item[0])):
        cells = _cells(line, is_waiting=view.num_awaited > 0)
        cells["stage"] = ", ".join(str(stage + 1) for stage in view.stages.of(peer)) or "-"
        table.add_row(view.name(peer), *(cells[title] for title in titles))
    return table


def _stages(stages: Stages) -> Table | Text:
    """Return a line for each stage, or of many stages what a person should know."""
    weakest = slowest(stages)
    if stages.num > _MAX_STAGES:
        sizes = [len(each.members) for each in stages.now]
        most = "" if weakest is None else f", the slowest is {ordinal([weakest], 0)}"
        return Text(f"{stages.num} stages of {min(sizes)} to {several(max(sizes), 'peer')}{most}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("stage", "layers", "peers", "rate", "waiting"):
        table.add_column(title, justify="left" if title == "layers" else "right", no_wrap=True)
    empty = stages.empty()
    for number, each in enumerate(stages.now):
        peers = Text("nobody", style="yellow") if number in empty else Text(str(len(each.members)))
        speed = f"{rate(each)}{', slowest' if number == weakest else ''}"
        table.add_row(f"{number + 1} of {stages.num}", each.layers or "-", peers, speed, str(each.waiting))
    return table


# And the columns that a terminal must have.
_COLUMNS = (("stage", 0), ("tokens/s", 60), ("round", 0), ("nats/token", 50), ("link", 66), ("state", 0))


def _cells(line: Line, *, is_waiting: bool) -> dict[str, RenderableType]:
    state = "waiting" if is_waiting and line.state in {"starting", "data ready"} else line.state
    is_here = not is_away(line.state) or line.state == "finished"  # it may still measure what all has come to
    shown = line.work if line.work and is_here else state
    link = "" if is_away(line.state) else line.link or ("here" if line.is_heard else "")
    return {
        "tokens/s": figures.amount(line.tokens_per_s) if line.tokens_per_s else "-",
        "round": "-" if line.round is None else str(line.round),
        "nats/token": "-" if line.loss is None else f"{line.loss:.3f}",
        "link": link or "-",
        "state": Text(shown, style="green" if state in _GOOD or not state else "yellow"),
    }
