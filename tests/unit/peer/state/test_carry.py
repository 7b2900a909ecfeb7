"""The carry through commits that count it and commits that do not."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from unit.peer import tiny
from weft.clock import VirtualClock
from weft.codec.config import Bf16Config, Fp32Config, Int8Config
from weft.errors import CheckpointError
from weft.model.initial import initial_vector
from weft.peer.state.carry import OVERDUE_ROUNDS, Carry
from weft.peer.state.replica import Replica
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, PulseConfig
from weft.sync.records.messages import Counted, payload_of
from weft.sync.round.machine import Fate
from weft.training.trainer import Trainer

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


def test_who_has_nothing_left_to_hand_in_trains(tmp_path: Path) -> None:
    """What was held of a process before this one, or was dropped since, is offered no more."""
    carry, _, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.settle(lambda: None, is_counted=False, fate="travelling")
    assert not carry.is_overdue
    carry.add_steps(trainer.train(LEASE, 0, 1))
    carry.settle(lambda: None, is_counted=False, fate="travelling")
    assert carry.is_overdue
    carry.start_over()
    assert not carry.is_overdue


def test_a_commit_that_counted_it_leaves_nothing(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    carry.settle(lambda: halve(replica), is_counted=True)
    assert carry.tokens == 0
    assert torch.equal(trainer.local(), replica.outer)


def ahead_of(carry: Carry, trainer: Trainer, num_steps: int) -> None:
    carry.go_ahead()
    for number in range(num_steps):
        carry.add_steps(trainer.train(LEASE[:4] + 8 + 4 * number, 0, 1))


def offered(carry: Carry, replica: Replica) -> torch.Tensor:
    (payload,) = carry.encode((range(replica.outer.numel()),), 1)
    carry.offered = (payload.digest,)
    return torch.from_numpy(np.frombuffer(payload.encoded, "<f4").copy())


STEP = 4 * tiny.SEQ_LEN


def test_what_is_ahead_is_offered_as_leases_come_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    counted = offered(carry, replica)
    ahead_of(carry, trainer, 5)
    assert torch.equal(offered(carry, replica), counted)  # what travels does not change
    assert (carry.tokens, carry.due, carry.num_done) == (7 * STEP, 2 * STEP, 2)
    whole = replica.outer - trainer.local()
    carry.settle(lambda: halve(replica), is_counted=True)
    assert (carry.tokens, carry.due, carry.num_done) == (5 * STEP, 0, 0)
    assert torch.allclose(replica.outer - trainer.local(), whole - counted, atol=1e-6)
    for left, made in ((3, 2), (1, 2), (0, 1)):
        carry.cover(2, STEP)
        assert (carry.ahead, carry.due, carry.num_done) == (left * STEP, made * STEP, made)
        counted += offered(carry, replica)
        carry.settle(lambda: halve(replica), is_counted=True)
    assert torch.allclose(counted, whole, atol=1e-6)
    assert torch.equal(trainer.local(), replica.outer)
    carry.cover(2, STEP)
    assert carry.num_done == 0


def test_what_was_not_counted_stays_due_and_what_is_ahead_stays_ahead(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    due = offered(carry, replica)
    ahead_of(carry, trainer, 3)
    whole = replica.outer - trainer.local()
    carry.settle(lambda: halve(replica), is_counted=False)
    assert (carry.due, carry.ahead) == (2 * STEP, 3 * STEP)
    assert torch.allclose(replica.outer - trainer.local(), whole, atol=1e-6)
    carry.cover(1, STEP)
    third = (whole - due) / 3
    assert torch.allclose(offered(carry, replica), due + third, atol=1e-6)


def test_of_another_lengths_steps_the_last_covers_what_is_left(tmp_path: Path) -> None:
    """A steward may have amended the length of samples meanwhile."""
    carry, _, trainer = carry_of(tiny.run_config(), tmp_path)
    ahead_of(carry, trainer, 3)
    carry.cover(10, 2 * STEP)
    assert (carry.ahead, carry.due, carry.num_done) == (0, 3 * STEP, 2)


def test_who_is_started_again_is_as_far_ahead_but_not_where_it_was_counted_meanwhile(tmp_path: Path) -> None:
    saved: tuple[dict[str, torch.Tensor], dict[str, int]] = ({}, {})
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path / "0")
    carry.add_steps(trainer.train(LEASE, 0, 1))
    ahead_of(carry, trainer, 3)
    due = offered(carry, replica)
    saved = {name: vector.clone() for name, vector in carry.vectors().items()}, carry.counters()
    for has_offered in (True, False):
        carry, replica, trainer = carry_of(tiny.run_config(), tmp_path / str(has_offered))
        carry.load(dict(saved[0]), dict(saved[1]))
        assert (carry.due, carry.ahead, carry.num_done) == (2 * STEP, 3 * STEP, 2)
        if has_offered:
            assert torch.equal(offered(carry, replica), due)
        carry.settle(lambda: None, is_counted=True)
        assert carry.tokens == carry.ahead == (3 * STEP if has_offered else 0)
        assert torch.equal(trainer.local(), replica.outer) == (not has_offered)
    with pytest.raises(CheckpointError, match="mark"):
        carry.load({"local": saved[0]["local"]}, dict(saved[1]))


def test_a_gradient_is_carried_through_one_miss_and_averaged(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(DDP), tmp_path)
    gradients = []
    for lease in (LEASE, LEASE + 8):
        gradient, work = trainer.gradient(lease, 0, 1)
        gradients.append(gradient.clone())
        carry.add_gradient(gradient, work)
        carry.settle(lambda: None, is_counted=False) if len(gradients) == 1 else None
    (payload,) = carry.encode((range(replica.outer.numel()),), 1)
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
        payloads.append((carry.tokens, carry.num_done, carry.encode((range(replica.outer.numel()),), 1)))
    assert payloads[0] == payloads[1]


def test_a_checkpoint_without_a_carry_is_refused(tmp_path: Path) -> None:
    carry, _, _ = carry_of(tiny.run_config(), tmp_path)
    with pytest.raises(CheckpointError, match="uncounted_tokens"):
        carry.load({}, {"num_steps": 3})


def test_a_commit_that_is_heard_of_twice_takes_nothing_that_was_made_ahead(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    offered(carry, replica)
    ahead_of(carry, trainer, 3)
    for _ in range(2):
        carry.settle(lambda: halve(replica), is_counted=True)
        assert (carry.tokens, carry.ahead) == (3 * STEP, 3 * STEP)
    carry.cover(3, STEP)
    assert carry.due == 3 * STEP


def test_a_lease_that_a_process_before_brought_is_dropped_and_what_is_ahead_stays(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    ahead_of(carry, trainer, 2)
    carry.settle(lambda: halve(replica), is_counted=True)
    assert (carry.tokens, carry.due) == (2 * STEP, 0)


def test_of_what_was_restored_nothing_stays_once_a_commit_counts_what_a_process_before_offered(tmp_path: Path) -> None:
    carry, _, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    ahead_of(carry, trainer, 2)
    again, replica, _ = carry_of(tiny.run_config(), tmp_path)
    again.load({name: vector.clone() for name, vector in carry.vectors().items()}, carry.counters())
    again.settle(lambda: halve(replica), is_counted=True)
    assert again.tokens == 0


def test_a_payload_that_waits_is_encoded_anew_once_another_codec_holds(tmp_path: Path) -> None:
    run = tiny.run_config(DiLoCoConfig(codec=Int8Config()))
    carry, replica, trainer = carry_of(run, tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    whole = (range(replica.outer.numel()),)
    (before,) = carry.encode(whole, 1)
    carry.settle(lambda: None, is_counted=False)
    assert carry.encode(whole, 2)[0].digest == before.digest
    charter, method = replica.charter, msgspec.structs.replace(run.method, codec=Bf16Config())
    settings = msgspec.structs.replace(charter.settings, method=method)
    replica.load(replica.head, msgspec.structs.replace(charter, settings=settings), replica.vectors())
    (after,) = carry.encode(whole, 3)
    assert len(after.encoded) == 2 * replica.outer.numel()


def test_what_was_made_once_more_on_samples_that_an_earlier_process_was_counted_for_is_known(tmp_path: Path) -> None:
    carry, _, trainer = carry_of(tiny.run_config(), tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    mine, other = ("a" * 64,), ("b" * 64,)
    counted = Counted(peer="c" * 64, tokens=carry.due, payload=payload_of(mine))
    carry.offer(mine)
    assert carry.made_twice(None) == carry.made_twice(counted) == 0
    carry.offer(other)
    assert carry.made_twice(counted) == carry.due
    carry.is_restored = True  # and may be what is counted
    assert carry.made_twice(counted) == 0


def test_what_others_look_at_is_offered_in_the_same_bytes(tmp_path: Path) -> None:
    """Of a basis that lets through what the parameters make visible, each round makes others."""
    run = tiny.run_config(method=PulseConfig(every=2))
    carry, replica, trainer = carry_of(run, tmp_path)
    carry.add_steps(trainer.train(LEASE, 0, 1))
    parts = (range(replica.outer.numel()),)
    first = carry.encode(parts, 1)[0].digest
    carry.settle(lambda: halve(replica), is_counted=False, fate="travelling")
    carry.is_held = True
    assert carry.encode(parts, 2)[0].digest == carry.encode(parts, 3)[0].digest == first
    halves = (range(64), range(64, replica.outer.numel()))
    assert len(carry.encode(halves, 3)) == 2, "cut otherwise, they are others"
    carry.is_held = False
    assert carry.encode(parts, 3)[0].digest != first
