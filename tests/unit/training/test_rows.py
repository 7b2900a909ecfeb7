"""Training on rows of whole texts: a batch's loss is the mean over its trained tokens, however it is cut up."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.nn.functional import cross_entropy

from unit.peer.tiny import MODEL, rows_batches, rows_of_texts, rows_run, run_config
from weft.clock import VirtualClock
from weft.data.rows import UNTRAINED, Batch
from weft.data.store import TRAINED, ShardStore
from weft.errors import DataError
from weft.events import Event
from weft.model.flat import assemble, flatten
from weft.model.initial import initial_vector
from weft.model.transformer import SectionModule
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.sync.method.presets import DdpConfig
from weft.training.trainer import Trainer

NUM = 6


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    torch.set_num_threads(1)
    return rows_run(run_config(DdpConfig(), batch_size=NUM), tmp_path)


def trainer_of(run: RunConfig, folder: Path, micro_batch: int = NUM) -> Trainer:
    settings = PeerConfig(device="cpu", threads=1, micro_batch=micro_batch)
    trainer = Trainer(run, settings, rows_batches(run, folder), list[Event]().append, VirtualClock())
    trainer.start(initial_vector(MODEL, 1))
    return trainer


def alone(module: SectionModule, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of a batch, text by text."""
    total = torch.zeros(())
    assert batch.positions is not None
    for tokens, targets, positions in zip(*batch, strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        for start, stop in pairwise(starts):
            logits = module(tokens[None, start:stop])[0]
            total = total + cross_entropy(logits, targets[start:stop], reduction="sum")
    return total


@pytest.mark.parametrize("micro_batch", [1, 4, NUM])
def test_the_gradient_is_that_of_the_mean_over_trained_tokens(run: RunConfig, tmp_path: Path, micro_batch: int) -> None:
    positions = np.arange(NUM, dtype=np.int64)
    batch = rows_batches(run, tmp_path).at(positions)
    shares = {int((row != UNTRAINED).sum()) for row in batch.targets}
    assert len(shares) > 1, "rows with as many trained tokens each tell nothing of how they are weighted"
    model = flatten(assemble(MODEL, initial_vector(MODEL, 1)).requires_grad_(True), "cpu")
    loss = alone(model.module, batch) / batch.num_predicted
    loss.backward()  # type: ignore[no-untyped-call]
    found, work = trainer_of(run, tmp_path, micro_batch).gradient(positions, 0, 1)
    torch.testing.assert_close(found, model.gradient, rtol=1e-4, atol=1e-6)
    assert work.mean_loss == pytest.approx(loss.item(), rel=1e-5)


def test_the_held_out_loss_is_the_mean_over_trained_tokens(run: RunConfig, tmp_path: Path) -> None:
    heldout = rows_batches(run, tmp_path, "heldout")
    vector = initial_vector(MODEL, 1)
    loss, num_tokens, *_ = trainer_of(run, tmp_path).evaluate(vector, heldout, 10)
    batches = list(heldout.heldout_batches(10, NUM))
    assert num_tokens == sum(batch.num_predicted for batch in batches)
    assert num_tokens < 10 * run.train.seq_len
    with torch.no_grad():
        total = sum(float(alone(assemble(MODEL, vector), batch)) for batch in batches)
    assert loss == pytest.approx(total / num_tokens, rel=1e-5)


def test_held_out_rows_of_which_nothing_is_trained_on_are_said_to_be_so(run: RunConfig, tmp_path: Path) -> None:
    data = rows_of_texts() & ~np.uint32(TRAINED)
    digest = ShardStore(tmp_path).put(data.astype("<u4").tobytes())
    info = replace(run.data.heldout[0], digest=digest)
    run = replace(run, data=replace(run.data, heldout=(info,)))
    with pytest.raises(DataError, match="no token of the held-out conversations is trained on"):
        trainer_of(run, tmp_path).evaluate(initial_vector(MODEL, 1), rows_batches(run, tmp_path, "heldout"), 10)


def test_warming_up_meets_rows_as_they_are_trained_on(run: RunConfig, tmp_path: Path) -> None:
    trainer = trainer_of(run, tmp_path)
    before = trainer.local().clone()
    trainer.warm_up()
    assert trainer.is_warm
    assert torch.equal(trainer.local(), before)
