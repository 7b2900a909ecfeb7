"""Make a recipe's first training steps in exact numbers, and print the digest of what they come to. Arguments: the
recipe's path, threads, steps, a folder."""

import sys
from pathlib import Path

import numpy as np

from weft.clock import SystemClock
from weft.config import from_tree, load_tree
from weft.data.batch import Batches
from weft.run.config import RunConfig, RunFile
from weft.run.genesis import initial, seal
from weft.run.machine import PeerConfig
from weft.store.home import Home
from weft.training.trainer import Trainer
from weft.wire import digest


def digest_after(recipe: Path, num_threads: int, num_steps: int, folder: Path) -> str:
    """Return the digest of parameters and moments after so many steps of one peer, on a text that the folder has."""
    tree = load_tree(recipe)
    tree |= {
        "peers": 3,  # fewer cannot audit each other
        "trust": {"type": "audited", "numerics": "exact"},
        "data": {"source": {"type": "text", "paths": ["text.txt"]}},
    }
    home = Home(folder / f"home-{num_threads}")
    run = seal(from_tree(tree, RunFile, where=str(recipe)), folder, home, lambda _event: None).config
    assert isinstance(run, RunConfig)
    outer = initial(run, home)
    assert outer is not None
    batches = Batches(home.shards, run.data, "train", run.train.seq_len, run.seed)
    peer = PeerConfig(device="cpu", threads=num_threads)
    trainer = Trainer(run, peer, batches, lambda _event: None, SystemClock())
    trainer.start(outer)
    trainer.train(np.arange(num_steps * run.train.batch_size), 0, 1)
    state = trainer.private_state()
    return digest(b"".join(each.numpy().tobytes() for each in (trainer.local(), state["moment1"], state["moment2"])))


if __name__ == "__main__":
    sys.stdout.write(digest_after(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
