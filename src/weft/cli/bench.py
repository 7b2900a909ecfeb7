"""`weft bench`: compare methods by what they learn and what they send, on simulated machines."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import figures, settings
from weft.config import load, load_tree, replace_field
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.sim.bench import Bench, Point
    from weft.sim.bench_log import BenchLine, BenchLog
    from weft.sim.bench_point import Task

LOG, REPORT = "points.csv", "report.md"


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Compare methods: loss against bytes, on simulated machines (docs/bench.md).",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("methods")(methods)
    app.callback()(_nothing)  # so that the verb below is named, though it is the only one
    return app


def _nothing() -> None:
    pass


def methods(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.TOML", help="Run, machines, rows and their grids.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of points.csv, report and plots. Default: bench-NAME, of the plan.", metavar="DIR"),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Points played at a time, each by one core.", min=1, max=256)] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="Play this row; again for more.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the run file.")
    ] = None,
    is_report: Annotated[
        bool, typer.Option("--report", help="Play nothing: write report and plots of what is there.")
    ] = False,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw nothing.")] = False,
) -> None:
    """Train with every method of a plan, at every point of its grid; go on where it was interrupted."""
    from weft.sim import bench_plot
    from weft.sim.bench import Bench
    from weft.sim.bench_log import COMPLETE, DIVERGED, BenchLog

    described: Bench = load(plan, Bench)
    _check_rows(described, only or ())
    if not no_plot:
        bench_plot.require()
    folder = out or Path(f"bench-{plan.stem}")
    log = BenchLog(folder / LOG)
    tasks = _tasks(plan, described, changes or ())
    points = {name: task.point for name, task in tasks.items()}
    wanted = [task for name, task in tasks.items() if name not in log.lines and (not only or task.point.row in only)]
    if not is_report:
        _play(wanted, log, jobs)
    _write(plan.name, described, points, log, folder, has_plot=not no_plot)
    odd = [line for line in log.lines.values() if line.digest in points and line.outcome not in (COMPLETE, DIVERGED)]
    if odd:
        raise RuntimeError(f"{len(odd)} points were not completed; the first, of row {odd[0].row}: {odd[0].outcome}")


def _check_rows(described: "Bench", only: Sequence[str]) -> None:
    names = [row.name for row in described.row]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only {name}: the plan has no such row. Rows: {', '.join(names)}.")


def _tasks(plan: Path, described: "Bench", changes: Sequence[str]) -> "dict[str, Task]":
    """Return what is to be played for each point, by digest, in the plan's order."""
    import tempfile

    from weft.peer.config import RunFile
    from weft.peer.home import Home
    from weft.peer.seal import seal
    from weft.sim.bench import config_of, names_of, points_of
    from weft.sim.bench_point import Task

    path = plan.parent / described.run
    settings.run_file(path, changes)  # a fault of the file, or of an option, is said as such
    tree = load_tree(path)
    for dotted, value in settings.changes_of(changes).items():
        replace_field(tree, dotted, value)
    points, base = points_of(described, tree, str(path)), path.absolute().parent
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        first: dict[int, RunFile] = {}
        for point in points:
            first.setdefault(point.seed, point.run_file)
        sealed = {
            seed: seal(each, base, Home(Path(folder)), lambda _event: None).config for seed, each in first.items()
        }
    return {
        name: Task(name, point, config_of(point, sealed[point.seed]), described.kind, base)
        for name, point in names_of(points, described, sealed).items()
    }


def _play(tasks: "Sequence[Task]", log: "BenchLog", jobs: int) -> None:
    for number, line in enumerate(_lines(tasks, jobs), 1):
        log.append(line)
        typer.echo(f"[{number}/{len(tasks)}] {said(line)}")


def _lines(tasks: "Sequence[Task]", jobs: int) -> "Iterator[BenchLine]":
    """Yield what comes of each point, as soon as it is there."""
    from weft.sim.bench_point import measure

    if jobs == 1:
        yield from map(measure, tasks)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        for done in as_completed([pool.submit(measure, task) for task in tasks]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def said(line: "BenchLine") -> str:
    """Return a line of CSV in words."""
    took = f"{figures.duration(line.cpu_s)} of computing"
    if line.heldout_loss is None or line.ratio_bf16 is None:
        return f"{line.row} {line.grid}, seed {line.seed}: {line.outcome}, {took}"
    return (
        f"{line.row} {line.grid}, seed {line.seed}: held-out {line.heldout_loss:.4f}, {figures.nbytes(line.sent_mean)} "
        f"sent by a peer, {figures.ratio(line.ratio_bf16, 1)} ring DDP's, {took}"
    )


def _write(
    name: str, described: "Bench", points: "Mapping[str, Point]", log: "BenchLog", folder: Path, *, has_plot: bool
) -> None:
    from weft.sim import bench_plot
    from weft.sim.bench_report import groups_of, plot_name, report

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / REPORT]
    written[0].write_text(report(name, described, points, log.lines), encoding="utf-8")
    groups = groups_of(points, log.lines)
    for steps in dict.fromkeys(group.steps for group in groups) if has_plot else ():
        path = folder / plot_name(steps)
        if bench_plot.draw([group for group in groups if group.steps == steps], path):
            written.append(path)
    typer.echo(f"written: {', '.join(map(str, written))}")
