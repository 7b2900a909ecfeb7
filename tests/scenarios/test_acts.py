"""Stewards and members act on a run that trains: removals, bans, amendments, a successor, votes."""

import asyncio
from typing import Any

import pytest

from scenarios.swarm import BATCH, EVERY, FEDAVG, SEQ_LEN, Member, Swarm
from scenarios.test_faults import MakeSwarm, one_replica
from scenarios.test_gossip import METHODS as GOSSIP
from scenarios.visits import visit
from weft.codec.config import Bf16Config, Int8Config, TopKConfig
from weft.errors import Refused, Removed
from weft.events import ActEnacted, ActRefused, ActWaits, AdmissionRefused, RoundCommitted, StateJoined, StepDone
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.launch.visit import act_of, ask_charter, ballot_of, hand_in
from weft.peer.messages import HandInAnswer
from weft.peer.round.acts import letters_file
from weft.sync.method.presets import DdpConfig, DiLoCoConfig
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records.acts import Act, Amend, AnyDeed, Ban, Pardon, Remove, Succeed
from weft.wire import Signed, seal

STEWARD = Identity.from_seed(bytes([1] * 32))
OTHER = Identity.from_seed(bytes([2] * 32))
STRANGER = Identity.from_seed(bytes([3] * 32))
PATIENCE_S = 120.0  # of virtual time
BOTH = tuple(sorted((STEWARD.peer, OTHER.peer)))


async def act(swarm: Swarm, member: Member, deed: AnyDeed, who: Identity = STEWARD) -> HandInAnswer:
    """Hand an act in at `member`, and wait until it is decided."""
    async with visit(swarm, member, who) as node:
        charter = (await ask_charter(node, swarm.clock)).charter
        return await hand_in(node, act_of(who, node, charter, deed), swarm.clock, PATIENCE_S)


async def hand(swarm: Swarm, member: Member, letter: Signed) -> HandInAnswer:
    async with visit(swarm, member, STEWARD) as node:
        return await hand_in(node, letter, swarm.clock, PATIENCE_S)


async def vote(swarm: Swarm, voter: Member, against: Member, patience_s: float = 0.0) -> HandInAnswer:
    async with visit(swarm, voter, STEWARD) as node:
        charter = (await ask_charter(node, swarm.clock)).charter
        letter = ballot_of(voter.identity, node, charter, against.id, "it sends noise")
        return await hand_in(node, letter, swarm.clock, patience_s)


def enacted(member: Member, life: int = -1) -> list[tuple[str, str]]:
    return [(event.kind, event.subject) for event in member.lives[life].seen(ActEnacted)]


async def error_of(member: Member) -> BaseException | None:
    return (await asyncio.gather(member.life.task, return_exceptions=True))[0]


@pytest.mark.full
def test_a_removed_member_is_told_why_ends_and_may_come_back(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=14, stewards=BOTH)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 2)
        answer = await act(swarm, a, Remove(peer=b.id, reason="it sends noise"))
        assert answer.outcome == "decided"
        error = await error_of(b)
        assert isinstance(error, Removed)
        assert "it sends noise" in str(error)
        assert error.exit_code == 31
        for member in (a, b, c, d):
            await swarm.round(member, 4) if member is not b else None
            assert enacted(member) == [("remove", b.id)]
        after = a.life.seen(ActEnacted)[0].round
        assert b.id in swarm.chains[swarm.run_config.run, after].left
        swarm.launch(b)
        counted = await swarm.when(a, RoundCommitted, lambda event: b.id in event.contributors)
        assert counted.round > after + 1
        one_replica(await swarm.done(a, b, c, d))

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_a_banned_key_is_out_and_refused_until_it_is_pardoned(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=24, stewards=BOTH)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 2)
        assert (await act(swarm, c, Ban(peer=b.id, reason="noise"))).outcome == "decided"
        assert isinstance(await error_of(b), Removed)
        await asyncio.sleep(3)
        assert not any(b.id in each.peer.context.node.peers for each in (a, c, d))
        swarm.launch(b)
        assert isinstance(await error_of(b), Refused)
        assert any("banned" in event.reason for event in a.life.seen(AdmissionRefused))
        await act(swarm, a, Pardon(peer=b.id, reason="it was repaired"), OTHER)
        swarm.launch(b)
        await swarm.when(a, RoundCommitted, lambda event: b.id in event.contributors)
        one_replica(await swarm.done(a, b, c, d))
        assert [kind for kind, _ in enacted(a)] == ["ban", "pardon"]

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_who_is_banned_while_it_is_away_hears_it_when_it_comes_back(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=60, stewards=BOTH, is_strict=True)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 2)
        swarm.cut([b], [a, c, d])
        await act(swarm, a, Ban(peer=b.id, reason="noise"))
        swarm.heal([b], [a, c, d])
        assert isinstance(await error_of(b), Removed)
        one_replica(await swarm.done(a, c, d))

    swarm.run(scenario)


AMENDMENTS: dict[str, Amend] = {
    "rate": Amend(reason="", schedule=ConstantConfig(lr=3e-3)),
    "every": Amend(reason="", every=3),
    "codec": Amend(reason="", codec=Int8Config(), reply_codec=Bf16Config()),
    "length": Amend(reason="", seq_len=SEQ_LEN // 2, batch_size=2 * BATCH),
    "all": Amend(reason="", schedule=ConstantConfig(lr=3e-3), every=1, codec=Int8Config(), seq_len=8, batch_size=3),
}


DILOCO = DiLoCoConfig(every=EVERY)
QUICK = {"fedavg-all": (FEDAVG, AMENDMENTS["all"])}
SLOW = {
    f"{name}-{which}": (method, amend)
    for name, method in (("fedavg", FEDAVG), ("diloco", DILOCO))
    for which, amend in AMENDMENTS.items()
    if f"{name}-{which}" not in QUICK
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "amend"),
    [
        *(pytest.param(*of, id=name) for name, of in QUICK.items()),
        *(pytest.param(*of, id=name, marks=pytest.mark.slow) for name, of in SLOW.items()),
    ],
)
def test_amended_settings_hold_on_all_members_alike(make_swarm: MakeSwarm, method: Any, amend: Amend) -> None:
    """Whoever was there, joins after it, or comes back from a checkpoint of before it: all hold the same bits."""
    swarm = make_swarm(num_rounds=12, stewards=BOTH, method=method)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        await b.peer._autosave.save()
        swarm.kill(b)
        assert (await act(swarm, a, amend)).outcome == "decided"
        number = a.life.seen(ActEnacted)[0].round
        await swarm.round(a, number + 1)
        swarm.launch(b)
        e = swarm.member("e")
        swarm.launch(e)
        await swarm.when(e, StateJoined)
        one_replica(await swarm.done(*members, e))
        for member in (a, c, d):
            assert len(enacted(member)) == 1
        assert {each.peer.replica.charter for each in (*members, e)} == {a.peer.replica.charter}
        now = a.peer.replica.config
        for name in ("seq_len", "batch_size", "schedule"):
            assert getattr(now.train, name) == (getattr(amend, name) or getattr(swarm.run_config.train, name))
        assert now.method.every == (amend.every or EVERY)
        steps = [event for event in a.life.seen(StepDone) if event.num_tokens != BATCH * SEQ_LEN]
        is_resized = amend.seq_len is not None and amend.seq_len * (amend.batch_size or BATCH) != BATCH * SEQ_LEN
        assert bool(steps) == is_resized
        if amend.schedule is not None:
            assert a.life.seen(StepDone)[-1].learning_rate == pytest.approx(3e-3)
            assert e.life.seen(StepDone)[-1].learning_rate == pytest.approx(3e-3)

    swarm.run(scenario)
    swarm.check()


def test_the_rate_is_amended_where_gradients_are_sent(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=10, stewards=BOTH, method=DdpConfig())

    async def scenario() -> None:
        a, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        assert (await act(swarm, a, Amend(reason="", every=4))).outcome == "refused"
        assert (await act(swarm, a, AMENDMENTS["rate"])).outcome == "decided"
        one_replica(await swarm.done(*members))
        assert {member.life.seen(StepDone)[-1].learning_rate for member in members} == {3e-3}

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["dpsgd", pytest.param("choco", marks=pytest.mark.slow), pytest.param("noloco", marks=pytest.mark.slow)]
)
def test_where_members_exchange_another_codec_holds_from_the_round_after(make_swarm: MakeSwarm, name: str) -> None:
    codec = TopKConfig(kept=128) if name == "choco" else Int8Config()
    swarm = make_swarm(num_rounds=16, stewards=BOTH, method=GOSSIP[name])

    async def scenario() -> None:
        a, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 1)
        assert (await act(swarm, a, Amend(reason="", codec=codec))).outcome == "decided"
        (enacted,) = a.life.seen(ActEnacted)
        assert enacted.round % 5, "the round was a mean, of another codec"
        one_replica(await swarm.done(*members))
        assert a.peer.replica.config.method.codec == codec

    swarm.run(scenario)
    swarm.check()


@pytest.mark.parametrize(
    "deed", [Amend(reason="enough", tokens=1), Succeed(run=RunId("5e" * 32), is_at_once=True, reason="")]
)
def test_a_run_of_neighbours_that_is_ended_in_an_exchange_ends_with_a_mean(
    make_swarm: MakeSwarm, deed: AnyDeed
) -> None:
    swarm = make_swarm(num_rounds=40, stewards=BOTH, method=GOSSIP["choco"])

    async def scenario() -> None:
        a, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 1)
        await act(swarm, a, deed)
        outcomes = await swarm.done(*members)
        one_replica(outcomes)
        (enacted,) = a.life.seen(ActEnacted)
        assert enacted.round % 5, "the round was a mean"
        assert {outcome.reason for outcome in outcomes} == {"complete"}
        assert outcomes[0].round == enacted.round + 1
        assert {(local.peer._trainer.local() - a.peer.replica.outer).abs().max().item() for local in members} == {0.0}

    swarm.run(scenario)
    swarm.check()


def test_a_run_that_is_told_to_train_on_less_is_complete_sooner(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=40, stewards=BOTH)

    async def scenario() -> None:
        a, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        await act(swarm, a, Amend(reason="enough", tokens=1))
        outcomes = await swarm.done(*members)
        one_replica(outcomes)
        assert {outcome.reason for outcome in outcomes} == {"complete"}
        assert outcomes[0].round < 10

    swarm.run(scenario)


@pytest.mark.full
def test_a_member_that_all_others_but_one_vote_out_is_out(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=14)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 2)
        assert (await vote(swarm, a, b)).outcome == "waits"
        assert (await vote(swarm, c, b)).outcome == "waits"
        await swarm.round(a, a.life.committed[-1].round + 3)
        assert enacted(a) == [], "two of four are no majority"
        assert (await vote(swarm, d, b, 60.0)).outcome == "decided"
        assert "3 members" in str(await error_of(b))
        one_replica(await swarm.done(a, c, d))
        (event,) = a.life.seen(ActEnacted)
        assert (event.kind, event.subject, set(event.by)) == ("vote out", b.id, {a.id, c.id, d.id})

    swarm.run(scenario)
    swarm.check()


def test_only_members_vote(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 1)
        async with visit(swarm, a, STRANGER) as node:
            charter = (await ask_charter(node, swarm.clock)).charter
            answer = await hand_in(node, ballot_of(STRANGER, node, charter, b.id, ""), swarm.clock, PATIENCE_S)
        assert answer.outcome == "refused"
        assert "only members vote" in answer.reason
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


def test_a_run_without_stewards_refuses_their_acts(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=4)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 1)
        letter = seal(STEWARD, Act(run=swarm.run_config.run, serial=1, deed=Remove(peer=b.id, reason="")))
        answer = await hand(swarm, a, letter)
        assert answer.outcome == "refused"
        assert "no stewards" in answer.reason
        assert "no stewards" in a.life.seen(ActRefused)[0].reason
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


def forged(run: RunId, deed: AnyDeed) -> dict[str, Signed]:
    act = Act(run=run, serial=1, deed=deed)
    mine = seal(STRANGER, act)
    return {
        "not a steward of this run": mine,
        "does not hold": Signed(kind=mine.kind, body=mine.body, signer=STEWARD.peer, signature=mine.signature),
        "whose next act is 1": seal(STEWARD, Act(run=run, serial=2, deed=deed)),
        "is for run": seal(STEWARD, Act(run=RunId("ab" * 32), serial=1, deed=deed)),
        "expected a signed Act": seal(STEWARD, deed),
    }


def test_forged_acts_are_refused_and_change_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6, stewards=BOTH)

    async def scenario() -> None:
        a, b, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 1)
        for reason, letter in forged(swarm.run_config.run, Remove(peer=b.id, reason="")).items():
            answer = await hand(swarm, a, letter)
            assert (answer.outcome, reason in answer.reason) == ("refused", True), answer
        one_replica(await swarm.done(*members))
        assert all(enacted(member) == [] and member.life.seen(ActWaits) == [] for member in members)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_an_act_that_was_decided_cannot_be_replayed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=20, stewards=BOTH)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd")
        await swarm.round(a, 1)
        letter = seal(STEWARD, Act(run=swarm.run_config.run, serial=1, deed=Remove(peer=b.id, reason="")))
        assert (await hand(swarm, a, letter)).outcome == "decided"
        await error_of(b)
        swarm.launch(b)
        await swarm.when(a, RoundCommitted, lambda event: b.id in event.contributors)
        assert (await hand(swarm, a, letter)).outcome == "decided", "once, and not again"
        assert (await hand(swarm, b, letter)).outcome == "refused", "it has not seen it, and knows that it is spent"
        one_replica(await swarm.done(a, b, c, d))
        assert len(enacted(a)) == 1

    swarm.run(scenario)
    swarm.check()


@pytest.mark.full
def test_two_stewards_act_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=16, stewards=BOTH)

    async def scenario() -> None:
        a, _, c, _ = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        answers = await asyncio.gather(
            act(swarm, a, AMENDMENTS["rate"]), act(swarm, c, Amend(reason="", every=3), OTHER)
        )
        assert [answer.outcome for answer in answers] == ["decided", "decided"]
        one_replica(await swarm.done(*members))
        for member in members:
            assert len(enacted(member)) == 2
        assert a.peer.replica.config.train.schedule == ConstantConfig(lr=3e-3)
        assert a.peer.replica.config.method.every == 3

    swarm.run(scenario)
    swarm.check()


@pytest.mark.parametrize("is_at_once", [True, False])
def test_members_learn_where_a_run_goes_on(make_swarm: MakeSwarm, is_at_once: bool) -> None:
    swarm = make_swarm(num_rounds=8, stewards=BOTH)
    successor = RunId("5e" * 32)

    async def scenario() -> None:
        a, *_ = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        await act(swarm, a, Succeed(run=successor, is_at_once=is_at_once, reason="a longer context", ticket="weft1..."))
        outcomes = await swarm.done(*members)
        one_replica(outcomes)
        for outcome in outcomes:
            assert outcome.successor is not None
            assert outcome.successor.run == successor
            assert outcome.reason == "complete"
        assert (outcomes[0].round < 8) == is_at_once

    swarm.run(scenario)
    swarm.check()


def test_members_may_be_removed_down_to_the_last(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=20, stewards=BOTH)

    async def scenario() -> None:
        members = await swarm.start("abcd")
        left = list(members)
        for _ in range(3):
            first = left[0]
            await swarm.round(first, first.life.committed[-1].round + 1 if first.life.committed else 1)
            gone = left.pop()
            assert (await act(swarm, first, Remove(peer=gone.id, reason=""))).outcome == "decided"
            assert isinstance(await error_of(gone), Removed)
        refused = await act(swarm, left[0], Remove(peer=left[0].id, reason=""))
        assert (refused.outcome, "no member left" in refused.reason) == ("refused", True)
        await swarm.done(*left)

    swarm.run(scenario)
    swarm.check()


@pytest.mark.slow
def test_what_waits_outlives_all_who_keep_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=16, stewards=BOTH, is_strict=True)

    async def scenario() -> None:
        a, b, c, d = members = await swarm.start("abcd")
        await swarm.round(a, 2)
        for member in (c, d):
            swarm.cut([member], [a, b])
        swarm.cut([c], [d])  # one of them may be the tie-breaker, with whom two of four are a majority
        swarm.kill(b)
        await asyncio.sleep(20)  # nothing is decided without a majority
        letter = seal(STEWARD, Act(run=swarm.run_config.run, serial=1, deed=Amend(reason="", every=3)))
        assert (await hand(swarm, a, letter)).outcome == "waits"
        assert (await vote(swarm, a, against=d)).outcome == "waits"
        assert [kept.kind for kept in letters_file(a.folder.awaiting).read().letters] == ["Act", "Ballot"]
        for member in (a, c, d):
            swarm.kill(member)
            swarm.heal([member], [a, b])
        swarm.heal([c], [d])
        b.folder.awaiting.write_bytes(a.folder.awaiting.read_bytes()[:-1])  # damaged: it is not believed
        for member in members:
            swarm.launch(member)
        decided = await swarm.when(c, ActEnacted)
        assert decided.kind == "amend"
        await swarm.round(a, decided.round + 1)
        assert "Act" not in [kept.kind for kept in letters_file(a.folder.awaiting).read().letters]  # it waits no more
        one_replica(await swarm.done(*members))

    swarm.run(scenario)


def test_strangers_that_refuse_a_key_do_not_end_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8)

    async def scenario() -> None:
        a, b, c = await swarm.start("abc")
        await swarm.round(a, 2)
        strangers = {PeerId(f"{number:064x}") for number in range(40)}
        a.peer.context.node.passport.banned_by.update(strangers, {b.id})  # of two others, one is no majority
        one_replica(await swarm.done(a, b, c))

    swarm.run(scenario)
    swarm.check()
