"""Exchanges with neighbours against D-PSGD, CHOCO-SGD and NoLoCo written from their papers, on real models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from unit.peer import tiny
from unit.peer.state.test_carry import carry_of
from unit.peer.test_equivalences import assert_same
from unit.peer.test_streaming import samples
from weft.codec.build import build
from weft.codec.config import CodecConfig, Fp32Config, Int8Config, RandomKConfig, SignConfig, TopKConfig
from weft.errors import ConfigError
from weft.ids import Digest, PeerId, Round
from weft.model.initial import initial_vector
from weft.peer.state.mixing import Met
from weft.run.config import RunConfig
from weft.sync.merge.gossip import Neighbour
from weft.sync.merge.gossip import build as build_gossip
from weft.sync.merge.mean import merge
from weft.sync.merge.reduce import codec_in
from weft.sync.method.choices import Choices, GraphConfig, InnerSgdConfig, MixConfig, check_graph
from weft.sync.method.graph import mixing
from weft.sync.method.presets import ChocoConfig, DPsgdConfig, MethodConfig, NoLoCoConfig, spell_out

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PEERS, ROUNDS, EVERY = 5, 8, 2
KEY = "run"
NAMES = [PeerId(str(peer)) for peer in range(PEERS)]
ALL = tuple(range(PEERS))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def of(method: MethodConfig) -> RunConfig:
    return tiny.run_config(method, optimizer=InnerSgdConfig(), clip=float("inf"))


def weights_in(run: RunConfig, round: int) -> list[dict[int, float]]:
    graph = run.method.graph
    assert graph is not None
    return list(mixing(graph.graph, PEERS, graph.degree, KEY, round))


@dataclass
class Crew:
    """Peers as they are, each with its carry; who is counted in which round, a script says."""

    run: RunConfig
    folder: Path
    counted: Callable[[int], Sequence[int]] = lambda _: ALL
    means: tuple[int, ...] = ()
    moved: float = 0.0  # the mean over peers, at most, by a gossip round

    def train(self) -> list[Tensor]:
        """Return their parameters after each has had all rounds."""
        self.peers = [carry_of(self.run, self.folder) for _ in range(PEERS)]
        num = self.peers[0][1].outer.numel()
        for number in range(1, ROUNDS + 1):
            is_mean = number in self.means
            counted, parts = self.counted(number), {}
            for peer, (carry, _, trainer) in enumerate(self.peers):
                for step in range(EVERY):
                    carry.add_steps(trainer.train(samples(self.run, peer, EVERY * number + step), 0, 1))
                (parts[peer],) = carry.encode((range(num),), number, is_gossip=not is_mean)
                carry.offered = (Digest(parts[peer].digest),)
            before = self.mean()
            if is_mean:
                codec = codec_in(self.run.method.of_mean(), number)
                merged = merge([(1, codec.decode(parts[peer].encoded, num)) for peer in counted])
                for peer, (carry, replica, _) in enumerate(self.peers):
                    carry.settle(
                        partial(replica.make_step, Round(number), merged, 0), peer in counted, "late", Round(number)
                    )
            else:
                rows = weights_in(self.run, number)
                for peer, (carry, _, _) in enumerate(self.peers):
                    taken = {NAMES[j]: parts[j].encoded for j in rows[peer] if j in counted}
                    met = Met(taken, {NAMES[j]: weight for j, weight in rows[peer].items()})
                    carry.settle(lambda: None, peer in counted, "late", Round(number), met)
                self.moved = max(self.moved, float((self.mean() - before).abs().max()))
        return [trainer.local().clone() for _, _, trainer in self.peers]

    def mean(self) -> Tensor:
        return torch.stack([trainer.local() for _, _, trainer in self.peers]).double().mean(0)


@dataclass
class Paper:
    run: RunConfig
    folder: Path

    def start(self) -> Tensor:
        _, _, self._plain = carry_of(self.run, self.folder)
        return initial_vector(self.run.model, self.run.seed)

    def steps(self, x: Tensor, peer: int, number: int) -> Tensor:
        self._plain.set_local(x)
        for step in range(EVERY):
            self._plain.train(samples(self.run, peer, EVERY * number + step), 0, 1)
        return self._plain.local().clone()

    def matrix(self, number: int) -> Tensor:
        w = torch.zeros(PEERS, PEERS)
        for i, row in enumerate(weights_in(self.run, number)):
            for j, weight in row.items():
                w[i, j] = weight
        return w + torch.diag(1 - w.sum(1))

    def dpsgd(self) -> list[Tensor]:
        """Adapt, then combine: x_i = sum_j w_ij (x_j - eta g_j)."""
        x = [self.start()] * PEERS
        for number in range(1, ROUNDS + 1):
            half = torch.stack([self.steps(x[i], i, number) for i in ALL])
            x = list(self.matrix(number) @ half)
        return x

    def choco(self, gamma: float, compress: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Algorithm 2: q = Q(x - xhat); xhat += q; x += gamma sum_j w_ij (xhat_j - xhat_i)."""
        start = self.start()
        x, hat = torch.stack([start] * PEERS), torch.stack([start] * PEERS)
        for number in range(1, ROUNDS + 1):
            w = self.matrix(number)
            half = torch.stack([self.steps(x[i], i, number) for i in ALL])
            hat = hat + torch.stack([compress(half[i] - hat[i]) for i in ALL])
            x = half + gamma * (w @ hat - hat)
        return list(x)

    def noloco(self, alpha: float, beta: float, gamma: float) -> list[Tensor]:
        """Section 3: m = alpha m - beta / n sum Delta - gamma (phi_i - mean phi); phi += m, of groups of n = 2 or 1."""
        start = self.start()
        phi, m = torch.stack([start] * PEERS), torch.zeros(PEERS, len(start))
        for number in range(1, ROUNDS + 1):
            delta = torch.stack([phi[i] - self.steps(phi[i], i, number) for i in ALL])
            groups = [[i, *row] for i, row in enumerate(weights_in(self.run, number))]
            near = torch.stack([delta[group].mean(0) for group in groups])
            apart = torch.stack([phi[i] - phi[group].mean(0) for i, group in enumerate(groups)])
            m = alpha * m - beta * near - gamma * apart
            phi = phi + m
        return list(phi)


def compare(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other)
    assert float((mine[0] - mine[2]).abs().max()) > 1e-4  # there are no replicas


SLOW_GRAPHS = [pytest.param(each, marks=pytest.mark.slow) for each in ("one_peer", "random", "complete")]


@pytest.mark.full
@pytest.mark.parametrize("graph", ["ring", "exponential", "pairs", *SLOW_GRAPHS])
def test_dpsgd_is_its_paper(tmp_path: Path, graph: str) -> None:
    run = of(DPsgdConfig(every=EVERY, graph=graph, degree=2, codec=Fp32Config()))  # type: ignore[arg-type]
    mine, theirs = Crew(run, tmp_path).train(), Paper(run, tmp_path).dpsgd()
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other)


@pytest.mark.full
@pytest.mark.parametrize(
    ("codec", "step"),
    [(Fp32Config(), 0.5), (Int8Config(), 0.5), pytest.param(TopKConfig(kept=128), 0.1, marks=pytest.mark.slow)],
)
def test_choco_is_its_paper(tmp_path: Path, codec: CodecConfig, step: float) -> None:
    run, built = of(ChocoConfig(every=EVERY, codec=codec, step=step)), build(codec)
    paper = Paper(run, tmp_path).choco(step, lambda x: -built.decode(built.encode(-x), x.numel()))
    mine = Crew(run, tmp_path).train()
    start = initial_vector(run.model, run.seed)
    for one, other in zip(mine, paper, strict=True):  # rounding moves a place over the threshold now and then
        assert float((one - other).norm()) < 1e-2 * float((other - start).norm())


@pytest.mark.full
def test_noloco_is_its_paper(tmp_path: Path) -> None:
    run = of(NoLoCoConfig(every=EVERY, lr=0.7, momentum=0.5, pull=0.9, codec=Fp32Config()))
    compare(Crew(run, tmp_path).train(), Paper(run, tmp_path).noloco(0.5, 0.7, 0.9))


@pytest.mark.full
def test_choco_with_an_exact_codec_and_a_whole_step_is_dpsgd(tmp_path: Path) -> None:
    choco = Crew(of(ChocoConfig(every=EVERY, codec=Fp32Config(), step=1.0)), tmp_path).train()
    dpsgd = Crew(of(DPsgdConfig(every=EVERY, codec=Fp32Config())), tmp_path).train()
    compare(choco, dpsgd)


def some_are_away(number: int) -> Sequence[int]:
    return ALL if number % 3 else (0, 2, 3)


@pytest.mark.parametrize("counted", [lambda _: ALL, some_are_away], ids=["all", "some"])
@pytest.mark.parametrize(
    "method",
    [
        DPsgdConfig(codec=Int8Config()),
        DPsgdConfig(graph="complete"),
        DPsgdConfig(graph="pairs"),
        pytest.param(ChocoConfig(codec=TopKConfig(kept=64)), marks=pytest.mark.full),
    ],
    ids=["dpsgd", "complete", "pairs", "choco"],
)
def test_a_gossip_round_keeps_the_mean_whoever_is_away(
    tmp_path: Path, method: MethodConfig, counted: Callable[[int], Sequence[int]]
) -> None:
    crew = Crew(of(method), tmp_path, counted)
    crew.train()
    assert 0 < crew.moved < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("graph", ["exponential", "one_peer"])
def test_where_exchange_goes_one_way_the_mean_stays_only_if_all_are_there(tmp_path: Path, graph: str) -> None:
    method = DPsgdConfig(graph=graph, codec=Fp32Config())  # type: ignore[arg-type]
    whole, torn = Crew(of(method), tmp_path), Crew(of(method), tmp_path, some_are_away)
    whole.train()
    torn.train()
    assert whole.moved < 1e-6
    assert torn.moved > 1e-5


@pytest.mark.full
def test_all_who_are_counted_go_on_from_the_mean_and_the_others_from_where_they_are(tmp_path: Path) -> None:
    for method in (DPsgdConfig(), ChocoConfig(), NoLoCoConfig()):
        method = of(method).method
        run = tiny.run_config(method, optimizer=InnerSgdConfig(), clip=float("inf"))
        crew = Crew(run, tmp_path, lambda number: (0, 1, 3) if number == ROUNDS else ALL, means=(4, ROUNDS))
        last = crew.train()
        outer = crew.peers[0][1].outer
        assert all(torch.equal(last[peer], outer) == (peer in (0, 1, 3)) for peer in ALL)
        assert all(torch.equal(replica.outer, outer) for _, replica, _ in crew.peers)
        assert all(
            carry.tokens == (0 if peer in (0, 1, 3) else 2 * run.tokens_per_step)
            for peer, (carry, _, _) in enumerate(crew.peers)
        )
        assert all((carry.mixing.distance or 0) > 1e-4 for carry, _, _ in crew.peers)


def test_who_lacks_an_exchange_brings_nothing_to_those_that_build_on_it(tmp_path: Path) -> None:
    for method, is_lame in ((ChocoConfig(), True), (DPsgdConfig(), False)):
        carry, replica, trainer = carry_of(of(method), tmp_path)
        assert carry.mixing.is_in_step
        carry.add_steps(trainer.train(np.arange(8), 0, 1))
        before = trainer.local().clone()
        met = Met({NAMES[1]: None}, {NAMES[1]: 1 / 3})
        carry.settle(lambda: None, False, "late", Round(1), met)
        assert met.lost == (NAMES[1],)
        assert carry.mixing.is_in_step != is_lame
        assert torch.equal(trainer.local(), before)
        carry.settle(partial(replica.outer.mul_, 0.9), False, "late", Round(2))
        assert carry.mixing.is_in_step
        assert torch.equal(trainer.local(), before)


def test_who_takes_over_another_state_keeps_its_distance(tmp_path: Path) -> None:
    carry, replica, trainer = carry_of(of(NoLoCoConfig()), tmp_path)
    carry.add_steps(trainer.train(np.arange(8), 0, 1))
    apart = trainer.local() - replica.outer
    carry.settle(lambda: replica.outer.mul_(0.5), is_counted=False)
    torch.testing.assert_close(trainer.local() - replica.outer, apart, rtol=0, atol=1e-6)
    assert carry.tokens == 8 * tiny.SEQ_LEN


def test_who_is_restarted_between_means_brings_no_move_that_others_have_had(tmp_path: Path) -> None:
    run = of(NoLoCoConfig(codec=Fp32Config()))
    carry, replica, trainer = carry_of(run, tmp_path)
    carry.add_steps(trainer.train(np.arange(8), 0, 1))
    vectors, counters = {name: each.clone() for name, each in carry.vectors().items()}, carry.counters()
    num = replica.outer.numel()
    before = trainer.local().clone()

    again, _, other = carry_of(run, tmp_path)
    again.load(vectors, counters)
    other.train(np.arange(8, 16), 0, 1)
    (part,) = again.encode((range(num),), 1, is_gossip=True)
    sent = build(Fp32Config()).decode(part.encoded, 2 * num)
    torch.testing.assert_close(sent[:num], before - other.local(), rtol=0, atol=0)
    torch.testing.assert_close(sent[num:], replica.outer - before, rtol=0, atol=0)


def test_what_was_made_ahead_keeps_its_distance(tmp_path: Path) -> None:
    carry, _, trainer = carry_of(of(DPsgdConfig(codec=Fp32Config())), tmp_path)
    carry.add_steps(trainer.train(np.arange(8), 0, 1))
    carry.go_ahead()
    leased = trainer.local().clone()
    carry.add_steps(trainer.train(np.arange(8, 16), 0, 1))
    ahead = trainer.local() - leased
    (payload,) = carry.encode((range(leased.numel()),), 1, is_gossip=True)
    carry.offered = (Digest(payload.digest),)
    zero = build(Fp32Config()).encode(torch.zeros(leased.numel()))
    carry.settle(lambda: None, True, "late", Round(1), Met({NAMES[1]: zero}, {NAMES[1]: 0.5}))
    assert carry.tokens == carry.ahead == 8 * tiny.SEQ_LEN
    wanted = (leased + initial_vector(tiny.run_config().model, tiny.run_config().seed)) / 2 + ahead
    torch.testing.assert_close(trainer.local(), wanted, rtol=0, atol=1e-6)


def test_a_method_of_neighbours_is_refused_where_it_is_no_whole() -> None:
    for fields in (
        {"send": "weights", "apply": MixConfig(), "among": "all"},
        {"send": "difference", "apply": MixConfig(), "among": GraphConfig(graph="pairs")},
        {"send": "weights", "apply": MixConfig(), "among": GraphConfig(), "codec": TopKConfig()},
        {"send": "weights", "apply": MixConfig(), "among": GraphConfig(), "proximal": 0.1},
        {"send": "delta", "apply": MixConfig(), "among": GraphConfig()},
    ):
        with pytest.raises(ValueError, match="method: "):
            Choices(every=1, **fields)  # type: ignore[arg-type]


def test_a_graph_in_which_not_all_hear_of_each_other_is_refused() -> None:
    check_graph(GraphConfig(graph="ring"), num_peers=32, electors=32)
    with pytest.raises(ConfigError, match="of 40 peers only 32 can be members"):
        check_graph(GraphConfig(graph="ring"), num_peers=40, electors=32)
    with pytest.raises(ConfigError, match=r'graph "random" of degree 1, 32 peers do not mix'):
        check_graph(GraphConfig(graph="random", degree=1), num_peers=32, electors=32)


@pytest.mark.full
@pytest.mark.parametrize("num", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (TopKConfig(), 0.7),
        pytest.param(TopKConfig(kept=256), 0.4, marks=pytest.mark.slow),
        (RandomKConfig(kept=410, largest=82, values="int4"), 0.75),
        (SignConfig(), 0.1),
        (Int8Config(), 0.02),
    ],
)
def test_choco_brings_members_together_by_default(codec: CodecConfig, most: float, num: int) -> None:
    """Of what would stay if nothing were exchanged, where nobody trains meanwhile."""
    num_numbers = 4096
    gossip = build_gossip(spell_out(ChocoConfig(codec=codec), num))
    assert gossip is not None
    outer, states = torch.zeros(num_numbers), [dict[str, Tensor]() for _ in range(num)]
    x = list(torch.randn(num, num_numbers, generator=torch.Generator().manual_seed(0)))

    def apart() -> float:
        return float((torch.stack(x) - torch.stack(x).mean(0)).norm())

    before = apart()
    for number in range(1, 41):
        codec_now = build(codec, number)
        sent = [
            codec_now.decode(codec_now.encode(gossip.payload(outer, *each)), num_numbers)
            for each in zip(x, states, strict=True)
        ]
        for i, row in enumerate(mixing("ring", num)):
            theirs = [Neighbour(PeerId(str(j)), weight, sent[j]) for j, weight in row.items()]
            x[i], states[i] = gossip.mixed(x[i], states[i], sent[i], theirs)
    assert apart() < most * before
