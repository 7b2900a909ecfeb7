"""What tests of the command line share: an answer, and a run as small as can be."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from weft.config import from_tree
from weft.ids import BranchId, PeerId
from weft.peer.chain import genesis, open_branch
from weft.peer.state.checkpoint import Snapshot, load, save
from weft.run.amend import first_charter
from weft.run.config import RunConfig, RunFile
from weft.run.genesis import initial, seal
from weft.store.home import Home

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


def saved(run_path: Path, home: Path) -> Kept:
    """Seal a run of a file in a home, and save its initial weights there as a checkpoint."""
    run_file: RunFile = from_tree(tomllib.loads(run_path.read_text()), RunFile, where="run.toml")
    place = Home(home)
    sealed = seal(run_file, run_path.parent, place, lambda _event: None)
    vector = initial(sealed.config, place)
    assert vector is not None
    folder = home / "runs" / sealed.config.run / ("ab" * 32) / "checkpoint"
    snapshot = Snapshot(
        config=sealed.config, tokenizer=sealed.tokenizer.to_bytes(), head=None, replicated={"outer": vector}
    )
    save(folder, snapshot)
    return Kept(sealed.config, folder)


def as_trained(folder: Path, round: int, at_ms: int | None, tokens: int = 0) -> None:
    """Save a checkpoint again as one of that round; None: by a weft that did not say when it was trained."""
    snapshot, peer = load(folder), PeerId("ab" * 32)
    run = snapshot.config.run
    opening = open_branch(genesis(run, peer, first_charter(snapshot.config)), [peer], peer, BranchId(run))
    head = msgspec.structs.replace(opening, round=round, committed_tokens=tokens)
    counters = {} if at_ms is None else {"trained_at_ms": at_ms}
    save(folder, replace(snapshot, head=head, replicated=dict(snapshot.replicated), counters=counters))
