"""Runs whose members do some of each other's training steps again."""

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, get_args

import pytest
import torch

from scenarios.cheats import Levered, Resting, always, bring_more, signed_otherwise
from scenarios.swarm import Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp8Config, Int8Config
from weft.errors import Removed
from weft.events import ActEnacted, AuditorDoubted, LieProven, MergeAudited, MergeDoubted, WorkAudited, WorkDoubted
from weft.ids import Digest, PeerId, Round
from weft.keys import verify
from weft.peer.audit.auditor import Auditor
from weft.peer.audit.checks import TOO_FAR, UNLEFT, Audit, Checks
from weft.peer.audit.kept import Kept
from weft.peer.audit.merges import Merge, Merges
from weft.peer.audit.outcome import Found
from weft.peer.audit.sealing import UNEQUAL
from weft.peer.audit.steps import LOCAL
from weft.peer.audit.trace import Trace
from weft.peer.audit.worker import Worker
from weft.peer.group.records import lease_of
from weft.peer.messages import AuditAnswer, AuditRequest, Gathered
from weft.peer.round.driver import RoundDriver
from weft.peer.round.merge import RoundMerger
from weft.peer.round.payloads import Payloads
from weft.run.trust import AuditedTrust
from weft.sim.scenario import Way
from weft.sim.world import Life
from weft.sync.merge.method import OUTER
from weft.sync.method.choices import Choices, NesterovConfig
from weft.sync.method.presets import DiLoCoConfig, FedAvgConfig, MethodConfig, PulseConfig
from weft.sync.records.index import StateIndex
from weft.sync.records.messages import Certificate, Manifest, Merged, Ready
from weft.sync.records.work import Work, link
from weft.training.trainer import Trainer
from weft.verify.suspicion import TIMES
from weft.wire import Buffer, digest_of, unseal

ALWAYS = AuditedTrust(audit_rate=1.0)
EXACT = AuditedTrust(audit_rate=1.0, numerics="exact")
METHODS: tuple[MethodConfig, ...] = (
    DiLoCoConfig(every=2, codec=Int8Config()),
    FedAvgConfig(every=3, proximal=0.1),
    PulseConfig(every=2),
)


SOME = [METHODS[0], *(pytest.param(each, marks=pytest.mark.full) for each in METHODS[1:])]
FIRST = [METHODS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS[1:])]
QUICK = ("none",)
LIKE_OTHERS = (
    "noise",
    "upwards",
    "half the steps",
    "other text",
    "half a batch",
    "slower",
    "new optimizer",
)  # plainer than one of the rest


def audits(swarm: Swarm) -> list[WorkAudited]:
    """Return what members have done again and found as they were told."""
    return [event for life in swarm.lives for event in life.seen(WorkAudited)]


def doubts(swarm: Swarm, but: str = "") -> list[WorkDoubted]:
    """Return what members have found wrong, one of them left out."""
    return [event for life in swarm.lives if life.member.name != but for event in life.seen(WorkDoubted)]


@pytest.mark.parametrize("method", SOME, ids=lambda each: type(each).__name__)
def test_honest_work_and_honest_parts_are_audited_and_found_equal(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=5, num_peers=3, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abc")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    assert len(audits(swarm)) >= 6
    assert doubts(swarm) == []
    assert {audit.distance for audit in audits(swarm)} == {0.0}  # one machine: to the last bit
    assert [event for life in swarm.lives for event in life.seen(AuditorDoubted)] == []
    merged = [event for life in swarm.lives for event in life.seen(MergeAudited)]
    assert {event.member for event in merged} == {swarm.member(name).id for name in "abc"}
    assert of_merging(swarm) == []


@pytest.mark.parametrize("has_kept", [True, False])
def test_what_a_lease_began_at_is_fetched_only_where_no_own_lease_began_there(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, has_kept: bool
) -> None:
    pulled, names = Checks.pulled, Counter[str]()

    async def noted(checks: Checks, audit: Audit, index: StateIndex, only: set[str] | None = None) -> Any:
        found = await pulled(checks, audit, index, only)
        names.update(found.keys())
        return found

    monkeypatch.setattr(Checks, "pulled", noted)
    if not has_kept:
        monkeypatch.setattr(Trace, "began_at", lambda _trace, _head: None)
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=4, num_peers=3, learns=True)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abc")))

    swarm.run(scenario)
    assert len(audits(swarm)) >= 6
    assert doubts(swarm) == []
    assert (OUTER not in names) == has_kept
    assert names[LOCAL] >= 2 * len(audits(swarm)), "the state before, and the last"


def test_honest_work_in_exact_numbers_is_found_equal(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=4, num_peers=3, learns=True)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abc")))

    swarm.run(scenario)
    assert len(audits(swarm)) >= 3
    assert doubts(swarm) == []
    assert {audit.distance for audit in audits(swarm)} == {0.0}


def test_an_auditor_that_makes_no_steps_is_found_in_exact_numbers_by_what_it_had_sealed(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=5, num_peers=3, learns=True)
    repeated, compared = Auditor._repeated, Auditor._compared

    def is_lazy(auditor: Auditor) -> bool:
        return auditor._context.node.peer == swarm.member("c").id

    async def nothing(auditor: Auditor, audit: Any, state: Any, *given: Any) -> Any:
        return state if is_lazy(auditor) else await repeated(auditor, audit, state, *given)

    async def the_same(auditor: Auditor, *given: Any) -> Found:
        return Found("equal") if is_lazy(auditor) else await compared(auditor, *given)

    monkeypatch.setattr(Auditor, "_repeated", nothing)
    monkeypatch.setattr(Auditor, "_compared", the_same)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abc")))

    swarm.run(scenario)
    found = {life.member.name: life.seen(AuditorDoubted) for life in swarm.lives}
    assert {name for name, events in found.items() if events} == {"a", "b"}
    told = {(event.member, event.outcome, event.why) for events in found.values() for event in events}
    assert told == {(swarm.member("c").id, "false", UNEQUAL)}
    assert doubts(swarm) == []


@pytest.mark.slow
def test_newcomers_and_who_strays_are_audited_more_often_and_answer(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=AuditedTrust(audit_rate=0.25), num_rounds=40, num_peers=4, learns=True)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        await swarm.round(members[0], 15)
        for life in swarm.lives:
            life.peer._audits.suspicion.strays(swarm.member("d").id, "loss", False)
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
    of_d = Counter(audit.member == swarm.member("d").id for audit in audits(swarm) if audit.round > 20)
    early, late = (
        sum(audit.round in rounds and audit.member != swarm.member("d").id for audit in audits(swarm))
        for rounds in (range(1, 10), range(21, 41))
    )
    assert early / 9 > 2 * late / 20, "a work is drawn once, then a quarter as often"
    assert of_d[True] > of_d[False] / 3 * 2, "so is that of who strays"
    assert doubts(swarm) == []
    assert [event for life in swarm.lives for event in life.seen(ActEnacted)] == []


def struck_out(swarm: Swarm, name: str = "d") -> str:
    """Assert that the others have struck out one member, and nobody else; return why."""
    (why,) = reasons(swarm, name)
    return why


def reasons(swarm: Swarm, name: str = "d") -> set[str]:
    """As `struck_out`, of one whose works one round may find false for several reasons."""
    liar = swarm.member(name).id
    enacted = [event for life in swarm.lives for event in life.seen(ActEnacted)]
    assert {(event.kind, event.subject) for event in enacted} == {("strike out", liar)}
    return {event.reason for event in enacted}


BY_EVIDENCE = r"members banned this key.*never signs that|refuse this key"


def proven(swarm: Swarm, name: str = "d") -> str:
    """Assert that one member was struck out by evidence, and by nobody's vote; return why."""
    enacted = [event for life in swarm.lives for event in life.seen(ActEnacted)]
    assert {event.by for event in enacted} == {()}
    liar, why = swarm.member(name).id, struck_out(swarm, name)
    lies = [event for life in swarm.lives for event in life.seen(LieProven)]
    assert {(event.member, event.what) for event in lies} == {(liar, why)}
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
    "way",
    [
        *(
            pytest.param(each, marks=() if each in QUICK else pytest.mark.full)
            for each in get_args(Way)
            if each not in LIKE_OTHERS
        ),
        *(pytest.param(each, marks=pytest.mark.slow) for each in LIKE_OTHERS),
    ],
)
def test_who_computes_something_else_is_struck_out(make_swarm: MakeSwarm, way: Way) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=6, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (always(way) if next(made) == 3 else Trainer)(*given)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm).startswith("it came to other")
    assert {(doubt.member, doubt.outcome) for doubt in doubts(swarm, but="d")} == {(swarm.member("d").id, "differs")}


@pytest.mark.full
def test_who_moves_some_numbers_far_to_hide_what_it_does_to_the_others_is_struck_out(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=6, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (Levered if next(made) == 3 else Trainer)(*given)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm) == UNLEFT


@pytest.mark.full
def test_who_rests_on_a_state_that_steps_do_not_change_is_struck_out_by_whatever_step_is_drawn(
    make_swarm: MakeSwarm,
) -> None:
    """All of its steps but two are right, but no training leads from where the run is to where they are."""
    method = DiLoCoConfig(every=8, codec=Int8Config())
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=6, num_peers=4, learns=True)
    made, d = count(), swarm.member("d")

    def make_trainer(*given: Any) -> Trainer:
        if next(made) != 3:
            return Trainer(*given)
        trainer = Resting(*given)
        trainer.lease = lambda: lease_of(d.life.peer.head.leases, d.id)
        return trainer

    swarm.make_trainer = make_trainer
    play(swarm, r"done again what it says it has done|refuse this key")
    assert all(why == TOO_FAR or why.startswith("it came to other") for why in reasons(swarm))
    assert TOO_FAR in {doubt.why for doubt in doubts(swarm, but="d")}
    assert d.id not in {audit.member for audit in audits(swarm)}, "nobody has found any of its steps right"


@pytest.mark.slow
def test_who_trains_at_another_rate_is_struck_out_in_exact_numbers(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=24, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (always("slower") if next(made) == 3 else Trainer)(*given)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its optimizer did not make this training step"
    assert {(doubt.member, doubt.outcome) for doubt in doubts(swarm, but="d")} == {(swarm.member("d").id, "differs")}
    assert {audit.distance for audit in audits(swarm)} == {0.0}


@pytest.mark.slow
def test_one_bit_of_a_state_is_enough_in_exact_numbers(make_swarm: MakeSwarm) -> None:
    class OneBit(Trainer):
        """Changes the last bit of one parameter in each step."""

        def _descend(self, norm: float, rate: float) -> float:
            found = super()._descend(norm, rate)
            self._vector.view(torch.int32)[7] ^= 1
            return found

    swarm = make_swarm(method=METHODS[0], trust=EXACT, num_rounds=24, num_peers=4, learns=True)
    made = count()
    swarm.make_trainer = lambda *given: (OneBit if next(made) == 3 else Trainer)(*given)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "its optimizer did not make this training step"


@pytest.mark.full
def test_who_brings_more_than_its_steps_came_to_is_struck_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=5, num_peers=4, learns=True)
    bring_more(monkeypatch, lambda carry: carry is swarm.member("d").life.peer._carry, 2.0)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert struck_out(swarm) == "its payload is not what its training steps came to"


@pytest.mark.full
def test_who_goes_on_from_parameters_of_its_own_is_struck_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=7, num_peers=4, learns=True)
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
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=9, num_peers=4, learns=True)
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
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=8, num_peers=4, learns=True)

    async def scenario() -> None:
        a, _, _, d = members = await swarm.start("abcd")
        for round in range(2, 6):
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
    assert doubts(swarm) == of_merging(swarm) == []


def of_merging(swarm: Swarm, but: str = "") -> list[MergeDoubted]:
    """Return what members have found wrong with parts, one of them left out."""
    return [event for life in swarm.lives if life.member.name != but for event in life.seen(MergeDoubted)]


def test_where_all_merge_for_themselves_no_owner_is_audited(make_swarm: MakeSwarm) -> None:
    """Nobody writes down what was brought, so nobody could show it."""
    method = Choices(every=2, send="delta", apply=NesterovConfig(), codec=Int8Config(), merged_by="all")
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=5, num_peers=3, learns=True)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abc")))

    swarm.run(scenario)
    assert [event for life in swarm.lives for event in life.seen(MergeAudited)] == of_merging(swarm) == []
    assert len(audits(swarm)) >= 6


@pytest.mark.full
@pytest.mark.parametrize("num", [None, Int8Config().block], ids=["all of it", "one block"])
def test_an_owner_that_merges_something_else_is_struck_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, num: int | None
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=5, num_peers=4, learns=True)
    reply, false = RoundMerger._reply, slice(num)

    def lie(merger: RoundMerger, work: Any, mean: torch.Tensor) -> Any:
        if merger is swarm.member("d").life.peer.rounds.merger and work.is_mine:
            assert num is None or len(mean) > num, "the rest of it is right"
            mean = torch.cat([-mean[false], mean[len(mean[false]) :]])
        return reply(merger, work, mean)

    monkeypatch.setattr(RoundMerger, "_reply", lie)
    play(swarm, BY_EVIDENCE)
    assert proven(swarm) == "it has merged something else than what was brought"
    assert {(doubt.member, doubt.outcome) for doubt in of_merging(swarm, "d")} == {(swarm.member("d").id, "differs")}
    assert doubts(swarm, but="d") == []


@pytest.mark.full
def test_an_owner_that_tells_a_bare_majority_what_it_has_merged_is_struck_out(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such parts no block shows anything, so all others have to look."""
    method = FedAvgConfig(every=2, codec=Fp8Config())
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=5, num_peers=4, learns=True)
    reply = RoundMerger._reply

    def lie(merger: RoundMerger, work: Any, mean: torch.Tensor) -> Any:
        is_own = merger is swarm.member("d").life.peer.rounds.merger and work.is_mine
        return reply(merger, work, mean.mul(-1) if is_own else mean)

    def is_told(life: Life, to: PeerId, message: Any) -> bool:
        is_of_d = life.member.name == "d" and isinstance(message, Merged)
        return not (is_of_d and to == swarm.member("b").id)

    monkeypatch.setattr(RoundMerger, "_reply", lie)
    swarm.watchers.append(is_told)
    play(swarm, r"done again what it says it has done|refuse this key")
    assert "it has merged something else" in struck_out(swarm)


@pytest.mark.full
def test_who_brings_the_same_work_again_is_not_counted_again(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed otherwise it has another name, its steps are right, and nobody makes any more."""
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=6, num_peers=4, learns=True)
    announce, kept, number, known = RoundDriver.announce, list[Any](), count(2), Trace.known

    def shown(trace: Trace, name: Digest) -> Any:
        is_of_d = trace is swarm.member("d").life.peer._trace and kept
        return known(trace, digest_of(kept[0][2]) if is_of_d else name)

    def again(rounds: RoundDriver, tokens: Any, parts: Any, *given: Any, work: Any = None) -> Any:
        if rounds is not swarm.member("d").life.peer.rounds:
            return announce(rounds, tokens, parts, *given, work=work)
        kept.append((tokens, parts, work))
        tokens, parts, first = kept[0]
        signed = signed_otherwise(swarm.member("d").identity, first, next(number)) if len(kept) > 1 else first
        assert unseal(signed, Work, verify) == unseal(first, Work, verify)
        return announce(rounds, tokens, parts, *given, work=signed)

    monkeypatch.setattr(RoundDriver, "announce", again)
    monkeypatch.setattr(Trace, "known", shown)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abcd")))

    swarm.run(scenario)
    works = [each for manifest in swarm.chains.values() for each in manifest.contributions]
    mine = [each for each in works if each.peer == swarm.member("d").id]
    assert len(kept) > 3
    assert len(mine) == 1
    assert {doubt.member for doubt in doubts(swarm)} == set()


Shows = Callable[[Merges | Kept, PeerId, Digest], bool]


def only_shown(monkeypatch: pytest.MonkeyPatch, shows: Shows) -> None:
    """Once a round is decided, let only those show what was brought to it of whom `shows` says so."""
    decided, lookup, brought, over = Merges._decided, Merges._lookup, Payloads._lookup, set[Digest]()
    on_disk, mine = Kept._lookup, Kept.part

    def note(merges: Merges, certificate: Certificate) -> None:
        decided(merges, certificate)
        for known in merges._known.values():
            over.update(part for each in known.plan.contributions for part in each.parts)

    def shown(merges: Merges, peer: PeerId, wanted: Digest) -> Buffer | None:
        return lookup(merges, peer, wanted) if shows(merges, peer, wanted) else None

    def shown_of_disk(kept: Kept, peer: PeerId, wanted: Digest) -> Buffer | None:
        return on_disk(kept, peer, wanted) if shows(kept, peer, wanted) else None

    def own(kept: Kept, wanted: Digest) -> Buffer | None:
        return mine(kept, wanted) if shows(kept, kept._context.node.peer, wanted) else None

    def of_the_round(payloads: Payloads, peer: PeerId, wanted: Digest) -> Buffer | None:
        return None if wanted in over else brought(payloads, peer, wanted)

    monkeypatch.setattr(Merges, "_decided", note)
    monkeypatch.setattr(Merges, "_lookup", shown)
    monkeypatch.setattr(Kept, "_lookup", shown_of_disk)
    monkeypatch.setattr(Kept, "part", own)
    monkeypatch.setattr(Payloads, "_lookup", of_the_round)


def is_of(part: Merges | Kept, swarm: Swarm, name: str) -> bool:
    return part._context.node.peer == swarm.member(name).id


@pytest.mark.full
def test_an_owner_that_shows_nobody_what_it_has_merged_is_removed_with_the_third_round(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it brings to its own part nobody else has."""
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=9, num_peers=4, learns=True)
    only_shown(monkeypatch, lambda part, _peer, _wanted: not is_of(part, swarm, "d"))
    play(swarm, "it did not show auditors")
    enacted = swarm.member("a").life.seen(ActEnacted)
    assert [(event.kind, event.subject) for event in enacted] == 3 * [("no answer", swarm.member("d").id)]
    assert {(doubt.member, doubt.outcome) for doubt in of_merging(swarm, "d")} == {(swarm.member("d").id, "unanswered")}


@pytest.mark.full
def test_an_owner_that_was_killed_shows_what_it_had_merged(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=9, num_peers=3, learns=True)
    alone = [False]
    only_shown(monkeypatch, lambda part, _peer, _wanted: not alone[0] or is_of(part, swarm, "c"))

    async def scenario() -> None:
        a, _, c = members = await swarm.start("abc")
        await swarm.round(a, 4)
        swarm.kill(c)
        swarm.launch(c)
        merges = a.life.peer._audits._taken.merges
        name, known = list(merges._known.items())[-1]
        part = next(number for number, each in enumerate(known.manifest.parts) if each.owner == c.id)
        alone[0] = True
        merge = Merge(name, known.manifest.round, part, c.id, known.manifest.parts[part].result)
        found = await merges.look(merge)
        alone[0] = False
        assert found == Found("equal")
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


@pytest.mark.full
def test_who_has_found_a_fault_shows_the_others_what_it_fetched(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that merges wrongly accuses an owner: the others fetch of it alone, and find the owner right."""
    # Of members that are new: each part is drawn by one of two, on average.
    swarm = make_swarm(method=METHODS[0], trust=AuditedTrust(audit_rate=0.125), num_rounds=14, num_peers=4, learns=True)
    again = RoundMerger.again

    async def wrong(merger: RoundMerger, *given: Any) -> Digest | None:
        return None if merger is swarm.member("b").life.peer.rounds.merger else await again(merger, *given)

    def shows(part: Merges | Kept, _peer: PeerId, wanted: Digest) -> bool:
        accused = {
            each for _, shown in swarm.member("b").life.peer._audits._taken.merges._shown.values() for each in shown
        }
        return wanted not in accused or is_of(part, swarm, "b")

    only_shown(monkeypatch, shows)
    monkeypatch.setattr(RoundMerger, "again", wrong)

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abcd")))

    swarm.run(scenario)
    false = {(doubt.round, doubt.part) for doubt in of_merging(swarm)}
    right = [event for life in swarm.lives for event in life.seen(MergeAudited) if (event.round, event.part) in false]
    assert {life.member.name for life in swarm.lives if life.seen(MergeDoubted)} == {"b"}
    assert len(right) >= 3
    assert [event for life in swarm.lives for event in life.seen(ActEnacted)] == []


@pytest.mark.full
def test_a_leader_can_lay_no_result_at_another_ones_door(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an owner is not heard to say itself is nothing that it is judged by."""
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=5, num_peers=4, learns=True)
    told = RoundDriver.told.fget

    def other(driver: RoundDriver) -> Any:
        plan, results = told(driver)
        return plan, {part: result[::-1] for part, result in results.items()}

    monkeypatch.setattr(RoundDriver, "told", property(other))

    async def scenario() -> None:
        one_replica(await swarm.done(*await swarm.start("abcd")))

    swarm.run(scenario)
    assert [event for life in swarm.lives for event in life.seen(MergeAudited)] == []
    assert of_merging(swarm) == []


@pytest.mark.full
@pytest.mark.parametrize("method", FIRST, ids=lambda each: type(each).__name__)
def test_who_is_late_or_killed_or_stops_is_found_honest(make_swarm: MakeSwarm, method: MethodConfig) -> None:
    """What one round did not count goes on in the next lease, from the same distance to other parameters."""
    swarm = make_swarm(method=method, trust=ALWAYS, num_rounds=10, num_peers=4, learns=True)

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
    for stopped in (swarm.member("b").id, swarm.member("d").id):
        counted = {
            manifest.round
            for manifest in swarm.chains.values()
            for each in manifest.contributions
            if each.peer == stopped and each.tokens
        }
        assert {1, 2, 6} <= counted, "what was counted before it ended stays"
        assert max(counted) > 9, "and so is what it has done since it is back"
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


class OneLease(Trainer):
    """Steps up the gradient on some samples, whenever it makes these steps."""

    false: frozenset[int] = frozenset()
    _is_false = False

    def _fill(self, positions: Any) -> Any:
        self._is_false = not self.false.isdisjoint(map(int, positions))
        return super()._fill(positions)

    def _descend(self, norm: float, rate: float) -> float:
        if self._is_false:
            self._model.gradient.neg_()
        return super()._descend(norm, rate)


def killed_and_back(swarm: Swarm, begin: Callable[[bool], None]) -> None:
    """Play a run in which d is false for about a round, and all others are killed before they have found it.

    Args:
        begin: told that d begins to be false, or that it has ended and all is shown.
    """

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(d, 4)
        begin(True)
        await swarm.round(d, 6)
        for member in (a, b, c):
            swarm.kill(member)
            swarm.launch(member)
        begin(False)
        one_replica(await swarm.done(a, b, c))
        with pytest.raises(Removed, match=r"banned this key|refuse this key"):
            await d.lives[-1].task

    swarm.run(scenario)


@pytest.mark.full
def test_members_that_were_killed_do_the_audits_that_they_were_drawn_for(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=10, num_peers=4, learns=True)
    made, false = count(), list[OneLease]()

    def make_trainer(*given: Any) -> Trainer:
        if next(made) != 3:
            return Trainer(*given)
        false.append(OneLease(*given))
        return false[0]

    swarm.make_trainer = make_trainer
    answer, is_silent = Worker._on_request, [False]

    async def later(worker: Worker, peer: PeerId, request: AuditRequest) -> AuditAnswer:
        if is_silent[0]:
            return AuditAnswer(is_ready=False, reason="later")
        return await answer(worker, peer, request)

    monkeypatch.setattr(Worker, "_on_request", later)

    def begin(is_false: bool) -> None:
        is_silent[0] = is_false
        if is_false:
            d = swarm.member("d")
            false[0].false = frozenset(map(int, lease_of(d.life.peer.head.leases, d.id)))

    killed_and_back(swarm, begin)
    assert struck_out(swarm).startswith("it came to other")
    assert {doubt.member for doubt in doubts(swarm, but="d")} == {swarm.member("d").id}


@pytest.mark.slow
def test_members_that_were_killed_merge_again_the_parts_that_they_were_drawn_for(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(method=METHODS[0], trust=ALWAYS, num_rounds=12, num_peers=4, learns=True)
    reply, is_false = RoundMerger._reply, [False]

    def lie(merger: RoundMerger, work: Any, mean: torch.Tensor) -> Any:
        lies = is_false[0] and work.is_mine and merger is swarm.member("d").life.peer.rounds.merger
        return reply(merger, work, mean.mul(-1) if lies else mean)

    monkeypatch.setattr(RoundMerger, "_reply", lie)
    only_shown(monkeypatch, lambda part, peer, _wanted: not is_false[0] or part._context.node.peer == peer)

    def begin(now: bool) -> None:
        is_false[0] = now

    killed_and_back(swarm, begin)
    assert "it has merged something else" in struck_out(swarm)


@pytest.mark.full
def test_who_was_killed_looks_at_some_as_often_as_before(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(method=METHODS[0], trust=AuditedTrust(audit_rate=0.1), num_rounds=16, num_peers=4, learns=True)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 4)
        work = next(each.work for each in a.life.peer.head.contributions if each.peer == d.id)
        a.life.peer._audits._conclude(d.id, a.life.peer.head.round, work, 0, Found("unanswered", "not today"), None)
        swarm.kill(a)
        swarm.launch(a)
        await swarm.round(a, 14)
        mine, other = a.life.peer._audits.suspicion, b.life.peer._audits.suspicion
        assert mine.times(c.id) == other.times(c.id) == 1.0, "by now it is not new"
        assert (mine.times(d.id), other.times(d.id)) == (TIMES, 1.0), "it had not answered"
        one_replica(await swarm.done(*members))

    swarm.run(scenario)
