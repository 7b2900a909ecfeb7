"""Runs that go back to the parameters after an earlier round, by a steward's act or by votes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scenarios.swarm import Member, Swarm
from scenarios.test_acts import BOTH, PATIENCE_S, STEWARD, act
from scenarios.test_anchor import Kept
from scenarios.test_archive import RARELY, check, level
from scenarios.test_audits import METHODS, doubts, of_merging
from scenarios.test_faults import MakeSwarm, one_replica
from scenarios.visits import visit
from weft.events import ActEnacted, CheckpointSaved, RoundCommitted, StateJoined, WorkAudited
from weft.ids import Round
from weft.launch.visit import ask_rewind, hand_in, rewind_ballot_of
from weft.peer.audit.heads import Head
from weft.peer.audit.trace import Trace
from weft.peer.state.replica import Replica
from weft.run.trust import AuditedTrust
from weft.sync.records import rewinds
from weft.sync.records.acts import Rewind
from weft.sync.records.charter import Rewound
from weft.sync.records.messages import Manifest
from weft.wire import digest

TRUST = AuditedTrust(audit_rate=0.5, quarantine=0)
TO = Round(3)


class Played:
    """A run, and what all replicas were after each round: the last word of each."""

    def __init__(self, make_swarm: MakeSwarm, patch: pytest.MonkeyPatch, **given: Any) -> None:
        self.swarm: Swarm = make_swarm(
            method=METHODS[0], trust=TRUST, num_peers=4, learns=True, **({"num_rounds": 20, "stewards": BOTH} | given)
        )
        self.models: dict[Round, list[Tensor]] = {}
        self.memory: dict[Round, list[Tensor]] = {}
        self.manifests: dict[Round, Manifest] = {}
        apply = Replica.apply

        def noted(replica: Replica, manifest: Manifest, *given: Any) -> None:
            apply(replica, manifest, *given)
            self.manifests[manifest.round] = manifest
            self.models.setdefault(manifest.round, []).append(replica.outer.clone())
            self.memory.setdefault(manifest.round, []).append(torch.cat([*replica.state.values()]))

        patch.setattr(Replica, "apply", noted)

    @property
    def at(self) -> Round:
        """The round that went back."""
        (found,) = (round for round, manifest in self.manifests.items() if rewinds.decided(manifest) is not None)
        return found

    def check(self, member: Member, to: int = TO) -> None:
        assert member.life.peer.replica.charter.rewound == (Rewound(at=self.at, to=to),)
        assert all(torch.equal(each, self.models[Round(to)][0]) for each in self.models[self.at])
        assert not torch.equal(self.models[Round(self.at - 1)][0], self.models[self.at][0])
        assert not any(each.any() for each in self.memory[self.at]), "the outer optimizer is new"
        assert self.manifests[self.at].committed_tokens >= self.manifests[Round(self.at - 1)].committed_tokens


async def rewind(swarm: Swarm, member: Member, to: int = TO) -> Rewind:
    async with visit(swarm, member, STEWARD) as node:
        return await ask_rewind(node, Round(to), "it diverged", swarm.clock)


async def go_back(swarm: Swarm, member: Member, to: int = TO) -> None:
    answer = await act(swarm, member, await rewind(swarm, member, to))
    assert answer.outcome == "decided", answer.reason


@pytest.mark.full
def test_a_steward_brings_all_replicas_back_bit_for_bit_and_the_run_goes_on(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(make_swarm, monkeypatch, num_rounds=10)
    swarm = played.swarm

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 7)
        await go_back(swarm, members[1])
        one_replica(await swarm.done(*members))
        played.check(members[0])

    swarm.run(scenario)
    for life in swarm.lives:
        (told,) = life.seen(ActEnacted)
        assert (told.kind, told.changes, told.reason) == ("rewind", {"round": "3"}, "it diverged")
        assert len(life.seen(StateJoined)) == 0, "each had what it takes"
        assert played.at in [event.round for event in life.seen(CheckpointSaved)]
    assert doubts(swarm) == of_merging(swarm) == [], "audits follow"
    assert any(event.round > played.at + 1 for life in swarm.lives for event in life.seen(WorkAudited))
    counted = [each for round, each in played.manifests.items() if round > played.at]
    assert all(len(each.contributions) == 3 for each in counted[1:])


@pytest.mark.full
def test_members_vote_and_more_than_half_of_them_decide(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(make_swarm, monkeypatch, num_rounds=12, stewards=())
    swarm = played.swarm

    async def vote(member: Member, patience_s: float) -> str:
        wanted = await rewind(swarm, member)
        async with visit(swarm, member, STEWARD) as node:
            letter = rewind_ballot_of(member.identity, node, wanted)
            return (await hand_in(node, letter, swarm.clock, patience_s)).outcome

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 7)
        assert await vote(a, 0.0) == "waits"
        await swarm.round(a, 10)
        assert not any(rewinds.decided(each) for each in played.manifests.values()), "one of three is no majority"
        assert await vote(c, PATIENCE_S) == "decided"
        one_replica(await swarm.done(a, b, c))
        played.check(a)

    swarm.run(scenario)


@pytest.mark.slow
def test_who_came_later_or_has_lost_what_its_lease_began_with_asks_others(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(make_swarm, monkeypatch)
    swarm = played.swarm
    began_at: Callable[..., Any] = Trace.began_at

    def lost(trace: Trace, head: Head) -> Any:
        return None if trace._context.node.peer == swarm.member("b").id else began_at(trace, head)

    monkeypatch.setattr(Trace, "began_at", lost)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 5)
        d = swarm.member("d")
        swarm.launch(d)
        await swarm.when(members[0], RoundCommitted, lambda event: d.id in event.contributors)
        await go_back(swarm, members[0])
        one_replica(await swarm.done(*members, d))
        played.check(d)

    swarm.run(scenario)
    assert [len(swarm.member(name).life.seen(StateJoined)) for name in "abcd"] == [0, 0, 0, 1]


@pytest.mark.slow
def test_who_is_killed_then_comes_back_to_the_same_parameters(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(make_swarm, monkeypatch)
    swarm = played.swarm

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 7)
        await go_back(swarm, a)
        for member in (a, b):
            if not member.life.seen(ActEnacted):
                await swarm.when(member, ActEnacted, lambda event: event.kind == "rewind")
        swarm.kill(b)
        await swarm.round(a, played.at + 2)
        swarm.launch(b)
        one_replica(await swarm.done(a, b, c))
        played.check(b)

    swarm.run(scenario)


@pytest.mark.slow
def test_a_newcomer_takes_over_what_the_run_has_gone_back_to(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(make_swarm, monkeypatch)
    swarm = played.swarm

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 7)
        await go_back(swarm, members[0])
        d = swarm.member("d")
        swarm.launch(d)
        one_replica(await swarm.done(*members, d))
        played.check(d)

    swarm.run(scenario)


@pytest.mark.full
def test_to_what_was_not_so_nobody_goes_back(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(make_swarm, monkeypatch, num_rounds=9)
    swarm = played.swarm

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 7)
        right = await rewind(swarm, members[0])
        for wrong, why in (
            (Rewind(round=TO, manifest=right.manifest, state=digest(b"poison"), reason=""), "was another"),
            (Rewind(round=TO, manifest=digest(b"no round"), state=right.state, reason=""), "another manifest"),
            (Rewind(round=Round(4), manifest=right.manifest, state=right.state, reason=""), "another manifest"),
        ):
            answer = await act(swarm, members[0], wrong)
            assert (answer.outcome, why in answer.reason) == ("refused", True), answer.reason
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    assert not any(rewinds.decided(each) for each in played.manifests.values())


@pytest.mark.full
def test_an_archive_of_a_run_that_went_back_is_replayed_and_the_anchor_has_a_new_state(
    make_swarm: MakeSwarm, tmp_path: Path
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=RARELY, num_rounds=10, num_peers=3, learns=True, stewards=BOTH)

    async def scenario() -> None:
        anchor = Kept(swarm, tmp_path / "anchor", has_archive=True)
        members = await swarm.start("abc")
        await anchor.start(*members)
        await swarm.round(members[0], 6)
        await go_back(swarm, members[0])
        one_replica(await swarm.done(*members))
        await level(anchor, *members)
        kept = anchor.anchor._kept
        assert kept.chain is not None
        assert kept.chain.charter.rewound
        assert not kept.has_gone_back, "its state is of after that"
        await anchor.end()

    swarm.run(scenario)
    report = check(swarm, tmp_path / "anchor" / "archive")
    assert report.faults == []
    assert report.outcomes == {"equal": report.num_segments}
