"""A plan of a bench, as small as can be: two machines, two rows, seconds."""

from pathlib import Path
from typing import Any

from unit.cli.small import RUN, TEXT
from weft.bench.plan import Bench, Point, points_of
from weft.config import load, load_tree

PLAN = """
run = "run.toml"
steps = [4]
[[kind]]
name = "peer"
count = 2
up_mbit = 20.0
[[row]]
name = "ddp"
method = { type = "ddp" }
[[row]]
name = "diloco"
method = { type = "diloco", lr = 0.7, momentum = 0.2 }
grid = [{ "method.every" = [2, 4] }]
"""
ROW = '[[row]]\nname = "another"\nmethod = { type = "fedavg", every = 2 }\n'


def write(folder: Path, plan: str = PLAN) -> Path:
    """Return the path of a plan, beside its run file and text."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "run.toml").write_text(RUN)
    path = folder / "plan.toml"
    path.write_text(plan)
    return path


def read(path: Path) -> tuple[Bench, tuple[Point, ...]]:
    """Return a plan and its points."""
    bench: Bench = load(path, Bench)
    tree: dict[str, Any] = load_tree(path.parent / bench.run)
    return bench, points_of(bench, tree, bench.run)
