"""Makes training steps from states that another process has left, on the setting that this one was started with.

python lean_program.py FOLDER THREADS NUMERICS
"""

import sys
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from unit.peer.tiny import MODEL, batches, run_config
from weft.clock import VirtualClock
from weft.model.initial import initial_vector
from weft.peer.audit.steps import LOCAL, state_of
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.training.trainer import Trainer
from weft.verify.judge import Numerics

NUM, BATCH = 64, 4
State = dict[str, Tensor]


def trainer(path: Path, num_threads: int, numerics: Numerics) -> Trainer:
    torch.set_num_threads(num_threads)
    model = replace(MODEL, width=64, ffn_width=160, num_layers=3)
    run = replace(run_config(model=model), trust=AuditedTrust(numerics=numerics))
    peer = PeerConfig(device="cpu", threads=num_threads)
    made = Trainer(run, peer, batches(path), lambda _event: None, VirtualClock())
    made.start(initial_vector(run.model, run.seed))
    return made


def step(made: Trainer, before: State, number: int) -> State:
    """Return the state after the step of a number."""
    made.load_private_state({**before, "num_steps": torch.tensor([number], dtype=torch.int64)})
    made.set_local(before[LOCAL])
    made.train(torch.arange(number * BATCH, (number + 1) * BATCH).numpy(), 0, 1)
    return {name: vector.clone() for name, vector in state_of(made).items()}


def main(folder: Path, num_threads: int, numerics: Numerics) -> None:
    made, states = trainer(folder / f"{num_threads}", num_threads, numerics), torch.load(folder / "states.pt")
    torch.save([step(made, each, number) for number, each in enumerate(states[:-1])], folder / "made.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])  # type: ignore[arg-type]
