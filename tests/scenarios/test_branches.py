"""Branches that meet: what the one that is given up had counted is counted once in the other, and moves it no further
than a member's round does."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from scenarios import rules
from scenarios.swarm import LEASE_TOKENS, SEQ_LEN, Life, Member, Swarm
from weft.codec.build import build
from weft.codec.config import Fp32Config
from weft.events import (
    BranchLeft,
    BranchOpened,
    Event,
    LegacyCounted,
    LegacyDropped,
    RoundCommitted,
    StateJoined,
    WorkDropped,
)
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.peer.join.state_transfer import StateServer
from weft.peer.loop.contribution import MOST_ROUNDS
from weft.peer.state.carry import FORGOTTEN
from weft.peer.state.legacies import Brought
from weft.sync.merge.method import Scope
from weft.sync.merge.reduce import encode_parts, named, parts_of
from weft.sync.method.presets import DdpConfig
from weft.sync.records.messages import Counted, Manifest, Propose, Ready
from weft.tasks import Inline
from weft.wire import digest, digest_of

MakeSwarm = Callable[..., Swarm]
Vector = NDArray[np.float32]
TRAIN_S = 8.0


class Recorder:
    """Keeps the outer parameters after each manifest, and every payload that was announced."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.outer: dict[Digest, Vector] = {}
        self.payloads: dict[Digest, bytes] = {}  # by the digest of their parts' digests
        swarm.watchers.append(self._listen)
        note = swarm.on_event

        def on_event(life: Life, event: Event) -> None:
            note(life, event)
            if isinstance(event, RoundCommitted):
                self.outer.setdefault(event.manifest, life.peer.replica.outer.numpy().copy())

        swarm.on_event = on_event

    def _listen(self, life: Life, _to: PeerId, message: Any) -> bool:
        if isinstance(message, Ready):
            parts = life.peer.rounds.parts._payload  # type: ignore[union-attr]
            if all(name in parts for name in message.parts):
                name = digest("".join(message.parts).encode())
                self.payloads[name] = b"".join(bytes(parts[part]) for part in message.parts)
        return True

    def brought(self, contribution: Counted) -> Vector:
        return np.frombuffer(self.payloads[contribution.payload], dtype=np.float32)

    def expected(self, before: Manifest, manifest: Manifest) -> Vector:
        """Return the outer parameters after `manifest`, by hand: fedavg with fp32 and rate 1."""
        outer = self.outer[digest_of(before)]
        weights = {each.peer: _weight(each) for each in manifest.contributions}
        late = sum(lease.num_windows for lease in before.leases if lease.peer in manifest.awaited)
        mean, total = np.empty_like(outer), sum(weights.values()) + late * SEQ_LEN
        for part in filter(len, parts_of(manifest, Scope(len(outer)))):
            here, summed, lengths = slice(part.start, part.stop), 0.0, []
            own = [each for each in manifest.contributions if each.legacy is None]
            for each in own:
                vector = weights[each.peer] * self.brought(each)[here].astype(np.float64)
                summed = summed + vector
                lengths.append(np.linalg.norm(vector))
            median = sorted(lengths)[(len(lengths) - 1) // 2]
            for each in manifest.contributions:
                if each.legacy is not None:
                    vector = weights[each.peer] * self.brought(each)[here].astype(np.float64)
                    summed = summed + min(1.0, median / np.linalg.norm(vector)) * vector
            mean[here] = summed / total
        return outer - mean


def _weight(contribution: Counted) -> int:
    return min(contribution.tokens, LEASE_TOKENS) if contribution.group is None else contribution.group.weight


def manifests(swarm: Swarm, branch: BranchId) -> list[Manifest]:
    return [each for (name, _), each in sorted(swarm.chains.items(), key=lambda item: item[0][1]) if name == branch]


def check_once(swarm: Swarm, recorder: Recorder, left: BranchId, into: BranchId, *, is_shown: bool = True) -> Counted:
    """Assert that all that `left` counted is in `into` once, with the vector that it must be, and return it.

    Args:
        is_shown: who brought it could still prove its branch's head: else it counts as one lease.
    """
    (legacy,) = [
        each
        for each in rules.legacies(swarm.chains.values(), into)
        if each.legacy and each.legacy.stretches[0].branch == left
    ]
    assert legacy.legacy is not None
    first = legacy.legacy.stretches[0].start
    of_branch = [each for each in manifests(swarm, left) if each.round >= first and each.contributions]
    tokens = sum(one.tokens for each in of_branch for one in each.contributions)
    assert legacy.legacy.tokens == (tokens if is_shown else LEASE_TOKENS)
    holding = next(each for each in manifests(swarm, into) if legacy in each.contributions)
    others = sorted(
        each.tokens // (1 + each.group.num_counted if each.group else 1)
        for each in holding.contributions
        if each.legacy is None
    )
    assert legacy.tokens == min(legacy.legacy.tokens, others[(len(others) - 1) // 2])
    common = next(each for (_, number), each in swarm.chains.items() if number == first - 1)
    delta = recorder.outer[digest_of(common)] - recorder.outer[digest_of(of_branch[-1])]
    np.testing.assert_array_equal(recorder.brought(legacy), delta)
    before = swarm.chains[into, Round(holding.round - 1)]
    np.testing.assert_allclose(
        recorder.outer[digest_of(holding)], recorder.expected(before, holding), rtol=1e-6, atol=1e-8
    )
    return legacy


def halves(members: Sequence[Member], num: int) -> tuple[list[Member], list[Member]]:
    """Return the members in two parts, the first with the tie-breaker."""
    keeper = members[0].peer.rounds.chain.base.keeper  # type: ignore[union-attr]
    ordered = sorted(members, key=lambda member: (member.id != keeper, member.name))
    return ordered[:num], ordered[num:]


@pytest.mark.full
def test_who_is_given_a_state_of_before_the_split_brings_what_its_branch_counted_all_the_same(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Donors may have such a state pinned for others; what followed on it comes by again."""
    swarm = make_swarm(num_rounds=24, num_peers=3)
    recorder = Recorder(swarm)
    monkeypatch.setattr(StateServer, "_at_hand", lambda self, _wanted, _present: next(iter(self._pins), None))

    async def scenario() -> None:
        members = await swarm.start("abc", train_s=TRAIN_S)
        await swarm.round(members[0], 2)
        stay, go = halves(members, 2)
        for member in stay:
            await member.peer.pin()
        await swarm.round(members[0], 4)
        swarm.cut(stay, go)
        opened = await swarm.when(go[0], BranchOpened)
        await swarm.round(go[0], opened.round + MOST_ROUNDS + 1)
        swarm.heal(stay, go)
        await swarm.done(*members)
        joined = go[0].life.seen(StateJoined)
        assert joined[0].round < opened.round  # type: ignore[attr-defined]
        (left,) = go[0].life.seen(BranchLeft)
        legacy = check_once(swarm, recorder, opened.branch, swarm.run_config.run)
        assert left.kept == left.tokens == legacy.legacy.tokens  # type: ignore[union-attr]
        assert go[0].life.seen(LegacyDropped) == []

    swarm.run(scenario)
    swarm.check(has_branches=True)


@pytest.mark.slow
@pytest.mark.parametrize("num", [5, 4], ids=["5|3", "4|4"])
def test_what_the_lesser_branch_counted_is_counted_once_in_the_other(make_swarm: MakeSwarm, num: int) -> None:
    swarm = make_swarm(num_rounds=24, num_peers=8)
    recorder = Recorder(swarm)

    async def scenario() -> None:
        members = await swarm.start("abcdefgh", train_s=TRAIN_S)
        await swarm.round(members[0], 2)
        stay, go = halves(members, num)
        swarm.cut(stay, go)
        opened = await swarm.when(go[0], BranchOpened)
        for member in go:
            await swarm.round(member, opened.round + MOST_ROUNDS + 1)  # and is no more ahead of its leases
        swarm.heal(stay, go)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        legacy = check_once(swarm, recorder, opened.branch, swarm.run_config.run)
        assert legacy.peer in {member.id for member in go}
        for member in go:
            (left,) = member.life.seen(BranchLeft)
            assert left.kept == left.tokens == legacy.legacy.tokens  # type: ignore[union-attr]
            assert member.life.seen(LegacyDropped) == []
            assert list(member.peer.context.folder.forks.glob("vector*")) == []
        assert all(len(member.life.seen(LegacyCounted)) <= 1 for member in members)

    swarm.run(scenario)
    swarm.check(has_branches=True)


@pytest.mark.full
def test_what_a_round_counts_of_who_is_cut_off_in_its_middle_is_not_counted_in_a_branch_again(
    make_swarm: MakeSwarm,
) -> None:
    """The other has its payload, and decides alone; it hears nothing of that, and opens a branch."""
    swarm = make_swarm(num_rounds=60, num_peers=2)
    proposed: list[Manifest] = []

    async def scenario() -> None:
        members = await swarm.start("ab")

        def cut(life: Life, _to: PeerId, message: Any) -> bool:
            if isinstance(message, Propose) and life.peer.peer == life.peer.rounds.chain.base.keeper:  # type: ignore[union-attr]
                swarm.cut(*([member] for member in members))
                proposed.append(message.manifest)
            return not proposed

        swarm.watchers.append(cut)
        opened = await swarm.when(None, BranchOpened)
        swarm.watchers.remove(cut)
        (alone,) = (member for member in members if member.id in opened.members)
        assert alone.id in {each.peer for each in proposed[0].contributions}
        await swarm.round(alone, opened.round + 3)
        swarm.heal(*([member] for member in members))
        await swarm.done(*members)
        assert len(rules.legacies(swarm.chains.values(), swarm.kept().branch)) == 1
        assert WorkDropped(tokens=Tokens(LEASE_TOKENS), reason=FORGOTTEN) in alone.life.seen(WorkDropped)

    swarm.run(scenario)
    swarm.check(has_branches=True)


class Split:
    """Five members, of which two are cut off until they have a branch of their own."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.recorder = Recorder(swarm)
        self.run = BranchId(swarm.run_config.run)
        self.stay: list[Member] = []
        self.go: list[Member] = []

    async def start(self, **options: Any) -> None:
        members = await self.swarm.start("abcde", train_s=TRAIN_S, **options)
        await self.swarm.round(members[0], 2)
        self.stay, self.go = halves(members, 3)

    async def part(self, num_rounds: int = 2) -> BranchId:
        """Cut the two off; return their branch once it has counted so many rounds."""
        self.swarm.cut(self.stay, self.go)
        opened = await self.swarm.when(self.go[0], BranchOpened)
        for member in self.go:
            await self.swarm.round(member, opened.round + num_rounds)
        return opened.branch

    def heal(self) -> None:
        self.swarm.heal(self.stay, self.go)

    async def done(self, *members: Member) -> None:
        outcomes = await self.swarm.done(*(members or (*self.stay, *self.go)))
        assert len({outcome.replica for outcome in outcomes}) == 1


@pytest.mark.full
@pytest.mark.parametrize("returns", [pytest.param(False, marks=pytest.mark.slow), True])
def test_where_who_brings_it_dies_another_does_and_its_return_changes_nothing(
    make_swarm: MakeSwarm, returns: bool
) -> None:
    swarm = make_swarm(num_rounds=18, num_peers=5)
    split = Split(swarm)

    async def scenario() -> None:
        await split.start()
        left = await split.part()
        for member in split.go:
            await member.peer._autosave.save()
        killed: list[Member] = []

        def kill_bringer(life: Life, _to: PeerId, message: Any) -> bool:
            if isinstance(message, Ready) and message.legacy is not None and not killed:
                killed.append(life.member)
                swarm.kill(life.member)
            return not life.is_dead

        swarm.watchers.append(kill_bringer)
        split.heal()
        event = await swarm.when(split.stay[0], LegacyCounted)
        (victim,) = killed
        (other,) = (member for member in split.go if member is not victim)
        assert event.by == other.id
        if returns:
            swarm.launch(victim, train_s=TRAIN_S)
        await split.done(*split.stay, *(split.go if returns else [other]))
        # Left alone it may have opened another branch, whose opening nobody has voted for.
        is_shown = len(other.life.seen(BranchOpened)) == 1
        assert check_once(swarm, split.recorder, left, split.run, is_shown=is_shown).peer == other.id

    swarm.run(scenario)


@pytest.mark.slow
def test_both_who_could_bring_it_end_and_bring_it_after_they_have_started_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=26, num_peers=5)
    split = Split(swarm)

    async def scenario() -> None:
        await split.start()
        left = await split.part()
        for member in split.go:
            await member.peer._autosave.save()
            swarm.kill(member)
        split.heal()
        for member in split.go:
            swarm.launch(member, train_s=TRAIN_S)
        await split.done()
        check_once(swarm, split.recorder, left, split.run, is_shown=False)

    swarm.run(scenario)


@pytest.mark.slow
def test_two_splits_are_healed_one_after_the_other(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=50, num_peers=5)
    split = Split(swarm)

    async def scenario() -> None:
        await split.start()
        branches = []
        for _ in range(2):
            branches.append(await split.part())
            split.heal()
            await swarm.when(split.stay[0], LegacyCounted)
            await swarm.when(split.stay[0], RoundCommitted, lambda event: len(event.contributors) == 5)
        await split.done()
        for branch in branches:
            check_once(swarm, split.recorder, branch, split.run)

    swarm.run(scenario)
    swarm.check(has_branches=True)


@pytest.mark.full
def test_who_claims_a_quintillion_tokens_and_brings_a_vector_a_million_times_too_long_weighs_as_any_other(
    make_swarm: MakeSwarm,
) -> None:
    swarm = make_swarm(num_rounds=18, num_peers=5)
    split = Split(swarm)

    async def scenario() -> None:
        await split.start()
        left = await split.part()
        for member in split.go:
            legacies = member.peer._entrance.legacies
            honest = legacies.to_bring

            async def lie(base: Any, parts: Any, honest: Any = honest, legacies: Any = legacies) -> Any:
                brought = await honest(base, parts)
                if brought is None:
                    return None
                legacy = msgspec.structs.replace(brought.kept.legacy, tokens=10**18)
                kept = msgspec.structs.replace(brought.kept, legacy=legacy)
                vector = 1e6 * legacies._read(kept.vectors)
                return Brought(kept, tuple(map(named, encode_parts(build(Fp32Config()), vector, parts))))

            legacies.to_bring = lie  # type: ignore[method-assign]
        split.heal()
        counted = await swarm.when(split.stay[0], LegacyCounted)
        await split.done()
        assert counted.weight == LEASE_TOKENS
        assert manifests(swarm, left)
        (holding,) = [each for each in manifests(swarm, split.run) if any(one.legacy for one in each.contributions)]
        before = swarm.chains[split.run, Round(holding.round - 1)]
        after = split.recorder.outer[digest_of(holding)]
        np.testing.assert_allclose(after, split.recorder.expected(before, holding), rtol=1e-6, atol=1e-8)

    swarm.run(scenario)


@pytest.mark.slow
def test_the_side_that_went_on_is_given_up_where_the_branch_counts_more(make_swarm: MakeSwarm) -> None:
    """Its members have kept no fork: those of the branch have."""
    swarm = make_swarm(num_rounds=40, num_peers=5)
    split = Split(swarm)

    async def scenario() -> None:
        members = [swarm.member(name) for name in "abcde"]
        members[0].is_founder = True
        computes = {member: Inline(4.0) for member in members}
        for member in members:
            swarm.launch(member, wait_for=5, compute=computes[member])
        await swarm.round(members[0], 2)
        split.stay, split.go = halves(members, 3)
        for member in split.stay:
            computes[member]._train_s = 30.0  # slower than the branch; no round of theirs ends while they leave
        left, into = split.run, await split.part(num_rounds=30)
        split.heal()
        for member in split.stay:
            if not member.life.seen(BranchLeft):
                await swarm.when(member, BranchLeft)
            computes[member]._train_s = 4.0
        await split.done()
        assert check_once(swarm, split.recorder, left, into).peer in {member.id for member in split.stay}
        for member in split.stay:
            assert [event.kept == event.tokens for event in member.life.seen(BranchLeft)] == [True]

    swarm.run(scenario)
    swarm.check(has_branches=True)


@pytest.mark.slow
def test_a_run_that_sends_gradients_says_what_it_gives_up(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=60, num_peers=5, method=DdpConfig(codec=Fp32Config()))
    split = Split(swarm)

    async def scenario() -> None:
        await split.start()
        left = await split.part()
        split.heal()
        await split.done()
        for member in split.go:
            (event,) = member.life.seen(BranchLeft)
            assert not event.kept
            assert event.tokens == sum(one.tokens for each in manifests(swarm, left) for one in each.contributions)
        assert rules.legacies(swarm.chains.values(), split.run) == []

    swarm.run(scenario)


@pytest.mark.slow
def test_a_branch_of_a_branch_is_brought_with_it_or_after_it(make_swarm: MakeSwarm) -> None:
    """Of two that were cut off, one goes on in their branch and the other opens its own."""
    swarm = make_swarm(num_rounds=34, num_peers=5)
    split = Split(swarm)

    async def scenario() -> None:
        await split.start()
        first = await split.part()
        d, e = halves(split.go, 1)
        swarm.cut(d, e)
        second = (await swarm.when(e[0], BranchOpened)).branch
        await swarm.when(e[0], RoundCommitted, lambda event: event.branch == second)
        split.heal()
        await swarm.when(split.stay[0], LegacyCounted)
        swarm.heal(d, e)
        await split.done()
        brought = rules.legacies(swarm.chains.values(), split.run)
        taken = {stretch.branch for each in brought if each.legacy for stretch in each.legacy.stretches}
        dropped = [event for member in split.go for event in member.life.seen(LegacyDropped)]
        assert second in taken or dropped
        assert first in taken

    swarm.run(scenario)


@pytest.mark.slow
def test_one_link_between_two_branches_is_enough_to_end_one_of_them(make_swarm: MakeSwarm) -> None:
    """Each side sees more of its own members than of the others; certificates tell who stands where."""
    swarm = make_swarm(num_rounds=60, num_peers=5)
    split = Split(swarm)

    async def scenario() -> None:
        await split.start()
        await split.part()
        swarm.heal(split.stay[:1], split.go[:1])
        await swarm.when(split.go[0], BranchLeft)
        split.heal()
        await split.done()
        assert all(member.life.seen(BranchLeft) == [] for member in split.stay)

    swarm.run(scenario)
