"""Training steps in exact numbers beside the same steps in fp32: their CPU time, and the loss that they come to.

    python -m benchmarks.exact          # five minutes; wants an idle machine

Two trainers of one run, of which one is audited with `numerics = "exact"`, begin with the same weights and take turns
of some steps, with one thread, in an order that turns round every time. A ratio is the median over turns: the CPU time
of one, by that of the other in the same turn. What a whole run comes to is the part of `exact_demo`.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks import report
from benchmarks.step import WeftLoop, ratio, run_of, take_turns
from weft.model.config import ModelConfig
from weft.model.flat import layout
from weft.model.initial import initial_vector
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sync.method.schedule import ConstantConfig

NEAR = 0.005  # how far apart losses may lie
TURNS, LR = 5, 2e-3
SHAPES = {  # batch, tokens, steps of a turn, what a step may cost
    "the demo's": (4, 128, 40, 3.0),
    "width 256": (4, 256, 8, 3.0),
    "width 512": (4, 256, 3, 2.8),
}
COMMON: dict[str, Any] = {"vocab_size": 257, "has_qk_norm": True, "is_tied": True}
MODELS = {
    "the demo's": ModelConfig(
        num_layers=2, num_heads=4, num_kv_heads=4, width=128, ffn_width=344, max_seq_len=128, **COMMON
    ),
    "width 256": ModelConfig(
        num_layers=4, num_heads=8, num_kv_heads=8, width=256, ffn_width=704, max_seq_len=256, **COMMON
    ),
    "width 512": ModelConfig(
        num_layers=4, num_heads=8, num_kv_heads=8, width=512, ffn_width=1408, max_seq_len=256, **COMMON
    ),
}


def compare(name: str, num_turns: int, folder: Path) -> list[object]:
    """Return a row: model, numbers, seconds of both, their ratio and what it may be, losses of both, how far apart."""
    config, (batch_size, seq_len, turn_steps, most) = MODELS[name], SHAPES[name]
    run, batches = run_of(config, batch_size, seq_len, folder)
    run = replace(run, train=replace(run.train, schedule=ConstantConfig(lr=LR)))
    vector, device, one = initial_vector(config, 0), torch.device("cpu"), PeerConfig(threads=1)
    loops: dict[str, Callable[[int], list[float]]] = {
        "plain": WeftLoop(run, device, batches, vector, one),
        "exact": WeftLoop(replace(run, trust=AuditedTrust(numerics="exact")), device, batches, vector, one),
    }
    turns = take_turns(loops, num_turns, turn_steps, run.tokens_per_step)
    plain_s, exact_s = (statistics.median(turns.costs[each]) / turn_steps for each in ("plain", "exact"))
    plain, exact = turns.losses["plain"], turns.losses["exact"]
    times = ratio(turns.costs["exact"], turns.costs["plain"])
    return [
        f"{name}, {batch_size} x {seq_len}",
        layout(config).num_parameters,
        (num_turns + 1) * turn_steps,
        plain_s,
        exact_s,
        times,
        most,
        f"{plain:.5f}",
        f"{exact:.5f}",
        f"{100 * (exact / plain - 1):+.3f} %",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=TURNS, help="times each loop is measured")
    arguments = parser.parse_args()
    load, rows = report.load(), []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(name, arguments.turns, Path(folder)))
            print(rows[-1], flush=True)
    header = ["model, batch x tokens", "parameters", "steps", "CPU s of a step, fp32", "exact", "exact / fp32", "aim"]
    header += ["last loss, fp32", "exact", "apart"]
    sections = [
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        f"{report.load_line(load)} Medians of {arguments.turns} turns.",
        report.table(header, rows),
        f"Losses are to be within {100 * NEAR:g} %.",
    ]
    report.write("exact", (__doc__ or "").splitlines()[0].rstrip("."), "python -m benchmarks.exact", sections)
    is_near = all(abs(float(str(row[-1]).split()[0])) <= 100 * NEAR for row in rows)
    return 0 if is_near and all(float(str(row[5])) <= float(str(row[6])) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
