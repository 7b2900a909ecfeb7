"""What members know can be lost for good, or no member may be left: nobody waits for ever for what cannot come."""

import asyncio
from typing import Any

import msgspec
import pytest

from scenarios.swarm import Life, Member
from scenarios.test_faults import MakeSwarm, leading, one_replica
from weft.events import AttemptStarted, BranchOpened, MajorityLost, Notice, RoundCommitted, StateJoined
from weft.ids import BranchId, PeerId, Round
from weft.peer.fork import ORPHAN_AFTER_PAIR_S, ORPHAN_AFTER_S, UNREACHED_S, Split
from weft.peer.join.entrance import JOINING_EXPIRES_S
from weft.peer.messages import BranchConsent, BranchProposal
from weft.store.journal import Votes
from weft.sync.records.messages import Certificate
from weft.sync.round.rules import Durable


def slow_down(life: Life, delay_s: float) -> None:
    """Let results take so long to come down to a process that takes part."""
    parts = life.peer.rounds.parts  # type: ignore[union-attr]
    fetch = parts._from_any

    async def late(*args: Any) -> Any:
        await asyncio.sleep(delay_s)
        return await fetch(*args)

    parts._from_any = late  # type: ignore[method-assign]


async def abreast(*members: Member) -> int:
    """Wait until all have made the outer step of one round; save their states and return it."""
    while len({member.peer.replica.head.round for member in members}) > 1:  # type: ignore[union-attr]  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    for member in members:
        await member.peer._autosave.save()
    return members[0].peer.replica.head.round  # type: ignore[union-attr]


def reopened(members: tuple[Member, ...]) -> set[tuple[str, ...]]:
    """Return who the branches opened by the members' present lives name."""
    return {event.members for member in members for event in member.life.seen(BranchOpened)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("is_strict", "num_refusals"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, 0), (False, 1))),
        pytest.param(True, 0, marks=pytest.mark.slow),
        (True, 1),
    ],
)
def test_where_an_accepted_rounds_results_are_lost_all_together_leave_it(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, is_strict: bool, num_refusals: int
) -> None:
    """Two of three accept a manifest, lose its results in a power cut, and come back; the third never had them.

    The last that is asked may not consent at first, when others have.
    """
    swarm = make_swarm(num_rounds=20, num_peers=3, is_strict=is_strict)
    consider, refused = Split._consider, list[PeerId]()

    async def reluctant(self: Split, peer: PeerId, proposal: BranchProposal) -> BranchConsent:
        if len(refused) < num_refusals and self._node.peer == max(proposal.opening.members):
            refused.append(self._node.peer)
            return BranchConsent(is_given=False, reason="not now")
        return await consider(self, peer, proposal)

    monkeypatch.setattr(Split, "_consider", reluctant)

    async def scenario() -> None:
        a, b, c = members = tuple(await swarm.start("abc"))
        for member in members:
            await swarm.round(member, 4)
        last = await abreast(*members)
        slow_down(c.life, 5.0)
        swarm.watchers.append(lambda life, to, message: not (isinstance(message, Certificate) and to == c.id))
        await swarm.when(None, RoundCommitted, lambda event: event.round == last + 1)
        swarm.cut_power(a)
        swarm.cut_power(b)
        swarm.watchers.clear()
        await asyncio.sleep(4)
        swarm.launch(a)
        swarm.launch(b)
        at = swarm.clock.now()
        opened = await swarm.when(c, BranchOpened)
        assert any(words in opened.reason for words in ("has the results", "lost what they voted for"))
        assert opened.members == tuple(sorted(member.id for member in members))
        assert swarm.clock.now() - at < ORPHAN_AFTER_S + 60
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    assert len(refused) == num_refusals


@pytest.mark.full
@pytest.mark.parametrize("is_strict", [pytest.param(False, marks=pytest.mark.slow), True])
def test_after_a_power_cut_for_all_the_run_goes_on_from_the_newest_checkpoint(
    make_swarm: MakeSwarm, is_strict: bool
) -> None:
    """Every checkpoint is older than what its owner has voted for since."""
    swarm = make_swarm(num_rounds=25, num_peers=3, is_strict=is_strict)

    async def scenario() -> None:
        members = tuple(await swarm.start("abc"))
        for member in members:
            await swarm.round(member, 20)
        for member in members:
            swarm.cut_power(member)
        await asyncio.sleep(1)
        for member in members:
            swarm.launch(member, wait_for=3)
        one_replica(await swarm.done(*members))
        if is_strict:
            assert reopened(members) == {tuple(sorted(member.id for member in members))}

    swarm.run(scenario)


@pytest.mark.full
def test_a_strict_run_is_not_split_by_who_left_and_comes_back_alone(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=200, num_peers=3, is_strict=True)

    async def scenario() -> None:
        a, b, c = members = await swarm.start("abc")
        await swarm.round(a, 3)
        a.peer.stop("asked to")
        await swarm.done(a)
        swarm.cut([a], [b, c])
        swarm.launch(a)
        await asyncio.sleep(60)
        assert a.life.committed == []
        assert a.life.seen(MajorityLost)[0].opens_branch_in_s is None
        swarm.heal([a], [b, c])
        await swarm.when(a, RoundCommitted)
        for member in members:
            member.peer.stop("asked to")
        await swarm.done(*members)
        assert {event.branch for member in members for event in member.life.committed} == {swarm.run_config.run}

    swarm.run(scenario)


def test_who_heard_of_a_round_whose_results_are_gone_goes_on_without_it(make_swarm: MakeSwarm) -> None:
    """Of two, the tie-breaker commits and dies before the other has fetched what it decided."""
    swarm = make_swarm(num_rounds=40, num_peers=2)

    async def scenario() -> None:
        a, b = members = await swarm.start("ab")
        for member in members:
            await swarm.round(member, 3)
        head = a.peer.rounds.chain.head  # type: ignore[union-attr]
        keeper, other = (a, b) if head.leader == a.id else (b, a)
        slow_down(other.life, 3.0)
        rounds = other.peer.rounds
        assert rounds is not None
        while rounds.chain.head == other.peer.replica.head or rounds.parts.has_results(rounds.chain.head):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        swarm.kill(keeper)
        at = swarm.clock.now()
        await swarm.when(other, RoundCommitted)
        assert swarm.clock.now() - at < ORPHAN_AFTER_PAIR_S + UNREACHED_S + JOINING_EXPIRES_S + 10
        (outcome,) = await swarm.done(other)
        assert outcome.reason == "complete"

    swarm.run(scenario)


def test_a_complete_run_waits_for_who_still_fetches_its_last_results(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6, num_peers=3)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(c, 2)
        slow_down(c.life, 10.0)
        outcomes = await swarm.done(a, b, c)
        assert [outcome.reason for outcome in outcomes] == 3 * ["complete"]
        one_replica(outcomes)

    swarm.run(scenario)


def test_a_newcomer_whose_members_all_stop_goes_on_alone(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=12, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        await swarm.round(a, 3)
        c = swarm.member("c")
        swarm.launch(c)
        await swarm.when(c, StateJoined)
        a.peer.stop("asked to")
        b.peer.stop("asked to")
        await swarm.done(a, b)
        (outcome,) = await swarm.done(c)
        assert outcome.reason == "complete"
        assert c.life.seen(MajorityLost)[0].alive == 0
        assert reopened((c,)) == {(c.id,)}

    swarm.run(scenario)


class Nothing(list[Any]):
    """The blobs of a member that serves none, whatever it is asked to serve."""

    def append(self, lookup: Any) -> None:
        """Keep nothing."""


def test_a_newcomer_that_no_member_answers_says_so(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=30, num_peers=2)

    async def scenario() -> None:
        members = await swarm.start("ab")
        await swarm.round(members[0], 3)
        for member in members:
            member.peer.context.node._blobs._lookups = Nothing()
        c = swarm.member("c")
        swarm.launch(c)
        notice = await swarm.when(c, Notice)
        assert "no linked peer has delivered a state" in notice.text

    swarm.run(scenario)


def test_a_newcomer_goes_to_the_next_donor_when_the_first_does_not_deliver(make_swarm: MakeSwarm) -> None:
    """The one that is asked first tells of rounds that nobody has made, and gives no chunk."""
    swarm = make_swarm(num_rounds=60, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        bad = members[1].peer
        bad.context.node._blobs._lookups = Nothing()
        honest = bad._membership._status
        bad._membership._status = lambda: msgspec.structs.replace(honest(), round=honest().round + 5)
        n = swarm.member("n")
        swarm.launch(n)
        at = swarm.clock.now()
        joined = await swarm.when(n, StateJoined)
        assert joined.donors != (members[1].id,)
        assert swarm.clock.now() - at < 30

    swarm.run(scenario)


def test_members_whose_timers_ran_apart_meet_in_one_attempt(make_swarm: MakeSwarm) -> None:
    """One of three follows a far later attempt; another leads none that the third follows."""
    swarm = make_swarm(num_rounds=8, num_peers=3)

    async def scenario() -> None:
        a, b, c = members = await swarm.start("abc")
        for member in members:
            await swarm.round(member, 3)
        swarm.watchers.append(lambda life, to, message: False)  # no letter arrives for a while
        await asyncio.sleep(5)
        for member, attempts in ((a, 9), (b, 4)):
            for _ in range(attempts):
                rounds = member.peer.rounds
                rounds._expire("progress", rounds._state.attempt)  # type: ignore[union-attr]
        swarm.watchers.clear()
        at = swarm.clock.now()
        committed = await swarm.when(c, RoundCommitted)
        assert swarm.clock.now() - at < 20
        assert committed.attempt >= 4
        assert c.life.seen(AttemptStarted)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()


def test_a_leader_that_comes_back_into_its_own_attempt_leaves_it_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8, num_peers=3)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        started = await abreast(*members)
        leader = leading(members)
        swarm.kill(leader)
        swarm.launch(leader)
        at = swarm.clock.now()
        await swarm.round(leader, started + 1)
        assert swarm.clock.now() - at < 30  # a progress timer that knows nothing yet takes two minutes
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


def test_nobody_waits_for_a_member_without_a_vote(make_swarm: MakeSwarm) -> None:
    """It voted in the coming rounds once, and has forgotten how: it merges nothing for who goes on without it."""
    swarm = make_swarm(num_rounds=10, num_peers=2)

    async def scenario() -> None:
        (a,) = await swarm.start("a")
        await swarm.round(a, 2)
        b, base = swarm.member("b"), a.peer.rounds.chain.base  # type: ignore[union-attr]
        promises = Votes(b.folder.durable)
        for branch, number in ((base.branch, Round(8)), (BranchId("ee" * 32), Round(1))):
            promises.write(Durable(base=msgspec.structs.replace(base, branch=branch, round=number)))
        promises.close()
        swarm.launch(b)
        await swarm.when(b, RoundCommitted, lambda event: event.round >= 6)
        assert not b.peer.rounds.is_member  # type: ignore[union-attr]
        await swarm.when(b, RoundCommitted, lambda event: b.id in event.contributors)
        assert b.life.committed[-1].round > 8
        one_replica(await swarm.done(a, b))

    swarm.run(scenario)
