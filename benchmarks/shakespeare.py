"""nanoGPT's CPU recipe for tinyshakespeare, by one peer and by four: writes benchmarks/reports/shakespeare.md.

    python -m benchmarks.shakespeare            # about half an hour of two cores; --jobs 2 runs two rows at a time
    python -m benchmarks.shakespeare --try train.schedule.lr=0.002 --try method.every=5

Every row trains the run of recipes/shakespeare-char.toml on 1,536,000 tokens, with the overrides named in the row. The
first rows are processes that people could have started (`benchmarks._shells`), the others production code in one
process, without sockets (`benchmarks._simulation`). `--try` prints one such row of one's own instead.

The text lies beside the recipe, as its first lines say, or where `--text PATH` says. Where it is not, nothing is
measured and the last report stays.
"""

import argparse
import json
import multiprocessing
import shutil
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks._shells import Ended
from benchmarks._shells import run as run_shells
from benchmarks._simulation import Simulated, read_run_file, simulate
from benchmarks.report import load, load_line, table, write
from weft.store.home import Home

RECIPE = Path(__file__).parents[1] / "recipes" / "shakespeare-char.toml"
TEXT = "tinyshakespeare.txt"  # as the recipe names it

# One peer has nobody to average with: plain training. Its delta passes uncompressed.
SOLO = {"peers": 1, "method": {"type": "fedavg", "every": 50, "codec": {"type": "fp32"}}}

# For 20 outer steps or fewer.
RARELY = {"train.schedule.lr": 2.5e-3, "method.lr": 0.9, "method.momentum": 0.3}

TITLE = "tinyshakespeare, one peer and four"
ABOUT = """
The run of `recipes/shakespeare-char.toml`: the shape, batch and number of tokens of nanoGPT's recipe for a CPU (4
layers, 4 heads, width 128, context 64, batch 12; 2,000 steps for one peer, 500 for each of four), whose published
validation loss is 1.88. weft's model has rotary positions, RMSNorm and SwiGLU, with about as many parameters (0.80 M),
and no dropout, as there. nanoGPT evaluates 20 random batches of the last 10 % of the text; here every window of it is
evaluated, once, at the end.
""".strip()
IN_SHELLS = """
## Real processes

What people type, in a folder that holds the recipe and the text: a process and a home each, over TLS on loopback, one
thread each, all of them on this one machine. (The benchmark adds `--quiet --report FILE`, to read how each ended.)
""".strip()
IN_ONE_PROCESS = """
## Outer steps after every H inner steps

Each row is one run of all its peers in one process, one after another (`benchmarks/_simulation.py`): production code
without sockets, every peer counted in every round. All rows have the recipe's settings but for what they name: inner
learning rate 4e-3, outer learning rate 0.7, outer momentum 0.2, seed 0. Fewer outer steps want smaller inner ones: the
last rows have another rate for H = 25 and 50.

Learning rate and outer step were chosen by the same held-out loss, so the figures flatter weft by as much as a choice
among some twenty runs can: `shakespeare_tuning.md` has them all.
""".strip()


@dataclass(frozen=True)
class Row:
    name: str
    overrides: dict[str, object] = field(default_factory=dict)


ROWS = (
    Row("one peer, plain", SOLO),
    Row("one peer, the recipe as it is: diloco, H = 10", {"peers": 1}),
    *(Row(f"four peers, diloco, H = {every}", {"method.every": every}) for every in (5, 10, 25, 50)),
    *(Row(f"four peers, diloco, H = 10, seed {seed}", {"seed": seed}) for seed in (1, 2)),
    *(
        Row(f"four peers, diloco, H = {every}, lr 2.5e-3, outer 0.9, 0.3", {"method.every": every, **RARELY})
        for every in (25, 50)
    ),
)


def run(row: Row, source: Path) -> Simulated:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(source, Path(folder) / TEXT)
        return simulate(read_run_file(RECIPE, row.overrides), Path(folder), Home(Path(folder) / "home"))


def run_all(rows: Iterable[Row], source: Path, jobs: int) -> list[tuple[Row, Simulated]]:
    rows = list(rows)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = []
        for row, result in zip(rows, pool.map(partial(run, source=source), rows), strict=True):
            print(row.name, result, flush=True)
            found.append((row, result))
    return found


def run_processes(num_peers: int, source: Path) -> Ended:
    """Train the recipe as it is with the command line, in a folder that holds it and the text."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(RECIPE, folder)
        shutil.copy(source, Path(folder) / TEXT)
        ended = run_shells(RECIPE.name, num_peers, Path(folder))
    print(num_peers, ended, flush=True)
    return ended


def process_sections(ended: list[Ended]) -> list[str]:
    header = (
        "processes",
        "rounds",
        "of them with all",
        "committed tokens",
        "steps of each",
        "held-out loss",
        "replicas",
        "wall seconds",
        "CPU-seconds",
    )
    rows = [
        (
            len(each.reports),
            each.num_rounds,
            each.num_rounds - each.num_short_rounds,
            _all_equal([report.committed_tokens for report in each.reports]),
            _all_equal(each.num_steps),
            _all_equal([None if report.loss is None else f"{report.loss:.4f}" for report in each.reports]),
            _all_equal([f"`{report.replica[:12]}`" for report in each.reports]),
            round(each.wall_s),
            round(each.cpu_s),
        )
        for each in ended
    ]
    commands = [f"```text\n{chr(10).join(each.commands)}\n```" for each in ended]
    return [IN_SHELLS, *commands, table(header, rows), "One value in a cell: all processes reported the same."]


def _all_equal(values: Iterable[object]) -> object:
    """Return what all have in common, or all of them."""
    values = list(values)
    return values[0] if len(set(values)) == 1 else ", ".join(map(str, values))


def simulated_sections(found: list[tuple[Row, Simulated]], ended: list[Ended]) -> list[str]:
    header = (
        "run",
        "rounds",
        "committed tokens",
        "training loss at the end",
        "held-out loss",
        "CPU-seconds",
        "replica",
    )
    rows = [
        (
            row.name,
            result.num_rounds,
            result.committed_tokens,
            f"{result.train_loss:.4f}",
            f"{result.loss:.4f}",
            round(result.cpu_s),
            f"`{result.replica[:12]}`",
        )
        for row, result in found
    ]
    real = {report.replica for each in ended for report in each.reports}
    same = [row.name for row, result in found if result.replica in real]
    return [
        IN_ONE_PROCESS,
        table(header, rows),
        f"Held-out loss: nats per character, {found[0][1].heldout_tokens:,} characters. Same bits as real processes: "
        + ("; ".join(same) or "none")
        + ".",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--try", dest="tried", action="append", metavar="FIELD=VALUE", help="one row with overrides")
    parser.add_argument("--solo", action="store_true", help="with --try: one peer")
    parser.add_argument("--text", type=Path, default=RECIPE.parent / TEXT, metavar="PATH", help="where the text lies")
    chosen, before = parser.parse_args(), load()
    if not chosen.text.is_file():
        print(f"skipped: {chosen.text.name} is not there; the first lines of recipes/{RECIPE.name} say where to get it")
        return
    if chosen.tried:
        overrides = dict(SOLO) if chosen.solo else {}
        for each in chosen.tried:
            name, _, value = each.partition("=")
            overrides[name] = tomllib.loads(f"value = {value}")["value"]
        print(json.dumps(overrides), run(Row("tried", overrides), chosen.text))
        return
    ended = [run_processes(num_peers, chosen.text) for num_peers in (1, 4)]
    found = run_all(ROWS, chosen.text, chosen.jobs)
    sections = [ABOUT, load_line(before), *process_sections(ended), *simulated_sections(found, ended)]
    write("shakespeare", TITLE, "python -m benchmarks.shakespeare", sections)


if __name__ == "__main__":
    main()
