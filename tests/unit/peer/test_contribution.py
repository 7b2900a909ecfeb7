"""The carry through commits that count it and commits that do not."""

from pathlib import Path

import numpy as np
import pytest
import torch

from unit.peer import tiny
from weft.clock import VirtualClock
from weft.codec import Fp32Config
from weft.errors import CheckpointError
from weft.model import initial_vector
from weft.peer.absence import Fate
from weft.peer.config import PeerConfig, RunConfig
from weft.peer.contribution import OVERDUE_ROUNDS, Carry
from weft.peer.replica import Replica
from weft.peer.trainer import Trainer
from weft.sync.method import DdpConfig

LEASE = np.arange(8)
DDP = DdpConfig(codec=Fp32Config())


def carry_of(run: RunConfig, folder: Path) -> tuple[Carry, Replica, Trainer]:
    replica = Replica(run, initial_vector(run.model, run.seed))
    settings = PeerConfig(device="cpu", micro_batch=4)
    trainer = Trainer(run, settings, tiny.batches(folder), lambda event: None, VirtualClock())
    trainer.start(replica.outer)
    return Carry(trainer, replica), replica, trainer


def halve(replica: Replica) -> None:
    replica.outer.mul_(0.5)


def test_what_a_commit_did_not_count_is_carried_on_its_result(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    delta = replica.outer - trainer.local()
    assert carry.tokens == 8 * tiny.SEQ_LEN
    carry.settle(lambda: halve(replica), is_counted=False)
    assert carry.tokens == 8 * tiny.SEQ_LEN
    assert carry.num_done == 0
    assert torch.allclose(replica.outer - trainer.local(), delta, atol=1e-6)
    assert float(delta.abs().max()) > 1e-3


@pytest.mark.parametrize(("fate", "waits"), [("late", False), ("travelling", True), ("lost", False)])
def test_who_was_late_twice_hands_in_first_and_whose_payload_was_lost_trains_on(
    tmp_path: Path, fate: Fate, waits: bool
) -> None:
    carry, _, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    carry.settle(lambda: None, is_counted=False, fate=fate)
    assert carry.is_overdue == waits
    for _ in range(OVERDUE_ROUNDS):
        carry.settle(lambda: None, is_counted=False, fate=fate)
    assert carry.is_overdue == (fate != "lost")


def test_a_commit_that_counted_it_leaves_nothing(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    carry.settle(lambda: halve(replica), is_counted=True)
    assert carry.tokens == 0
    assert torch.equal(trainer.local(), replica.outer)


def test_a_gradient_is_carried_through_one_miss_and_averaged(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(DDP), tmp_path)
    gradients = []
    for lease in (LEASE, LEASE + 8):
        gradient, work = trainer.gradient(lease, 0, 1)
        gradients.append(gradient.clone())
        carry.add_gradient(gradient, work)
        carry.settle(lambda: None, is_counted=False) if len(gradients) == 1 else None
    (payload,) = carry.encode((range(replica.outer.numel()),))
    offered = torch.from_numpy(np.frombuffer(payload.encoded, "<f4").copy())
    assert torch.allclose(offered, (gradients[0] + gradients[1]) / 2, atol=1e-7)
    assert carry.tokens == 16 * tiny.SEQ_LEN
    carry.settle(lambda: None, is_counted=False)
    assert carry.tokens == 0  # it belongs to parameters too long ago


def test_commits_that_found_nothing_to_carry_are_no_misses(tmp_path: Path) -> None:
    """As a newcomer replays them: its first gradient is carried through its first miss all the same."""
    carry, _, trainer = carry_of(tiny.run_config(DDP), tmp_path)
    for _ in range(3):
        carry.settle(lambda: None, is_counted=False)
    carry.add_gradient(*trainer.gradient(LEASE, 0, 1))
    carry.settle(lambda: None, is_counted=False)
    assert carry.tokens == 8 * tiny.SEQ_LEN
    carry.settle(lambda: None, is_counted=False)
    assert carry.tokens == 0


@pytest.mark.parametrize("method", [tiny.FEDAVG, DDP], ids=["delta", "gradient"])
def test_a_carry_comes_back_from_a_checkpoint_whole(tmp_path: Path, method: tiny.MethodConfig) -> None:
    payloads = []
    saved: tuple[dict[str, torch.Tensor], dict[str, int]] = ({}, {})
    for number in range(2):
        carry, replica, trainer = carry_of(tiny.run_config(method), tmp_path / str(number))
        if number == 0:
            if carry.sends_gradient:
                carry.add_gradient(*trainer.gradient(LEASE, 0, 1))
            else:
                carry.add_steps(trainer.train(LEASE, 0, 1))
            saved = {name: vector.clone() for name, vector in carry.vectors().items()}, carry.counters()
            assert not carry.is_restored
        else:
            carry.load(*saved)
            assert carry.is_restored  # a round since may have counted it
        payloads.append((carry.tokens, carry.num_done, carry.encode((range(replica.outer.numel()),))))
    assert payloads[0] == payloads[1]


def test_a_checkpoint_without_a_carry_is_refused(tmp_path: Path) -> None:
    carry, _, _ = carry_of(tiny.run_config(), tmp_path)
    with pytest.raises(CheckpointError, match="uncounted_tokens"):
        carry.load({}, {"num_steps": 3})
