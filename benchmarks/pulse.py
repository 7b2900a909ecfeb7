"""`pulse` against `diloco`: what each learns, for how many bytes, training from nothing and tuning a trained model.

    python -m benchmarks.pulse --text PATH            # recipes/bench/shakespeare-1m.toml says where it is from
    python -m benchmarks.pulse --text PATH --model FOLDER      # and of a chat model which share a step changes in bf16

Four peers in one process (`benchmarks/_simulation.py`), three seeds. What is tuned is a model of a million parameters
that has learnt the text, on conversations (`rig.tasks`). A chat model takes too long for that here: of it one peer's
steps are made, and what it would send is told.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks._simulation import SETTINGS, Simulated, read_run_file, simulate
from benchmarks.rig.tasks import conversation, drawn
from weft.clock import SystemClock
from weft.codec.build import build
from weft.codec.config import NonzeroConfig
from weft.config import from_tree
from weft.data.batch import Batches
from weft.data.tokenizer import ByteTokenizer
from weft.model.config import ModelConfig
from weft.model.weights import write_folder
from weft.run.config import RunFile
from weft.run.genesis import initial, seal
from weft.store.home import Home
from weft.sync.merge.method import OUTER, Visible
from weft.training.trainer import Trainer

RECIPE = Path(__file__).parents[1] / "recipes" / "bench" / "shakespeare-1m.toml"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SEEDS, EVERY, SEQ_LEN = 3, 10, 192
STEPS, STEPS_BEFORE, STEPS_TUNED = 200, 200, 60  # of each peer: from nothing; of what is tuned; and then
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"type": "diloco", "every": EVERY, "lr": 0.7, "momentum": 0.2},
    "pulse": {"type": "pulse", "every": EVERY, "lr": 0.7, "momentum": 0.2},
}
RATES = (1e-4, 1e-5)  # of tuning
OF_MODEL = ((1e-4, 30), (1e-5, 30), (1e-6, 30))  # learning rate, steps
CLAIM = (
    "PULSELoCo's authors (2602.03839v2) train four models by rewards, at the learning rates that are usual there: of a "
    "step 99 % is not seen in bf16, and it sends 1/17 of what DiLoCo does in fp32, at equal loss."
)


@dataclass(frozen=True)
class Row:
    what: str
    method: str
    found: list[Simulated]

    def cells(self, first: "Row", num: int) -> list[object]:
        losses = [each.loss for each in self.found]
        nbytes = mean(each.payload_nbytes for each in self.found)
        spread = stdev(losses) if len(losses) > 1 else 0.0
        return [
            self.what,
            self.method,
            f"{mean(losses):.4f} +- {spread:.4f}",
            f"{100 * (mean(losses) / mean(each.loss for each in first.found) - 1):+.2f} %",
            f"{nbytes / num / 1.5:.4f}",
            f"{mean(each.payload_nbytes for each in first.found) / nbytes:.2f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", required=True, help="path of tinyshakespeare")
    parser.add_argument("--model", type=Path, help="folder of a chat model")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options, before = parser.parse_args(), report.load()
    with TemporaryDirectory() as folder:
        base = Path(folder)
        rows, num = trained(base, options.text, options.seeds)
        more, num_tuned = tuned(base, options.text, options.seeds)
        sections = [
            f"{num:,} and {num_tuned:,} parameters, {options.seeds} seeds, {STEPS} and {STEPS_TUNED} steps of each "
            f"peer, a round every {EVERY}. Bytes are those of payloads and results. {report.load_line(before)}",
            report.table(
                ["", "method", "held-out, nats per token", "of diloco", "bytes a value", "diloco's over its own"],
                [row.cells(first, n) for pairs, n in ((rows, num), (more, num_tuned)) for first, row in pairs],
            ),
            CLAIM,
        ]
        if options.model is not None:
            sections += of_model(base, options.model)
    report.write("pulse", "What is seen in bf16", "python -m benchmarks.pulse --text PATH --model FOLDER", sections, [])


def trained(base: Path, text: str, num_seeds: int) -> tuple[list[tuple[Row, Row]], int]:
    found = dict[str, list[Simulated]]()
    for name, method in METHODS.items():
        for seed in range(num_seeds):
            fields = _fields(text, method, STEPS, 64) | {"seed": seed}
            found.setdefault(name, []).append(
                _told(name, simulate(read_run_file(RECIPE, fields), base, Home(base / "h")))
            )
    first, other = (Row("from nothing, lr 2e-3", name, runs) for name, runs in found.items())
    return [(first, first), (first, other)], found["diloco"][0].outer.numel()


def _fields(text: str, method: dict[str, Any], steps: int, seq_len: int) -> dict[str, Any]:
    tokens = 4 * steps * 8 * seq_len
    return {
        "data.source.paths": [str(Path(text).resolve())],
        "method": method,
        "train.seq_len": seq_len,
        "train.tokens": tokens,
        "train.schedule.total_tokens": tokens,
    }


def tuned(base: Path, text: str, num_seeds: int) -> tuple[list[tuple[Row, Row]], int]:
    fields = _fields(text, METHODS["diloco"], STEPS_BEFORE, SEQ_LEN) | {
        "tokenizer": {"type": "bytes"},
        "train.evaluate_windows": 100,
    }
    run_file, home = read_run_file(RECIPE, fields), Home(base / "h")
    learnt = _told("to be tuned", simulate(run_file, base, home))
    model = seal(run_file, base, home, lambda _event: None).config.model
    _write(base / "model", model, learnt.outer)
    chats = [conversation(each) for each in drawn(seed=0, num=3000)]
    (base / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    rows = []
    for rate in RATES:
        found = dict[str, list[Simulated]]()
        for name, method in METHODS.items():
            for seed in range(num_seeds):
                tuning = _tuning(method, rate, seed)
                found.setdefault(name, []).append(_told(f"{name} {rate:g}", simulate(tuning, base, home)))
        first, other = (Row(f"tuning, lr {rate:g}", name, runs) for name, runs in found.items())
        rows += [(first, first), (first, other)]
    return rows, learnt.outer.numel()


def _tuning(method: dict[str, Any], rate: float, seed: int, num_peers: int = 4, batch_size: int = 4) -> RunFile:
    tree = {
        "name": "tuning",
        "seed": seed,
        "peers": num_peers,
        "model": {"type": "folder", "path": "model"},
        "tokenizer": {"type": "json", "path": "model"},
        "data": {"source": {"type": "conversations", "paths": ["chats.jsonl"]}, "heldout_fraction": 0.05},
        "method": method,
        "train": {
            "seq_len": SEQ_LEN,
            "batch_size": batch_size,
            "tokens": num_peers * STEPS_TUNED * batch_size * SEQ_LEN,
            "evaluate_windows": 40,
            "schedule": {"type": "constant", "lr": rate, "warmup_tokens": 0},
        },
    }
    return from_tree(tree, RunFile, where="benchmarks/pulse.py")


def _write(folder: Path, model: ModelConfig, vector: torch.Tensor) -> None:
    write_folder(folder, model, vector, ByteTokenizer().to_json())
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _told(name: str, found: Simulated) -> Simulated:
    per_value = found.payload_nbytes / found.outer.numel() / 1.5
    print(f"{name}: {found.loss:.4f} nats, {per_value:.4f} bytes a value, {found.cpu_s:.0f} CPU-s", flush=True)
    return found


def of_model(base: Path, folder: Path) -> list[str]:
    """Return what a chat model's delta has that is seen in bf16, after so many steps at some rates."""
    (base / "model").rename(base / "small")
    (base / "model").symlink_to(folder.resolve())
    codec, rows = build(NonzeroConfig()), []
    for rate, steps in OF_MODEL:
        run_file, home = _tuning(METHODS["pulse"], rate, 0, batch_size=2), Home(base / "h")
        run = seal(run_file, base, home, lambda _event: None).config
        outer = initial(run, home)
        assert outer is not None
        trainer = Trainer(
            run, SETTINGS, Batches(home.shards, run.data, "train", SEQ_LEN, 0), lambda _event: None, SystemClock()
        )
        trainer.start(outer)
        for made in (1, EVERY, steps):
            at = np.arange(2 * trainer._num_steps, 2 * made)
            trainer.train(at, 0, 1)
            seen = Visible().forward(outer - trainer.local(), {OUTER: outer}, 0)
            share = float(seen.count_nonzero()) / seen.numel()
            nbytes = memoryview(codec.encode(seen)).nbytes / seen.numel()
            rows.append([f"{rate:g}", made, f"{100 * share:.3f} %", f"{nbytes:.4f}", f"{1.0156 / nbytes:.1f}"])
            print(rows[-1], flush=True)
    told = f"{folder.name}, a batch of 2 conversations, one peer, AdamW; all its parameters are trained:"
    header = ["learning rate", "steps", "seen in bf16", "bytes a value", "int8's over its own"]
    return [told, report.table(header, rows)]


if __name__ == "__main__":
    main()
