"""Steps that are made in a process of their own are those of a trainer here; another processor rounds otherwise, but in
exact numbers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.rig.elsewhere import KINDS, Elsewhere, Machine
from msgspec.structs import replace
from torch import Tensor

from unit.peer.tiny import MODEL, batches, run_config
from weft.clock import VirtualClock
from weft.model.initial import initial_vector
from weft.peer.audit.auditor import distance
from weft.peer.audit.steps import state_of
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sync.method.presets import FedAvgConfig
from weft.training.trainer import Trainer
from weft.verify.judge import Numerics, threshold

STEPS = 6
PEER = PeerConfig(device="cpu", threads=1)
HERE, OTHER = "all, one thread", "SSE4.1, two threads"


@pytest.fixture(scope="module")
def machines() -> Iterator[dict[str, Machine]]:
    started = {name: Machine(*KINDS[name]) for name in (HERE, OTHER)}
    yield started
    for each in started.values():
        each.end()


def run_in(numerics: Numerics) -> RunConfig:
    run = run_config(FedAvgConfig(every=STEPS, proximal=0.1), clip=0.5)
    return replace(run, trust=AuditedTrust(numerics=numerics))


def trained(trainer: Trainer) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """Return what a trainer comes to, and what it told of its gradients."""
    told = list[tuple[float, float]]()
    trainer.start(initial_vector(MODEL, 1))
    trainer.on_gradient = lambda gradient, norm: told.append((float(gradient.double().sum()), norm))
    trainer.train(np.arange(STEPS * 4), 0, 1)
    return {name: vector.clone() for name, vector in state_of(trainer).items()}, told


@pytest.mark.full
@pytest.mark.parametrize("numerics", ["fp32", "exact"])
def test_steps_made_elsewhere_are_those_made_here(
    machines: dict[str, Machine], numerics: Numerics, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    given = run_in(numerics), PEER, batches(tmp_path), lambda _event: None, VirtualClock()
    here, told = trained(Trainer(*given))
    for name, machine in machines.items():
        there, told_there = trained(Elsewhere(machine, *given))
        is_equal = all(torch.equal(here[each], there[each]) for each in here)
        assert is_equal == (name == HERE or numerics == "exact")
        assert np.allclose(told, told_there, rtol=1e-3)
        start = initial_vector(MODEL, 1)
        assert distance(start, here["local"], there["local"]) < threshold("fp32", STEPS) / 10


@pytest.mark.full
def test_another_peer_of_the_same_process_is_another(machines: dict[str, Machine], tmp_path: Path) -> None:
    """What a step begins with comes with it: nothing of one member is left for the next."""
    given = run_in("fp32"), PEER, batches(tmp_path), lambda _event: None, VirtualClock()
    one, two = (Elsewhere(machines[HERE], *given) for _ in range(2))
    first, _ = trained(one)
    two.start(initial_vector(MODEL, 2))
    for number in range(STEPS):  # by turns
        two.train(np.arange(4 * number, 4 * number + 4), 0, 1)
        one.train(np.arange(4 * number, 4 * number + 4), 0, 1)
    again, _ = trained(two)
    assert all(torch.equal(first[each], again[each]) for each in first)
