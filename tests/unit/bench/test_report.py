"""What a bench says of its lines: the best of each row, and all of them."""

from pathlib import Path

import msgspec
import pytest

from unit.bench.test_log import LINE
from unit.sim.plans import PLAN, read, write
from weft.bench import plot as bench_plot
from weft.bench.log import BenchLine
from weft.bench.plan import Bench, Point
from weft.bench.report import best_of, groups_of, plot_name, report

Losses = dict[tuple[str, int, int], float | None]  # by row, rounds' length and seed; None: it diverged


@pytest.fixture
def bench(tmp_path: Path) -> tuple[Bench, dict[str, Point]]:
    plan = PLAN.replace("steps = [4]", "steps = [4]\nseeds = [0, 1]")
    found, points = read(write(tmp_path, plan))
    return found, {f"{number:016x}": point for number, point in enumerate(points)}


def lines_of(points: dict[str, Point], losses: Losses) -> dict[str, BenchLine]:
    found = {}
    for name, point in points.items():
        key = (point.row, point.values.get("method.every", 1), point.seed)
        if key in losses:
            loss = losses[key]
            outcome = "diverged" if loss is None else "complete"
            found[name] = msgspec.structs.replace(
                LINE, digest=name, row=point.row, seed=point.seed, outcome=outcome, heldout_loss=loss
            )
    return found


ALL: Losses = {
    ("ddp", 1, 0): 1.0,
    ("ddp", 1, 1): 2.0,
    ("diloco", 2, 0): 1.0,
    ("diloco", 2, 1): None,
    ("diloco", 4, 0): 1.8,
    ("diloco", 4, 1): 1.8,
}


def test_the_best_point_is_that_of_the_least_mean_and_none_that_diverged(bench: tuple[Bench, dict[str, Point]]) -> None:
    _, points = bench
    best = best_of(groups_of(points, lines_of(points, ALL)))
    assert {row: group.values for row, group in best.items()} == {"ddp": {}, "diloco": {"method.every": 4}}
    assert best["ddp"].loss == 1.5


def test_a_report_has_the_best_and_every_point_the_bad_ones_too(bench: tuple[Bench, dict[str, Point]]) -> None:
    described, points = bench
    text = report("plan.toml", described, points, lines_of(points, ALL))
    best, every = text.split("All points")
    assert "| ddp | as in the plan | 1.5000 +- 0.7071 | +0.00 % +- 0.00 |" in best
    assert "| diloco | method.every = 4 | 1.8000 +- 0.0000 | +35.00 % +- 63.64 |" in best  # +80 and -10 %
    assert "method.every = 2" not in best
    assert [row for row in every.splitlines() if "method.every = 2" in row and "diverged" in row]
    assert "| 1/149 | 1/303 |" in best
    assert "6 of 6 runs were played" in text
    assert plot_name(4) in text


def test_a_report_of_a_part_says_what_is_missing(bench: tuple[Bench, dict[str, Point]]) -> None:
    described, points = bench
    lines = lines_of(points, {("diloco", 2, 0): 1.0})
    lines["of another plan"] = LINE
    text = report("plan.toml", described, points, lines)
    assert "1 of 6 runs were played" in text
    assert "| 1 of 2 played |" in text
    assert "| 0 of 2 played |" in text


def test_a_point_that_was_played_with_a_lucky_seed_alone_is_not_the_best(bench: tuple[Bench, dict[str, Point]]) -> None:
    _, points = bench
    lines = lines_of(points, {**ALL, ("diloco", 2, 0): 0.5} | {("diloco", 2, 1): 9.0})
    lucky = {name: line for name, line in lines.items() if line.heldout_loss != 9.0}
    assert best_of(groups_of(points, lucky))["diloco"].values == {"method.every": 4}
    assert best_of(groups_of(points, lines))["diloco"].values == {"method.every": 4}


def test_a_best_point_that_was_played_in_part_says_so(bench: tuple[Bench, dict[str, Point]]) -> None:
    described, points = bench
    losses: Losses = {("ddp", 1, 0): 1.0, ("ddp", 1, 1): 2.0, ("diloco", 4, 1): 1.8}
    best, every = report("plan.toml", described, points, lines_of(points, losses)).split("All points")
    assert "| diloco (1 of 2 seeds) | method.every = 4 | 1.8000 |" in best
    assert "| diloco | method.every = 4 | 1.8000 |" in every


def test_rows_are_compared_over_the_seeds_of_both(bench: tuple[Bench, dict[str, Point]]) -> None:
    described, points = bench
    losses: Losses = {("ddp", 1, 0): 1.0, ("ddp", 1, 1): 2.0, ("diloco", 4, 1): 2.2}
    best, _ = report("plan.toml", described, points, lines_of(points, losses)).split("All points")
    assert "| 2.2000 | +10.00 % (equal seeds: 1) |" in best  # against the mean of both it were +46.67 %
    del losses["ddp", 1, 1]
    best, _ = report("plan.toml", described, points, lines_of(points, losses)).split("All points")
    assert "| 2.2000 | - |" in best


def test_a_point_that_failed_is_not_counted_as_played(bench: tuple[Bench, dict[str, Point]]) -> None:
    described, points = bench
    lines = lines_of(points, {("ddp", 1, 0): 1.0, ("ddp", 1, 1): 2.0})
    first = next(iter(lines))
    lines[first] = msgspec.structs.replace(lines[first], outcome="failed: no room", heldout_loss=None)
    text = report("plan.toml", described, points, lines)
    assert "1 of 6 runs were played, 1 failed and will be played again." in text
    assert "| failed: no room, complete |" in text
    assert "\n\n0 of 6 runs were played.\n\n" in report("plan.toml", described, points, {})


def test_a_report_of_two_lengths_says_what_becomes_of_a_gap(tmp_path: Path) -> None:
    plan = PLAN.replace("steps = [4]", "steps = [4, 16]").replace('"method.every" = [2, 4]', '"method.every" = [2]')
    bench, found = read(write(tmp_path, plan))
    points = {f"{number:016x}": point for number, point in enumerate(found)}
    losses = {("ddp", 4): 2.0, ("ddp", 16): 1.0, ("diloco", 4): 2.4, ("diloco", 16): 1.1}
    lines = {
        name: msgspec.structs.replace(
            LINE, digest=name, row=point.row, seed=0, heldout_loss=losses[point.row, point.steps]
        )
        for name, point in points.items()
    }
    text = report("plan.toml", bench, points, lines)
    assert "| diloco | +20.00 % | +10.00 % | 40 * steps^-0.50 | 1,600 steps |" in text
    assert "| ddp | +0" not in text.split("by length")[1]


def test_where_nobody_sends_there_is_no_picture(bench: tuple[Bench, dict[str, Point]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    described, points = bench
    alone = {name: msgspec.structs.replace(line, sent_mean=0.0) for name, line in lines_of(points, ALL).items()}
    assert plot_name(4) not in report("plan.toml", described, points, alone)
    assert not bench_plot.draw(groups_of(points, alone), tmp_path / "none.svg")


def test_equal_figures_are_drawn_to_equal_files(bench: tuple[Bench, dict[str, Point]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    _, points = bench
    groups = groups_of(points, lines_of(points, ALL | {("ddp", 1, 1): 9.0}))
    drawn = []
    for name in ("one.svg", "two.svg"):
        assert bench_plot.draw(groups, tmp_path / name)
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert not bench_plot.draw(groups_of(points, {}), tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
