"""What tests of the command line share: an answer, and a run as small as can be."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.run.config import RunConfig

TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(400))
RUN = """
name = "small"
peers = 1
[model]
type = "shape"
num_layers = 1
num_heads = 2
width = 16
ffn_width = 32
[data.source]
type = "text"
paths = ["text.txt"]
[train]
seq_len = 16
batch_size = 2
tokens = 320
evaluate_windows = 4
[train.schedule]
type = "constant"
"""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


Weft = Callable[..., Answer]


@dataclass(frozen=True)
class Kept:
    run: RunConfig
    folder: Path
