"""Runs in which newcomers' first works count once others have done some of their training steps again."""

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from scenarios.cheats import ByChance, bring_more
from scenarios.swarm import Swarm
from scenarios.test_audits import ALWAYS, METHODS, doubts, of_merging, struck_out
from scenarios.test_faults import MakeSwarm, one_replica
from scenarios.test_recorded import lies_about_its_state, tells_the_truth
from weft.codec.config import Fp32Config
from weft.errors import Removed
from weft.events import ActEnacted, Notice, PayloadOffered, StateContradicted
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.audits import Audits
from weft.peer.audit.worker import Worker
from weft.peer.messages import AuditAnswer, AuditRequest
from weft.peer.peer import Peer
from weft.peer.state.replica import Replica
from weft.sim.cheats import Cheating
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.method.presets import MethodConfig
from weft.sync.records import quarantine
from weft.sync.records.messages import Manifest
from weft.training.trainer import Trainer

PLAIN = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0), codec=Fp32Config())
NUM = ALWAYS.quarantine
SOME = [METHODS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[1:])]


def manifests(swarm: Swarm) -> list[Manifest]:
    return sorted(swarm.chains.values(), key=lambda manifest: manifest.round)


def held(swarm: Swarm, peer: PeerId) -> list[tuple[Round, Digest]]:
    """Return what rounds have held of a member, in order."""
    return [(each.round, one.work) for each in manifests(swarm) for one in each.held or () if one.peer == peer]


def counted(swarm: Swarm, peer: PeerId) -> list[tuple[Round, Digest]]:
    """Return what rounds have counted of a member, in order."""
    return [(each.round, one.work) for each in manifests(swarm) for one in each.contributions if one.peer == peer]


@pytest.mark.full
@pytest.mark.parametrize("method", SOME, ids=lambda each: type(each).__name__)
def test_an_honest_newcomers_works_count_later_and_none_is_lost(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=15, num_peers=4, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        d = swarm.member("d")
        swarm.launch(d)
        one_replica(await swarm.done(*members, d))
        assert members[0].life.peer.replica.charter.quarantined is UNSET

    swarm.run(scenario)
    d = swarm.member("d").id
    waited, came = held(swarm, d), counted(swarm, d)
    assert [work for _, work in waited] == [work for _, work in came[:NUM]], "the very works, each once"
    for (first, _), (then, _) in zip(waited, came, strict=False):
        assert first + 2 <= then <= first + 4
    assert len(came) > NUM + 2, "then its works count at once"
    assert doubts(swarm) == of_merging(swarm) == []
    assert [event for life in swarm.lives for event in life.seen(ActEnacted)] == []
    founders = {swarm.member(name).id for name in "abc"}
    assert all(one.peer == d for each in manifests(swarm) for one in each.held or ())
    assert {part.owner for each in manifests(swarm) if each.round < came[NUM - 1][0] for part in each.parts} <= founders


class Newcomer:
    """A run that d joins, and to which it brings a multiple of its update; nobody's steps depend on the parameters."""

    def __init__(self, make_swarm: MakeSwarm, patch: pytest.MonkeyPatch, times: float, num_rounds: int = 8) -> None:
        self.swarm = make_swarm(method=PLAIN, trust=ALWAYS, num_rounds=num_rounds, num_peers=4, learns=True)
        self.swarm.make_trainer = ByChance
        self.models: dict[Round, Tensor] = {}  # the outer parameters after each round
        apply = Replica.apply

        def noted(replica: Replica, manifest: Manifest, *given: Any) -> None:
            apply(replica, manifest, *given)
            self.models.setdefault(manifest.round, replica.outer.clone())

        bring_more(patch, lambda carry: self.new is not None and carry is self.new._carry, times)
        patch.setattr(Replica, "apply", noted)

    @property
    def new(self) -> Peer | None:
        d = self.swarm.members.get("d")
        return None if d is None or not d.lives else d.life.peer

    async def join(self) -> None:
        members = await self.swarm.start("abc")
        await self.swarm.round(members[0], 3)
        d = self.swarm.member("d")
        self.swarm.launch(d)
        one_replica(await self.swarm.done(*members))


@pytest.mark.full
def test_a_newcomer_that_lies_moves_no_parameter(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    """The parameters are those of a run to which it brings nothing but zeros."""
    played = []
    for times in (30.0, 0.0):
        with pytest.MonkeyPatch.context() as patch:
            found = Newcomer(partial(Swarm, tmp_path / f"{times}"), patch, times)

            async def scenario(found: Newcomer = found) -> None:
                await found.join()
                with pytest.raises(Removed, match=r"done again what it says it has done|refuse this key"):
                    await found.swarm.member("d").lives[-1].task

            found.swarm.run(scenario)
        assert struck_out(found.swarm) == "its payload is not what its training steps came to"
        d = found.swarm.member("d").id
        assert held(found.swarm, d) != []
        assert counted(found.swarm, d) == []
        played.append(found)
    assert played[0].models.keys() == played[1].models.keys()
    assert all(torch.equal(model, played[1].models[round]) for round, model in played[0].models.items())


@pytest.mark.full
def test_a_newcomer_that_shows_auditors_nothing_is_counted_nothing(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Newcomer(make_swarm, monkeypatch, 30.0, num_rounds=10)
    answer = Worker._on_request

    async def silent(worker: Worker, peer: PeerId, request: AuditRequest) -> AuditAnswer:
        if found.new is not None and worker is found.new._audits._worker:
            return AuditAnswer(is_ready=False, reason="not today")
        return await answer(worker, peer, request)

    monkeypatch.setattr(Worker, "_on_request", silent)

    async def scenario() -> None:
        await found.join()
        await found.swarm.member("d").life.task

    found.swarm.run(scenario)
    d = found.swarm.member("d").id
    assert len(held(found.swarm, d)) == 1
    assert counted(found.swarm, d) == []
    assert [event for life in found.swarm.lives for event in life.seen(ActEnacted)] == []


@pytest.mark.full
def test_where_no_quarantine_is_asked_for_a_newcomer_counts_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=replace(ALWAYS, quarantine=0), num_rounds=7, num_peers=4, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 3)
        d = swarm.member("d")
        swarm.launch(d)
        one_replica(await swarm.done(*members, d))

    swarm.run(scenario)
    assert len(counted(swarm, swarm.member("d").id)) >= 3
    assert all(each.held is UNSET for each in manifests(swarm))


@pytest.mark.full
def test_what_waits_when_a_member_leaves_waits_anew_and_counts(make_swarm: MakeSwarm) -> None:
    """Parts are cut otherwise then: it is other bytes."""
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=15, num_peers=4, learns=True)

    async def scenario() -> None:
        a, b, c, e = await swarm.start("abce")
        await swarm.round(a, 2)
        d = swarm.member("d")
        swarm.launch(d)
        while not held(swarm, d.id):
            await swarm.round(a, a.life.peer.head.round + 1)
        e.peer.stop("for good")
        one_replica(await swarm.done(a, b, c, d))

    swarm.run(scenario)
    d = swarm.member("d").id
    waited, came = held(swarm, d), counted(swarm, d)
    assert len(waited) == NUM + 1, "the first was held twice"
    assert [work for _, work in came[:NUM]] == [work for _, work in waited[1:]]
    assert len(came) > NUM
    assert doubts(swarm) == of_merging(swarm) == []


@pytest.mark.full
def test_where_no_settled_member_stays_newcomers_go_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=9, num_peers=4, learns=True)

    async def scenario() -> None:
        founders = await swarm.start("ab")
        await swarm.round(founders[0], 2)
        newcomers = [swarm.member(name) for name in "cde"]
        for member in newcomers:
            swarm.launch(member)
        for member in newcomers:
            await swarm.round(member, 5)
        charter = founders[0].life.peer.replica.charter
        assert quarantine.members(charter) == tuple(sorted(member.id for member in newcomers))
        for member in founders:
            swarm.kill(member)
        one_replica(await swarm.done(*newcomers))
        assert newcomers[0].life.peer.replica.charter.quarantined is UNSET

    swarm.run(scenario)


@pytest.mark.slow
def test_newcomers_that_audit_nothing_keep_settled_members_from_striking_nobody_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six members are settled. One of them begins to cheat, in a way that a majority has to judge."""
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=24, num_peers=6, learns=True)
    made, is_false = count(1), [False]

    def make_trainer(*given: Any) -> Trainer:
        trainer = Cheating(*given)
        if next(made) == 3:
            trainer.ways = lambda _first: frozenset({"slower"} if is_false[0] else ())
        return trainer

    answer, tell = Worker._on_request, Audits._tell

    def is_idle(context: Any) -> bool:
        return context.node.peer not in {swarm.member(name).id for name in "abc"}

    async def silent(worker: Worker, peer: PeerId, request: AuditRequest) -> AuditAnswer:
        if is_idle(worker._context):
            return AuditAnswer(is_ready=False, reason="not today")
        return await answer(worker, peer, request)

    def nothing(audits: Audits, *given: Any) -> None:
        if not is_idle(audits._context):
            tell(audits, *given)

    swarm.make_trainer = make_trainer
    monkeypatch.setattr(Worker, "_on_request", silent)
    monkeypatch.setattr(Audits, "_tell", nothing)

    async def scenario() -> None:
        members = await swarm.start("abc")
        await swarm.round(members[0], 2)
        newcomers = [swarm.member(name) for name in "def"]
        for member in newcomers:
            swarm.launch(member)
        for member in newcomers:
            await swarm.round(member, 5)
        is_false[0] = True
        with pytest.raises(Removed, match=r"done again what it says it has done|refuse this key"):
            await members[2].lives[-1].task
        charter = members[0].life.peer.replica.charter
        assert len(quarantine.members(charter)) == 3, "they never came to be settled"
        one_replica(await swarm.done(*members[:2]))

    swarm.run(scenario)
    found = [event for life in swarm.lives for event in life.seen(ActEnacted) if event.kind == "strike out"]
    assert {event.subject for event in found} == {swarm.member("c").id}
    assert all(event.reason.startswith("it came to other") for event in found)


@pytest.mark.full
def test_an_honest_newcomer_that_is_given_a_false_state_brings_nothing_of_it_and_keeps_its_key(
    make_swarm: MakeSwarm,
) -> None:
    """What it would train from there is false work. The votes of the round that counts it in name the state."""
    swarm = make_swarm(trust=ALWAYS, num_rounds=20, num_peers=4, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc", train_s=6.0)
        await swarm.round(members[0], 2)
        for member in members:
            lies_about_its_state(member)
        late = swarm.member("d")
        swarm.launch(late, train_s=0.5)  # before others end their round, it could bring something
        await swarm.when(late, StateContradicted)
        assert not late.life.seen(PayloadOffered)
        for member in members:
            tells_the_truth(member)
        one_replica(await swarm.done(*members, late))
        assert not any(member.life.seen(ActEnacted) for member in (*members, late))
        assert not doubts(swarm)
        assert counted(swarm, late.id)

    swarm.run(scenario)


@pytest.mark.full
def test_who_finds_no_place_in_an_audited_run_is_told_and_comes_in_once_one_is_free(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=30, num_peers=4, learns=True, electors=4)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 2)
        late = swarm.member("e")
        swarm.launch(late)
        await swarm.round(members[0], 8)
        (told,) = [event.text for event in late.life.seen(Notice) if "as many members as it takes (4)" in event.text]
        assert "trains nothing until there is a place" in told
        members[1].peer.stop("asked to")
        await swarm.done(*members, late)
        assert counted(swarm, late.id)

    swarm.run(scenario)
