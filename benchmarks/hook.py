"""What torch's own PowerSGD hook learns where the row `powersgd` trains, at the same ranks.

    python -m benchmarks.hook --text PATH       # five minutes of two cores; PATH: tinyshakespeare

Four processes of DistributedDataParallel over gloo make the 500 inner steps of recipes/bench/methods.toml: weights,
text, batches, AdamW, clipping and schedule are those of its rows, whose figures stand in reports/methods. Two things
differ: the hook finds one factor's directions anew in a second exchange, where the row takes those of the round before;
and the hook's gradient is clipped once it is merged, the row's before it is encoded. One process that plays four told
them apart: clipping changes nothing (a quarter of a percent at rank 16).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from benchmarks._slow_ddp import GROUP, Member
from benchmarks.report import load, load_line, table, write
from weft import wire
from weft.bench.log import BenchLog
from weft.bench.plan import Bench, config_of, points_of
from weft.config import from_tree, load_tree
from weft.run.genesis import seal
from weft.store.home import Home

RECIPES = Path(__file__).parents[1] / "recipes" / "bench"
POINTS = Path(__file__).parent / "reports" / "methods" / "points.csv"
RATE = 2e-3  # of `ddp` at its best, and of rank 16
DENSE_STEPS = 2  # as few as the hook takes
DEADLINE_S = 900.0

ABOUT = """
Held-out nats per token of four processes after 500 inner steps of each, at the learning rate at which `ddp` and rank 16
of `powersgd` did best. *weft*: the row's figure in [methods](methods/report.md), best of its grid at that rank. Torch's
hook sends dense gradients in its first 1,000 steps where nothing else is said; here in its first {dense}.
""".strip()


class Found(msgspec.Struct, frozen=True):
    """What rank 0 tells."""

    heldout: float  # nats per token


def child(rank: int, low_rank: int, folder: Path) -> None:
    """Train as one of the processes; `low_rank` 0: with dense gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=GROUP)
    member, num_steps = Member(rank, folder), int(load_tree(RECIPES / "methods.toml")["steps"][0])
    state = PowerSGDState(None, low_rank, DENSE_STEPS) if low_rank else None
    member.link(powerSGD_hook if low_rank else None, state)
    for _ in range(num_steps):
        member.step()
    if rank == 0:
        (folder / "found.json").write_bytes(msgspec.json.encode(Found(member.evaluate())))
    dist.barrier()
    dist.destroy_process_group()


def measure(low_rank: int, sealed: bytes, home: Path) -> float:
    """Return the held-out loss of one run of four processes."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        (folder / "run.bin").write_bytes(sealed)
        (folder / "home").symlink_to(home)
        command = [sys.executable, "-m", "benchmarks.hook", "--child", str(low_rank), "--folder", name, "--rank"]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        processes = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(GROUP)]
        try:
            if any(process.wait(timeout=DEADLINE_S) for process in processes):
                raise SystemExit("a process failed; nothing is written")
        finally:
            for process in processes:
                process.kill()
        return msgspec.json.decode((folder / "found.json").read_bytes(), type=Found).heldout


def ours(row: str, low_rank: int | None = None) -> float:
    """Return the best held-out loss of a row in the report on methods, at a rank."""
    found = []
    for line in BenchLog(POINTS).lines.values():
        grid = json.loads(line.grid)
        is_alike = "train.schedule.floor" not in grid and "method.factors" not in grid
        is_alike &= low_rank in (None, grid.get("method.rank"))
        if line.row == row and is_alike and line.heldout_loss is not None:
            found.append(line.heldout_loss)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="tinyshakespeare, as recipes/bench/shakespeare-1m.toml says")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.rank, options.child, options.folder)
        return
    text = options.text or RECIPES / "tinyshakespeare.txt"
    if not text.exists():
        raise SystemExit(f"{text.name} is not there; --text PATH says where it is. Nothing is measured.")
    before = load()
    tree = load_tree(RECIPES / "shakespeare-1m.toml")
    tree["data"]["source"]["paths"] = [str(text.resolve())]
    bench = from_tree(load_tree(RECIPES / "methods.toml"), Bench, where="methods.toml")
    point = next(
        each
        for each in points_of(bench, tree, "shakespeare-1m.toml")
        if each.row == "ddp" and each.values["train.schedule.lr"] == RATE
    )
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        home = Home(Path(name))
        run = config_of(point, seal(point.run_file, Path(name), home, lambda _: None).config)
        rows = []
        for low_rank in (0, 1, 4, 16):
            theirs = measure(low_rank, wire.encode(run), Path(name))
            mine = ours("powersgd", low_rank) if low_rank else ours("ddp")
            row = (
                str(low_rank) if low_rank else "all, dense",
                f"{theirs:.4f}",
                f"{mine:.4f}",
                f"{mine / theirs - 1:+.1%}",
            )
            print(*row, flush=True)
            rows.append(row)
    write(
        "hook",
        "PowerSGD: what torch's hook learns, beside the row",
        "python -m benchmarks.hook --text PATH",
        [load_line(before), ABOUT.format(dense=DENSE_STEPS), table(("rank", "torch", "weft", "difference"), rows)],
    )


if __name__ == "__main__":
    main()
