"""What is timed is a step as a run makes it."""

from typing import Any

import pytest
import torch

from weft.cli.plan import speed_here
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.run.config import TrainConfig
from weft.run.machine import PeerConfig
from weft.sync.method.schedule import ConstantConfig
from weft.training.backward import Backward
from weft.training.device import choose


def test_a_step_begins_with_the_parameters_that_a_run_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of PyTorch saturate attention, and what is left is too small for a CPU to compute with quickly."""
    model = ModelConfig(
        vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=16, ffn_width=32, max_seq_len=8
    )
    made: list[Any] = []

    def backward(flat: Any, *rest: Any, **named: Any) -> Backward:
        made.append(flat.vector.clone())
        return Backward(flat, *rest, **named)

    monkeypatch.setattr(speed_here, "Backward", backward)
    train = TrainConfig(seq_len=8, batch_size=2, tokens=64, schedule=ConstantConfig(lr=1e-3))
    speed_here._step(model, train, choose(PeerConfig(device="cpu")))()
    assert torch.equal(made[0], initial_vector(model, 0))
