"""What fewer bits cost: the loss of a trained model on text, as the engine computes it in each kind of numbers.

    python -m benchmarks.kinds FOLDER [FOLDER ..]       # of Hugging Face models, each with its tokenizer.json
    python -m benchmarks.kinds FOLDER --text FILE       # else functions of Python's own library

Each text is read in windows of 512 tokens; the loss is of all tokens but the first of a window, in nats.
"""

import argparse
import inspect
import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from benchmarks import report
from weft.engine.batch import Piece
from weft.engine.numbers import Kind, can_multiply
from weft.engine.scheduling.pages import num_pages
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.model.config import ModelConfig, num_parameters
from weft.model.weights import read_folder

WINDOW = 512
AIM = 0.005  # int8 above bf16, as a share
KINDS: tuple[Kind, ...] = ("fp32", "bf16", "int8", "exact", "w8a16")
CPU = torch.device("cpu")
MODULES = (argparse, inspect, statistics, textwrap)


def windows(tokens: list[int], most: int) -> list[list[int]]:
    found = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    return found[:most]


def loss(config: ModelConfig, vector: torch.Tensor, kind: Kind, texts: list[list[int]]) -> list[float]:
    """Return the mean loss of each window, nats a token."""
    pages = list(range(num_pages(WINDOW)))
    stepper = Stepper(Weights(config, vector, kind), KeysAndValues(config, len(pages), CPU, kind))
    found = []
    for text in texts:
        logits = stepper.step([Piece(text, 0, pages, num_draws=len(text))]).float()
        found.append(float(cross_entropy(logits[:-1], torch.tensor(text[1:]))))
    return found


def rows(folder: Path, text: str, most: int) -> Iterator[list[object]]:
    config, vector = read_folder(folder)
    texts = windows(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids, most)
    if not texts:
        raise SystemExit(f"{folder}: the text has fewer than {WINDOW} of its tokens. Give a longer one with --text.")
    losses = {kind: loss(config, vector, kind, texts) for kind in KINDS if can_multiply(kind, CPU)}
    base = np.array(losses["bf16"])
    for kind, each in losses.items():
        above = np.array(each) - base
        share = float(above.mean() / base.mean())
        error = float(above.std(ddof=1) / len(above) ** 0.5 / base.mean()) if len(above) > 1 else float("nan")
        verdict = ("met" if share <= AIM else "**missed**") if kind == "int8" else ""
        name = f"{folder.resolve().name}, {num_parameters(config):,} parameters"
        yield [name, kind, float(np.mean(each)), f"{100 * share:+.2f} ± {100 * error:.2f} %", verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--most", type=int, default=40, help="windows of a text")
    options = parser.parse_args()
    text = "\n".join(map(inspect.getsource, MODULES)) if options.text is None else options.text.read_text("utf-8")
    found = [row for folder in options.folders for row in rows(folder, text, options.most)]
    header = ["model", "numbers", "loss", "against bf16", "aim: int8 at most 0.5 % above"]
    report.write(
        "kinds", "Loss by kinds of numbers", "python -m benchmarks.kinds FOLDER ..", [report.table(header, found)], []
    )


if __name__ == "__main__":
    main()
