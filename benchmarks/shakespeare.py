"""nanoGPT's CPU recipe for tinyshakespeare, by one peer and by four: writes benchmarks/reports/shakespeare.md.

    python -m benchmarks.shakespeare            # about 20 CPU-minutes; --jobs 2 runs two at a time
    python -m benchmarks.shakespeare --try train.schedule.lr=0.002 --try method.every=5

Every row trains the run of recipes/shakespeare-char.toml on the same 1,536,000 tokens, with the overrides named in the
row, as `benchmarks._simulation` has it: production code, no sockets. `--try` prints one row of one's own instead.
"""

import argparse
import json
import multiprocessing
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks._simulation import Simulated, read_run_file, simulate
from benchmarks.report import table, write
from weft.peer.home import Home

HOUSE = Path(__file__).parents[1]
RECIPE = HOUSE / "recipes" / "shakespeare-char.toml"

# One peer has nobody to average with: plain training. Its delta passes uncompressed.
SOLO = {"peers": 1, "method": {"type": "fedavg", "every": 50, "codec": {"type": "fp32"}}}

TITLE = "tinyshakespeare, one peer and four"
ABOUT = """
The run of `recipes/shakespeare-char.toml`: the shape, batch and number of tokens of nanoGPT's recipe for a CPU (4
layers, 4 heads, width 128, context 64, batch 12; 2,000 steps for one peer, 500 for each of four), whose published
validation loss is 1.88. weft's model has rotary positions, RMSNorm and SwiGLU, with about as many parameters (0.80 M),
and no dropout, as there. nanoGPT evaluates 20 random batches of the last 10 % of the text; here every window of it is
evaluated, once, at the end.

Each row is one run, with the recipe's seed, of all its peers in one process (`benchmarks/_simulation.py`). Learning
rate and outer step were chosen by the same held-out loss, so the figures flatter weft by as much as a choice among some
ten runs can: `shakespeare_tuning.md` has them all.
""".strip()


@dataclass(frozen=True)
class Row:
    name: str
    overrides: dict[str, object]


ROWS = (
    Row("one peer, plain", SOLO),
    Row("one peer, the recipe as it is: diloco, H = 10", {"peers": 1}),
    *(Row(f"four peers, diloco, H = {every}", {"method.every": every}) for every in (5, 10, 25, 50)),
)


def run(row: Row) -> Simulated:
    with tempfile.TemporaryDirectory() as folder:
        return simulate(read_run_file(RECIPE, row.overrides), RECIPE.parent, Home(Path(folder)))


def run_all(rows: Iterable[Row], jobs: int) -> list[tuple[Row, Simulated]]:
    rows = list(rows)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = []
        for row, result in zip(rows, pool.map(run, rows), strict=True):
            print(row.name, result, flush=True)
            found.append((row, result))
    return found


def sections(found: list[tuple[Row, Simulated]]) -> list[str]:
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
    return [
        ABOUT,
        table(header, rows),
        f"Held-out loss: nats per character, {found[0][1].heldout_tokens:,} characters.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--try", dest="tried", action="append", metavar="FIELD=VALUE", help="one row with overrides")
    parser.add_argument("--solo", action="store_true", help="with --try: one peer")
    chosen = parser.parse_args()
    if chosen.tried:
        overrides = dict(SOLO) if chosen.solo else {}
        for each in chosen.tried:
            name, _, value = each.partition("=")
            overrides[name] = tomllib.loads(f"value = {value}")["value"]
        print(json.dumps(overrides), run(Row("tried", overrides)))
        return
    write("shakespeare", TITLE, "python -m benchmarks.shakespeare", sections(run_all(ROWS, chosen.jobs)))


if __name__ == "__main__":
    main()
