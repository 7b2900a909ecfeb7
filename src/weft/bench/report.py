"""What a bench found, as Markdown: for each length the best point of every row, and all points, the bad ones too;
where there are several lengths, how far rows are behind the first at each.

A row's best point is that of the least held-out loss, mean over seeds; none of which a seed diverged. So the held-out
text chooses the settings, for all rows alike. A point of which seeds are still to be played is chosen where the row has
no other, and says so: with a lucky seed alone it would beat those that were played with all. Rows are compared over the
seeds that both were played with.

How far a row is behind the yardstick, the first, goes on from length to length as

    gap(steps) = loss(row) / loss(yardstick) - 1, of equal seeds;    fitted: gap = a * steps ** -b

Least squares of log gap over log steps. What the fit says beyond the lengths that were played is a guess.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean, stdev

import msgspec

from weft.bench.log import COMPLETE, BenchLine
from weft.bench.plan import Bench, Point, Values
from weft.ids import several

WITHIN = 0.01  # of the yardstick's loss


@dataclass(frozen=True)
class Gap:
    """Of one length, in shares of the yardstick's loss: mean over seeds and the deviation between them."""

    mean: float
    deviation: float | None  # None: one seed


@dataclass(frozen=True)
class Trend:
    """gap = scale * steps ** -exponent."""

    scale: float
    exponent: float

    def steps_to(self, gap: float) -> float:
        """Return the length at which the gap has closed so far; infinite: it never does."""
        try:
            return (self.scale / gap) ** (1 / self.exponent) if self.exponent > 0 else math.inf
        except OverflowError:
            return math.inf


def gap_of(losses: Mapping[int, float], yardstick: Mapping[int, float]) -> Gap | None:
    """Return the gap between losses by seed; None: they have no seed in common."""
    gaps = [losses[seed] / yardstick[seed] - 1 for seed in losses if seed in yardstick]
    return Gap(mean(gaps), stdev(gaps) if len(gaps) > 1 else None) if gaps else None


def fit(gaps: Mapping[int, float]) -> Trend | None:
    """Return how gaps by length go on; None: there are fewer than two, or a row is not behind at each."""
    if len(gaps) < 2 or min(gaps.values()) <= 0:
        return None
    slope, intercept = linear_regression(list(map(math.log, gaps)), list(map(math.log, gaps.values())))
    return Trend(math.exp(intercept), -slope)


HEAD = (
    "row",
    "settings",
    "held-out, nats per token",
    "against the first row",
    "nats per byte",
    "training",
    "sent by a peer, MB",
    "at most",
    "received, MB",
    "at most",
    "bits per parameter and step",
    "of them payload",
    "of ring DDP in bf16",
    "in fp32",
    "virtual s",
    "CPU-s",
)
NOTHING = "-"
FAR = 1000  # times the longest that was played: a fit says nothing there


@dataclass(frozen=True)
class Group:
    """The runs that differ in their seeds alone.

    Args:
        lines: of those that were played.
        num_seeds: that the plan asks for.
    """

    row: str
    values: Values
    steps: int
    lines: tuple[BenchLine, ...]
    num_seeds: int

    @property
    def is_complete(self) -> bool:
        return bool(self.lines) and all(line.outcome == COMPLETE for line in self.lines)

    @property
    def loss(self) -> float:
        """Held-out, mean over seeds; infinite where one diverged."""
        losses = [line.heldout_loss for line in self.lines]
        return mean(loss for loss in losses if loss is not None) if self.is_complete else math.inf

    @property
    def losses(self) -> dict[int, float]:
        """Held-out, by seed."""
        return {line.seed: line.heldout_loss for line in self.lines if line.heldout_loss is not None}

    @property
    def num_missing(self) -> int:
        """Seeds that are still to be played."""
        return self.num_seeds - len(self.lines)

    @property
    def title(self) -> str:
        """The row, and how much of it there is, where that is not all."""
        return f"{self.row} ({len(self.lines)} of {self.num_seeds} seeds)" if self.num_missing else self.row

    @property
    def settings(self) -> str:
        return ", ".join(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in self.values.items())


def groups_of(points: Mapping[str, Point], lines: Mapping[str, BenchLine]) -> list[Group]:
    """Return the groups of a plan in its order, with what is known of them.

    Args:
        points: by digest, as are `lines`.
    """
    named: dict[tuple[str, int, bytes], list[str]] = {}
    for name, point in points.items():
        named.setdefault((point.row, point.steps, msgspec.json.encode(point.values)), []).append(name)
    return [
        Group(row, points[names[0]].values, steps, tuple(lines[name] for name in names if name in lines), len(names))
        for (row, steps, _), names in named.items()
    ]


def best_of(groups: Iterable[Group]) -> dict[str, Group]:
    """Return the best group of each row of which one was completed: of those with the most seeds."""
    best: dict[str, Group] = {}
    for group in groups:
        if group.is_complete and (group.row not in best or _rank(group) < _rank(best[group.row])):
            best[group.row] = group
    return best


def _rank(group: Group) -> tuple[int, float]:
    return group.num_missing, group.loss


def report(name: str, bench: Bench, points: Mapping[str, Point], lines: Mapping[str, BenchLine]) -> str:
    """Return the report of a plan, of as many points as were played.

    Args:
        name: of the plan's file.
    """
    groups = groups_of(points, lines)
    known = [line for line in lines.values() if line.digest in points]
    sections = [f"# {name}", f"`weft bench methods {name}`", _played(known, len(points)), _about(bench, known)]
    for steps in dict.fromkeys(group.steps for group in groups):
        here = [group for group in groups if group.steps == steps]
        best, rows = best_of(here), dict.fromkeys(group.row for group in here)
        yardstick = best.get(bench.row[0].name)
        sections += [
            f"## {several(steps, 'training step')} of each peer",
            *([f"![held-out loss against bytes sent]({plot_name(steps)})"] if has_picture(best) else []),
            _table(HEAD, [_cells(best[row].title, best[row], yardstick) for row in rows if row in best]),
            "All points, in the order of the plan:",
            _table((*HEAD, "outcome"), [(*_cells(group.row, group, yardstick), _outcome(group)) for group in here]),
        ]
    return "\n\n".join([*sections, *_trends(groups, bench.row[0].name)]) + "\n"


def _played(known: Sequence[BenchLine], num_points: int) -> str:
    num = sum(line.is_final for line in known)
    failed = f", {len(known) - num} failed and will be played again" if num < len(known) else ""
    versions = sorted({line.software for line in known})
    return f"{num} of {num_points} runs were played{failed}. {'; '.join(versions)}{'.' if versions else ''}".rstrip()


def has_picture(best: Mapping[str, Group]) -> bool:
    """Return whether there are points to draw: a machine alone sends nothing."""
    return any(line.sent_mean for group in best.values() for line in group.lines)


def plot_name(steps: int) -> str:
    """Return the file in which the points of one length are drawn."""
    return f"loss_against_bytes_{steps}.svg"


def _trends(groups: Sequence[Group], yardstick: str) -> Iterator[str]:
    """Yield what becomes of rows' gaps with the length, where there are several."""
    lengths = sorted({group.steps for group in groups})
    best = {steps: best_of(group for group in groups if group.steps == steps) for steps in lengths}
    rows = []
    for row in dict.fromkeys(group.row for group in groups):
        gaps = {
            steps: gap
            for steps in lengths
            if row != yardstick and row in best[steps] and yardstick in best[steps]
            if (gap := gap_of(best[steps][row].losses, best[steps][yardstick].losses)) is not None
        }
        if len(gaps) > 1:
            trend = fit({steps: gap.mean for steps, gap in gaps.items()})
            rows.append((row, *(_gap(gaps.get(steps)) for steps in lengths), *_trend(trend, max(gaps))))
    if rows:
        yield f"## How far behind {yardstick}, by length"
        yield (
            "In shares of its held-out loss, mean and standard deviation over seeds. What the fit says of lengths that "
            "were not played is a guess."
        )
        yield _table(
            ("row", *(several(steps, "step") for steps in lengths), "gap in %", f"within {WITHIN:.0%} at"), rows
        )


def _gap(gap: Gap | None) -> str:
    if gap is None:
        return NOTHING
    return f"{100 * gap.mean:+.2f} %" + ("" if gap.deviation is None else f" +- {100 * gap.deviation:.2f}")


def _trend(trend: Trend | None, longest: int) -> tuple[str, str]:
    """Return a fit, and what follows from it."""
    if trend is None:
        return "not behind at each length", NOTHING
    steps = trend.steps_to(WITHIN)
    said = f"{100 * trend.scale:.3g} * steps^{-trend.exponent:.2f}"
    if steps <= longest:
        return said, "what was played"
    return said, f"{steps:,.0f} steps" if steps < FAR * longest else f"more than {FAR * longest:,} steps, if ever"


def _about(bench: Bench, lines: Sequence[BenchLine]) -> str:
    machines = ", ".join(
        f"{kind.count} x {kind.name} ({kind.tokens_per_s:g} tokens/s, up {_mbit(kind.up_mbit)}, down "
        f"{_mbit(kind.down_mbit)}, {kind.delay_ms:g} ms to the middle)"
        for kind in bench.kind
    )
    sizes = sorted({line.parameters for line in lines})
    models = " or ".join(f"{num:,}" for num in sizes) or "unknown"
    return (
        f"Run file {bench.run}, {models} parameters. Machines: {machines}. Seeds: {', '.join(map(str, bench.seeds))}; "
        "where there are several, the mean and the standard deviation between them. What columns mean: docs/bench.md."
    )


def _mbit(mbit: float | None) -> str:
    return "any" if mbit is None else f"{mbit:g} Mbit/s"


def _cells(title: str, group: Group, yardstick: Group | None) -> tuple[str, ...]:
    def over(name: str) -> list[float]:
        return [value for line in group.lines if (value := getattr(line, name)) is not None]

    return (
        title,
        group.settings or "as in the plan",
        _spread(over("heldout_loss")),
        _against(group, yardstick),
        _spread(over("nats_per_byte")),
        _spread(over("train_loss")),
        *(_mean(over(name), 1e-6) for name in ("sent_mean", "sent_max", "received_mean", "received_max")),
        *(_mean(over(name)) for name in ("bits", "payload_bits")),
        *(_share(over(name)) for name in ("ratio_bf16", "ratio_fp32")),
        *(_mean(over(name)) for name in ("virtual_s", "cpu_s")),
    )


def _against(group: Group, yardstick: Group | None) -> str:
    """Return the gap over the seeds of both, and how many those are, where one of them has more."""
    if yardstick is None or not group.is_complete:
        return NOTHING
    gap = gap_of(group.losses, yardstick.losses)
    num_equal = len(group.losses.keys() & yardstick.losses.keys())
    is_part = 0 < num_equal < max(len(group.losses), len(yardstick.losses))
    return _gap(gap) + (f" (equal seeds: {num_equal})" if is_part else "")


def _spread(values: Sequence[float]) -> str:
    if not values:
        return NOTHING
    return f"{mean(values):.4f}" + (f" +- {stdev(values):.4f}" if len(values) > 1 else "")


def _mean(values: Sequence[float], unit: float = 1.0) -> str:
    if not values:
        return NOTHING
    value = mean(values) * unit
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _share(values: Sequence[float]) -> str:
    """Return a share as one of so many parts, or as so many times."""
    if not values or not mean(values):
        return NOTHING
    return f"1/{1 / mean(values):,.3g}" if mean(values) < 1 else f"{mean(values):.3g} times"


def _outcome(group: Group) -> str:
    if group.num_missing:
        return f"{len(group.lines)} of {group.num_seeds} played"
    return ", ".join(dict.fromkeys(line.outcome for line in group.lines))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)
