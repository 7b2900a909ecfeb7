"""`weft bench`: compare methods by what they learn and what they send, on simulated machines."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import settings
from weft.config import is_in, leaves, load, load_tree, replace_field
from weft.dashboard import figures
from weft.errors import ConfigError, PointFailed
from weft.ids import several

if TYPE_CHECKING:
    from concurrent.futures import Future

    from weft.bench.log import BenchLine, BenchLog
    from weft.bench.plan import Bench, Point
    from weft.bench.point import Task

_PLANNED = (  # of a run file
    *("method", "seed", "peers", "has_even_leases", "train.tokens"),
    *("train.schedule.warmup_tokens", "train.schedule.total_tokens"),
)
LOG, REPORT = "points.csv", "report.md"
BROKEN = '; one that begins with "broken" is a fault in weft itself; please report it'


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Compare methods: loss against bytes, on simulated machines (docs/bench.md).",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("methods")(methods)
    app.callback()(lambda: None)  # so that the verb below is named, though it is the only one
    return app


def methods(
    context: typer.Context,
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN.TOML", help="Run, machines, rows and their grids.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of points.csv, report and plots. Default: bench-NAME, of the plan.", metavar="DIR"),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Number of points to play at the same time, one core each.", min=1, max=256)
    ] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="Play only this row; may be repeated.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the run file.")
    ] = None,
    is_report: Annotated[
        bool, typer.Option("--report", help="Play nothing; only write the report and plots of what is there.")
    ] = False,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw nothing.")] = False,
) -> None:
    """Train with every method of a plan, at every point of its grid; the same command goes on after an interruption."""
    from weft.bench import plot as bench_plot
    from weft.bench.log import BenchLog, held
    from weft.bench.plan import Bench

    if is_report:
        settings.refuse_idle(context, "--report plays nothing, and reports everything that is there", "jobs", "only")
    described: Bench = load(plan, Bench)
    _check_rows(described, only or ())
    if not no_plot:
        bench_plot.require()
    folder = out or Path(f"bench-{plan.stem}")
    tasks = _tasks(plan, described, changes or ())
    points = {name: task.point for name, task in tasks.items()}
    _prepare(folder)
    with nullcontext() if is_report else held(folder / LOG):
        log = BenchLog(folder / LOG)
        wanted = [] if is_report else _left(tasks, log, only or ())
        _play(wanted, log, jobs)
        _write(plan.name, described, points, log, folder, has_plot=not no_plot)
    _check_played([log.lines[task.name] for task in wanted])


def _prepare(folder: Path) -> None:
    """Make the folder, and make sure that it takes what a bench writes: not after hours, when there is something."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for name in (LOG, REPORT):
            if (folder / name).exists():
                (folder / name).open("ab").close()
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error}. Choose another folder.") from error


def _left(tasks: "Mapping[str, Task]", log: "BenchLog", only: Sequence[str]) -> "list[Task]":
    """Return what is still to be played, of the rows `only`, or of all."""
    final = {name for name, line in log.lines.items() if line.is_final}
    return [task for name, task in tasks.items() if name not in final and (not only or task.point.row in only)]


def _check_played(lines: "Sequence[BenchLine]") -> None:
    failed = [line for line in lines if not line.is_final]
    if failed:
        first = failed[0]
        is_fault = any(line.outcome.startswith("broken") for line in failed)
        raise PointFailed(
            f"not played to the end: {len(failed)} of {several(len(lines), 'point')}. The first is of row {first.row}, "
            f"{first.grid}, seed {first.seed}: {first.outcome}. The same command plays them again. If the reason stays "
            "the same, look for it in the plan: its machines, their lines and when they "
            f"join{BROKEN if is_fault else ''}."
        )


def _check_rows(described: "Bench", only: Sequence[str]) -> None:
    names = [row.name for row in described.row]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only {name}: the plan has no such row. Rows: {', '.join(names)}.")


def _check_changes(plan: Path, changes: Mapping[str, Any]) -> None:
    """Refuse a --set of what a plan, or each of its rows, says in the run file's place."""
    for name, _ in leaves(dict(changes)):
        if any(is_in(name, field) for field in _PLANNED):
            raise ConfigError(
                f"--set {name} has no effect: {plan.name} says it, in its rows or for all. Change it there."
            )


def _tasks(plan: Path, described: "Bench", changes: Sequence[str]) -> "dict[str, Task]":
    """Return what is to be played for each point, by digest, in the plan's order."""
    from weft.bench.plan import config_of, names_of, points_of
    from weft.bench.point import Task
    from weft.run.config import RunFile
    from weft.run.genesis import seal
    from weft.store.home import Home

    path = plan.parent / described.run
    wanted = settings.changes_of(changes)
    _check_changes(plan, wanted)
    settings.run_file(path, changes, is_final=False)  # a fault of the file, or of an option, is said as such
    tree = load_tree(path)
    for dotted, value in wanted.items():
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
        typer.echo(f"[{number}/{len(tasks)}] {said(log.lines[line.digest])}")


def _lines(tasks: "Sequence[Task]", jobs: int) -> "Iterator[BenchLine]":
    """Yield what comes of each point, as soon as it is there."""
    from weft.bench.point import measure

    if jobs == 1:
        yield from map(measure, tasks)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield from side_by_side(lambda task: pool.submit(measure, task), tasks, jobs)
        except BrokenProcessPool:
            raise PointFailed(
                f"one of {jobs} processes that played points was killed, probably because memory ran out; a point "
                "takes 1 to 3 GB. Run the same command again, with fewer --jobs: it goes on."
            ) from None


def side_by_side(
    begin: "Callable[[Task], Future[BenchLine]]", tasks: "Sequence[Task]", jobs: int
) -> "Iterator[BenchLine]":
    """Yield what comes of each point. After one that cannot be played none is begun, and those that run come first."""
    from concurrent.futures import FIRST_COMPLETED, wait

    running: list[Future[BenchLine]] = []
    left, fault = iter(tasks), None
    while True:
        while fault is None and len(running) < jobs and (task := next(left, None)) is not None:
            running.append(begin(task))
        if not running:
            break
        ended = wait(running, return_when=FIRST_COMPLETED).done
        for each in [each for each in running if each in ended]:
            running.remove(each)
            if (error := each.exception()) is None:
                yield each.result()
            else:
                fault = fault or error
    if fault is not None:
        raise fault


def said(line: "BenchLine") -> str:
    """Return a line of CSV in words."""
    took = f"{figures.duration(line.cpu_s)} of computing"
    what = f"{line.row} {line.grid}, seed {line.seed}"
    if line.heldout_loss is None:
        return f"{what}: {line.outcome}, {took}"
    learnt = f"{what}: held-out {line.heldout_loss:.4f}"
    if line.ratio_bf16 is None:  # a machine alone sends nothing
        return f"{learnt}, {took}"
    sent = f"{figures.nbytes(line.sent_mean)} sent by a peer, {figures.ratio(line.ratio_bf16, 1)} ring DDP's"
    return f"{learnt}, {sent}, {took}"


def _write(
    name: str, described: "Bench", points: "Mapping[str, Point]", log: "BenchLog", folder: Path, *, has_plot: bool
) -> None:
    from weft.bench import plot as bench_plot
    from weft.bench.report import groups_of, plot_name, report

    written = [folder / REPORT]
    written[0].write_text(report(name, described, points, log.lines), encoding="utf-8")
    groups = groups_of(points, log.lines)
    for steps in dict.fromkeys(group.steps for group in groups) if has_plot else ():
        path = folder / plot_name(steps)
        if bench_plot.draw([group for group in groups if group.steps == steps], path):
            written.append(path)
    typer.echo(f"written: {', '.join(map(str, written))}")
