"""The very end of a run: who was killed before it, or while it waits for others, comes back and ends with it.

Last, kills, freezes and stops until then, by methods that differ in each of their choices: all of six members end with
one replica, and no step is counted twice. The seed is in the test's name. What befell whom is printed when the test
fails. With real processes: tests/slow/test_chaos.
"""

import asyncio
import itertools
import random
from typing import Any

import pytest

from scenarios import rules
from scenarios.swarm import BATCH, FEDAVG, Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp32Config
from weft.events import BranchOpened, CheckpointSaved, Notice, RoundCommitted
from weft.run.machine import PeerConfig
from weft.sync.method.presets import AsyncDiLoCoConfig, DdpConfig, NoLoCoConfig, StreamingConfig

METHODS: dict[str, Any] = {
    "fedavg": FEDAVG,
    "ddp": DdpConfig(codec=Fp32Config()),
    "streaming": StreamingConfig(every=8, fragments=2, overlap=2, codec=Fp32Config()),
    "async-diloco": AsyncDiLoCoConfig(every=2, codec=Fp32Config()),
    "noloco": NoLoCoConfig(every=2, mean_every=3, codec=Fp32Config()),
}
NUM_PEERS, MOST_AWAY = 6, 2
NUM_ROUNDS = 50
STOPS_UNTIL = 0.5  # of all tokens: who says goodbye is not waited for at the end, and must be back before
LIMIT_S = 3000.0
LONGEST_S = 60.0  # without an outer step anywhere: never as long as a minority waits
NUM_ALL = 10
QUICK = (("ddp", 2),)  # it once found a fault
NUM_FEW = 5  # rounds of the tests without chance


def test_who_was_killed_in_the_last_round_ends_with_it_if_it_is_back_within_a_minute(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=NUM_FEW)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(d, NUM_FEW - 1)
        swarm.kill(d)
        await swarm.when(a, RoundCommitted, lambda _committed: a.peer.replica.is_complete)
        await asyncio.sleep(20)
        swarm.launch(d)
        one_replica(await swarm.done(a, b, c, d))
        assert any("has not made the last round yet" in note.text for note in a.life.seen(Notice))

    swarm.run(scenario)
    swarm.check()


def test_nobody_waits_for_who_said_goodbye_or_does_not_come_back(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=NUM_FEW)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(d, NUM_FEW - 2)
        d.life.stop("asked to")
        await swarm.done(d)
        one_replica(await swarm.done(a, b, c))
        assert swarm.clock.now() - a.life.times(RoundCommitted)[-1] < 5.0

    swarm.run(scenario)
    swarm.check()


def test_who_is_killed_as_it_waits_at_the_end_has_the_end_and_hands_it_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=NUM_FEW)

    async def scenario() -> None:
        settings = PeerConfig(device="cpu", micro_batch=BATCH, checkpoint_every_s=1.0)
        a, b, c, d = await swarm.start("abcd", settings=settings)
        await swarm.round(d, NUM_FEW - 1)
        swarm.kill(d)
        await swarm.when(a, CheckpointSaved, lambda _saved: a.peer.replica.is_complete)
        swarm.kill(a)
        ended = await swarm.done(b, c)
        # Nobody else is there any more: one that has the end comes back with it, and one that has not fetches it there.
        swarm.launch(d)
        await asyncio.sleep(3)
        swarm.launch(a)
        one_replica([*ended, *await swarm.done(a, d)])
        assert all(life.seen(BranchOpened) == [] for life in swarm.lives)

    swarm.run(scenario)
    swarm.check()


class Chaos:
    def __init__(self, swarm: Swarm, seed: int, num_rounds: int) -> None:
        self._swarm = swarm
        self._num_rounds = num_rounds
        self._luck = random.Random(seed)
        self._under: dict[str, asyncio.Task[None]] = {}
        self._tokens = swarm.run_config.train.tokens  # type: ignore[union-attr]

    async def go_on(self, members: list[Member]) -> None:
        """Let something befall one or two of the members every few seconds, until all have ended by themselves."""
        struck = False
        while not all(_has_completed(each) for each in members):
            left = self._tokens - max(_reached(each) for each in members)
            is_last = left <= 2 * self._tokens / self._num_rounds
            if is_last and not struck:
                struck = True
            else:
                await asyncio.sleep(self._luck.uniform(0.5, 8.0))
            num = 2 if self._luck.random() < 0.3 else 1
            away = {each.name for each in members if not self._is_back(each)}
            for victim in self._luck.sample(members, num):
                if victim.life.is_running and not self._is_under(victim) and len(away | {victim.name}) <= MOST_AWAY:
                    away.add(victim.name)
                    self._under[victim.name] = asyncio.ensure_future(self._strike(victim))
        await asyncio.gather(*self._under.values())

    async def _strike(self, victim: Member) -> None:
        reached = max(_reached(each) for each in self._swarm.members.values())
        what, may_stop = self._luck.choice(["kill", "freeze", "stop"]), reached < STOPS_UNTIL * self._tokens
        short_s, long_s = self._luck.uniform(0.0, 6.0), self._luck.uniform(1.0, 15.0)
        what = "kill" if what == "stop" and not (may_stop and victim.peer is not None) else what
        lasts_s = long_s if what == "freeze" else short_s
        print(f"{self._swarm.clock.now():.2f}: {what} {victim.name} for {lasts_s:.2f} s")  # noqa: T201
        if what == "freeze":
            await self._swarm.freeze(victim, long_s)
            return
        if what == "stop":
            victim.life.stop("asked to")
            await asyncio.wait([victim.life.task])
        else:
            self._swarm.kill(victim)
        await asyncio.sleep(short_s)
        self._swarm.launch(victim)

    def _is_under(self, member: Member) -> bool:
        return member.name in self._under and not self._under[member.name].done()

    def _is_back(self, member: Member) -> bool:
        if self._is_under(member):
            return False
        return not member.life.is_running or bool(member.life.committed)


def _reached(member: Member) -> int:
    return max((event.committed_tokens for life in member.lives for event in life.committed), default=0)


def _has_completed(member: Member) -> bool:
    life = member.life
    return not life.is_dead and life.task.done() and life.outcome.reason == "complete"


def play(make_swarm: MakeSwarm, method: str, seed: int, num_rounds: int = NUM_ROUNDS) -> None:
    swarm = make_swarm(num_rounds=num_rounds, num_peers=NUM_PEERS, seed=seed, method=METHODS[method])

    async def scenario() -> None:
        members = await swarm.start("abcdef")
        await swarm.round(members[0], 1)
        async with asyncio.timeout(LIMIT_S):
            await Chaos(swarm, seed, num_rounds).go_on(members)
        one_replica([member.life.outcome for member in members])

    swarm.run(scenario)
    commits = [event for life in swarm.lives for event in life.committed]
    rules.one_history(commits)
    assert len({event.branch for event in commits}) == 1
    rules.no_long_wait(sorted(at for life in swarm.lives for at in life.times(RoundCommitted)), LONGEST_S)
    swarm.check()


@pytest.mark.full
@pytest.mark.parametrize(("method", "seed"), QUICK)
def test_all_end_with_one_replica_under_faults_until_the_very_end(
    make_swarm: MakeSwarm, method: str, seed: int
) -> None:
    play(make_swarm, method, seed, num_rounds=25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "seed"), [each for each in itertools.product(METHODS, range(NUM_ALL)) if each not in QUICK]
)
def test_all_end_with_one_replica_under_many_faults(make_swarm: MakeSwarm, method: str, seed: int) -> None:
    play(make_swarm, method, seed)
