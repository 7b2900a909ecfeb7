"""Rounds in which members exchange with neighbours, and means over all now and then."""

import asyncio

import pytest

from scenarios import rules
from scenarios.comings import assert_it_came, kill_two_in_turn, replace_in_mid_round
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp32Config, TopKConfig
from weft.events import BranchLeft, BranchOpened, Evaluated, GraphChosen, PayloadRejected, RoundCommitted
from weft.ids import Round
from weft.sync.method.presets import ChocoConfig, DPsgdConfig, FedAvgConfig, MethodConfig, NoLoCoConfig
from weft.sync.records.messages import Collect
from weft.sync.round.machine import MergeDone, MergeFailed
from weft.sync.round.neighbours import NOTHING
from weft.wire import digest

METHODS = {
    "dpsgd": DPsgdConfig(every=2, mean_every=5, codec=Fp32Config(), reply_codec=Fp32Config()),
    "choco": ChocoConfig(every=2, mean_every=5, codec=TopKConfig(kept=256)),
    "noloco": NoLoCoConfig(every=4, mean_every=5),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@each_method
def test_members_exchange_and_end_with_one_mean(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, num_rounds=12)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()
    rounds = swarm.lives[0].seen(RoundCommitted)
    assert len(rounds) == 12


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [pytest.param(each, id=name, marks=() if name == "choco" else pytest.mark.slow) for name, each in METHODS.items()],
)
def test_one_dies_in_the_middle_of_a_round_and_another_joins(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, num_rounds=16)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        e = swarm.member("e")
        replace_in_mid_round(swarm, b, e)
        await swarm.round(a, 4)
        one_replica(await swarm.done(*(each for each in members if each is not b), e))
        assert_it_came(e, a)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
@each_method
@pytest.mark.parametrize("seed", range(8))
def test_who_is_killed_and_comes_back_goes_on(make_swarm: MakeSwarm, method: MethodConfig, seed: int) -> None:
    swarm = make_swarm(num_rounds=18, method=method, seed=seed)

    async def scenario() -> None:
        members = await swarm.start("abcd", train_s=1.0 + seed)
        one_replica(await kill_two_in_turn(swarm, members, seed, train_s=1.0 + seed))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
@each_method
def test_branches_meet(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(num_rounds=40, num_peers=5, method=method)

    async def scenario() -> None:
        members = await swarm.start("abcde", train_s=4.0)
        await swarm.round(members[0], 2)
        stay, go = members[:3], members[3:]
        swarm.cut(stay, go)
        await swarm.when(go[0], BranchOpened)
        await swarm.when(go[0], RoundCommitted)
        swarm.heal(stay, go)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert [event for member in members for event in member.life.seen(BranchLeft)]

    swarm.run(scenario)
    rules.one_history([event for life in swarm.lives for event in life.committed])
    swarm.check(has_branches=True)


@pytest.mark.full
def test_members_say_who_exchanges_and_how_far_they_were_from_the_mean(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(learns=True, method=METHODS["dpsgd"], num_rounds=12, train={"evaluate_every": 1})

    async def scenario() -> None:
        await swarm.done(*await swarm.start("abcd"))

    swarm.run(scenario)
    swarm.check()
    for life in swarm.lives:
        (graph,) = life.seen(GraphChosen)
        assert (graph.graph, graph.num_members) == ("ring", 4)
        assert graph.spectral_gap == pytest.approx(2 / 3)
        distances = {event.round: event.distance for event in life.committed if event.distance is not None}
        assert list(distances) == [5, 10, 12]
        assert min(distances.values()) > 1e-5
        assert not life.seen(PayloadRejected)
    evaluated = {event.round for life in swarm.lives for event in life.seen(Evaluated)}
    assert evaluated == {5, 10, 12}


@pytest.mark.parametrize("method", [METHODS["dpsgd"], FedAvgConfig(every=2)], ids=["dpsgd", "fedavg"])
def test_who_announces_nothing_as_a_payload_ends_nobody(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, num_rounds=8)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        parts = b.peer.rounds.parts  # type: ignore[union-attr]
        offer = parts.offer
        parts.offer = lambda payload: (NOTHING,) * len(members)  # type: ignore[method-assign]
        event = await swarm.when(a, RoundCommitted, lambda event: event.round == 3)
        assert event.contributors == tuple(sorted(each.id for each in (a, c, d)))
        parts.offer = offer  # type: ignore[method-assign]
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


@pytest.mark.parametrize("is_false", [True, False], ids=["false", "silent"])
def test_who_never_says_that_it_holds_what_it_takes_is_left_out(make_swarm: MakeSwarm, is_false: bool) -> None:
    swarm = make_swarm(method=METHODS["dpsgd"], num_rounds=8)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        merger = b.peer.rounds.merger  # type: ignore[union-attr]
        merge = merger.merge

        async def lie(plan: Collect, part: int, here: range, round: Round) -> MergeDone | MergeFailed:
            if not is_false:
                await asyncio.Event().wait()
            return MergeDone(plan=plan, part=part, result=digest(b"something"))

        merger.merge = lie  # type: ignore[method-assign]
        event = await swarm.when(a, RoundCommitted, lambda event: event.round == 3)
        assert event.contributors == tuple(sorted(each.id for each in (a, c, d)))
        merger.merge = merge  # type: ignore[method-assign]
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()
