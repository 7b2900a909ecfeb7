"""Methods that are the same where their choices do not matter, over twenty steps of real models; one a plain loop."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from unit.peer.tiny import batches, run_config
from weft.clock import VirtualClock
from weft.codec.config import Fp32Config
from weft.model.flat import assemble
from weft.model.initial import initial_vector
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.sync.merge.mean import merge
from weft.sync.merge.method import Method
from weft.sync.merge.outer import StepContext
from weft.sync.method.choices import Choices, InnerSgdConfig, OptimizerConfig, SgdConfig
from weft.sync.method.presets import DdpConfig, FedAvgConfig, MethodConfig
from weft.training.trainer import Trainer

STEPS = 20
RATE = 1e-2  # of `run_config`, constant


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def trained(run: RunConfig, folder: Path, num_peers: int) -> Tensor:
    """Return the outer parameters after twenty inner steps of each peer, whose payloads lose nothing."""
    method, outer = Method(run.method, run.train.optimizer), initial_vector(run.model, run.seed)
    state, every, size = method.init(outer.numel()), run.method.every, run.train.batch_size
    trainers = [
        Trainer(run, PeerConfig(device="cpu"), batches(folder), print, VirtualClock()) for _ in range(num_peers)
    ]
    for trainer in trainers:
        trainer.start(outer.clone())
    for number in range(STEPS // every):
        brought = []
        for peer, trainer in enumerate(trainers):
            start = (number * num_peers + peer) * every * size
            where = np.arange(start, start + every * size, dtype=np.int64)
            if run.method.send == "gradient":
                mine = trainer.gradient(where, 0, num_peers)[0].clone()
            else:
                trainer.train(where, 0, num_peers)
                mine = method.contribution(outer, trainer.local())
            brought.append((100 + peer, mine))
        context = StepContext(number=number + 1, lr=RATE, num_decayed=0)
        method.apply(outer, state, merge(brought), context)
        for trainer in trainers:
            trainer.set_local(outer)
            trainer.set_center(outer)
    return outer


def of(method: MethodConfig, optimizer: OptimizerConfig) -> RunConfig:
    return run_config(method, optimizer=optimizer, clip=float("inf"))


def assert_same(one: Tensor, other: Tensor) -> None:
    start = initial_vector(run_config().model, run_config().seed)
    moved = float((one - start).norm())
    assert moved > 0.1
    assert float((one - other).norm()) < 1e-5 * moved


@pytest.mark.full
def test_fedavg_of_one_step_is_ddp_with_sgd(tmp_path: Path) -> None:
    fedavg = of(FedAvgConfig(every=1, codec=Fp32Config()), InnerSgdConfig())
    ddp = of(DdpConfig(codec=Fp32Config()), InnerSgdConfig())
    assert_same(trained(fedavg, tmp_path, 4), trained(ddp, tmp_path, 4))


def plain(run: RunConfig, folder: Path, momentum: float) -> Tensor:
    """Return where torch's own SGD leads over the same samples, with nothing of weft but the model."""
    vector, data = initial_vector(run.model, run.seed), batches(folder)
    model = assemble(run.model, vector).requires_grad_(True).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    for step in range(STEPS):
        size = run.train.batch_size
        tokens, targets, _ = data.at(np.arange(step * size, (step + 1) * size, dtype=np.int64))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return vector  # the model's memory


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("every", [1, 5, STEPS])
def test_one_peer_whose_delta_is_taken_as_it_is_trains_as_a_plain_loop_does(
    tmp_path: Path, every: int, momentum: float
) -> None:
    choices = Choices(every=every, send="delta", apply=SgdConfig(lr=1.0), codec=Fp32Config())
    run = of(choices, InnerSgdConfig(momentum=momentum))
    assert_same(plain(run, tmp_path, momentum), trained(run, tmp_path, 1))


def test_the_proximal_term_pulls_each_inner_step_towards_the_outer_parameters(tmp_path: Path) -> None:
    """FedProx by its equation, beside the trainer: a gradient of the loss, and mu (x - outer)."""
    mu, every = 3.0, 4
    run = of(FedAvgConfig(every=every, codec=Fp32Config(), proximal=mu), InnerSgdConfig())
    outer = initial_vector(run.model, run.seed)
    trainer, plain = (
        Trainer(one, PeerConfig(device="cpu"), batches(tmp_path), print, VirtualClock())
        for one in (run, of(FedAvgConfig(every=every, codec=Fp32Config()), InnerSgdConfig()))
    )
    trainer.start(outer.clone())
    trainer.set_center(outer)
    where = np.arange(every * run.train.batch_size, dtype=np.int64).reshape(every, -1)
    trainer.train(where.reshape(-1), 0, 1)
    x = outer.clone()
    for one in where:
        plain.start(x.clone())  # makes one step of plain SGD: from there the gradient of the loss is read
        plain.train(one, 0, 1)
        gradient = (x - plain.local()) / RATE
        x = x - RATE * (gradient + mu * (x - outer))
    torch.testing.assert_close(trainer.local(), x, rtol=1e-4, atol=1e-5)
    unpulled = of(FedAvgConfig(every=every, codec=Fp32Config()), InnerSgdConfig())
    free = trained(unpulled, tmp_path, 1)
    assert float((trained(run, tmp_path, 1) - free).norm()) > 0.01 * float((free - outer).norm())
