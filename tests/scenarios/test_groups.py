"""More peers than the electorate has room for: they contribute through electors, and nothing is counted twice."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from scenarios import rules
from scenarios.swarm import LEASE_TOKENS, Life, Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp32Config
from weft.events import CountedThrough, RoundCommitted, Sponsored, StateJoined
from weft.ids import Digest, PeerId
from weft.peer.round.payloads import Payloads
from weft.peer.state.carry import Carry
from weft.sync.method.presets import FedAvgConfig
from weft.sync.records.messages import Manifest, Ready, claims_in
from weft.wire import digest_of

NAMES = "abcdefghi"
NUM = len(NAMES)


def start_of(make_swarm: MakeSwarm, num_rounds: int = 8, **options: object) -> Swarm:
    return make_swarm(num_rounds=num_rounds, num_peers=NUM, electors=3, **options)


def parted(members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
    """Return the electors and the leaves, as they are at the moment."""
    head = max((member.peer.head for member in members if member.peer.head), key=lambda head: head.round)
    electors = [member for member in members if member.id in head.members]
    return electors, [member for member in members if member not in electors]


def aggregator_of(member: Member) -> PeerId | None:
    return member.peer._in_rounds.groups.leaf.aggregator


def manifests(swarm: Swarm) -> list[Manifest]:
    return [swarm.chains[place] for place in sorted(swarm.chains, key=lambda place: place[1])]


@pytest.mark.full
def test_nine_peers_train_through_an_electorate_of_three(make_swarm: MakeSwarm) -> None:
    swarm = start_of(make_swarm)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        one_replica(await swarm.done(*members))
        assert all(len(manifest.members) == 3 for manifest in manifests(swarm))
        _, leaves = parted(members)
        assert len(leaves) == 6
        for leaf in leaves:
            assert leaf.life.seen(Sponsored)
            assert len(leaf.life.seen(CountedThrough)) >= 4
            told = [event for _, event in leaf.life.events if isinstance(event, CountedThrough | RoundCommitted)]
            for event, after in itertools.pairwise(told):
                if isinstance(event, CountedThrough):  # the view relies on the order
                    assert isinstance(after, RoundCommitted)
                    assert after.round == event.round
        last = manifests(swarm)[-2]
        assert sum(claim.num_counted for claim in claims_in(last).values()) == 6
        assert sum(each.tokens for each in last.contributions) == NUM * LEASE_TOKENS
        events = [event for event in members[0].life.committed if event.round == last.round]
        assert events[0].num_through == 6

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_two_levels_make_the_outer_step_that_one_would(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = start_of(make_swarm, num_rounds=6)
    brought: dict[Digest, list[tuple[int, torch.Tensor]]] = {}  # by the manifest before
    outers: dict[Digest, torch.Tensor] = {}
    encode = Carry.encode

    def noting(carry: Carry, parts: tuple[range, ...], round: int, **kind: Any) -> Any:
        replica = carry._replica
        assert replica.head is not None
        name = digest_of(replica.head)
        outers[name] = replica.outer.double()
        brought.setdefault(name, []).append((carry.tokens, outers[name] - carry._trainer.local().double()))
        return encode(carry, parts, round, **kind)

    monkeypatch.setattr(Carry, "encode", noting)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start(NAMES)))

    swarm.run(scenario)
    num_checked = 0
    for manifest in manifests(swarm):
        tokens = sum(each.tokens for each in manifest.contributions)
        after, deltas = outers.get(digest_of(manifest)), brought.get(manifest.previous, [])
        if after is None or len(deltas) < NUM or tokens != NUM * LEASE_TOKENS:
            continue
        mean = sum(num * delta for num, delta in deltas) / tokens
        assert torch.allclose(after, outers[manifest.previous] - mean, rtol=0, atol=1e-6)
        assert mean.abs().max() > 1e-4
        num_checked += 1
    assert num_checked >= 2


def strike(swarm: Swarm, is_moment: Any) -> list[Member]:
    """Kill the first aggregator with leaves at a message of its that `is_moment`; return who that was, once it was."""
    struck: list[Member] = []

    def before(life: Life, to: PeerId, message: Any) -> bool:
        if not struck and life.peer.head is not None and life.peer.head.round >= 3 and is_moment(life, to, message):
            struck.append(life.member)
            swarm.kill(life.member)
            return False
        return not life.is_dead

    swarm.watchers.append(before)
    return struck


def has_group(message: Any) -> bool:
    return isinstance(message, Ready) and message.group is not None and len(message.group.stakes) > 1


@pytest.mark.full
@pytest.mark.parametrize(
    "when",
    [
        "before it announces",
        *(
            pytest.param(when, marks=pytest.mark.slow)
            for when in ("once it has announced", "before it tells of the commit")
        ),
    ],
)
def test_an_aggregator_dies_and_what_it_was_brought_is_counted_once(make_swarm: MakeSwarm, when: str) -> None:
    swarm = start_of(make_swarm, num_rounds=10)
    announced: set[PeerId] = set()

    def is_moment(life: Life, _to: PeerId, message: Any) -> bool:
        if when == "before it announces":
            return has_group(message)
        if when == "before it tells of the commit":
            return type(message).__name__ == "HandOn"
        is_told = life.member.id in announced and not isinstance(message, Ready)
        if has_group(message):
            announced.add(life.member.id)
        return is_told and type(message).__name__ in ("Merged", "Collect", "Holding")

    struck = strike(swarm, is_moment)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        one_replica(await ended(members))
        assert len(struck) == 1
        left = [member for member in members if member not in struck]
        last = manifests(swarm)[-2]
        assert sum(claim.num_counted for claim in claims_in(last).values()) + len(last.contributions) == NUM - 1
        assert len(last.members) == 3  # a leaf has taken the place
        assert all(member.life.seen(CountedThrough) for member in left if member.id not in last.members)

    async def ended(members: list[Member]) -> Any:
        while not struck:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return await swarm.done(*(member for member in members if member not in struck))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_leaves_die_freeze_and_say_goodbye_and_nobody_waits_long(make_swarm: MakeSwarm) -> None:
    swarm = start_of(make_swarm, num_rounds=16)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        await swarm.round(members[0], 3)
        _, (killed, frozen, leaving, *_) = parted(members)
        swarm.kill(killed)
        freezing = asyncio.ensure_future(swarm.freeze(frozen, 25.0))
        leaving.peer.stop("asked to")
        one_replica(await swarm.done(*(member for member in members if member not in (killed, leaving))))
        await freezing
        assert len(frozen.life.seen(CountedThrough)) >= 3
        before = manifests(swarm)[-2]
        assert sum(claim.num_counted for claim in claims_in(before).values()) + len(before.contributions) == NUM - 2

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_an_aggregator_sends_what_was_decided_to_two_leaves_and_the_others_have_it_from_those(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[tuple[int, PeerId], Counter[PeerId]] = {}  # by round and holder: who fetched a result
    fetch = Payloads._fetch

    async def noting(parts: Payloads, holder: PeerId, wanted: Digest, nbytes: int, limit_s: float) -> Any:
        data = await fetch(parts, holder, wanted, nbytes, limit_s)
        if parts._parent is not None:
            taken.setdefault((parts._chain.head.round, holder), Counter())[parts._node.peer] += 1
        return data

    monkeypatch.setattr(Payloads, "_fetch", noting)
    names = "abcdefghijklm"
    swarm = make_swarm(num_rounds=10, num_peers=len(names), electors=3)

    async def scenario() -> None:
        members = await swarm.start(names)
        await swarm.round(members[0], 6)
        electors, leaves = parted(members)
        in_order = {place: set(of) for place, of in taken.items() if 3 <= place[0] <= 5}
        assert all(len(of) <= 2 for of in in_order.values())
        assert sum(map(len, in_order.values())) == 3 * len(leaves)
        giving = {holder for _, holder in in_order} - {member.id for member in electors}
        assert giving  # a group of more than two
        killed = [member for member in leaves if member.id in giving][:1]
        swarm.kill(killed[0])
        one_replica(await swarm.done(*(member for member in members if member not in killed)))
        last = manifests(swarm)[-2]
        assert sum(claim.num_counted for claim in claims_in(last).values()) == len(leaves) - 1

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_full_aggregator_sends_leaves_on(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.peer.group.groups.MAX_GROUP", 3)
    swarm = start_of(make_swarm, num_rounds=6)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        one_replica(await swarm.done(*members))
        electors, leaves = parted(members)
        last = manifests(swarm)[-2]
        assert {claim.num_counted for claim in claims_in(last).values()} == {2}
        assert len(claims_in(last)) == 3
        assert len(leaves) == 6
        assert len(electors) == 3

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_who_joins_a_full_electorate_trains_along_within_some_rounds(make_swarm: MakeSwarm) -> None:
    swarm = start_of(make_swarm, num_rounds=8)

    async def scenario() -> None:
        members = await swarm.start(NAMES[:-1])
        await swarm.round(members[0], 3)
        late = swarm.member(NAMES[-1])
        life = swarm.launch(late)
        one_replica(await swarm.done(*members, late))
        (joined,) = life.seen(StateJoined)
        first = life.seen(CountedThrough)[0]
        assert first.round - joined.round <= 4

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_an_aggregator_that_is_paused_lets_its_leaves_go_and_they_lose_nothing(make_swarm: MakeSwarm) -> None:
    swarm = start_of(make_swarm, num_rounds=12)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        await swarm.round(members[0], 3)
        _, leaves = parted(members)
        paused = next(member for member in members if member.id == aggregator_of(leaves[0]))
        paused.peer.pausing.want("asked to")
        await swarm.round(members[0], 8)
        assert all(aggregator_of(leaf) not in (None, paused.id) for leaf in leaves)
        paused.peer.pausing.want_no_more("asked to")
        one_replica(await swarm.done(*members))
        last = manifests(swarm)[-2]
        assert sum(claim.num_counted for claim in claims_in(last).values()) + len(last.contributions) == NUM

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, NUM])
def test_an_aggregator_cut_off_with_leaves_and_what_they_learnt_come_back(make_swarm: MakeSwarm, num: int) -> None:
    swarm = start_of(make_swarm, num_rounds=30, is_strict=True)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        await swarm.round(members[0], 3)
        electors, leaves = parted(members)
        aggregator = next(member for member in electors if any(aggregator_of(leaf) == member.id for leaf in leaves))
        away = [aggregator, *[leaf for leaf in leaves if aggregator_of(leaf) == aggregator.id][:num]]
        others = [member for member in members if member not in away]
        swarm.cut(away, others)
        await asyncio.sleep(30)
        swarm.heal(away, others)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_slower_leaves_are_leased_less(make_swarm: MakeSwarm) -> None:
    swarm = start_of(make_swarm, num_rounds=14, has_even_leases=False, method=FedAvgConfig(every=8, codec=Fp32Config()))

    async def scenario() -> None:
        members = await swarm.start(NAMES[:-1], train_s=0.2)
        slow = swarm.member(NAMES[-1])
        swarm.launch(slow, train_s=1.0)
        one_replica(await swarm.done(*members, slow))
        records = [record for record in swarm.records.values() if any(each.peer == slow.id for each in record.stakes)]
        latest = max(records, key=lambda record: record.round)
        samples = {stake.peer: stake.samples for stake in latest.stakes}
        assert 0 < samples[slow.id] <= max(samples.values()) / 3

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_leaf_that_brings_nothing_is_not_waited_for_again_and_forgotten(make_swarm: MakeSwarm) -> None:
    swarm = start_of(make_swarm, num_rounds=14)

    async def scenario() -> None:
        members = await swarm.start(NAMES)
        await swarm.round(members[0], 5)
        electors, (leaf, *_) = parted(members)
        other = next(member for member in electors if member.id != aggregator_of(leaf))
        aggregator = other.peer._in_rounds.groups.aggregator
        assert aggregator._take(leaf.id)  # it asked, and did not hear the answer
        await swarm.round(members[0], 9)
        assert leaf.id not in aggregator.leaves
        at = members[0].life.times(RoundCommitted)
        one_replica(await swarm.done(*members))
        rules.no_long_wait(members[0].life.times(RoundCommitted)[len(at) :], 2.5)
        last = manifests(swarm)[-2]
        assert sum(claim.num_counted for claim in claims_in(last).values()) == 6

    swarm.run(scenario)
    swarm.check()
