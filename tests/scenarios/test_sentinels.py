"""Members that stray from the others are named, and a method that engages and never learns is."""

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from scenarios.swarm import Life, Swarm
from scenarios.test_faults import MakeSwarm
from weft.codec.config import Fp32Config
from weft.data.rows import Batch
from weft.events import Event, MemberStrays, NotLearning, RoundCommitted
from weft.sync.method.presets import (
    AsyncDiLoCoConfig,
    ChocoConfig,
    DPsgdConfig,
    FedAvgConfig,
    MethodConfig,
    NoLoCoConfig,
)
from weft.tasks import Inline
from weft.training.trainer import Trainer

EVERY = 4
FEDAVG = FedAvgConfig(every=EVERY, codec=Fp32Config())
Spoil = Callable[[Trainer], None]
T = TypeVar("T")


def spoilt(swarm: Swarm, name: str, spoil: Spoil) -> None:
    """Let the machine of that name do something else than the run says."""
    made = swarm.on_made

    def on_made(life: Life) -> None:
        made(life)
        if life.member.name == name:
            assert isinstance(life.peer._trainer, Trainer)
            spoil(life.peer._trainer)

    swarm.on_made = on_made  # type: ignore[method-assign]


def times_the_rate(factor: float) -> Spoil:
    def spoil(trainer: Trainer) -> None:
        rate = trainer._rate
        trainer._rate = lambda *about: factor * rate(*about)  # type: ignore[method-assign]

    return spoil


def garbage(trainer: Trainer) -> None:
    """Train on tokens by chance."""
    read = trainer._batches.at

    def at(positions: object) -> Batch:
        drawn = torch.Generator().manual_seed(int(positions[0]))  # type: ignore[index]
        shapes = [part.shape for part in read(positions)[:2]]  # type: ignore[arg-type]
        return Batch(*(torch.randint(0, 256, shape, generator=drawn) for shape in shapes))

    trainer._batches.at = at  # type: ignore[method-assign]


def play(swarm: Swarm, names: str = "abcd", **train_s: float) -> None:
    async def scenario() -> None:
        members = [swarm.member(name) for name in names]
        members[0].is_founder = True
        for member in members:
            swarm.launch(member, wait_for=len(members), train_s=train_s.get(member.name, 1.0))
        await swarm.done(*members)

    swarm.run(scenario)
    swarm.check()


def said(swarm: Swarm, kind: type[Event]) -> dict[str, list[Event]]:
    """Return what each member has said of that kind."""
    return {life.member.name: list(life.seen(kind)) for life in swarm.lives}


@pytest.mark.full
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (times_the_rate(10), "update"),
        pytest.param(times_the_rate(1 / 30), "update", marks=pytest.mark.slow),
        (garbage, "loss"),
    ],
    ids=["rate too high", "rate too low", "garbage"],
)
def test_everybody_names_who_strays_and_nobody_else(make_swarm: MakeSwarm, spoil: Spoil, what: str) -> None:
    swarm = make_swarm(learns=True, method=FEDAVG, num_rounds=20)
    spoilt(swarm, "d", spoil)
    play(swarm)
    d = swarm.member("d").id
    for name, events in said(swarm, MemberStrays).items():
        assert events, f"{name} noticed nothing"
        assert {(event.member, event.what, event.is_back) for event in events} == {(d, what, False)}  # type: ignore[attr-defined]
    assert not any(said(swarm, NotLearning).values())


GOSSIP = [
    DPsgdConfig(every=EVERY, mean_every=4),
    pytest.param(ChocoConfig(every=EVERY, mean_every=4), marks=pytest.mark.slow),
    pytest.param(NoLoCoConfig(every=EVERY), marks=pytest.mark.slow),
]


@pytest.mark.full
@pytest.mark.parametrize("method", GOSSIP, ids=lambda method: type(method).__name__)
def test_neighbours_name_who_strays_and_nobody_else(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(learns=True, method=method, num_rounds=32)
    spoilt(swarm, "d", times_the_rate(10))
    play(swarm)
    d, found = swarm.member("d").id, said(swarm, MemberStrays)
    named = {name: {event.member for event in events if event.what == "update"} for name, events in found.items()}  # type: ignore[attr-defined]
    assert all(each <= {d} for each in named.values()), named
    assert sum(map(bool, named.values())) >= 2, named  # all who are its neighbours often enough


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [FEDAVG, *(pytest.param(each, marks=pytest.mark.slow) for each in (NoLoCoConfig(every=EVERY), GOSSIP[0]))],
    ids=["fedavg", "noloco", "dpsgd"],
)
def test_nobody_is_named_where_all_do_what_the_run_says(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(learns=True, method=method, num_rounds=20)
    play(swarm)
    assert not any(said(swarm, MemberStrays).values())
    assert not any(said(swarm, NotLearning).values())


class Busy(Inline):
    """A machine that something else takes in three calls of ten: then a call takes eight times as long."""

    def __init__(self, tokens_per_s: float, seed: int) -> None:
        super().__init__()
        self._tokens_per_s = tokens_per_s
        self._luck = random.Random(seed)

    async def train(self, work: Callable[[], T], num_tokens: int = 0) -> T:
        async with self._training:
            times = self._luck.choices((1.0, 8.0), (0.7, 0.3))[0]
            await asyncio.sleep(max(num_tokens, 1) * times / self._tokens_per_s)
            return work()


@pytest.mark.slow
def test_who_makes_few_steps_on_a_busy_machine_is_not_named(make_swarm: MakeSwarm) -> None:
    """Without `SLACK`, d hears of itself in round 33 that its updates are 1/28 as long as the others'."""
    method = FedAvgConfig(every=8, codec=Fp32Config())
    swarm = make_swarm(learns=True, method=method, num_rounds=24, has_even_leases=False)

    async def scenario() -> None:
        members = [swarm.member(name) for name in "abcd"]
        members[0].is_founder = True
        for number, member in enumerate(members):
            speed = 64.0 if member.name == "d" else 192.0
            swarm.launch(member, wait_for=4, compute=Busy(speed, number))
        await swarm.done(*members)

    swarm.run(scenario)
    strayed = [event for events in said(swarm, MemberStrays).values() for event in events]
    assert not [event for event in strayed if event.what == "update"]  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "does_learn"),
    [
        (AsyncDiLoCoConfig(every=EVERY, codec=Fp32Config()), True),
        # What comes 17 rounds late moves the parameters like all else, and momentum goes on with it in each round.
        (AsyncDiLoCoConfig(every=EVERY, codec=Fp32Config(), lr=1.0, momentum=0.95, delay=1), False),
    ],
    ids=["delayed momentum", "momentum at once"],
)
def test_rounds_that_count_what_is_stale_and_never_learn_are_named(
    make_swarm: MakeSwarm, method: AsyncDiLoCoConfig, does_learn: bool
) -> None:
    swarm = make_swarm(learns=True, method=method, num_rounds=15)
    play(swarm, a=1.0, b=2.0, c=5.0, d=9.0)
    for name, events in said(swarm, NotLearning).items():
        assert len(events) == (0 if does_learn else 1), name
    # It did engage: everybody was counted, again and again.
    commits = next(life for life in swarm.lives if life.member.name == "a").seen(RoundCommitted)
    for member in swarm.members.values():
        assert sum(member.id in event.contributors for event in commits) >= 3
