"""Methods whose codecs leave most of a vector for later: it is kept, by who sends and by who merges."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scenarios.comings import assert_it_came, replace_in_mid_round
from scenarios.swarm import EVERY, Member, Swarm
from scenarios.test_branches import TRAIN_S, halves
from scenarios.test_faults import one_replica
from scenarios.test_groups import NAMES, NUM
from scenarios.test_return import stop
from weft.codec.config import CodecConfig, Fp32Config, Int2Config, Int8Config, RandomKConfig, SignConfig, TopKConfig
from weft.events import BranchOpened, CountedThrough, LegacyCounted, LegacyDropped, PayloadRejected
from weft.sync.method.choices import Choices, LowRankConfig, SgdConfig
from weft.sync.method.presets import (
    CocktailConfig,
    DeMoConfig,
    MethodConfig,
    PowerSgdConfig,
    PulseConfig,
    SparseLoCoConfig,
)

MakeSwarm = Callable[..., Swarm]


def custom(codec: CodecConfig, reply_codec: CodecConfig) -> Choices:
    return Choices(
        every=EVERY,
        send="delta",
        apply=SgdConfig(lr=0.5),
        codec=codec,
        reply_codec=reply_codec,
        feedback=1.0,
        reply_feedback=1.0,
    )


LOW_RANK = Choices(
    every=EVERY, send="delta", apply=SgdConfig(lr=0.5), codec=Int8Config(), basis=LowRankConfig(rank=4), feedback=1.0
)
METHODS: dict[str, MethodConfig] = {
    "sparseloco": SparseLoCoConfig(every=EVERY),
    "pulse": PulseConfig(every=EVERY),
    "demo": DeMoConfig(),
    "powersgd": PowerSgdConfig(rank=2),
    "low rank": LOW_RANK,
    "cocktail": CocktailConfig(every=EVERY),
    "random_k": custom(RandomKConfig(kept=410, largest=82, values="int4"), RandomKConfig(kept=410, values="int8")),
    "sign": custom(SignConfig(), Int8Config()),
    "int2": custom(Int2Config(), Int8Config()),
    "top_k int8": custom(TopKConfig(kept=200, values="int8"), TopKConfig(kept=400, values="bf16")),
}
BRINGING = ("sparseloco", "pulse", "random_k", "sign", "top_k int8")  # what a branch has counted to another


def by_method(*quick: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "method",
        [
            pytest.param(method, id=name, marks=() if name in quick else pytest.mark.slow)
            for name, method in METHODS.items()
        ],
    )


@pytest.mark.full
@by_method("sparseloco", "pulse")
def test_one_dies_in_the_middle_of_a_round_and_another_joins(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, num_rounds=9)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        e = swarm.member("e")
        replace_in_mid_round(swarm, b, e)
        await swarm.round(a, 4)
        outcomes = await swarm.done(*(each for each in members if each is not b), e)
        one_replica(outcomes)
        assert_it_came(e, a)
        assert not any(each.life.seen(PayloadRejected) for each in (*members, e))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
@by_method("sparseloco")
def test_the_mean_of_a_group_is_sent_whole(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, num_rounds=4, num_peers=NUM, electors=3)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        one_replica(await swarm.done(*members))
        assert any(member.life.seen(CountedThrough) for member in members)
        assert not any(member.life.seen(PayloadRejected) for member in members)

    swarm.run(scenario)
    swarm.check()


def left(member: Member) -> Tensor:
    """Return what codecs have left of what a member sent: beside its parameters, or in them."""
    carry = member.peer._carry
    if "error" in carry.vectors():
        return carry.vectors()["error"]
    return carry._replica.outer - carry._trainer.local()


@pytest.mark.full
@by_method("demo", "low rank")
def test_what_is_kept_for_later_outlives_the_process(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, num_rounds=6)

    async def scenario() -> None:
        _, b, *_ = members = await swarm.start("abcd")
        await swarm.round(b, 3)
        await stop(b)
        assert torch.count_nonzero(left(b)) > 0
        swarm.launch(b)
        await swarm.round(b, 4)
        assert torch.count_nonzero(left(b)) > 0
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()


def test_who_keeps_all_values_sends_what_a_dense_codec_sends(make_swarm: MakeSwarm) -> None:
    found = []
    for codec in (Fp32Config(), TopKConfig(kept=4096, values="fp32")):
        swarm = make_swarm(method=custom(codec, codec), num_rounds=5)

        async def scenario(swarm: Swarm = swarm) -> None:
            members = await swarm.start("abc")
            one_replica(await swarm.done(*members))
            found.append(members[0].peer.replica.outer.clone())

        swarm.run(scenario)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("method", [each for name, each in METHODS.items() if name in BRINGING])
def test_what_a_lesser_branch_counted_is_handed_in_whole(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, num_rounds=24, num_peers=8)

    async def scenario() -> None:
        members = await swarm.start("abcdefgh", train_s=TRAIN_S)
        await swarm.round(members[0], 2)
        stay, go = halves(members, 5)
        swarm.cut(stay, go)
        opened = await swarm.when(go[0], BranchOpened)
        for member in go:
            await swarm.round(member, opened.round + 2)
        swarm.heal(stay, go)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert any(member.life.seen(LegacyCounted) for member in members)
        assert not any(member.life.seen(LegacyDropped) for member in members)
        assert not any(member.life.seen(PayloadRejected) for member in members)

    swarm.run(scenario)
    swarm.check(has_branches=True)
