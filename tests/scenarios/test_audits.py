"""Runs whose members do some of each other's training steps again."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from scenarios.cheats import CHEATS, FalseMoments, NoWork
from scenarios.swarm import Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from scenarios.theatre import make_run_file
from weft.codec.config import Int8Config
from weft.errors import ConfigError, Removed
from weft.events import ActEnacted, MergeAudited, MergeDoubted, WorkAudited, WorkDoubted
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.found import Found
from weft.peer.audit.merges import Merges
from weft.peer.audit.trace import Trace
from weft.peer.audit.worker import Worker
from weft.peer.messages import AuditAnswer, AuditRequest, Gathered
from weft.peer.round.merge import RoundMerger
from weft.peer.state.carry import Carry
from weft.run.trust import AuditedTrust
from weft.sim.play import play as simulated
from weft.sim.scenario import Kind, Scenario
from weft.sim.world import Life
from weft.sync.method.presets import DiLoCoConfig, FedAvgConfig, MethodConfig, PulseConfig
from weft.sync.records.messages import Manifest, Ready
from weft.sync.records.work import link
from weft.training.trainer import Trainer
from weft.wire import Buffer

ALWAYS = AuditedTrust(audit_rate=1.0)
METHODS: tuple[MethodConfig, ...] = (
    DiLoCoConfig(every=2, codec=Int8Config()),
    FedAvgConfig(every=3, proximal=0.1),
    PulseConfig(every=2),
)


SOME = [METHODS[0], *(pytest.param(each, marks=pytest.mark.full) for each in METHODS[1:])]
QUICK = (NoWork, FalseMoments)


def audits(swarm: Swarm) -> list[WorkAudited]:
    """Return what members have done again and found as they were told."""
    return [event for life in swarm.lives for event in life.seen(WorkAudited)]


def doubts(swarm: Swarm, but: str = "") -> list[WorkDoubted]:
    """Return what members have found wrong, one of them left out."""
    return [event for life in swarm.lives if life.member.name != but for event in life.seen(WorkDoubted)]


@pytest.mark.parametrize("method", SOME, ids=lambda each: type(each).__name__)
def test_honest_work_is_audited_and_found_equal(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=6, num_peers=3, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    assert len(audits(swarm)) >= 6
    assert doubts(swarm) == []
    assert {audit.distance for audit in audits(swarm)} == {0.0}  # one machine: to the last bit


def struck_out(swarm: Swarm, name: str = "d") -> str:
    """Assert that the others have struck out one member, and nobody else; return why."""
    liar = swarm.member(name).id
    enacted = [event for life in swarm.lives for event in life.seen(ActEnacted)]
    assert {(event.kind, event.subject) for event in enacted} == {("strike out", liar)}
    (why,) = {event.reason for event in enacted}
    return why


def play(swarm: Swarm, why: str) -> None:
    """Play a run of a, b, c and d, of whom the last does not stay to the end."""

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        one_replica(await swarm.done(a, b, c))
        with pytest.raises(Removed, match=why):
            await d.lives[-1].task

    swarm.run(scenario)


@pytest.mark.parametrize(
    "cheat",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in CHEATS],
    ids=lambda each: each.__name__,
)
def test_who_computes_something_else_is_struck_out(make_swarm: MakeSwarm, cheat: type[Trainer]) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=24, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (cheat if next(made) == 3 else Trainer)(*given)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm).startswith("it came to other")
    assert {(doubt.member, doubt.outcome) for doubt in doubts(swarm, but="d")} == {(swarm.member("d").id, "differs")}


def test_who_brings_more_than_its_steps_came_to_is_struck_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=24, num_peers=4, learns=True)
    encode = Carry.encode

    def longer(carry: Carry, *given: Any, **named: Any) -> Any:
        if carry is not swarm.member("d").life.peer._carry or not carry.tokens:
            return encode(carry, *given, **named)
        trainer, honest = carry._trainer, carry._trainer.local().clone()
        trainer.local().mul_(2).sub_(carry._replica.outer)
        payload = encode(carry, *given, **named)
        trainer.set_local(honest)
        return payload

    monkeypatch.setattr(Carry, "encode", longer)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm) == "its payload is not what its training steps came to"


@pytest.mark.full
def test_who_goes_on_from_parameters_of_its_own_is_struck_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=24, num_peers=4, learns=True)
    begin = Trace.begin

    def stale(trace: Trace, head: Manifest, holder: PeerId) -> None:
        if trace is swarm.member("d").life.peer._trace and head.round > 1:
            trace._trainer.local().mul_(1.01)
        begin(trace, head, holder)

    monkeypatch.setattr(Trace, "begin", stale)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm) == "it did not begin at the run's parameters"


@pytest.mark.full
def test_who_gives_auditors_no_answer_is_removed_with_the_third_round(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=24, num_peers=4, learns=True)
    answer = Worker._on_request

    async def silent(worker: Worker, peer: PeerId, request: AuditRequest) -> AuditAnswer:
        if worker is swarm.member("d").life.peer._audits._worker:
            return AuditAnswer(is_ready=False, reason="not today")
        return await answer(worker, peer, request)

    monkeypatch.setattr(Worker, "_on_request", silent)
    play(swarm, "it did not show auditors")
    enacted = swarm.member("a").life.seen(ActEnacted)
    assert [(event.kind, event.subject) for event in enacted] == 3 * [("no answer", swarm.member("d").id)]
    assert {(doubt.member, doubt.outcome) for doubt in doubts(swarm)} == {(swarm.member("d").id, "unanswered")}


@pytest.mark.full
def test_one_that_accuses_all_is_believed_by_nobody(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=12, num_peers=4, learns=True)

    async def scenario() -> None:
        a, _, _, d = members = await swarm.start("abcd")
        for round in range(2, 8):
            await swarm.round(d, round)
            audited = d.life.peer._audits
            for each in d.life.peer.head.contributions:
                if each.peer != d.id and (work := d.life.peer.rounds.works.known(each.work)) is not None:
                    before = link(work.segments, 1, 0).before
                    audited._conclude(each.peer, Round(round), each.work, before, Found("differs", "a lie"), None)
            for part, each in enumerate(d.life.peer.head.parts):
                audited._conclude(each.owner, Round(round), each.result, part, Found("differs", "a lie"), None)
        one_replica(await swarm.done(*members))
        assert a.life.peer.replica.charter.banned == ()

    swarm.run(scenario)
    assert [event for life in swarm.lives for event in life.seen(ActEnacted)] == []
    assert doubts(swarm) == []


def of_merging(swarm: Swarm, but: str = "") -> list[MergeDoubted]:
    """Return what members have found wrong with parts, one of them left out."""
    return [event for life in swarm.lives if life.member.name != but for event in life.seen(MergeDoubted)]


def test_parts_are_merged_again_by_others_and_found_equal(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=6, num_peers=3, learns=True)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abc")))

    swarm.run(scenario)
    merged = [event for life in swarm.lives for event in life.seen(MergeAudited)]
    assert {event.member for event in merged} == {swarm.member(name).id for name in "abc"}
    assert of_merging(swarm) == []


def test_an_owner_that_merges_something_else_is_struck_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=24, num_peers=4, learns=True)
    reply = RoundMerger._reply

    def lie(merger: RoundMerger, work: Any, mean: torch.Tensor) -> Any:
        is_own = merger is swarm.member("d").life.peer.rounds.merger and work.is_mine
        return reply(merger, work, mean.mul(-1) if is_own else mean)

    monkeypatch.setattr(RoundMerger, "_reply", lie)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert "is not the mean of what was brought" in struck_out(swarm)
    assert {(doubt.member, doubt.outcome) for doubt in of_merging(swarm, "d")} == {(swarm.member("d").id, "differs")}
    assert doubts(swarm, but="d") == []


@pytest.mark.full
def test_an_owner_is_struck_out_though_who_brought_something_shows_it_to_nobody_else(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five: one merges something else, and the other lets only that one have what it brought."""
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=30, num_peers=5, learns=True)
    reply, lookup = RoundMerger._reply, Merges._lookup

    def lie(merger: RoundMerger, work: Any, mean: torch.Tensor) -> Any:
        is_own = merger is swarm.member("d").life.peer.rounds.merger and work.is_mine
        return reply(merger, work, mean.mul(-1) if is_own else mean)

    def hide(merges: Merges, peer: PeerId, wanted: Digest) -> Buffer | None:
        is_of_two = merges._context.node.peer in {swarm.member(name).id for name in "de"}
        return None if is_of_two and peer != merges._context.node.peer else lookup(merges, peer, wanted)

    monkeypatch.setattr(RoundMerger, "_reply", lie)
    monkeypatch.setattr(Merges, "_lookup", hide)

    async def scenario() -> None:
        *others, d, _ = await swarm.start("abcde")
        one_replica(await swarm.done(*others))
        with pytest.raises(Removed, match=r"it did not show auditors|done again what it says|refuse this key"):
            await d.lives[-1].task

    swarm.run(scenario)
    assert {doubt.member for doubt in of_merging(swarm)} == {swarm.member("d").id}


@pytest.mark.parametrize("method", SOME, ids=lambda each: type(each).__name__)
def test_who_is_late_or_killed_or_stops_is_found_honest(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    """What one round did not count goes on in the next lease, from the same distance to other parameters."""
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=14, num_peers=4, learns=True)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        late = {3, 4, 7}

        def lose(life: Life, _to: PeerId, message: Any) -> bool:
            head = life.peer.head
            return not (life.member is c and isinstance(message, Ready | Gathered) and head and head.round + 1 in late)

        swarm.watchers.append(lose)
        await swarm.round(a, 6)
        swarm.kill(d)
        b.peer.stop("a moment")
        await b.life.task
        swarm.launch(b)
        swarm.launch(d)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    works = [
        life.peer.rounds.works.known(each.work)
        for life in swarm.lives[:1]
        for manifest in swarm.chains.values()
        for each in manifest.contributions
    ]
    assert max(len(work.segments) for work in works if work is not None) >= 2
    assert doubts(swarm) == []
    assert of_merging(swarm) == []
    assert [event for life in swarm.lives for event in life.seen(ActEnacted)] == []


def test_machines_that_only_take_the_time_of_training_are_not_audited(tmp_path: Path) -> None:
    run_file = replace(make_run_file(tmp_path), trust=ALWAYS)
    with pytest.raises(ConfigError, match="none that could be done again"):
        simulated(
            Scenario(run="run.toml", kind=(Kind(name="lab"),), compute="cost"), run_file, tmp_path, tmp_path, list
        )
