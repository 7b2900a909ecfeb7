"""Draws what a bench found: held-out loss against the bytes that a peer sends, one colour a row, the best points named.

A point far above all that are any good is drawn at the upper edge, as a triangle. Equal figures give an equal file.

It needs matplotlib, which is an extra.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from weft.bench.report import Group, best_of, has_picture
from weft.errors import ConfigError
from weft.ids import several

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOM = 0.6  # above the worst of the best points, as a share of how far those are apart
LEAST_ROOM = 0.1  # nats


def require() -> None:
    """Make sure that something can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "plots need matplotlib, which is not installed. In a clone: pip install -e '.[plot]', with the pip beside "
            "this weft; elsewhere: pip install 'weft[plot]'. Or give --no-plot."
        )


def draw(groups: Sequence[Group], path: Path) -> bool:
    """Draw the groups of one length to `path`, whose ending says how; return whether there was anything to draw.

    Raises:
        ConfigError: matplotlib is missing.
    """
    require()
    import matplotlib as library
    from matplotlib.figure import Figure

    best = best_of(groups)
    if not has_picture(best):
        return False
    losses, some = [group.loss for group in best.values()], next(iter(best.values())).lines[0]
    colours = library.colormaps["tab10" if len(best) <= 10 else "tab20"]
    top = max(losses) + max(ROOM * (max(losses) - min(losses)), LEAST_ROOM)
    with library.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "path"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.add_subplot()
        for number, (row, group) in enumerate(best.items()):
            colour = colours(number % colours.N)
            for each in groups:
                if each.row == row and each.is_complete:
                    _dot(axes, each, top, colour)
            axes.scatter(_sent(group), group.loss, s=70, color=colour, edgecolor="black", label=group.title, zorder=3)
        for kind, share, style in (("bf16", some.ratio_bf16, "--"), ("fp32", some.ratio_fp32, ":")):
            if share:
                axes.axvline(some.sent_mean / share, color="grey", linestyle=style, label=f"ring DDP in {kind}")
        axes.set_xscale("log")
        axes.set_ylim(top=top)
        axes.set_xlabel("bytes that a peer sends in the whole run")
        axes.set_ylabel("held-out loss, nats per token")
        axes.set_title(f"{several(groups[0].steps, 'training step')} of each of {several(some.peers, 'peer')}")
        axes.grid(which="both", alpha=0.2)
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def _dot(axes: "Axes", group: Group, top: float, colour: Any) -> None:
    is_above = group.loss > top
    marker, size = ("^", 30) if is_above else ("o", 18)
    at = _sent(group), min(group.loss, top)
    axes.scatter(*at, s=size, marker=marker, color=colour, alpha=0.5, clip_on=not is_above)


def _sent(group: Group) -> float:
    return mean(line.sent_mean for line in group.lines)
