"""The inner loop: equal to a plain PyTorch loop, whatever the micro-batch; exact on resume; loud when numbers break."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unit.peer.tiny import FEDAVG, MODEL, SEQ_LEN, VOCAB, batches, run_config
from weft.clock import VirtualClock
from weft.codec.build import build as build_codec
from weft.data.tokenizer import ByteTokenizer
from weft.errors import CheckpointError, NotFinite, OutOfMemory, TooLarge
from weft.events import Event, FellBack, MicroBatchChanged, StepDone, WarmedUp
from weft.model.config import named, num_parameters
from weft.model.flat import assemble, flatten
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.run.trust import AuditedTrust
from weft.sync.merge.method import Method
from weft.sync.merge.outer import StepContext
from weft.sync.method.choices import AdamWConfig
from weft.sync.method.presets import DdpConfig, FedAvgConfig, MethodConfig
from weft.sync.method.schedule import ConstantConfig, CosineConfig, WsdConfig
from weft.training import device as device_module
from weft.training import trainer as trainer_module
from weft.training.learner import Measured
from weft.training.trainer import Trainer

Stage = Callable[..., tuple[Trainer, list[Event]]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Return a maker of started trainers, each with the list of what it emits."""

    def make(
        run: RunConfig | None = None, vector: Tensor | None = None, **settings: Any
    ) -> tuple[Trainer, list[Event]]:
        run, emitted = run or run_config(), list[Event]()
        settings = {"device": "cpu", "threads": 1} | settings
        trainer = Trainer(run, PeerConfig(**settings), batches(tmp_path), emitted.append, VirtualClock())
        trainer.start(initial_vector(run.model, run.seed) if vector is None else vector)
        return trainer, emitted

    return make


def steps(emitted: list[Event]) -> list[StepDone]:
    return [event for event in emitted if isinstance(event, StepDone)]


def positions(num: int, start: int = 0) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.arange(start, start + num, dtype=np.int64)


class PlainLoop:
    """The same training written with nothing of the trainer: module parameters, torch's AdamW, torch's clipping."""

    def __init__(self, run: RunConfig, folder: Path) -> None:
        self._run = run
        self._batches = batches(folder)
        self._model = Transformer(run.model)
        vector = initial_vector(run.model, run.seed)
        spans = flatten(Transformer(run.model), "cpu").layout
        with torch.no_grad():
            for span in spans:
                self._model.get_parameter(span.name).copy_(spans.view(vector, span))
        self._spans = spans
        config = run.train.optimizer
        matrices = [parameter for parameter in self._model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self._model.parameters() if parameter.dim() != 2]
        assert isinstance(run.train.schedule, ConstantConfig)
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=run.train.schedule.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
        )

    def train(self, where: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> list[float]:
        size, losses = self._run.train.batch_size, []
        for start in range(0, len(where), size):
            tokens, targets, _ = self._batches.at(where[start : start + size])
            self._optimizer.zero_grad()
            loss = self._model.loss(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._run.train.clip)
            self._optimizer.step()
            losses.append(loss.item())
        return losses

    def vector(self) -> Tensor:
        return torch.cat([self._model.get_parameter(span.name).detach().flatten() for span in self._spans])


@pytest.mark.parametrize(("clip", "weight_decay"), [(math.inf, 0.0), (0.5, 0.0), (math.inf, 2.0), (0.5, 2.0)])
def test_one_fedavg_peer_trains_as_a_plain_loop(stage: Stage, tmp_path: Path, clip: float, weight_decay: float) -> None:
    run = run_config(clip=clip, optimizer=AdamWConfig(weight_decay=weight_decay, eps=1e-6))
    trainer, emitted = stage(run)
    method, outer = Method(run.method, run.train.optimizer), initial_vector(run.model, run.seed)
    state, codec = method.init(outer.numel()), build_codec(run.method.codec)
    for number in range(1, 6):
        trainer.train(positions(run.quota, (number - 1) * run.quota), 0, 1)
        delta = method.contribution(outer, trainer.local())
        merged = codec.decode(codec.encode(delta), delta.numel())
        method.apply(outer, state, merged, StepContext(number=number))
        trainer.set_local(outer)
    plain = PlainLoop(run, tmp_path)
    losses = plain.train(positions(5 * run.quota))
    assert [step.loss for step in steps(emitted)] == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < 0.7 * losses[0]
    assert torch.allclose(outer, plain.vector(), rtol=0, atol=2e-4)  # 20 steps of up to 1e-2 each


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 5])
def test_a_batch_in_pieces_has_the_gradient_of_the_whole(stage: Stage, micro_batch: int) -> None:
    whole, _ = stage(run_config(DdpConfig(), batch_size=6))
    pieces, emitted = stage(run_config(DdpConfig(), batch_size=6), micro_batch=micro_batch)  # 5: five and one
    assert pieces.micro_batch == micro_batch
    expected, work = whole.gradient(positions(6), 0, 1)
    found, pieces_work = pieces.gradient(positions(6), 0, 1)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert pieces_work.mean_loss == pytest.approx(work.mean_loss, rel=1e-5)
    assert steps(emitted)[0].gradient_norm == pytest.approx(float(expected.norm()), rel=1e-4)


def test_resume_goes_on_bit_for_bit(stage: Stage) -> None:
    first, emitted = stage()
    first.train(positions(20), 0, 1)
    saved = {name: tensor.clone() for name, tensor in first.private_state().items()}
    local = first.local().clone()
    first.train(positions(20, 20), 0, 1)

    second, resumed = stage()
    second.set_local(local)
    second.load_private_state(saved)
    second.train(positions(20, 20), 0, 1)
    assert torch.equal(second.local(), first.local())
    assert steps(resumed) == steps(emitted)[5:]
    assert steps(resumed)[0].step == 6

    without, _ = stage()
    without.set_local(local)
    without.train(positions(20, 20), 0, 1)
    assert not torch.equal(without.local(), first.local())


def test_private_state_of_another_model_is_refused(stage: Stage) -> None:
    trainer, _ = stage()
    trainer.train(positions(8), 0, 1)
    before = {name: tensor.clone() for name, tensor in trainer.private_state().items()}
    for broken in (
        before | {"moment2": torch.zeros(3)},
        {name: tensor for name, tensor in before.items() if name != "moment1"},
        {name: tensor for name, tensor in before.items() if name != "num_steps"},
    ):
        with pytest.raises(CheckpointError):
            trainer.load_private_state(broken)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.private_state().items())


def test_calls_join_without_a_seam(stage: Stage) -> None:
    whole, _ = stage()
    whole.train(positions(32), 0, 1)
    parts, _ = stage()
    parts.train(positions(12), 0, 1)
    parts.train(positions(20, 12), 0, 1)
    assert torch.equal(whole.local(), parts.local())


@pytest.mark.parametrize("pace", [Fraction(1), Fraction(37, 10), Fraction(8, 3), Fraction(8)])
def test_steps_are_the_same_however_many_are_made_in_a_call(stage: Stage, pace: Fraction) -> None:
    num_steps, size = 21, 4
    run = run_config(schedule=CosineConfig(lr=0.01, warmup_tokens=500, total_tokens=40_000))
    found = list[Tensor]()
    for at_once in (1, 3, 7, num_steps):
        trainer, _ = stage(run)
        for done in range(0, num_steps, at_once):
            trainer.train(positions(at_once * size, done * size), 1000, pace, num_done=done)
        found.append(trainer.local().clone())
    assert all(torch.equal(each, found[0]) for each in found)


def test_the_learning_rate_follows_the_tokens_of_the_whole_run(stage: Stage) -> None:
    tokens_per_step = 4 * SEQ_LEN  # of one peer; three train
    schedule = WsdConfig(
        lr=0.5,
        warmup_tokens=20 * tokens_per_step,
        decay_tokens=30 * tokens_per_step,
        total_tokens=100 * tokens_per_step,
    )
    trainer, emitted = stage(run_config(schedule=schedule))
    trainer.train(positions(8), 0, 3)
    trainer.train(positions(4), 50 * tokens_per_step, 3)
    trainer.train(positions(8), 69 * tokens_per_step, 3)
    rates = [step.learning_rate for step in steps(emitted)]
    # In steps of one peer: 3 and 6 of 20 while warming up, 53 at the peak, 72 and 75 in the decay from 70 to 100.
    assert rates == pytest.approx([0.5 * 3 / 20, 0.5 * 6 / 20, 0.5, 0.5 * 28 / 30, 0.5 * 25 / 30])


@pytest.mark.parametrize("times", [1, 3])
def test_who_left_the_device_and_came_back_trains_on_bit_for_bit(stage: Stage, times: int) -> None:
    run = run_config()
    (plain, _), (parked, emitted) = stage(run), stage(run)
    plain.train(positions(2 * run.quota), 0, 1)
    parked.train(positions(run.quota), 0, 1)
    for _ in range(times):
        parked.park()
        parked.park()
        assert parked.is_parked
        assert torch.equal(parked.local(), parked.local())
        kept = parked.private_state()
        assert int(kept["num_steps"]) == run.quota // run.train.batch_size
        parked.unpark()
        parked.unpark()
        assert not parked.is_parked
    parked.train(positions(run.quota, run.quota), run.quota * run.train.seq_len, 1)
    assert torch.equal(plain.local(), parked.local())
    for name, vector in plain.private_state().items():
        assert torch.equal(vector, parked.private_state()[name]), name
    assert len(steps(emitted)) == 2 * run.quota // run.train.batch_size


def test_what_is_set_while_the_device_is_left_is_trained_on_after(stage: Stage) -> None:
    run = run_config()
    (plain, _), (parked, _) = stage(run), stage(run)
    moved = initial_vector(run.model, run.seed + 1)
    parked.park()
    parked.set_local(moved)
    assert torch.equal(parked.local(), moved)
    parked.unpark()
    plain.set_local(moved)
    for trainer in (plain, parked):
        trainer.train(positions(run.quota), 0, 1)
    assert torch.equal(plain.local(), parked.local())


def test_the_device_holds_nothing_of_who_left_it(stage: Stage) -> None:
    trainer, _ = stage()
    trainer.park()
    assert not {"_model", "_optimizer", "_backward"} & set(vars(trainer))


def test_where_gradients_are_sent_who_came_back_still_trains_on_the_outer_parameters(stage: Stage) -> None:
    run = run_config(DdpConfig())
    outer = initial_vector(run.model, run.seed)
    trainer, _ = stage(run, outer)
    before, _ = trainer.gradient(positions(run.quota), 0, 1)
    before = before.clone()
    trainer.park()
    trainer.unpark()
    after, _ = trainer.gradient(positions(run.quota), 0, 1)
    assert torch.equal(before, after)
    assert trainer.local().data_ptr() == outer.data_ptr()


def test_work_counts_whole_batches_and_stops_when_told(stage: Stage) -> None:
    trainer, emitted = stage()
    work = trainer.train(positions(4 * 3 + 2), 0, 1)
    assert (work.num_steps, work.num_tokens) == (3, 3 * 4 * SEQ_LEN)
    assert work.mean_loss == pytest.approx(np.mean([step.loss for step in steps(emitted)]))
    asked: Iterator[bool] = iter([False, False, True])
    stopped = trainer.train(positions(4 * 10), 0, 1, lambda: next(asked))
    assert (stopped.num_steps, stopped.num_tokens) == (2, 2 * 4 * SEQ_LEN)
    nothing = trainer.train(positions(3), 0, 1)
    assert (nothing.num_steps, nothing.num_tokens) == (0, 0)
    assert math.isnan(nothing.mean_loss)
    assert [step.step for step in steps(emitted)] == [1, 2, 3, 4, 5]


# --- methods that send gradients ---


def test_a_gradient_is_that_of_the_mean_loss_and_moves_nothing(stage: Stage, tmp_path: Path) -> None:
    run = run_config(DdpConfig(), clip=1e-3)
    vector = initial_vector(MODEL, 1)
    trainer, emitted = stage(run, vector.clone())
    found, work = trainer.gradient(positions(4), 0, 1)
    model = flatten(assemble(MODEL, vector.clone()).requires_grad_(True), "cpu")
    loss = model.module.loss(*batches(tmp_path).at(positions(4)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(found, model.gradient, rtol=1e-4, atol=1e-7)
    assert float(found.norm()) > 1e-3  # unclipped: the merged gradient is clipped, by everybody alike
    assert work.mean_loss == pytest.approx(loss.item())
    assert torch.equal(trainer.local(), vector)
    assert steps(emitted)[0].num_tokens == work.num_tokens == 4 * SEQ_LEN


def test_where_gradients_are_sent_the_outer_parameters_are_trained_on_directly(stage: Stage) -> None:
    outer = initial_vector(MODEL, 1)
    trainer, _ = stage(run_config(DdpConfig()), outer)
    assert trainer.local().data_ptr() == outer.data_ptr()
    before = trainer.gradient(positions(4), 0, 1)[0].clone()
    outer.mul_(1.1)
    trainer.set_local(outer)
    after, _ = trainer.gradient(positions(4), 0, 1)
    assert not torch.equal(before, after)
    assert set(trainer.private_state()) == {"num_steps"}
    with pytest.raises(RuntimeError, match="no inner steps"):
        trainer.train(positions(4), 0, 1)


def test_where_deltas_are_sent_the_outer_parameters_stay(stage: Stage) -> None:
    outer = initial_vector(MODEL, 1)
    trainer, _ = stage(run_config(FEDAVG), outer)
    trainer.train(positions(8), 0, 1)
    assert torch.equal(outer, initial_vector(MODEL, 1))
    assert not torch.equal(trainer.local(), outer)
    trainer.set_local(outer)
    assert torch.equal(trainer.local(), outer)
    assert trainer.local().data_ptr() != outer.data_ptr()


# --- before others wait ---


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("method", [FEDAVG, DdpConfig()], ids=["delta", "gradient"])
def test_warming_up_changes_no_bit(stage: Stage, method: MethodConfig, precision: str) -> None:
    run = run_config(method)

    def go(trainer: Trainer, start: int) -> Tensor:
        if method is FEDAVG:
            trainer.train(positions(8, start), 0, 1)
            return trainer.local().clone()
        return trainer.gradient(positions(4, start), 0, 1)[0].clone()

    (cold, told), (warm, heard) = stage(run, precision=precision), stage(run, precision=precision)
    generator = torch.get_rng_state()
    warm.warm_up()
    assert warm.is_warm
    assert [type(event) for event in heard] == [WarmedUp]
    assert torch.equal(go(warm, 0), go(cold, 0))
    warm._warm_shape = None  # once more, between steps: as where an amendment changed the shape of a batch
    warm.warm_up()
    assert torch.equal(go(warm, 8), go(cold, 8))
    assert torch.equal(torch.get_rng_state(), generator)
    mine, other = warm.private_state(), cold.private_state()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert [each for each in heard if not isinstance(each, WarmedUp)] == told


def test_warming_up_meets_every_shape_that_is_trained_and_evaluated(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    plain = Transformer.forward

    def forward(model: Transformer, tokens: Tensor, *args: Any, **more: Any) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return plain(model, tokens, *args, **more)

    monkeypatch.setattr(Transformer, "forward", forward)
    trainer, _ = stage(micro_batch=3)  # of four: three and one
    trainer.warm_up()
    met = set(shapes)
    assert len(met) == 2
    shapes.clear()
    trainer.train(positions(8), 0, 1)
    trainer.evaluate(initial_vector(MODEL, 5), batches(tmp_path, "heldout"), 4)
    assert set(shapes) == met
    shapes.clear()
    trainer.warm_up()
    assert shapes == []  # once is enough


def test_memory_that_runs_out_in_the_warm_up_makes_the_micro_batch_smaller_before_anybody_waits(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    Allocator(monkeypatch, room=2)
    trainer, emitted = stage()
    trainer.warm_up()
    assert [type(event) for event in emitted] == [MicroBatchChanged, WarmedUp]
    trainer.train(positions(8), 0, 1)
    assert [event.after for event in emitted if isinstance(event, MicroBatchChanged)] == [2]


def test_what_is_compiled_is_compiled_in_the_warm_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for: list[tuple[int, ...]] = []

    def compiler(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compiled(tokens: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
            if tuple(tokens.shape) not in compiled_for:
                compiled_for.append(tuple(tokens.shape))
            return loss(tokens, targets, positions)

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    trainer, emitted = stage(is_compiled=True, micro_batch=3)
    trainer.warm_up()
    before = list(compiled_for)
    trainer.train(positions(8), 0, 1)
    assert before == compiled_for == [(3, SEQ_LEN), (1, SEQ_LEN)]
    assert [event.is_compiled for event in emitted if isinstance(event, WarmedUp)] == [True]


# --- memory ---


class Allocator:
    """Runs out of memory where a forward pass needs more samples at once than it has room for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, error: Exception | None = None) -> None:
        self.room = room
        self.num_calls = 0
        self.fails_at: int | None = None  # this call, whatever its size
        plain = Transformer.forward

        def forward(model: Transformer, tokens: Tensor, *args: Any, **more: Any) -> Tensor:
            self.num_calls += 1
            if len(tokens) > self.room or self.num_calls == self.fails_at:
                raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
            return plain(model, tokens, *args, **more)

        monkeypatch.setattr(Transformer, "forward", forward)


def test_memory_that_runs_out_halves_the_micro_batch_and_keeps_the_batch(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config(batch_size=12)
    expected, _ = stage(run, micro_batch=3)
    expected.train(positions(36), 0, 1)
    Allocator(monkeypatch, room=5)
    trainer, emitted = stage(run)
    work = trainer.train(positions(36), 0, 1)
    assert work.num_steps == 3
    reason = "CUDA out of memory. Tried to allocate 2.00 GiB."
    changes = [event for event in emitted if isinstance(event, MicroBatchChanged)]
    assert changes == [
        MicroBatchChanged(before=12, after=6, reason=reason),
        MicroBatchChanged(before=6, after=3, reason=reason),
    ]
    assert trainer.micro_batch == 3
    assert torch.equal(trainer.local(), expected.local())


def test_a_batch_half_done_when_memory_runs_out_begins_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config(batch_size=8)
    expected, _ = stage(run, micro_batch=2)
    expected.train(positions(8), 0, 1)
    allocator = Allocator(monkeypatch, room=100)
    allocator.fails_at = 2  # after a micro-batch of 4 has left its gradient
    trainer, _ = stage(run, micro_batch=4)
    trainer.train(positions(8), 0, 1)
    assert allocator.num_calls == 2 + 4
    assert torch.equal(trainer.local(), expected.local())


def test_evaluation_halves_the_micro_batch_too(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vector, heldout = initial_vector(MODEL, 1), batches(tmp_path, "heldout")
    whole, _ = stage()
    expected = whole.evaluate(vector, heldout, 10)
    Allocator(monkeypatch, room=2)
    trainer, _ = stage()
    loss, num_tokens, *_ = trainer.evaluate(vector, heldout, 10)
    assert trainer.micro_batch == 2
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert num_tokens == expected[1] == 10 * SEQ_LEN


def test_an_evaluation_and_a_text_break_off_where_they_are_told_to(stage: Stage, tmp_path: Path) -> None:
    trainer, _ = stage(run_config(model=named("tiny", 257, SEQ_LEN)))
    calls: list[None] = []

    class Enough(Exception):
        pass

    def between() -> None:
        calls.append(None)
        raise Enough

    with pytest.raises(Enough):
        trainer.evaluate(trainer.local(), batches(tmp_path, "heldout"), 10, between)
    with pytest.raises(Enough):
        trainer.sample(trainer.local(), ByteTokenizer(), "ab", 50, 0, between)
    assert len(calls) == 2


def test_one_sample_that_does_not_fit_is_out_of_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator(monkeypatch, room=0)
    trainer, emitted = stage()
    with pytest.raises(OutOfMemory, match=r"one sample .* parameters does not fit on cpu.* 2\.00 GiB.* has_recompute"):
        trainer.train(positions(4), 0, 1)
    assert [event.after for event in emitted if isinstance(event, MicroBatchChanged)] == [2, 1]
    assert torch.equal(trainer.local(), initial_vector(MODEL, 3))


def test_memory_that_is_gone_before_the_first_step_is_said_to_be(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer, _ = stage()
    monkeypatch.setattr(torch, "zeros_like", full)
    with pytest.raises(OutOfMemory, match=r"the model does not fit on cpu.*2\.00 GiB"):
        stage()
    monkeypatch.setattr(trainer_module, "assemble", full)
    with pytest.raises(OutOfMemory, match="the outer model"):
        trainer.evaluate(trainer.local(), batches(tmp_path, "heldout"), 4)


def test_other_errors_are_not_taken_for_want_of_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator(monkeypatch, room=0, error=RuntimeError("shapes cannot be multiplied"))
    trainer, emitted = stage()
    with pytest.raises(RuntimeError, match="multiplied"):
        trainer.train(positions(4), 0, 1)
    assert emitted == []


@pytest.mark.full
def test_memory_that_the_system_really_refuses_halves_the_micro_batch(stage: Stage, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="no limits of this kind on this system")
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("the system does not enforce a limit on address space")
    # 128 samples of 16 tokens and 40,000 words make logits of 328 MB: more than 200 MB and what the process keeps free.
    model = MODEL.__class__(
        vocab_size=40_000, num_layers=1, num_heads=1, num_kv_heads=1, width=8, ffn_width=8, max_seq_len=16
    )
    trainer, emitted = stage(run_config(model=model, batch_size=128))
    trainer.train(positions(0), 0, 1)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(status.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, before[1]))
    try:
        work = trainer.train(positions(256), 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert work.num_steps == 2
    changes = [event for event in emitted if isinstance(event, MicroBatchChanged)]
    assert changes
    assert "allocate memory" in changes[0].reason
    assert trainer.micro_batch < 128


def test_on_a_cpu_the_first_micro_batch_is_one_that_surely_fits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config(batch_size=64)
    needed = device_module.needed_nbytes(run, PeerConfig(), device_module.choose(PeerConfig(device="cpu")), 20)["cpu"]
    monkeypatch.setattr(device_module, "host_free_nbytes", lambda: int(needed / 0.9) + 1000)
    trainer, emitted = stage(run)
    assert trainer.micro_batch == 16
    assert [(event.before, event.after) for event in emitted if isinstance(event, MicroBatchChanged)] == [(64, 16)]
    monkeypatch.setattr(device_module, "host_free_nbytes", lambda: 100_000)
    with pytest.raises(TooLarge, match=r"parameters and does not fit.* GB needed, 0\.00 GB free"):
        stage(run)


# --- numbers that break ---


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_parameters_change(stage: Stage, value: float) -> None:
    vector = initial_vector(MODEL, 1)
    vector[: VOCAB * MODEL.width] = value
    trainer, emitted = stage(run_config(schedule=ConstantConfig(lr=0.25)), vector.clone())
    with pytest.raises(NotFinite, match=r"step 1 at learning rate 0\.25: the loss is nan.*Lower train\.schedule"):
        trainer.train(positions(8), 0, 1)
    assert torch.equal(trainer.local().nan_to_num(), vector.nan_to_num())
    assert emitted == []
    assert all(not tensor.any() for tensor in trainer.private_state().values())


def test_a_gradient_that_is_not_finite_stops_though_the_loss_is(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Transformer.loss

    def loss(model: Transformer, *given: Tensor | None) -> Tensor:
        # The square root has an infinite slope at 0, where its value is fine.
        return plain(model, *given) + (model.norm.weight[0] * 0).abs().sqrt()

    monkeypatch.setattr(Transformer, "loss", loss)
    trainer, _ = stage()
    before = trainer.local().clone()
    with pytest.raises(NotFinite, match=r"the loss is 5\.\d+, the gradient's norm nan"):
        trainer.train(positions(4), 0, 1)
    assert torch.equal(trainer.local(), before)


def test_a_run_that_diverged_is_not_evaluated_in_silence(stage: Stage, tmp_path: Path) -> None:
    trainer, _ = stage()
    with pytest.raises(NotFinite, match="held-out loss"):
        trainer.evaluate(torch.full_like(trainer.local(), math.inf), batches(tmp_path, "heldout"), 4)


# --- precision ---


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.01)])
def test_half_precision_finds_nearly_the_same_gradient(stage: Stage, precision: str, tolerance: float) -> None:
    run = run_config(DdpConfig())
    expected = stage(run)[0].gradient(positions(4), 0, 1)[0]
    found, _ = stage(run, precision=precision)[0].gradient(positions(4), 0, 1)
    assert not torch.equal(found, expected)  # it was computed in half precision
    assert float((found - expected).norm()) < tolerance * float(expected.norm())


def test_an_fp16_gradient_that_overflows_is_computed_again_with_a_smaller_factor(stage: Stage) -> None:
    run = run_config(DdpConfig())
    expected = stage(run, precision="fp16")[0].gradient(positions(4), 0, 1)[0]
    trainer, emitted = stage(run, precision="fp16")
    trainer.load_private_state(
        {"num_steps": torch.tensor([0]), "loss_scale": torch.tensor([2**40])} | {"num_good": torch.tensor([0])}
    )
    found, _ = trainer.gradient(positions(4), 0, 1)
    assert float((found - expected).norm()) < 0.01 * float(expected.norm())
    assert int(trainer.private_state()["loss_scale"]) < 2**40
    assert int(trainer.private_state()["num_good"]) == 1
    assert len(steps(emitted)) == 1


def test_recomputing_activations_changes_no_gradient(stage: Stage) -> None:
    run = run_config(DdpConfig())
    expected, _ = stage(run)[0].gradient(positions(4), 0, 1)
    found, _ = stage(run, has_recompute=True)[0].gradient(positions(4), 0, 1)
    assert torch.equal(found, expected)


def test_a_loss_that_cannot_be_compiled_is_computed_as_it_is(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(loss: object) -> Callable[..., Tensor]:
        def compiled(*args: object) -> Tensor:
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found\nin detail")

        return compiled

    expected, _ = stage()
    expected.train(positions(8), 0, 1)
    monkeypatch.setattr(torch, "compile", compiler)
    trainer, emitted = stage(is_compiled=True)
    trainer.warm_up()
    assert [event.is_compiled for event in emitted if isinstance(event, WarmedUp)] == [False]
    trainer.train(positions(8), 0, 1)
    assert torch.equal(trainer.local(), expected.local())
    assert [event for event in emitted if isinstance(event, FellBack)] == [
        FellBack(wanted="torch.compile", used="uncompiled", reason="InvalidCxxCompiler: no working C++ compiler found")
    ]


COMPILED = """
import sys
from pathlib import Path

import numpy as np
import torch
from unit.peer.tiny import batches, run_config

from weft.clock import SystemClock
from weft.model.initial import initial_vector
from weft.run.machine import PeerConfig
from weft.training.learner import Measured
from weft.training.trainer import Trainer
from weft.sync.method.presets import DdpConfig

found, run = [], run_config(DdpConfig())
for settings in ({}, {"is_compiled": True, "micro_batch": 3}):  # three and one: shapes change
    peer = PeerConfig(device="cpu", threads=1, **settings)
    trainer = Trainer(run, peer, batches(Path(sys.argv[1])), lambda event: print(type(event).__name__), SystemClock())
    trainer.start(initial_vector(run.model, run.seed))
    found.append(trainer.gradient(np.arange(4), 0, 1)[0])
assert torch.allclose(*found, rtol=1e-3, atol=1e-6)
assert not torch.equal(*found)
"""


@pytest.mark.slow
def test_a_compiled_loss_has_the_same_gradient(tmp_path: Path) -> None:
    # In a process of its own: here, every call of the model is checked by a wrapper that cannot be compiled.
    house = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(house / "src"), str(house / "tests")))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if "FellBack" in done.stdout:
        pytest.skip("there is no compiler here for torch to compile with")
    assert done.stdout.split() == ["StepDone", "StepDone"]


# --- the outer parameters ---


def test_evaluation_is_the_mean_loss_and_always_the_same(stage: Stage, tmp_path: Path) -> None:
    trainer, _ = stage(micro_batch=3)
    heldout, vector = batches(tmp_path, "heldout"), initial_vector(MODEL, 5)
    trainer.train(positions(8), 0, 1)
    before = trainer.local().clone()
    loss, num_tokens, *_ = trainer.evaluate(vector, heldout, 10)
    assert trainer.evaluate(vector, heldout, 10) == Measured(loss, num_tokens)
    assert stage()[0].evaluate(vector, heldout, 10)[0] == pytest.approx(loss, rel=1e-6)
    tokens, targets, _ = next(iter(heldout.heldout_batches(10, 10)))
    logits = assemble(MODEL, vector)(tokens)
    assert loss == pytest.approx(cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-5)
    assert num_tokens == tokens.numel()
    assert torch.equal(trainer.local(), before)
    assert torch.equal(vector, initial_vector(MODEL, 5))
    trainer.train(positions(8), 0, 1)  # and training goes on


def test_samples_depend_on_parameters_prompt_and_seed_only(stage: Stage) -> None:
    trainer, _ = stage()
    trainer.train(positions(120), 0, 1)
    tokenizer, trained = ByteTokenizer(), trainer.local()
    text = trainer.sample(trained, tokenizer, "abc", 60, seed=1)
    assert text
    assert trainer.sample(trained, tokenizer, "abc", 60, seed=1) == text
    assert trainer.sample(trained, tokenizer, "abc", 60, seed=2) != text
    letters = sum(character in "abcdefghijklmnopqrstuvwxyz" for character in text)
    assert letters > 0.9 * len(text)  # it learnt which bytes occur at all
    assert isinstance(trainer.sample(trained, tokenizer, "", 5, seed=1), str)
    assert trainer.sample(trained, tokenizer, "abc", 60, seed=1, within_s=0.0) == ""
    assert trainer.sample(trained, tokenizer, "abc", 10**9, seed=1, within_s=0.5)  # not for days


# --- lent ---


@pytest.mark.parametrize("method", [FEDAVG, FedAvgConfig(every=4, proximal=0.1)], ids=["plain", "pulled"])
def test_what_is_trained_while_it_is_lent_leaves_no_trace(stage: Stage, method: MethodConfig) -> None:
    trainer, emitted = stage(run_config(method))
    other, _ = stage(run_config(method))
    outer = trainer.local().clone()
    told: list[int] = []
    for each in (trainer, other):
        each.set_center(outer)
        each.train(positions(8), 0, 1)
    trainer.on_step = told.append
    num_told = len(emitted)
    with trainer.lent():
        trainer.set_local(torch.zeros_like(outer))
        trainer.set_center(torch.ones_like(outer))
        trainer.load_private_state({name: torch.zeros_like(value) for name, value in trainer.private_state().items()})
        trainer.train(positions(12, 40), 0, 1)
        assert trainer.num_steps == 3
    assert (len(emitted), told) == (num_told, [])
    for each in (trainer, other):
        each.train(positions(8, 8), 0, 1, num_done=2)
    assert told == [3, 4]
    assert torch.equal(trainer.local(), other.local())
    for name, value in other.private_state().items():
        assert torch.equal(trainer.private_state()[name], value), name


def test_what_fails_while_it_is_lent_leaves_no_trace(stage: Stage) -> None:
    trainer, _ = stage()
    before = trainer.local().clone()

    def train_on_nothing() -> None:
        with trainer.lent():
            trainer.set_local(torch.full_like(before, math.nan))
            trainer.train(positions(4), 0, 1)

    with pytest.raises(NotFinite):
        train_on_nothing()
    assert torch.equal(trainer.local(), before)
    assert trainer.num_steps == 0


@pytest.mark.parametrize("numerics", ["fp32", "exact"])
def test_a_model_of_zeros_stays_one_whatever_it_reads(stage: Stage, numerics: str) -> None:
    """So training steps can be right that nobody has computed (docs/audits.md)."""
    trust = AuditedTrust(numerics=numerics)  # type: ignore[arg-type]
    run = msgspec.structs.replace(run_config(), trust=trust)
    trainer, emitted = stage(run, torch.zeros(num_parameters(run.model)))
    trainer.train(positions(2 * run.train.batch_size), 0, 1)
    assert len(steps(emitted)) == 2
    assert not any(vector.any() for name, vector in trainer.private_state().items() if name != "num_steps")
    assert not trainer.local().any()
