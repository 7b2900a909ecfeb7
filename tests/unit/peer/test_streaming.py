"""Fragments, overlap and mixing against Streaming DiLoCo written from its paper, on real models."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from unit.peer import tiny
from unit.peer.state.test_carry import carry_of
from unit.peer.test_equivalences import assert_same
from weft.codec.build import build
from weft.codec.config import Fp32Config
from weft.ids import Digest, Round
from weft.model.initial import initial_vector
from weft.run.config import RunConfig
from weft.sync.merge.mean import merge
from weft.sync.merge.method import Scope
from weft.sync.merge.reduce import Merger, Replies, coding_in, reply_codec_in
from weft.sync.method.choices import InnerSgdConfig
from weft.sync.method.presets import CocktailConfig, DiLoCoConfig, MethodConfig, StreamingConfig
from weft.training.learner import Work

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PEERS, ROUNDS, WEIGHT = 2, 8, 100


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def of(method: MethodConfig) -> RunConfig:
    return tiny.run_config(method, optimizer=InnerSgdConfig(), clip=float("inf"))


def samples(run: RunConfig, peer: int, step: int) -> NDArray[np.int64]:
    size = run.train.batch_size
    return np.arange(size, dtype=np.int64) + (peer * 1000 + step) * size


def by_peers(run: RunConfig, folder: Path) -> Tensor:
    """Return the outer parameters after some rounds of peers as they are, each with its carry and its replica."""
    peers = [carry_of(run, folder) for _ in range(PEERS)]
    every, overlap, codec = run.method.every, run.method.overlap, build(Fp32Config())
    step = [0] * PEERS
    for number in range(1, ROUNDS + 1):
        brought = []
        for peer, (carry, replica, trainer) in enumerate(peers):
            carry.cover(every, run.tokens_per_step)
            while carry.num_done < every:
                carry.add_steps(trainer.train(samples(run, peer, step[peer]), 0, 1))
                step[peer] += 1
            num = replica.scope.num_sent(number)
            (payload,) = carry.encode((range(num),), number)
            carry.offered = (Digest(payload.digest),)
            brought.append((WEIGHT, codec.decode(payload.encoded, num)))
            for _ in range(overlap):  # while the round is decided
                carry.go_ahead()
                carry.add_steps(trainer.train(samples(run, peer, step[peer]), 0, 1))
                step[peer] += 1
        merged = merge(brought)
        for carry, replica, _ in peers:
            carry.settle(partial(replica.make_step, Round(number), merged, 0), True, round=Round(number))
    outers = [replica.outer for _, replica, _ in peers]
    assert torch.equal(outers[0], outers[1])
    return outers[0]


@dataclass
class Paper:
    """Streaming DiLoCo, algorithm 2: fragment p of round t, sent at step t H / P and taken up tau steps later."""

    run: RunConfig
    folder: Path
    fragments: int
    tau: int
    alpha: float
    lr: float
    momentum: float

    def train(self) -> Tensor:
        _, _, plain = carry_of(self.run, self.folder)
        theta = initial_vector(self.run.model, self.run.seed)
        local, m = [theta.clone() for _ in range(PEERS)], torch.zeros_like(theta)
        scope, every = Scope(theta.numel(), self.fragments), self.run.method.every
        is_in = [torch.zeros(theta.numel(), dtype=torch.bool) for _ in range(self.fragments)]
        for number, mask in enumerate(is_in):
            scope.put(mask, number, torch.ones(scope.num_sent(number), dtype=torch.bool))
        flight: list[tuple[int, Tensor, Tensor]] = []

        def take_up(step: int) -> None:
            while flight and step == flight[0][0] + self.tau:
                _, mask, delta = flight.pop(0)
                m[mask] = self.momentum * m[mask] + delta[mask]
                theta[mask] -= self.lr * (delta[mask] + self.momentum * m[mask])
                for x in local:
                    x[mask] = self.alpha * x[mask] + (1 - self.alpha) * theta[mask]

        for step in range(ROUNDS * every + self.tau + 1):
            take_up(step)
            if step and step % every == 0 and step <= ROUNDS * every:
                flight.append((step, is_in[step // every % self.fragments], sum(theta - x for x in local) / PEERS))
                take_up(step)
            for peer, x in enumerate(local):
                plain.set_local(x)
                plain.train(samples(self.run, peer, step), 0, 1)
                x.copy_(plain.local())
        return theta


@pytest.mark.parametrize(
    ("fragments", "tau", "alpha"), [(1, 0, 0.0), (2, 0, 0.0), (4, 0, 0.5), (2, 1, 0.5), (2, 2, 0.0)]
)
def test_streaming_is_its_paper(tmp_path: Path, fragments: int, tau: int, alpha: float) -> None:
    config = StreamingConfig(
        every=2 * fragments, fragments=fragments, overlap=tau, mix=alpha, lr=0.4, momentum=0.9, codec=Fp32Config()
    )
    run = of(config)
    assert_same(by_peers(run, tmp_path), Paper(run, tmp_path, fragments, tau, alpha, 0.4, 0.9).train())


def test_one_fragment_without_overlap_and_mixing_is_diloco_bit_for_bit(tmp_path: Path) -> None:
    streaming = StreamingConfig(every=3, fragments=1, overlap=0, mix=0.0, lr=0.7, momentum=0.8, codec=Fp32Config())
    diloco = DiLoCoConfig(every=3, lr=0.7, momentum=0.8, codec=Fp32Config())
    assert torch.equal(by_peers(of(streaming), tmp_path), by_peers(of(diloco), tmp_path))


def test_what_a_round_did_not_count_of_a_fragment_is_brought_the_next_time(tmp_path: Path) -> None:
    run = of(StreamingConfig(every=4, fragments=2, overlap=0, mix=0.0, codec=Fp32Config()))
    carry, replica, trainer = carry_of(run, tmp_path)
    carry.add_steps(trainer.train(samples(run, 0, 0), 0, 1))
    before, moved = replica.outer - trainer.local(), torch.ones(replica.scope.num_sent(1))
    carry.settle(lambda: replica.make_step(Round(1), moved, 0), is_counted=False, round=Round(1))
    torch.testing.assert_close(replica.outer - trainer.local(), before, rtol=0, atol=1e-5)
    assert carry.tokens == run.tokens_per_step
    # Another state is taken over: all of it moves, and what was trained stays on top.
    carry.settle(lambda: replica.outer.mul_(0.5), is_counted=False)
    torch.testing.assert_close(replica.outer - trainer.local(), before, rtol=0, atol=1e-5)


def test_what_is_made_beyond_the_overlap_keeps_its_distance(tmp_path: Path) -> None:
    """The rule mixes what was made up to tau steps after a fragment was sent, and no more: no work is lost."""
    num_within = 2
    run = of(StreamingConfig(every=4, fragments=2, overlap=num_within, mix=0.25, codec=Fp32Config()))
    found = []
    for num_ahead in (num_within, 3 * num_within):  # all steps move it alike
        carry, replica, trainer = carry_of(run, tmp_path)
        carry.add_steps(trainer.train(samples(run, 0, 0), 0, 1))
        step = torch.linspace(0.0, 1.0, replica.outer.numel())
        carry.go_ahead()
        trainer.set_local(trainer.local() + num_ahead * step)
        work = Work(num_steps=num_ahead, num_tokens=run.tokens_per_step * num_ahead, mean_loss=0.0, duration_s=0.0)
        carry.add_steps(work)
        carry.offered = (Digest("0" * 64),)
        moved = torch.ones(replica.scope.num_sent(1))
        carry.settle(partial(replica.make_step, Round(1), moved, 0), True, round=Round(1))
        found.append(trainer.local())
    torch.testing.assert_close(found[1] - found[0], 2 * num_within * step, rtol=0, atol=1e-5)


def cocktail(run: RunConfig, folder: Path) -> Tensor:
    """CocktailSGD, algorithm 1: what was not sent stays in each worker's parameters, and in the server's error.

    With overlap the inner steps of it are made from parameters that still hold C(x): it leaves them with z, once the
    round is decided. The authors' code takes it out as it is sent.
    """
    _, _, plain = carry_of(run, folder)
    theta = initial_vector(run.model, run.seed)
    num, every, overlap = theta.numel(), run.method.every, run.method.overlap
    local, server = [theta.clone() for _ in range(PEERS)], torch.zeros(num)
    step = [0] * PEERS

    def compressed(x: Tensor, number: int) -> Tensor:
        codec = build(run.method.codec, number)
        return codec.decode(codec.encode(x.contiguous()), num)

    def train(num_steps: int) -> None:
        for peer, x in enumerate(local):
            for _ in range(num_steps):
                plain.set_local(x)
                plain.train(samples(run, peer, step[peer]), 0, 1)
                x.copy_(plain.local())
                step[peer] += 1

    for number in range(1, ROUNDS + 1):
        train(every if number == 1 else every - overlap)  # the others were made meanwhile
        sent = [compressed(theta - x, number) for x in local]
        y = sum(sent) / PEERS + server
        z = compressed(y, number)
        server = y - z
        train(overlap)
        for x, c in zip(local, sent, strict=True):
            x.add_(c).sub_(z)
        theta = theta - z
    return theta


@pytest.mark.full
@pytest.mark.parametrize(("every", "overlap"), [pytest.param(1, 0, marks=pytest.mark.slow), (1, 1), (2, 1)])
def test_cocktail_is_its_paper(tmp_path: Path, every: int, overlap: int) -> None:
    """A round's payloads are merged and sent back before the next step, or while it is made."""
    run = of(CocktailConfig(every=every, overlap=overlap))
    peers = [carry_of(run, tmp_path) for _ in range(PEERS)]
    num = peers[0][1].outer.numel()
    replies, step = Replies(Scope(num)), [0] * PEERS
    for number in range(1, ROUNDS + 1):
        merger = Merger(num, coding_in(run.method, number))
        for peer, (carry, _, trainer) in enumerate(peers):
            carry.cover(every, run.tokens_per_step)
            while carry.num_done < every:
                carry.add_steps(trainer.train(samples(run, peer, step[peer]), 0, 1))
                step[peer] += 1
            (payload,) = carry.encode((range(num),), number)
            carry.offered = (Digest(payload.digest),)
            merger.add(WEIGHT, payload.encoded)
            for _ in range(overlap):
                carry.go_ahead()
                carry.add_steps(trainer.train(samples(run, peer, step[peer]), 0, 1))
                step[peer] += 1
        result = replies.encode(merger.merged(), range(num), Round(number), run.method)
        replies.settle(Round(number), [result.digest])
        merged = reply_codec_in(run.method, number).decode(result.encoded, num)
        for carry, replica, _ in peers:
            carry.settle(partial(replica.make_step, Round(number), merged, 0), True, round=Round(number))
    assert torch.equal(peers[0][1].outer, peers[1][1].outer)
    wanted = cocktail(run, tmp_path)
    start = initial_vector(run.model, run.seed)
    assert float((peers[0][1].outer - wanted).norm()) < 1e-3 * float((wanted - start).norm())
    assert not torch.equal(peers[0][2].local(), peers[0][1].outer)  # what was not sent
