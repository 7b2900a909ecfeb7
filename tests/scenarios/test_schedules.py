"""Random schedules of faults: members are killed, say goodbye, are cut off, come back, and take long to fetch results.

The seed is in the test's name, and the schedule it stands for is printed when the test fails.
"""

import asyncio
import random
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from scenarios import rules
from scenarios.swarm import FEDAVG, Life, Member
from scenarios.test_faults import MakeSwarm
from scenarios.test_stuck import slow_down
from weft.codec.config import Fp32Config
from weft.events import RoundCommitted
from weft.sync.method.presets import DdpConfig

NUM_ALL = 200
NUM_GROUPS = 40
QUICK = (57, 95, 165)  # they once found a fault
NUM_FAULTS = 6
LIMIT_S = 1500.0  # from the last fault to the end of a run of 40 rounds of a second each, waits and branches included
# Without an outer step anywhere: a minute until a branch opens, and again in that, or two minutes of a round whose
# members were just started and have measured nothing; and what faults take.
LONGEST_S = 200.0


@dataclass(frozen=True)
class Fault:
    after_s: float  # the one before
    kind: Literal["kill", "stop", "cut"]
    member: int
    lasts_s: float


@dataclass(frozen=True)
class Schedule:
    num_peers: int
    method: Literal["fedavg", "ddp"]
    delay_s: float
    fetch_s: tuple[float, ...]  # how long results take to come down, for each life in turn
    faults: tuple[Fault, ...]


def draw(seed: int, has_groups: bool = False) -> Schedule:
    luck = random.Random(seed)
    num_peers = luck.choice([5, 6, 7] if has_groups else [2, 3, 4])
    lasts = {"kill": 15.0, "stop": 10.0, "cut": 40.0}
    faults = []
    for _ in range(NUM_FAULTS):
        kind: Any = luck.choices(["kill", "stop", "cut"], [2, 1, 1])[0]
        wait_s, lasts_s = 12 * luck.random(), lasts[kind] * luck.random()
        faults.append(Fault(wait_s, kind, luck.randrange(num_peers), lasts_s))
    return Schedule(
        num_peers=num_peers,
        method="fedavg" if has_groups else luck.choices(["fedavg", "ddp"], [2, 1])[0],  # type: ignore[arg-type]
        delay_s=luck.choice([0.02, 0.3]),
        fetch_s=tuple(2.5 * luck.random() for _ in range(num_peers + NUM_FAULTS)),
        faults=tuple(faults),
    )


async def slow_down_later(life: Life, delay_s: float) -> None:
    """Let results take so long to come down to a process, once it takes part."""
    while life.peer is None or life.peer.rounds is None:  # noqa: ASYNC110  # the peer tells nobody when it begins
        await asyncio.sleep(0.05)
    slow_down(life, delay_s)


def play(make_swarm: MakeSwarm, seed: int, electors: int | None = None) -> None:
    schedule = draw(seed, has_groups=electors is not None)
    print(schedule)  # noqa: T201  # shown where it fails
    method = FEDAVG if schedule.method == "fedavg" else DdpConfig(codec=Fp32Config())
    swarm = make_swarm(
        num_rounds=40,
        num_peers=schedule.num_peers,
        seed=seed,
        method=method,
        delay_s=schedule.delay_s,
        **({} if electors is None else {"electors": electors}),
    )
    fetches = iter(schedule.fetch_s)
    slowing: list[asyncio.Task[None]] = []

    def slow(member: Member) -> None:
        slowing.append(asyncio.ensure_future(slow_down_later(member.life, next(fetches))))

    async def strike(members: list[Member], fault: Fault) -> None:
        member = members[fault.member]
        others = [other for other in members if other is not member]
        if fault.kind == "cut":
            swarm.cut([member], others)
            await asyncio.sleep(fault.lasts_s)
            swarm.heal([member], others)
            return
        if fault.kind == "kill":
            swarm.kill(member)
        else:
            member.peer.stop("asked to")
            await asyncio.wait([member.life.task])
        await asyncio.sleep(fault.lasts_s)
        if member.is_founder or any(other.life.is_running for other in others):  # else there is nobody to join
            swarm.launch(member)
            slow(member)

    async def scenario() -> None:
        members = await swarm.start("abcdefg"[: schedule.num_peers])
        for member in members:
            slow(member)
        await swarm.round(members[0], 2)
        for fault in schedule.faults:
            await asyncio.sleep(fault.after_s)
            if members[fault.member].life.is_running:
                await strike(members, fault)
        async with asyncio.timeout(LIMIT_S):
            outcomes = await swarm.done(*(member for member in members if member.life.is_running))
        assert {outcome.reason for outcome in outcomes} <= {"complete"}
        for each in slowing:
            each.cancel()

    swarm.run(scenario)
    ended = [life for life in swarm.lives if not life.is_dead and life.task.exception() is None]
    assert "complete" in {life.outcome.reason for life in ended}
    commits = [event for life in swarm.lives for event in life.committed]
    rules.one_history(commits)
    rules.no_long_wait(sorted(at for life in swarm.lives for at in life.times(RoundCommitted)), LONGEST_S)
    swarm.check(has_branches=len({event.branch for event in commits}) > 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", QUICK)
def test_a_run_outlives_a_random_schedule_of_faults(make_swarm: MakeSwarm, seed: int) -> None:
    play(make_swarm, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(NUM_ALL)) - set(QUICK)))
def test_a_run_outlives_many_random_schedules_of_faults(make_swarm: MakeSwarm, seed: int) -> None:
    play(make_swarm, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_GROUPS))
def test_groups_outlive_many_random_schedules_of_faults(make_swarm: MakeSwarm, seed: int) -> None:
    play(make_swarm, seed, electors=3)
