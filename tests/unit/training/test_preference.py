"""Losses of pairs of answers are those of their papers, text by text, however a batch is cut up."""

from collections.abc import Iterator
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import log_softmax

from unit.peer.tiny import MODEL, SEQ_LEN, rows_batches, rows_run, run_config
from weft.clock import VirtualClock
from weft.data.rows import UNTRAINED, Batch, Packer, PairBatch, words
from weft.data.store import ShardInfo, ShardStore
from weft.events import Event
from weft.model.flat import assemble, flatten
from weft.model.initial import initial_vector
from weft.model.transformer import SectionModule
from weft.run.config import DpoConfig, OrpoConfig, RunConfig
from weft.run.frozen import Frozen
from weft.run.machine import PeerConfig
from weft.sync.method.presets import DdpConfig, FedAvgConfig
from weft.training.trainer import Trainer

NUM, BETA, WEIGHT = 6, 0.3, 0.5
FIRST, NOW = initial_vector(MODEL, 1), initial_vector(MODEL, 2)


def pairs_run(folder: Path, loss: DpoConfig | OrpoConfig, **settings: Any) -> RunConfig:
    """Return a run on pairs of answers: the chosen one counts up, the rejected one down."""
    generator, packer, rows = np.random.default_rng(8), Packer(SEQ_LEN, 0), []
    for _ in range(200):
        asked = generator.integers(97, 110, generator.integers(1, 4))
        sides = [
            np.concatenate([asked, 110 + step * np.arange(generator.integers(1, 5))]).astype(np.uint32)
            for step in (1, -1)
        ]
        rows += packer.add(np.concatenate([words(ids, np.arange(len(ids)) >= len(asked)) for ids in sides]))
    data = np.concatenate([*rows, *packer.finish()])
    run = rows_run(run_config(batch_size=NUM, **settings), folder)
    digest = ShardStore(folder).put(data.astype("<u4").tobytes())
    info = ShardInfo(digest=digest, num_tokens=data.size, nbytes=4 * data.size)
    assert run.data.rows
    index = replace(run.data, train=(info,), heldout=(info,), rows=replace(run.data.rows, is_paired=True))
    return replace(run, data=index, train=replace(run.train, loss=loss))


def trainer_of(run: RunConfig, folder: Path, vector: Tensor, micro_batch: int = NUM) -> Trainer:
    torch.set_num_threads(1)
    settings = PeerConfig(device="cpu", threads=1, micro_batch=micro_batch)
    frozen = Frozen(reference=FIRST.clone())
    trainer = Trainer(run, settings, rows_batches(run, folder), list[Event]().append, VirtualClock(), lambda: frozen)
    trainer.start(vector.clone())
    return trainer


# --- the papers, one answer at a time ---


def answers(module: SectionModule, batch: Batch) -> Iterator[tuple[tuple[Tensor, int], tuple[Tensor, int]]]:
    """Yield for each pair the log probability and the length of the chosen answer and of the rejected one."""
    assert batch.positions is not None
    for tokens, targets, positions in zip(*batch, strict=True):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        found = list[tuple[Tensor, int]]()
        for start, stop in pairwise(starts):
            wanted = targets[start:stop]
            where = torch.nonzero(wanted != UNTRAINED).flatten()
            if len(where):  # else it is padding
                logs = log_softmax(module(tokens[None, start:stop])[0], -1)
                found.append((logs[where, wanted[where]].sum(), len(where)))
        yield from zip(found[::2], found[1::2], strict=True)


def dpo(module: SectionModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the losses of 2305.18290, equation 7, and what each chosen answer is ahead by."""
    with torch.no_grad():
        first = [(float(c), float(r)) for (c, _), (r, _) in answers(assemble(MODEL, FIRST), batch)]
    margins = torch.stack(
        [BETA * ((c - c0) - (r - r0)) for ((c, _), (r, _)), (c0, r0) in zip(answers(module, batch), first, strict=True)]
    )
    return -torch.log(torch.sigmoid(margins)), margins


def orpo(module: SectionModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the losses of 2403.07691, equation 6."""

    def odds(score: Tensor, length: int) -> Tensor:
        q = torch.exp(score / length)
        return q / (1 - q)

    losses, margins = list[Tensor](), list[Tensor]()
    for (c, num_c), (r, num_r) in answers(module, batch):
        margins.append(torch.log(odds(c, num_c) / odds(r, num_r)))
        losses.append(-c / num_c - WEIGHT * torch.log(torch.sigmoid(margins[-1])))
    return torch.stack(losses), torch.stack(margins)


LOSSES = [(DpoConfig(beta=BETA), dpo), (OrpoConfig(weight=WEIGHT), orpo)]


@pytest.mark.parametrize("micro_batch", [1, 4, NUM])
@pytest.mark.parametrize(("config", "paper"), LOSSES, ids=["dpo", "orpo"])
def test_the_gradient_is_that_of_the_papers_mean(tmp_path: Path, config: Any, paper: Any, micro_batch: int) -> None:
    run = pairs_run(tmp_path, config, method=DdpConfig())
    positions = np.arange(NUM, dtype=np.int64)
    batch = rows_batches(run, tmp_path).at(positions)
    assert isinstance(batch, PairBatch)
    model = flatten(assemble(MODEL, NOW).requires_grad_(True), "cpu")
    losses, _ = paper(model.module, batch)
    assert len(losses) == batch.num_predicted > NUM, "some rows hold several pairs"
    assert len({batch.part(row, row + 1).num_predicted for row in range(NUM)}) > 1, "and some rows more than others"
    losses.mean().backward()
    found, work = trainer_of(run, tmp_path, NOW, micro_batch).gradient(positions, 0, 1)
    torch.testing.assert_close(found, model.gradient, rtol=1e-4, atol=1e-6)
    assert work.mean_loss == pytest.approx(losses.mean().item(), rel=1e-5)


@pytest.mark.parametrize(("config", "paper"), LOSSES, ids=["dpo", "orpo"])
def test_held_out_pairs_are_told_by_their_loss_and_by_which_answer_is_better(
    tmp_path: Path, config: Any, paper: Any
) -> None:
    run = pairs_run(tmp_path, config)
    heldout = rows_batches(run, tmp_path, "heldout")
    found = trainer_of(run, tmp_path, FIRST).evaluate(NOW, heldout, 10)
    batches = list(heldout.heldout_batches(10, NUM))
    module, first = assemble(MODEL, NOW), assemble(MODEL, FIRST)
    with torch.no_grad():
        losses, margins = (torch.cat(each) for each in zip(*(paper(module, batch) for batch in batches), strict=True))
        divergence, num = 0.0, 0
        for batch in batches:
            p, q = (log_softmax(each(batch.tokens, positions=batch.positions), -1) for each in (module, first))
            there = batch.targets != UNTRAINED
            divergence += float((p.exp() * (p - q)).sum(-1)[there].sum())
            num += int(there.sum())
    assert found.num == len(losses)
    assert found.loss == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found.preferred is not None
    assert found.preferred.accuracy == pytest.approx(float((margins > 0).float().mean()))
    assert 0 < found.preferred.accuracy < 1
    assert found.preferred.margin == pytest.approx(float(margins.mean()), rel=1e-4)
    assert found.preferred.kl == pytest.approx(divergence / num, rel=1e-4)
    assert divergence > 0


def test_a_run_begins_undecided_and_learns_what_is_preferred(tmp_path: Path) -> None:
    run = pairs_run(tmp_path, DpoConfig(beta=BETA), method=FedAvgConfig(every=20))
    trainer, heldout = trainer_of(run, tmp_path, FIRST), rows_batches(run, tmp_path, "heldout")
    before = trainer.evaluate(trainer.local(), heldout, 10)
    assert before.loss == pytest.approx(log(2))
    assert before.preferred is not None
    assert (before.preferred.accuracy, before.preferred.kl) == (0, pytest.approx(0, abs=1e-9))
    trainer.warm_up()
    trainer.train(np.arange(20 * NUM), 0, 1)
    after = trainer.evaluate(trainer.local(), heldout, 10)
    assert after.preferred is not None
    assert after.preferred.kl is not UNSET
    assert after.loss < before.loss
    assert after.preferred.accuracy > 0.9
    assert after.preferred.margin > 0.1
    assert after.preferred.kl > 0


def test_who_left_the_device_goes_on_from_the_same_reference(tmp_path: Path) -> None:
    run = pairs_run(tmp_path, DpoConfig(beta=BETA), method=FedAvgConfig(every=4))
    plain, parked = (trainer_of(run, tmp_path, FIRST) for _ in range(2))
    for trainer in (plain, parked):
        trainer.train(np.arange(2 * NUM), 0, 1)
        if trainer is parked:
            trainer.park()
            trainer.unpark()
        trainer.train(np.arange(2 * NUM, 4 * NUM), 0, 1)
    assert torch.equal(plain.local(), parked.local())
