"""A member that is paused trains nothing, votes and follows, and slows nobody down."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from scenarios.swarm import EVERY, FEDAVG, LEASE_TOKENS, TRAIN_S, Swarm
from scenarios.test_faults import Uneven
from weft.codec.config import Fp32Config
from weft.events import MemberProgress, Paused, PeerStarted, Resumed, RoundCommitted, RoundMissed, StepDone
from weft.peer.round.driver import PAUSED
from weft.sync.method.presets import DdpConfig, DiLoCoConfig

Make = Callable[..., Swarm]
DILOCO = DiLoCoConfig(every=EVERY, codec=Fp32Config())
SLOW_S = 60.0
PAUSE_S = 300.0
DDP = DdpConfig(codec=Fp32Config())


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **options: Swarm(tmp_path / "swarm", **options)


def run(swarm: Swarm, scenario: Callable[[], Awaitable[None]]) -> None:
    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (FEDAVG, DILOCO)), DDP],
    ids=["fedavg", "diloco", "ddp"],
)
@pytest.mark.parametrize("num_rounds_before", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_rounds_go_on_as_fast_without_one_that_is_paused(make: Make, method: object, num_rounds_before: int) -> None:
    swarm = make(method=method, num_rounds=12)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 1 + num_rounds_before)
        d.peer.pausing.want("asked to")
        paused_at = swarm.clock.now()
        await d.peer.pausing.settled()
        assert d.peer._trainer.is_parked
        await swarm.round(d, 7)
        rounds = [at for at, event in d.life.events if type(event).__name__ == "RoundCommitted" and at > paused_at]
        waits = [after - before for before, after in itertools.pairwise(rounds[1:])]
        # One call of training, and a few messages: nobody's grace runs out.
        assert max(waits) < TRAIN_S + 0.5, waits
        before = d.life.trained_tokens
        assert not d.life.times(StepDone, paused_at + TRAIN_S + 0.1)
        told = [event for event in a.life.seen(MemberProgress, paused_at + 3) if event.member == d.id]
        assert {event.state for event in told} == {"paused"}
        last = a.life.committed[-1]
        assert last.left_out == {d.id: PAUSED}
        assert not d.life.seen(RoundMissed, paused_at + 2 * TRAIN_S)

        d.peer.pausing.want_no_more("asked to")
        resumed_at = swarm.clock.now()
        await swarm.done(a, b, c, d)
        assert d.life.trained_tokens > before
        assert any(d.id in event.contributors for event in a.life.seen(type(last), resumed_at))
        assert [type(event) for event in d.life.seen(Paused) + d.life.seen(Resumed)] == [Paused, Resumed]
        assert len({member.life.outcome.replica for member in (a, b, c, d)}) == 1

    run(swarm, scenario)


def test_of_two_one_is_paused_and_its_vote_still_decides(make: Make) -> None:
    swarm = make(num_rounds=6, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(a, 2)
        b.peer.pausing.want("asked to")
        await swarm.done(a, b)  # to the end, with one that trains
        assert {outcome.replica for outcome in (a.life.outcome, b.life.outcome)} == {a.life.outcome.replica}
        assert all(event.left_out == {b.id: PAUSED} for event in a.life.committed[3:])

    run(swarm, scenario)


def test_what_was_trained_before_a_pause_is_counted_in_it(make: Make) -> None:
    swarm = make(method=FEDAVG, num_rounds=8)

    async def scenario() -> None:
        def when_read(life: object) -> None:
            if len(swarm.positions[b.life]) == LEASE_TOKENS // 16 * 2 + 2:  # its first batch of the third round
                b.peer.pausing.want("asked to")

        a, b, c = [swarm.member(name) for name in "abc"]
        a.is_founder = True
        for member in (a, b, c):
            swarm.launch(member, wait_for=3, on_batch=when_read if member is b else lambda life: None)
        await swarm.round(a, 6)
        shares = [event for event in b.life.committed if b.id in event.contributors]
        counted = sum(
            each.tokens
            for event in shares
            for each in swarm.chains[event.branch, event.round].contributions
            if each.peer == b.id
        )
        assert counted == b.life.trained_tokens
        assert (
            counted % LEASE_TOKENS == LEASE_TOKENS // 2
        )  # half a lease: the step under way ended, the next did not begin
        assert len(shares) == 3
        b.peer.pausing.want_no_more("asked to")
        await swarm.done(a, b, c)

    run(swarm, scenario)


@pytest.mark.full
def test_all_are_paused_for_minutes_and_go_on(make: Make) -> None:
    swarm = make(num_rounds=8, num_peers=3)
    swarm.limit_s += PAUSE_S

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        for member in members:
            member.peer.pausing.want("asked to")
        await asyncio.sleep(PAUSE_S)
        reached = {member.life.committed[-1].round for member in members}
        assert max(reached) <= 5
        assert len(reached) == 1
        for member in members:
            member.peer.pausing.want_no_more("asked to")
        await swarm.done(*members)
        assert len({member.life.outcome.replica for member in members}) == 1

    run(swarm, scenario)


def test_a_member_that_is_paused_again_and_again_loses_nothing(make: Make) -> None:
    swarm = make(num_rounds=14, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        for number in range(12):
            await asyncio.sleep(0.73)
            if number % 2:
                c.peer.pausing.want_no_more("asked to")
            else:
                c.peer.pausing.want("asked to")
        await swarm.done(a, b, c)
        assert len({member.life.outcome.replica for member in (a, b, c)}) == 1

    run(swarm, scenario)


def test_a_peer_that_starts_outside_its_hours_joins_paused_and_leaves_politely(make: Make) -> None:
    swarm = make(num_rounds=10, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(a, 2)
        late = swarm.member("late")
        swarm.launch(late)
        await swarm.when(late, PeerStarted)
        late.peer.pausing.want("outside its hours, until 22:00")
        await swarm.round(late, 6)
        assert late.life.trained_tokens == 0
        late.peer.stop("stopped by SIGINT")
        await swarm.done(late)
        await swarm.done(a, b)
        assert late.life.outcome.reason == "stopped by SIGINT"

    run(swarm, scenario)


@pytest.mark.slow
def test_where_most_are_paused_the_others_do_not_wait_for_the_slowest(make: Make) -> None:
    swarm = make(num_rounds=30, num_peers=5)

    async def scenario() -> None:
        a, b, *paused = members = [swarm.member(name) for name in "abcde"]
        a.is_founder = True
        for member in members:
            swarm.launch(member, wait_for=5, compute=Uneven(range(8, 12), SLOW_S) if member is b else None)
        await swarm.round(a, 4)
        for member in paused:
            member.peer.pausing.want("asked to")
        paused_at = swarm.clock.now()
        await swarm.round(a, 12)
        alone = [event for event in a.life.committed if event.round > 4 and event.contributors == (a.id,)]
        assert len(alone) >= 4
        assert swarm.clock.now() - paused_at < SLOW_S
        for member in paused:
            member.peer.pausing.want_no_more("asked to")
        await swarm.done(*members)

    run(swarm, scenario)


@pytest.mark.parametrize("lasts_s", [0.0, 0.001, 0.5, 2.0])
def test_who_is_alone_and_pauses_for_a_moment_goes_on(make: Make, lasts_s: float) -> None:
    swarm = make(num_rounds=8, num_peers=1)

    async def scenario() -> None:
        (a,) = await swarm.start("a")
        for _ in range(5):
            await swarm.when(a, RoundCommitted)
            pausing = a.peer.pausing
            pausing.want("a test")
            await asyncio.sleep(lasts_s)
            pausing.want_no_more("a test")
        (outcome,) = await swarm.done(a)
        assert outcome.reason == "complete"

    run(swarm, scenario)
