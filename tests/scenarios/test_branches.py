"""Branches that meet: what the one that is given up had counted is counted once in the other, and moves it no further
than a member's round does."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from scenarios import rules
from scenarios.swarm import LEASE_TOKENS, Life, Member, Swarm
from weft.events import BranchLeft, BranchOpened, Event, LegacyCounted, LegacyDropped, RoundCommitted
from weft.ids import BranchId, Digest, PeerId
from weft.sync.messages import Contribution, Manifest, Ready
from weft.sync.uplinks import parts_of
from weft.wire import digest_of

MakeSwarm = Callable[..., Swarm]
Vector = NDArray[np.float32]
TRAIN_S = 8.0


class Recorder:
    """Keeps the outer parameters after each manifest, and every payload that was announced."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.outer: dict[Digest, Vector] = {}
        self.payloads: dict[Digest, bytes] = {}
        swarm.watchers.append(self._listen)
        note = swarm.on_event

        def on_event(life: Life, event: Event) -> None:
            note(life, event)
            if isinstance(event, RoundCommitted):
                self.outer.setdefault(event.manifest, life.peer._replica.outer.numpy().copy())

        swarm.on_event = on_event

    def _listen(self, life: Life, _to: PeerId, message: Any) -> bool:
        if isinstance(message, Ready):
            payload = life.peer._rounds.parts._payload  # type: ignore[union-attr]
            self.payloads |= {name: bytes(data) for name, data in payload.items()}
        return True

    def brought(self, contribution: Contribution) -> Vector:
        return np.frombuffer(b"".join(self.payloads[part] for part in contribution.parts), dtype=np.float32)

    def expected(self, before: Manifest, manifest: Manifest) -> Vector:
        """Return the outer parameters after `manifest`, by hand: fedavg with fp32 and rate 1."""
        outer, total = self.outer[digest_of(before)], sum(each.tokens for each in manifest.contributions)
        mean = np.empty_like(outer)
        for part in filter(len, parts_of(manifest, len(outer))):
            here, summed, lengths = slice(part.start, part.stop), 0.0, []
            own = [each for each in manifest.contributions if each.legacy is None]
            for each in own:
                share = min(each.tokens, LEASE_TOKENS)
                vector = self.brought(each)[here].astype(np.float64)
                summed = summed + share * vector
                lengths.append(share / each.tokens * np.linalg.norm(vector))
            median = sorted(lengths)[(len(lengths) - 1) // 2]
            for each in manifest.contributions:
                if each.legacy is not None:
                    vector = self.brought(each)[here].astype(np.float64)
                    summed = summed + each.tokens * min(1.0, median / np.linalg.norm(vector)) * vector
            mean[here] = summed / total
        return outer - mean


def manifests(swarm: Swarm, branch: BranchId) -> list[Manifest]:
    return [each for (name, _), each in sorted(swarm.chains.items(), key=lambda item: item[0][1]) if name == branch]


def check_once(swarm: Swarm, recorder: Recorder, left: BranchId, into: BranchId) -> Contribution:
    """Assert that all that `left` counted is in `into` once, with the vector that it must be, and return it."""
    (legacy,) = [
        each
        for each in rules.legacies(swarm.chains.values(), into)
        if each.legacy and each.legacy.stretches[0].branch == left
    ]
    assert legacy.legacy is not None
    first = legacy.legacy.stretches[0].start
    of_branch = [each for each in manifests(swarm, left) if each.round >= first and each.contributions]
    assert legacy.legacy.tokens == sum(one.tokens for each in of_branch for one in each.contributions)
    holding = next(each for each in manifests(swarm, into) if legacy in each.contributions)
    others = sorted(each.tokens for each in holding.contributions if each.legacy is None)
    assert legacy.tokens == min(legacy.legacy.tokens, others[(len(others) - 1) // 2])
    common = next(each for (_, number), each in swarm.chains.items() if number == first - 1)
    delta = recorder.outer[digest_of(common)] - recorder.outer[digest_of(of_branch[-1])]
    np.testing.assert_array_equal(recorder.brought(legacy), delta)
    before = swarm.chains[into, type(holding.round)(holding.round - 1)]
    np.testing.assert_allclose(
        recorder.outer[digest_of(holding)], recorder.expected(before, holding), rtol=1e-6, atol=1e-8
    )
    return legacy


def halves(members: Sequence[Member], num: int) -> tuple[list[Member], list[Member]]:
    """Return the members in two parts, the first with the keeper."""
    keeper = members[0].peer._rounds.chain.base.keeper  # type: ignore[union-attr]
    ordered = sorted(members, key=lambda member: (member.id != keeper, member.name))
    return ordered[:num], ordered[num:]


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
            await swarm.round(member, opened.round + 2)
        swarm.heal(stay, go)
        outcomes = await swarm.done(*members)
        assert len({outcome.replica for outcome in outcomes}) == 1
        legacy = check_once(swarm, recorder, opened.branch, swarm.run_config.run)
        assert legacy.peer in {member.id for member in go}
        for member in go:
            (left,) = member.life.seen(BranchLeft)
            assert (left.is_kept, left.tokens) == (True, legacy.legacy.tokens)  # type: ignore[union-attr]
            assert member.life.seen(LegacyDropped) == []
            assert list(member.peer.place.folder.forks.glob("vector*")) == []
        assert all(len(member.life.seen(LegacyCounted)) <= 1 for member in members)

    swarm.run(scenario)
    swarm.check(has_branches=True)
