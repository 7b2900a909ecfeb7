"""Peers that have lost the majority train on ahead of their leases, so far and no further; all is counted once."""

import asyncio
from collections.abc import Callable, Iterable

import pytest

from scenarios import rules
from scenarios.swarm import BATCH, EVERY, LEASE_TOKENS, SEQ_LEN, Member, Swarm
from scenarios.test_branches import halves
from weft.codec.config import Fp32Config
from weft.data.assign import _BEYOND
from weft.events import BranchOpened, MajorityLost, Notice, RoundCommitted, TrainsOn
from weft.peer.fork import ORPHAN_AFTER_PAIR_S, ORPHAN_AFTER_S
from weft.peer.loop.contribution import MOST_ROUNDS
from weft.sync.method.presets import DdpConfig

MakeSwarm = Callable[..., Swarm]
MOST_STEPS = MOST_ROUNDS * EVERY


def num_ahead(swarm: Swarm, member: Member) -> int:
    """Return how many inner steps the member has made beyond its leases, in all its processes."""
    made = [position for life in member.lives for position in swarm.positions[life] if position >= _BEYOND]
    return len(made) // BATCH


def nothing_was_cut(swarm: Swarm) -> None:
    """Nobody claimed more than was leased to it."""
    notices = [event.text for life in swarm.lives for event in life.seen(Notice)]
    assert not [text for text in notices if "claims" in text]


def check_whole(swarm: Swarm, members: Iterable[Member]) -> None:
    """Assert that of what living processes trained each token is counted once or carried, on whichever branch."""
    counted = rules.counted(swarm.chains.values(), swarm.records)
    for member in members:
        assert member.life.trained_tokens == counted[member.id] + member.peer.carried_tokens
    nothing_was_cut(swarm)


@pytest.mark.full
@pytest.mark.parametrize("is_strict", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "strict"])
def test_a_minority_trains_on_for_four_rounds_steps_and_its_later_leases_are_covered(
    make_swarm: MakeSwarm, is_strict: bool
) -> None:
    swarm = make_swarm(num_rounds=18, num_peers=8, is_strict=is_strict)

    async def scenario() -> None:
        members = await swarm.start("abcdefgh", train_s=2.5)
        await swarm.round(members[0], 2)
        stay, go = halves(members, 5)
        swarm.cut(stay, go)
        await asyncio.sleep(ORPHAN_AFTER_S - 20.0)
        for member in go:
            (event,) = member.life.seen(TrainsOn)
            assert event.steps == num_ahead(swarm, member) == MOST_STEPS
            assert member.life.times(MajorityLost)[0] <= member.life.times(TrainsOn)[0]
            assert member.peer._carry.due <= 2 * LEASE_TOKENS
            assert member.peer._carry.ahead == MOST_STEPS * BATCH * SEQ_LEN
        swarm.heal(stay, go)
        for member in go:
            await swarm.when(member, RoundCommitted, lambda event, id=member.id: id in event.contributors)  # type: ignore[misc]
            assert 0 < member.peer._carry.ahead <= MOST_STEPS * BATCH * SEQ_LEN  # all: what it carried came first
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        for member in stay:
            assert member.life.seen(TrainsOn) == []
        for member in go:
            assert num_ahead(swarm, member) == MOST_STEPS
            assert member.peer._carry.ahead == 0
            assert member.life.seen(BranchOpened) == []
        check_whole(swarm, members)

    swarm.run(scenario)
    swarm.check()


def test_of_two_the_one_without_the_tie_breaker_trains_on_and_its_branch_counts_that_first(
    make_swarm: MakeSwarm,
) -> None:
    swarm = make_swarm(num_rounds=24, num_peers=2)

    async def scenario() -> None:
        a, b = await swarm.start("ab")
        while True:  # until b is not the tie-breaker
            event = await swarm.when(b, RoundCommitted)
            bases = [each.peer.rounds.chain.base for each in (a, b)]  # type: ignore[union-attr]
            if bases[0] == bases[1] and bases[0].keeper == a.id and event.round >= 2:
                break
        swarm.kill(a)
        at = swarm.clock.now()
        opened = await swarm.when(b, BranchOpened)
        assert swarm.clock.now() - at <= ORPHAN_AFTER_PAIR_S + 1.0
        assert len(b.life.seen(TrainsOn)) == 1
        made = num_ahead(swarm, b)
        assert EVERY < made <= MOST_STEPS
        before = len(swarm.positions[b.life])
        await swarm.when(b, RoundCommitted, lambda event: event.round == opened.round + made // EVERY)
        assert len(swarm.positions[b.life]) - before <= BATCH  # the step that it was making when it opened the branch
        await swarm.done(b)
        assert b.peer._carry.ahead == 0
        check_whole(swarm, [b])

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_what_a_branch_did_not_come_to_count_is_counted_where_it_goes_over_to(make_swarm: MakeSwarm) -> None:
    """The branch counts some of what was made ahead, and its rounds are brought as a legacy; the rest is carried."""
    swarm = make_swarm(num_rounds=24, num_peers=5)

    async def scenario() -> None:
        members = await swarm.start("abcde", train_s=8.0)
        await swarm.round(members[0], 2)
        stay, go = halves(members, 3)
        swarm.cut(stay, go)
        opened = await swarm.when(go[0], BranchOpened)
        for member in go:
            (event,) = member.life.seen(TrainsOn)
            assert 2 * EVERY < num_ahead(swarm, member) <= event.steps == MOST_STEPS
        await swarm.when(go[0], RoundCommitted, lambda event: event.branch == opened.branch)
        swarm.heal(stay, go)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        for member in go:
            assert member.peer._carry.ahead == 0
        (legacy,) = rules.legacies(swarm.chains.values(), members[0].peer.head.branch)  # type: ignore[union-attr]
        assert legacy.legacy is not None
        of_branch = [each for (branch, _), each in swarm.chains.items() if branch == opened.branch]
        assert legacy.legacy.tokens == sum(rules.counted(of_branch, swarm.records).values())
        check_whole(swarm, members)

    swarm.run(scenario)
    swarm.check(has_branches=True)


@pytest.mark.full
def test_who_is_stopped_ahead_of_its_leases_comes_back_as_far_ahead_and_goes_no_further(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=30, num_peers=3, is_strict=True)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 2)
        stay, (goes,) = halves([a, b, c], 2)
        swarm.cut(stay, [goes])
        await swarm.when(goes, TrainsOn)
        await asyncio.sleep(2.5)
        goes.peer.stop("asked to")
        await swarm.done(goes)
        made = num_ahead(swarm, goes)
        assert 0 < made < MOST_STEPS
        swarm.heal(stay, [goes])
        swarm.launch(goes)
        while goes.peer is None or not goes.peer.carried_tokens:  # noqa: ASYNC110  # it tells nobody when it has read it
            await asyncio.sleep(0.05)
        assert goes.peer._carry.ahead == made * BATCH * SEQ_LEN
        await swarm.done(*stay, goes)
        assert goes.peer._carry.ahead == 0
        trained = sum(life.trained_tokens for life in goes.lives)
        counted = rules.counted(swarm.chains.values(), swarm.records)[goes.id]
        # Where it came back by another's state, it cannot tell which of what it had saved is counted in there.
        told = sum(book.told(is_sure=False) for book in swarm.ledger.books if book.life.member is goes)
        lost = trained - counted - goes.peer.carried_tokens
        assert 0 <= lost <= told <= (1 + made) * BATCH * SEQ_LEN * EVERY
        nothing_was_cut(swarm)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_leaves_train_on_like_their_electors(make_swarm: MakeSwarm) -> None:
    """Of three electors one is cut off with its leaves."""
    swarm = make_swarm(num_rounds=20, num_peers=9, electors=3)

    async def scenario() -> None:
        members = await swarm.start("abcdefghi")
        await swarm.round(members[0], 4)
        ids = members[0].peer.head.members  # type: ignore[union-attr]
        electors = [member for member in members if member.id in ids]
        _, (aggregator,) = halves(electors, 2)
        leaves = [member for member in members if member.peer._in_rounds.groups.leaf.aggregator == aggregator.id]
        assert leaves
        go = [aggregator, *leaves]
        stay = [member for member in members if member not in go]
        swarm.cut(stay, go)
        await asyncio.sleep(ORPHAN_AFTER_S / 2)
        for member in go:
            (event,) = member.life.seen(TrainsOn)
            assert event.steps == num_ahead(swarm, member) == MOST_STEPS
            assert member.peer._carry.ahead == MOST_STEPS * BATCH * SEQ_LEN
        for member in stay:
            assert member.life.seen(TrainsOn) == []

    swarm.run(scenario)


def test_who_sends_gradients_waits(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=30, num_peers=3, method=DdpConfig(codec=Fp32Config()), is_strict=True)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 2)
        stay, (goes,) = halves([a, b, c], 2)
        swarm.cut(stay, [goes])
        await swarm.when(goes, MajorityLost)
        made = len(swarm.positions[goes.life])
        await asyncio.sleep(10.0)
        assert len(swarm.positions[goes.life]) == made
        assert goes.life.seen(TrainsOn) == []

    swarm.run(scenario)
