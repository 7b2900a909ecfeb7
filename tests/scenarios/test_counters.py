"""Runs that take out of the model again what a member has brought into it that is struck out for false work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from scenarios.cheats import ByChance, bring_more
from scenarios.swarm import Swarm
from scenarios.test_audits import ALWAYS, of_merging, play, struck_out
from scenarios.test_faults import MakeSwarm, one_replica
from weft.codec.config import Fp32Config, Int8Config
from weft.errors import PeerError, Removed
from weft.events import MergeAudited, WorkStays, WorkTakenOut
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.counters import LOST, Counters
from weft.peer.audit.kept import Kept
from weft.peer.chain import FIRST, Chain
from weft.peer.round.payloads import Payloads
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.run.trust import AuditedTrust
from weft.sim.world import Life
from weft.sync.method.choices import Choices, NesterovConfig, SgdConfig
from weft.sync.records.counters import WITHIN
from weft.sync.records.messages import Collect, Counted, Holding, Manifest

FALSE = Round(4)  # the round that d lies in
TIMES = 30.0  # as long as its update should be
PLAIN = Choices(every=2, send="delta", apply=SgdConfig(lr=1.0), codec=Fp32Config())
NESTEROV = replace(PLAIN, apply=NesterovConfig(lr=0.7, momentum=0.3))


class Played:
    """A run in which d brings a multiple of its update to one round, and nobody's steps depend on the parameters."""

    def __init__(
        self,
        make_swarm: MakeSwarm,
        patch: pytest.MonkeyPatch,
        method: Choices,
        times: float,
        num_rounds: int = 9,
        trust: AuditedTrust = ALWAYS,
    ) -> None:
        self.swarm = make_swarm(method=method, trust=trust, num_rounds=num_rounds, num_peers=4, learns=True)
        self.swarm.make_trainer = ByChance
        self.models: dict[Round, Tensor] = {}  # the outer parameters after each round
        self._lie(patch, times)
        self._watch(patch)

    def _lie(self, patch: pytest.MonkeyPatch, times: float) -> None:
        def is_false(carry: Carry) -> bool:
            head = carry._replica.head
            is_of_d = carry is self.swarm.member("d").life.peer._carry
            return is_of_d and head is not None and head.round + 1 == FALSE

        bring_more(patch, is_false, times)

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        apply = Replica.apply

        def noted(replica: Replica, manifest: Manifest, *given: Any) -> None:
            apply(replica, manifest, *given)
            known = self.models.setdefault(manifest.round, replica.outer.clone())
            assert torch.equal(known, replica.outer), "all members have the same"

        patch.setattr(Replica, "apply", noted)

    @property
    def countered_in(self) -> list[Round]:
        return sorted(manifest.round for manifest in self.swarm.chains.values() if manifest.counters)

    @property
    def stays(self) -> list[WorkStays]:
        return [event for life in self.swarm.lives for event in life.seen(WorkStays)]

    def play(self) -> "Played":
        play(self.swarm, r"banned this key|refuse this key")
        assert struck_out(self.swarm) == "its payload is not what its training steps came to"
        assert of_merging(self.swarm) == []
        return self


MakeClean = Callable[..., Played]


@pytest.fixture(scope="module")
def make_clean(tmp_path_factory: pytest.TempPathFactory) -> MakeClean:
    """Play runs in which d brings nothing to the round that it lies in, and is struck out for it as well."""
    known = dict[Choices, Played]()

    def make(method: Choices, **given: int) -> Played:
        if method not in known:
            root = tmp_path_factory.mktemp("clean")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 4)
                made = Played(lambda **fields: Swarm(root / "swarm", **fields), patch, method, 0.0, **given)
                known[method] = made.play()
        return known[method]

    return make


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).double().norm() / other.double().norm())


def rounds_alike(played: Played, clean: Played, first: Round) -> list[Round]:
    """Return the rounds from one on, until somebody is late in one run alone: other audits are drawn, and take time."""
    rounds, found = [of_round(each.swarm, first) for each in (played, clean)], list[Round]()
    while all(rounds) and len({tuple(each.peer for each in counted) for counted in rounds}) == 1:
        found.append(Round(first + len(found)))
        rounds = [of_round(each.swarm, Round(first + len(found))) for each in (played, clean)]
    return found


@pytest.mark.full
def test_what_a_false_work_has_moved_is_taken_out_again(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, make_clean: MakeClean
) -> None:
    clean = make_clean(PLAIN)
    played = Played(make_swarm, monkeypatch, PLAIN, TIMES).play()
    (out,) = played.countered_in
    assert FALSE < out <= FALSE + 3
    assert apart(played.models[Round(out - 1)], clean.models[Round(out - 1)]) > 1
    alike = rounds_alike(played, clean, out)
    assert len(alike) >= 3
    assert max(apart(played.models[round], clean.models[round]) for round in alike) < 1e-6
    told = {(each.round, each.member, each.counted_in) for each in taken_out(played.swarm)}
    assert told == {(out, played.swarm.member("d").id, FALSE)}
    assert played.stays == []
    audited = {event.part for life in played.swarm.lives for event in life.seen(MergeAudited) if event.round == out}
    assert audited == {0, 1, 2}, "auditors come to what the owners have"


def taken_out(swarm: Swarm) -> list[WorkTakenOut]:
    return [event for life in swarm.lives for event in life.seen(WorkTakenOut)]


@pytest.mark.full
def test_a_momentum_forgets_a_false_work_two_rounds_later(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, make_clean: MakeClean
) -> None:
    clean = make_clean(NESTEROV, num_rounds=12)
    played = Played(make_swarm, monkeypatch, NESTEROV, TIMES, num_rounds=12).play()
    (out,) = played.countered_in
    moved = (played.models[FALSE] - clean.models[FALSE]).norm()
    left = [(played.models[round] - clean.models[round]).norm() / moved for round in (out - 1, out + 2, out + 8)]
    assert left[0] > 1
    assert left[1] < 0.03
    assert left[2] < 1e-4


@pytest.mark.full
def test_a_false_work_is_taken_out_once_where_that_round_is_made_again(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, make_clean: MakeClean
) -> None:
    """Who leads it first does not hear that its results are held: the next one plans it again."""
    clean = make_clean(PLAIN)
    played, planned = Played(make_swarm, monkeypatch, PLAIN, TIMES), set[tuple[Round, int]]()

    def lose(life: Life, _to: PeerId, message: Any) -> bool:
        round = life.peer.rounds.chain.base.round if life.peer.rounds is not None else Round(0)
        if isinstance(message, Collect) and message.counters:
            planned.add((round, message.attempt))
        return not (isinstance(message, Holding) and message.attempt == 0 and (round, 0) in planned)

    played.swarm.watchers.append(lose)
    played.play()
    (out,) = played.countered_in
    assert planned == {(out, 0), (out, 1)}
    assert all(each.attempt for each in played.swarm.chains.values() if each.round == out)
    assert apart(played.models[out], clean.models[out]) < 1e-6


@pytest.mark.full
def test_a_false_work_stays_where_nobody_has_kept_what_it_takes(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(make_swarm, monkeypatch, PLAIN, TIMES, num_rounds=18)
    part, fetch = Kept.part, Payloads.from_any

    def lost(kept: Kept, wanted: Digest) -> Any:
        counted = of_round(played.swarm, FALSE)
        lists = (listed for each in counted if (listed := kept.listed(Digest(each.payload))) is not None)
        return None if any(wanted.encode() in listed for listed in lists) else part(kept, wanted)

    async def found(payloads: Payloads, first: PeerId, *given: Any) -> Any:
        if first == played.swarm.member("d").id:
            raise PeerError("nobody has it")
        return await fetch(payloads, first, *given)

    monkeypatch.setattr(Payloads, "from_any", found)
    monkeypatch.setattr(Kept, "part", lost)
    play(played.swarm, r"banned this key|refuse this key")
    assert played.countered_in == []
    assert {(each.round, each.counted_in, each.why) for each in played.stays} == {(FALSE + WITHIN, FALSE, LOST)}


def of_round(swarm: Swarm, round: Round) -> tuple[Counted, ...]:
    return next((each.contributions for each in swarm.chains.values() if each.round == round), ())


@pytest.mark.full
def test_results_that_have_left_the_memory_of_all_are_kept_on_some_disk(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, make_clean: MakeClean
) -> None:
    """Of a large model members have the results of two rounds in memory."""
    clean = make_clean(PLAIN)
    played, result = Played(make_swarm, monkeypatch, PLAIN, TIMES), Chain.result

    def recent(chain: Chain, digest: Digest, since: Round = FIRST) -> Any:
        return result(chain, digest, Round(max(since, chain.head.round)))

    monkeypatch.setattr(Chain, "result", recent)
    (out,) = played.play().countered_in
    assert apart(played.models[out], clean.models[out]) < 1e-6


@pytest.mark.full
def test_a_false_work_stays_where_rounds_are_merged_by_another_rule(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(make_swarm, monkeypatch, replace(PLAIN, merge="senders_mean"), TIMES).play()
    assert played.countered_in == []
    (why,) = {each.why for each in played.stays}
    assert "senders_mean" in why


@pytest.mark.full
def test_who_joined_since_takes_it_out_of_its_part_too(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing of what was brought, and fetches that by names that follow from the charter."""
    trust = replace(ALWAYS, quarantine=0)  # it has a part at once
    played = Played(make_swarm, monkeypatch, replace(PLAIN, codec=Int8Config()), TIMES, num_rounds=12, trust=trust)
    swarm, recalled = played.swarm, Counters._recalled

    def later(counters: Counters) -> Any:
        return recalled(counters) if counters._rounds.chain.head.round >= FALSE + 5 else iter(())

    monkeypatch.setattr(Counters, "_recalled", later)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, FALSE + 2)
        e = swarm.member("e")
        swarm.launch(e)
        one_replica(await swarm.done(a, b, c, e))
        with pytest.raises(Removed):
            await d.lives[-1].task

    swarm.run(scenario)
    (out,) = played.countered_in
    (manifest,) = (each for each in swarm.chains.values() if each.round == out)
    assert swarm.member("e").id in {part.owner for part in manifest.parts}
    assert of_merging(swarm) == []
