"""The inner optimizer: torch's AdamW, number for number, on flat vectors."""

import pytest
import torch

from unit.peer.tiny import MODEL
from weft.model import Transformer, flatten, initial_vector
from weft.peer.inner import InnerOptimizer
from weft.sync.choices import AdamWConfig


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_steps_are_those_of_torch_bit_for_bit() -> None:
    config = AdamWConfig(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.7)
    model, reference = (flatten(Transformer(MODEL), "cpu") for _ in range(2))
    for one in (model, reference):
        one.vector.copy_(initial_vector(MODEL, 1))
    mine = InnerOptimizer(config, model)
    decayed, rest = reference.groups()
    theirs = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": config.weight_decay}, {"params": [rest], "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for number in range(1, 6):
        gradient = initial_vector(MODEL, 1 + number)
        model.gradient.copy_(gradient)
        reference.gradient.copy_(gradient)
        mine.step(0.1 / number)
        for group in theirs.param_groups:
            group["lr"] = 0.1 / number
        theirs.step()
    assert torch.equal(model.vector, reference.vector)
    moments = [theirs.state[group]["exp_avg_sq"] for group in (decayed, rest)]
    assert torch.equal(mine.state()["moment2"], torch.cat(moments))


def test_the_state_is_the_optimizers_own_memory() -> None:
    model = flatten(Transformer(MODEL), "cpu")
    optimizer = InnerOptimizer(AdamWConfig(), model)
    state = optimizer.state()
    model.gradient.fill_(1.0)
    optimizer.step(0.1)
    assert state["moment1"].sum() > 0
