"""The demo's run in exact numbers and in fp32, from several seeds: the held-out loss that both come to. Writes
reports/exact_demo.md.

    python -m benchmarks.exact_demo --into FILE            # an hour of one core; goes on from where it was stopped
    python -m benchmarks.exact_demo --into FILE --report   # writes the report of what is there

All peers of a run in one process, one after another (`_simulation`): what production peers learn, without what it costs
to talk. CPU seconds are those of all peers' steps and one evaluation: beside other programs they are longer, so what a
step costs is the part of `exact`.
"""

import argparse
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from benchmarks._simulation import read_run_file, simulate
from benchmarks.report import FOLDER, table, whole
from weft.store.home import Home

NEAR = 0.005  # of the plain loss: how far apart they may lie
SEEDS = (1, 2, 3)
TRUSTS: dict[str, dict[str, object]] = {"fp32": {}, "exact": {"trust": {"type": "audited", "numerics": "exact"}}}
DEMO = Path(__file__).parents[1] / "src" / "weft" / "recipes" / "demo.toml"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run comes to."""

    numbers: str
    seed: int
    tokens: int  # that it has trained on
    loss: float  # held-out, nats per token
    cpu_s: float


def run(numbers: str, seed: int, tokens: int, folder: Path) -> Found:
    told: dict[str, object] = {"seed": seed, **TRUSTS[numbers]}
    if tokens:
        told |= {
            "train.tokens": tokens,
            "train.schedule.total_tokens": tokens,
            "train.schedule.warmup_tokens": tokens // 30,
        }
    found = simulate(read_run_file(DEMO, told), DEMO.parent, Home(folder))
    return Found(
        numbers=numbers, seed=seed, tokens=found.committed_tokens, loss=found.loss, cpu_s=round(found.cpu_s, 1)
    )


def known(path: Path) -> list[Found]:
    """Return the runs that a file has; a last line that was cut short is none."""
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def keep(path: Path, all_found: list[Found]) -> None:
    """Write what is there in the file's place."""
    beside = path.with_name(path.name + ".new")
    beside.write_text("".join(json.dumps(asdict(each)) + "\n" for each in all_found), "utf-8")
    os.replace(beside, path)


def report(all_found: list[Found]) -> bool:
    """Write the report of the seeds that are there in both; return whether losses are as near as they are to be."""
    pairs = {(each.numbers, each.seed): each for each in all_found}
    seeds = sorted({each.seed for each in all_found if all((name, each.seed) in pairs for name in TRUSTS)})
    rows, apart = list[list[object]](), list[float]()
    for seed in seeds:
        plain, exact = (pairs[name, seed] for name in ("fp32", "exact"))
        apart.append(exact.loss / plain.loss - 1)
        losses = [f"{plain.loss:.4f}", f"{exact.loss:.4f}", f"{100 * apart[-1]:+.3f} %"]
        rows.append([seed, plain.tokens, *losses, plain.cpu_s, exact.cpu_s, exact.cpu_s / plain.cpu_s])
    is_near = bool(apart) and abs(mean(apart)) <= NEAR
    header = ["seed", "tokens", "held-out loss, fp32", "exact", "apart", "CPU s, fp32", "exact", "exact / fp32"]
    verdict = "met" if is_near else "**missed**"
    sections = [
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        table(header, rows),
        f"In the mean {100 * mean(apart):+.3f} % apart; aim: at most {100 * NEAR:g} %: {verdict}." if apart else "",
    ]
    text = whole("The demo's run in exact numbers", "python -m benchmarks.exact_demo --into FILE", sections)
    (FOLDER / "exact_demo.md").write_text(text, encoding="utf-8")
    return is_near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="where runs are kept, one a line")
    parser.add_argument("--tokens", type=int, default=0, help="of each run; 0: the demo's")
    parser.add_argument("--report", action="store_true", help="train nothing, and write the report")
    options = parser.parse_args()
    all_found = known(options.into)
    done = {(each.numbers, each.seed) for each in all_found}
    with tempfile.TemporaryDirectory() as folder:
        for seed in () if options.report else SEEDS:
            for numbers in TRUSTS:
                if (numbers, seed) not in done:
                    all_found.append(run(numbers, seed, options.tokens, Path(folder)))
                    keep(options.into, all_found)
                    print(all_found[-1], flush=True)
    return 0 if report(all_found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
