"""Members die, freeze, lie and come back, at every stage of a round; the others go on."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lines import set_link
from scenarios.swarm import LEASE_TOKENS, Life, Member, Swarm
from weft.errors import DiskFull, NotFinite
from weft.events import (
    AttemptStarted,
    LinkUp,
    MajorityLost,
    MemberGone,
    MemberLeft,
    MemberSuspected,
    Notice,
    PayloadRejected,
    PeerStopped,
    RoundCommitted,
    RoundMissed,
    StateJoined,
)
from weft.ids import Attempt, PeerId, Round
from weft.net.membership.full_mesh import GONE_S
from weft.run.machine import PeerConfig
from weft.sync.merge.reduce import EncodedPart, named
from weft.sync.records.messages import Accept, Certificate, Collect, Holding, Merged, Propose, Ready
from weft.sync.round.rules import leader
from weft.tasks import Inline
from weft.wire import digest_of

MakeSwarm = Callable[..., Swarm]
DEADLINE_S = 12.0  # of virtual time, for a round in which somebody dies: suspicion, and an attempt or two


def one_replica(outcomes: list[Any]) -> None:
    assert {outcome.reason for outcome in outcomes} == {"complete"}
    assert len({outcome.replica for outcome in outcomes}) == 1


def leading(members: list[Member]) -> Member:
    base = members[0].peer.rounds.chain.base  # type: ignore[union-attr]
    return next(member for member in members if member.id == leader(base, Attempt(0)))


@pytest.mark.parametrize("stage", [Ready, Collect, Merged, Propose, Certificate], ids=lambda stage: stage.__name__)
@pytest.mark.parametrize("num_heard", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_leader_dies_as_it_speaks(make_swarm: MakeSwarm, stage: type[Any], num_heard: int) -> None:
    """Killed before it sends its announcement, plan, result, proposal or outcome, or when one member has heard it."""
    swarm = make_swarm(num_rounds=5)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 2)
        victim = leading(members)
        heard: list[PeerId] = []

        def die(life: Life, to: PeerId, message: Any) -> bool:
            if life is victim.life and isinstance(message, stage) and not life.is_dead:
                if len(heard) == num_heard:
                    swarm.kill(victim)
                heard.append(to)
            return True

        swarm.watchers.append(die)
        others = [member for member in members if member is not victim]
        at = swarm.clock.now()
        await swarm.round(others[0], 3)
        assert victim.life.is_dead
        assert swarm.clock.now() - at < DEADLINE_S
        one_replica(await swarm.done(*others))
        assert all(member.life.seen(MajorityLost) == [] for member in others)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.parametrize("stage", [Merged, Holding, Accept], ids=lambda stage: stage.__name__)
def test_an_owner_of_a_part_dies_as_it_speaks(make_swarm: MakeSwarm, stage: type[Any]) -> None:
    swarm = make_swarm(num_rounds=5)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 2)
        victim = next(member for member in members if member is not leading(members))

        def die(life: Life, to: PeerId, message: Any) -> bool:
            if life is victim.life and isinstance(message, stage) and not life.is_dead:
                swarm.kill(victim)
            return True

        swarm.watchers.append(die)
        others = [member for member in members if member is not victim]
        at = swarm.clock.now()
        await swarm.round(others[0], 3)
        assert victim.life.is_dead
        assert swarm.clock.now() - at < DEADLINE_S
        one_replica(await swarm.done(*others))

    swarm.run(scenario)
    swarm.check()


def test_a_member_killed_in_its_inner_steps_is_left_out_with_a_reason(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=9)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 2)
        await asyncio.sleep(0.5)
        at = swarm.clock.now()
        swarm.kill(b)
        event = await swarm.when(a, RoundCommitted)
        assert swarm.clock.now() - at < 3
        assert event.left_out == {b.id: "it was silent"}
        one_replica(await swarm.done(a, c, d))
        for member in (a, c, d):
            (gone,) = member.life.times(MemberGone)
            assert gone - at <= GONE_S + 0.5
        assert b.id not in max(swarm.chains.values(), key=lambda manifest: manifest.round).members

    swarm.run(scenario)
    swarm.check()


@pytest.mark.parametrize("pause_s", [0.5, pytest.param(4.0, marks=pytest.mark.slow), 20.0])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_killed_member_comes_back(make_swarm: MakeSwarm, name: str, pause_s: float) -> None:
    """The run's maker from its checkpoint, a joiner from what the others hold; before or after it is given up."""
    swarm = make_swarm(num_rounds=12 if pause_s > 10 else 8)

    async def scenario() -> None:
        members = await swarm.start("abcd", train_s=3.0)
        victim = swarm.member(name)
        others = [member for member in members if member is not victim]
        await swarm.round(others[0], 2)
        await asyncio.sleep(1.0)
        swarm.kill(victim)
        await asyncio.sleep(pause_s)
        swarm.launch(victim, train_s=3.0)
        joined = await swarm.when(victim, StateJoined)
        assert joined.round >= 2
        one_replica(await swarm.done(*members))
        counted = [event for event in others[0].life.committed if victim.id in event.contributors]
        assert counted[-1].round == others[0].life.committed[-1].round

    swarm.run(scenario)
    swarm.check()


def test_a_payload_that_is_not_finite_is_refused_and_the_round_goes_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=5)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        honest = b.peer._carry.encode

        def lie(ranges: tuple[range, ...], round: int, **kind: Any) -> tuple[EncodedPart, ...]:
            honest(ranges, round, **kind)
            return tuple(named(np.full(len(part), np.nan, "<f4").tobytes()) for part in ranges)

        b.peer._carry.encode = lie  # type: ignore[method-assign]
        event = await swarm.when(a, RoundCommitted, lambda event: event.round == 3)
        assert event.left_out.keys() == {b.id}
        assert "update" in event.left_out[b.id]
        rejected = [each for member in (a, c, d) for each in member.life.seen(PayloadRejected)]
        assert {each.member for each in rejected} == {b.id}
        assert "NaN" in rejected[0].reason
        b.peer._carry.encode = honest  # type: ignore[method-assign]
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()


class Uneven(Inline):
    """Trains as fast as the others, but for some calls."""

    def __init__(self, slow_calls: range, slow_s: float) -> None:
        super().__init__(1.0)
        self._calls, self._slow_calls, self._slow_s = 0, slow_calls, slow_s

    async def train(self, work: Any, num_tokens: int = 0) -> Any:
        self._calls += 1
        if self._calls in self._slow_calls:
            await asyncio.sleep(self._slow_s)
        return await super().train(work)


def test_work_of_a_slow_peer_stays_in_its_carry_and_is_counted_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=14)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc", wait_for=4)
        d = swarm.member("d")
        swarm.launch(d, compute=Uneven(range(6, 7), 9.0))
        one_replica(await swarm.done(a, b, c, d))
        missed = d.life.seen(RoundMissed)
        assert len(missed) >= 2
        assert {event.carried_tokens for event in missed} == {LEASE_TOKENS}
        after = next(event for event in d.life.committed if event.round == missed[-1].round + 1)
        assert d.id in after.contributors

    swarm.run(scenario)
    swarm.check()


class SlowToEncode(Inline):
    """Serves rounds at once, but for one call that takes long."""

    def __init__(self, slow_call: int, slow_s: float) -> None:
        super().__init__(1.0)
        self._calls, self._slow_call, self._slow_s = 0, slow_call, slow_s

    async def serve(self, work: Any) -> Any:
        if "encode" in work.__qualname__ or "Offering" in work.__qualname__:
            self._calls += 1
            if self._calls == self._slow_call:
                result = await super().serve(work)
                await asyncio.sleep(self._slow_s)
                return result
        return await super().serve(work)


def test_a_payload_that_is_encoded_too_late_is_not_offered_to_a_later_round(make_swarm: MakeSwarm) -> None:
    """It is outer - local of another outer; and the carry it came from goes into the next payload."""
    swarm = make_swarm(num_rounds=12)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc", wait_for=4)
        d = swarm.member("d")
        swarm.launch(d, compute=SlowToEncode(5, 4.2))
        one_replica(await swarm.done(a, b, c, d))
        assert len(d.life.seen(RoundMissed)) >= 1

    swarm.run(scenario)
    swarm.check()


def test_the_maker_says_goodbye_and_comes_back_without_counting_work_twice(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        a = members[0]
        await swarm.round(a, 2)

        def stop(life: Life, to: PeerId, message: Any) -> bool:
            if life is a.lives[0] and isinstance(message, Accept | Propose):
                life.peer.stop("a moment")  # what it has offered is about to be counted
            return True

        swarm.watchers.append(stop)
        (left,) = await swarm.done(a)
        await swarm.round(members[1], left.round + 1)
        offered = swarm.chains[swarm.run_config.run, Round(left.round + 1)]
        assert a.id in {each.peer for each in offered.contributions}
        await asyncio.sleep(2.0)
        swarm.launch(a)
        one_replica(await swarm.done(*members))
        assert a.life.committed[-1].contributors == tuple(sorted(member.id for member in members))

    swarm.run(scenario)
    swarm.check()


def test_a_restarted_member_is_bound_by_what_it_accepted(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 2)
        # Not the maker: it has saved a state, and goes on from that.
        victim = next(member for member in members[1:] if member is not leading(members))
        accepted, died = [], asyncio.Event()

        def die(life: Life, to: PeerId, message: Any) -> bool:
            if isinstance(message, Accept):  # nobody's arrives, so nothing is decided
                if life is victim.lives[0] and not life.is_dead:
                    accepted.append(message.manifest)
                    swarm.kill(victim)
                    died.set()
                return len(victim.lives) > 1
            return True

        swarm.watchers.append(die)
        await died.wait()
        swarm.launch(victim)
        await swarm.when(victim, StateJoined)
        await asyncio.sleep(0.1)
        rounds = victim.peer.rounds
        assert rounds is not None
        assert rounds._state is not None
        vote = rounds._state.durable.accepted
        assert [digest_of(vote.manifest)] == accepted if vote is not None else False
        one_replica(await swarm.done(*members))
        assert swarm.chains[vote.manifest.branch, vote.manifest.round] == vote.manifest

    swarm.run(scenario)
    swarm.check()


def test_the_maker_alone_after_a_crash_goes_on_as_a_branch(make_swarm: MakeSwarm) -> None:
    """Its checkpoint is older than what it had committed, which others may have fetched, and it keeps no journal."""
    swarm = make_swarm(num_rounds=4, num_peers=1)
    settings = PeerConfig(device="cpu", micro_batch=2, checkpoint_every_s=0.0)

    async def scenario() -> None:
        (a,) = await swarm.start("a", settings=settings)
        await swarm.round(a, 2)
        swarm.kill(a)
        swarm.launch(a, settings=settings)
        (outcome,) = await swarm.done(a)
        assert outcome.reason == "complete"
        assert "going on alone" in a.life.seen(Notice)[0].text
        assert a.life.committed[0].branch != a.lives[0].committed[0].branch

    swarm.run(scenario)


def test_the_maker_restarts_while_a_newcomer_waits_for_a_state(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6, num_peers=1)

    async def scenario() -> None:
        (a,) = await swarm.start("a")
        await swarm.round(a, 2)
        b = swarm.member("b")
        swarm.launch(b)
        await swarm.when(b, LinkUp)
        swarm.kill(a)
        await asyncio.sleep(3)
        swarm.launch(a)
        await swarm.when(b, StateJoined)
        one_replica(await swarm.done(a, b))
        assert b.id in a.life.committed[-1].contributors

    swarm.run(scenario)


def test_a_member_that_missed_a_decision_finds_it_in_the_chain(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 2)
        deaf = next(member for member in members if member is not leading(members))
        others = [member for member in members if member is not deaf]
        is_lossy = [True]

        def lose(life: Life, to: PeerId, message: Any) -> bool:
            return not (is_lossy[0] and to == deaf.id and isinstance(message, Certificate))

        swarm.watchers.append(lose)
        await swarm.round(others[0], 3)
        await asyncio.sleep(0.5)
        assert deaf.life.committed[-1].round == 2
        await swarm.round(deaf, 3)
        is_lossy[0] = False
        one_replica(await swarm.done(*members))
        assert deaf.life.seen(StateJoined) == []

    swarm.run(scenario)
    swarm.check()


def test_who_missed_the_last_decision_finds_the_others_still_there(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=3)

    async def scenario() -> None:
        members = await swarm.start("abcd", train_s=0.1)
        await swarm.round(members[0], 2)
        deaf = next(member for member in members if member is not leading(members))
        swarm.watchers.append(lambda life, to, said: not (to == deaf.id and isinstance(said, Certificate)))
        one_replica(await swarm.done(*members))
        assert deaf.life.seen(MajorityLost) == []

    swarm.run(scenario)
    swarm.check()


def test_a_member_that_finds_no_results_fetches_the_state_and_keeps_its_carry(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        await asyncio.sleep(0.5)
        swarm.cut([d], [a, b, c])
        await swarm.round(a, 4)
        for member in (a, b, c):  # as if the results had outgrown what is kept
            member.peer.rounds.chain._results.clear()  # type: ignore[union-attr]
        swarm.heal([d], [a, b, c])
        joined = await swarm.when(d, StateJoined)
        assert joined.round >= 4
        assert any("cannot be replayed" in event.text for event in d.life.seen(Notice))
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()


STAGES = [
    ("a", "waiting for peers"),
    ("b", "joining"),
    *((name, stage) for name in "ab" for stage in ("training", "syncing", "finishing")),
]


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_a_peer_told_to_stop_ends_soon_wherever_it_stands(make_swarm: MakeSwarm, name: str, stage: str) -> None:
    swarm = make_swarm(num_rounds=3, num_peers=2)

    async def scenario() -> None:
        await swarm.start("ab", wait_for=3 if stage in ("waiting for peers", "joining") else 2)
        member = swarm.member(name)
        while True:
            await asyncio.sleep(0.1)
            if member.life.peer is not None and member.peer._report.state == stage:
                break
        at = swarm.clock.now()
        member.peer.stop("asked to")
        (outcome,) = await swarm.done(member)
        assert swarm.clock.now() - at < 5
        assert outcome.reason == ("complete" if stage == "finishing" else "asked to")
        assert member.life.seen(PeerStopped)[-1].reason == outcome.reason

    swarm.run(scenario)


def test_a_full_disk_ends_the_peer_with_its_reason(make_swarm: MakeSwarm) -> None:
    """What cannot be written is not promised: the peer says goodbye and raises; the others go on."""
    swarm = make_swarm(num_rounds=5)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 2)

        def refuse(durable: object) -> None:
            raise DiskFull("no room on the disk")

        b.peer.rounds._votes.write = refuse  # type: ignore[union-attr, method-assign, assignment]
        with pytest.raises(DiskFull):
            await swarm.done(b)
        one_replica(await swarm.done(a, c, d))

    swarm.run(scenario)


def test_a_peer_whose_parameters_are_not_finite_says_so_and_leaves(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(learns=True, num_rounds=5)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(b, 2)
        b.peer._trainer._model.vector.fill_(float("nan"))
        at = swarm.clock.now()
        with pytest.raises(NotFinite):
            await swarm.done(b)
        assert swarm.clock.now() - at < 4
        one_replica(await swarm.done(a, c, d))
        assert all(b.id in {event.member for event in member.life.seen(MemberLeft)} for member in (a, c, d))

    swarm.run(scenario)


@pytest.mark.parametrize("fault", ["task", "training", "disk"])
def test_a_peer_that_a_fault_of_its_own_ends_says_goodbye_and_nobody_waits(make_swarm: MakeSwarm, fault: str) -> None:
    """Whatever broke is what is told, also where the last words fail for the same reason."""
    swarm = make_swarm(num_rounds=4, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(b, 2)
        rounds = b.peer.rounds
        assert rounds is not None

        def break_down(*_args: object, **_named: object) -> None:
            raise RuntimeError("a fault of weft")

        async def end_with_a_fault() -> None:
            break_down()

        at = swarm.clock.now()
        if fault == "disk":
            rounds._votes.write = break_down  # type: ignore[method-assign]
        if fault == "training":
            b.peer._trainer.train = break_down  # type: ignore[method-assign, assignment]
        else:
            b.peer._tasks.spawn(end_with_a_fault())
        with pytest.raises(RuntimeError, match="a fault of weft"):
            await swarm.done(b)
        assert swarm.clock.now() - at < 4
        said = [event.text for event in b.life.seen(Notice) if "cannot say its last word" in event.text]
        assert len(said) == (fault == "disk")
        one_replica(await swarm.done(a, c))
        for member in (a, c):
            assert b.id in {event.member for event in member.life.seen(MemberLeft)}
            assert b.id not in {event.member for event in member.life.seen(MemberSuspected)}

    swarm.run(scenario)


def test_attempts_follow_only_on_trouble(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=4)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.done(*members)
        assert all(member.life.seen(AttemptStarted) == [] for member in members)

    swarm.run(scenario)


def test_a_result_that_overtakes_its_plan_is_not_lost(make_swarm: MakeSwarm) -> None:
    """One of three hears the leader's plan at once and is through with its part before the others hear of it."""
    swarm = make_swarm(num_rounds=6)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        for member in members:
            await swarm.round(member, 3)
        await asyncio.sleep(0.5)
        leader = leading(members)
        _, *late = [member for member in members if member is not leader]
        for member in late:
            set_link(swarm.network, leader.id, member.id, delay_s=0.15)
        at = swarm.clock.now()
        await swarm.round(leader, 4)
        assert swarm.clock.now() - at < 5
        one_replica(await swarm.done(*members))
        assert all(member.life.seen(AttemptStarted) == [] for member in members)

    swarm.run(scenario)
    swarm.check()
