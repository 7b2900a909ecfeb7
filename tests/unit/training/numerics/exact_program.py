"""Train a small model in exact numbers, and print the digest of what it comes to. Arguments: threads, a folder."""

import sys
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from unit.peer.tiny import batches, run_config
from weft.clock import VirtualClock
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sync.method.presets import FedAvgConfig
from weft.training.trainer import Trainer
from weft.wire import digest

STEPS = 20
MODEL = ModelConfig(
    vocab_size=257,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    width=48,
    ffn_width=80,
    max_seq_len=80,
    head_width=12,
    has_qk_norm=True,
    is_tied=True,
    window=40,
    first_windowed=1,
)


def digest_after(num_threads: int, folder: Path) -> str:
    """Return the digest of parameters and moments after some training steps, pulled to where they began."""
    run = run_config(FedAvgConfig(every=STEPS, proximal=0.1), MODEL, seq_len=80, batch_size=5, clip=0.5)
    run = replace(run, trust=AuditedTrust(numerics="exact", micro_batch=2))
    peer = PeerConfig(device="cpu", threads=num_threads)
    trainer = Trainer(run, peer, batches(folder, seq_len=80), lambda _event: None, VirtualClock())
    trainer.start(initial_vector(MODEL, 1))
    trainer.train(np.arange(STEPS * 5) % 70, 0, 1)
    state = trainer.private_state()
    return digest(b"".join(each.numpy().tobytes() for each in (trainer.local(), state["moment1"], state["moment2"])))


if __name__ == "__main__":
    sys.stdout.write(digest_after(int(sys.argv[1]), Path(sys.argv[2])))
