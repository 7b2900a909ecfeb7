"""`async-diloco` against Async Local-SGD with delayed Nesterov written from its paper, members of unequal speed.

The paper's worker trains on from the parameters that it was given last, however often the server moves them meanwhile.
A peer's are moved along with the outer ones, so its later steps are taken from elsewhere. Where steps do not depend on
where they are taken the two are the same.
"""

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from unit.peer import tiny
from unit.peer.state.test_carry import carry_of
from unit.peer.state.test_carry_feedback import Walker
from unit.peer.test_equivalences import assert_same
from unit.peer.test_streaming import samples
from weft.codec.config import Fp32Config
from weft.data.assign import Lease
from weft.ids import PeerId, Round, Tokens
from weft.model.initial import initial_vector
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.run.config import RunConfig
from weft.sync.merge.reduce import Merger, coding_in
from weft.sync.method.choices import InnerSgdConfig
from weft.sync.method.presets import AsyncDiLoCoConfig, spell_out
from weft.sync.records.messages import Contribution
from weft.sync.records.weights import awaited_weight, weight_of
from weft.training.learner import Work

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

STEP_S = (1.0, 2.3, 5.1)  # of each member, so that no two end at once
NAMES = tuple(PeerId(digit * 64) for digit in "abc")
EVERY, ROUNDS = 3, 24
RATES = {"lr": 0.6, "momentum": 0.8}
Train = Callable[[Tensor, int, int], Tensor]  # parameters, member, which of its steps: where that leads
Training = Callable[[int, int], Work]  # member, which of its steps: what that came to


def handed_in() -> Iterator[tuple[int, int]]:
    """Yield each inner step in the order in which they end: whose, and which of its own."""
    due = [(step_s, member, 0) for member, step_s in enumerate(STEP_S)]
    while True:
        now, member, number = heapq.heappop(due)
        heapq.heappush(due, (now + STEP_S[member], member, number + 1))
        yield member, number


def paper(theta: Tensor, train: Train, activation: float, is_rebased: bool) -> Tensor:
    """Async Local-SGD, algorithm 3, by its notation: after t pseudo-gradients, the buffer Delta and the momentum m.

    Args:
        is_rebased: workers at work follow the server. The paper's do not.
    """
    n, lr, beta, c = len(STEP_S), RATES["lr"], RATES["momentum"], activation
    m, delta, t = torch.zeros_like(theta), torch.zeros_like(theta), 0
    given, x = [theta.clone() for _ in STEP_S], [theta.clone() for _ in STEP_S]
    for w, number in handed_in():
        x[w] = train(x[w], w, number)
        if (number + 1) % EVERY:
            continue
        g, before = given[w] - x[w], theta
        delta = delta + g
        if (t + 1) % n == 0:
            m = beta * m + delta / n
            theta = theta - lr * ((1 - c * n + c) * beta * m + g / n)
            delta = torch.zeros_like(theta)
        else:
            theta = theta - lr * (c * beta * m + g / n)
        t += 1
        if t == ROUNDS:
            return theta
        for other in range(n) if is_rebased else ():
            given[other], x[other] = given[other] + (theta - before), x[other] + (theta - before)
        given[w], x[w] = theta.clone(), theta.clone()
    raise AssertionError


def by_peers(peers: list[tuple[Carry, Replica]], train: Training) -> Tensor:
    """Return the outer parameters after some rounds, each of which counts whoever has made its inner steps."""
    names, run, quota = NAMES, peers[0][1].config, peers[0][1].charter.settings.quota
    leases = [Lease(peer=name, start=at * 100, stop=at * 100 + quota) for at, name in enumerate(names)]
    round = 0
    for member, number in handed_in():
        carry, replica = peers[member]
        carry.add_steps(train(member, number))
        if carry.num_done < EVERY:
            continue
        round, num, charter = round + 1, replica.outer.numel(), replica.charter
        (payload,) = carry.encode((range(num),), round)
        carry.offered = (payload.digest,)
        awaited = awaited_weight(charter, {name for name in names if name != names[member]}, (), leases)
        merger = Merger(num, coding_in(run.method, round), awaited)
        brought = Contribution(peer=names[member], tokens=Tokens(carry.due), parts=carry.offered)
        merger.add(weight_of(charter, brought), payload.encoded)
        merged = merger.merged()
        for other, (each, theirs) in enumerate(peers):
            step = partial(theirs.make_step, Round(round), merged, 0)
            each.settle(step, is_counted=other == member, round=Round(round))
        if round == ROUNDS:
            break
    outers = [replica.outer for _, replica in peers]
    assert all(torch.equal(outers[0], outer) for outer in outers)
    return outers[0]


def run_of(activation: float) -> RunConfig:
    row = spell_out(AsyncDiLoCoConfig(every=EVERY, codec=Fp32Config(), **RATES), len(STEP_S))
    apply = msgspec.structs.replace(row.apply, activation=activation)
    return tiny.run_config(msgspec.structs.replace(row, apply=apply), optimizer=InnerSgdConfig(), clip=float("inf"))


def step_of(member: int, number: int) -> Tensor:
    """Return a step that does not depend on where it is taken."""
    return torch.randn(300, generator=torch.Generator().manual_seed(1000 * member + number))


@pytest.mark.parametrize("activation", [0.0, 0.2])
def test_it_is_its_paper_where_steps_do_not_depend_on_where_they_are_taken(activation: float) -> None:
    run = run_of(activation)
    replicas = [Replica(run, torch.zeros(300)) for _ in STEP_S]
    walkers = [Walker(replica.outer) for replica in replicas]
    work = Work(num_steps=1, num_tokens=run.tokens_per_step, mean_loss=1.0, duration_s=1.0)

    def train(member: int, number: int) -> Work:
        walkers[member].vector = walkers[member].vector - step_of(member, number)
        return work

    found = by_peers([(Carry(*each), each[1]) for each in zip(walkers, replicas, strict=True)], train)
    wanted = paper(torch.zeros(300), lambda x, w, number: x - step_of(w, number), activation, is_rebased=False)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert float(wanted.abs().mean()) > 1.0


@pytest.mark.full
@pytest.mark.parametrize("activation", [0.0, 0.2])
def test_it_is_its_paper_but_that_who_is_at_work_follows_the_outer_parameters(
    tmp_path: Path, activation: float
) -> None:
    torch.set_num_threads(1)
    run = run_of(activation)
    crew = [carry_of(run, tmp_path) for _ in STEP_S]
    _, _, plain = carry_of(run, tmp_path)

    def train(x: Tensor, w: int, number: int) -> Tensor:
        plain.set_local(x)
        plain.train(samples(run, w, number), 0, 1)
        return plain.local().clone()

    found = by_peers(
        [(carry, replica) for carry, replica, _ in crew],
        lambda member, number: crew[member][2].train(samples(run, member, number), 0, 1),
    )
    start = initial_vector(run.model, run.seed)
    wanted, stale = (paper(start, train, activation, is_rebased) for is_rebased in (True, False))
    assert_same(found, wanted)
    assert float((stale - found).norm()) > 1e-3 * float((found - start).norm())
